//! A connection in transmission, as one process hands it over to another.
//!
//! Invariant: what the client has sent and not been answered is in the state, byte for byte, and so
//! is what it was not sent yet. A TLS session is never in it: its keys stay in one process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use nowait::ByteRange;

use crate::dirty_bitmaps::bitmap_spec::MAX_BITMAPS;
use crate::dirty_bitmaps::{BitmapName, DirtyBitmaps};
use crate::export::ExportId;
use crate::frontend_kind::FrontendKind;
use crate::nbd::command::TransmissionMode;
use crate::nbd::connection::HandoffConnection;
use crate::nbd::meta_context::Contexts;
use crate::nbd::session::Phase;
use crate::nbd::tls_session::Transport;
use crate::nbd::wire::{CMD_WRITE, ReplyMode, RequestHeader};
use crate::nbd::write_split::SplitRest;
use crate::net::connection_limit::ConnectionPermit;
use crate::net::peer::Peer;
use crate::net::socket::Socket;

/// A connection of an NBD client, between two processes.
#[derive(Debug)]
pub struct ConnectionState {
    /// Its socket.
    pub socket: OwnedFd,
    /// How it is answered: 0 by simple replies, 1 in chunks, 2 in chunks with extended headers.
    pub reply_mode: u8,
    /// The contexts of block status that the client has selected, one bit each.
    pub contexts: u8,
    /// The names of the dirty bitmaps that it has selected, in the order of their ids.
    pub bitmaps: Vec<String>,
    /// Bytes that the client still sends of a refused request, to be thrown away.
    pub discard: u64,
    /// The write of which a part was written already, and whose payload comes next.
    pub split: Option<SplitState>,
    /// Bytes that were received and not parsed.
    pub unparsed: Vec<u8>,
    /// Bytes that were not sent yet.
    pub unsent: Vec<u8>,
    /// The client has disconnected: it is sent these bytes, and nothing of it is read.
    pub ended: bool,
}

/// A long write of which a part was written.
#[derive(Clone, Copy, Debug)]
pub struct SplitState {
    /// The flags of its header.
    pub flags: u16,
    /// The client's name for it.
    pub cookie: u64,
    /// The first byte of the whole write.
    pub offset: u64,
    /// Bytes of the whole write.
    pub length: u64,
    /// The first byte that was not written.
    pub rest_offset: u64,
    /// Bytes that were not written.
    pub rest_length: u64,
}

impl SplitState {
    fn of(rest: &SplitRest) -> Self {
        let RequestHeader { flags, cookie, offset, length, .. } = rest.header;
        let ByteRange { pos: rest_offset, len: rest_length } = rest.range;
        Self { flags, cookie, offset, length, rest_offset, rest_length }
    }

    fn into_rest(self) -> SplitRest {
        let Self { flags, cookie, offset, length, rest_offset, rest_length } = self;
        SplitRest {
            header: RequestHeader { flags, command: CMD_WRITE, cookie, offset, length },
            range: ByteRange::new(rest_offset, rest_length),
        }
    }
}

impl ConnectionState {
    /// The state of `connection`, with a copy of its socket; `None` if it cannot leave the process,
    /// because it is encrypted or has not chosen an export.
    pub(crate) fn of(connection: &HandoffConnection) -> Option<io::Result<Self>> {
        let (Transport::Plain, Phase::Transmission(transmission)) =
            (&connection.transport, &connection.phase)
        else {
            return None;
        };
        let TransmissionMode { mode, contexts } = *transmission;
        let socket = connection.socket.as_fd().try_clone_to_owned();
        Some(socket.map(|socket| Self {
            socket,
            reply_mode: mode as u8,
            contexts: contexts.fixed_bits(),
            bitmaps: connection.bitmaps.iter().map(|bitmap| bitmap.name.to_string()).collect(),
            discard: connection.discard,
            split: connection.split.as_ref().map(SplitState::of),
            unparsed: connection.unparsed.clone(),
            unsent: connection.unsent.clone(),
            ended: connection.ended,
        }))
    }

    /// The connection of a client that has chosen `export`, whose dirty bitmaps are `all`.
    pub(crate) fn into_handoff(
        self,
        export: ExportId,
        permit: ConnectionPermit,
        all: &DirtyBitmaps,
    ) -> HandoffConnection {
        let Self { socket, reply_mode, contexts, bitmaps, .. } = self;
        let Self { discard, split, unparsed, unsent, ended, .. } = self;
        let mode = match reply_mode {
            0 => ReplyMode::Simple,
            1 => ReplyMode::Structured,
            _ => ReplyMode::Extended,
        };
        let known = all.names();
        let found = |name: &String| known.iter().find(|it| *it.name == **name).cloned();
        let named = |name: &String| found(name).unwrap_or_else(|| BitmapName::removed(name));
        let bitmaps: Vec<_> = bitmaps.iter().take(MAX_BITMAPS).map(named).collect();
        let contexts = Contexts::of_bits(contexts, bitmaps.len());
        let peer = Peer::of(&socket);
        permit.describe(FrontendKind::Nbd, peer.address());
        permit.mark_transmission(export, false);
        HandoffConnection {
            socket: Socket::from(socket),
            transport: Transport::Plain,
            phase: Phase::Transmission(TransmissionMode { mode, contexts }),
            unparsed,
            discard,
            split: split.map(SplitState::into_rest),
            unsent,
            ended,
            due: Instant::now(),
            peer,
            permit,
            used: None,
            bitmaps,
        }
    }
}
