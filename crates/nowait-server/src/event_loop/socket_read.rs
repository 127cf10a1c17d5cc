//! Receives bytes from the sockets.
//!
//! Invariant: received bytes are parsed or kept as unparsed input. An end of file without an event
//! is found before the thread sleeps.

use std::io::IoSliceMut;

use nowait::{BlockMap, IoQueue};

use crate::event_loop::{EventLoop, RECEIVE_BYTES};
use crate::injected_bug;
use crate::injected_bug::ServerBug;
use crate::nbd::connection::ReadState;
use crate::nbd::tls_session::Transport;
use crate::nbd::write_split::IncomingSplitWrite;

impl<Q: IoQueue, M: BlockMap> EventLoop<Q, M> {
    /// Runs before the thread sleeps: schedules another read of each open connection that was
    /// drained and may have reached its end of file since. Returns whether there is one.
    ///
    /// A multishot poll of Linux 6.18 sometimes misses a shutdown(2) that comes while it reports
    /// the last bytes, and there is no other event.
    pub(crate) fn recheck_eof(&mut self) -> bool {
        let mut any = false;
        if injected_bug::injected(ServerBug::TrustReports) {
            return any;
        }
        while let Some(index) = self.maybe_eof.pop() {
            let Some(connection) = self.connections.get_mut(index) else { continue };
            // A blocked connection is read when it is unblocked.
            connection.readable |= std::mem::take(&mut connection.eof_unchecked);
            if connection.readable && connection.input == ReadState::Open {
                self.schedule(index);
                any = true;
            }
        }
        any
    }

    /// Notes that a read has emptied the socket.
    fn mark_drained(&mut self, index: usize) {
        if let Some(connection) = self.connections.get_mut(index)
            && !connection.readable
            && !std::mem::replace(&mut connection.eof_unchecked, true)
        {
            self.maybe_eof.push(index);
        }
    }

    /// Receives once and parses the bytes.
    pub(crate) fn receive(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        if connection.input != ReadState::Open || !connection.readable {
            return;
        }
        if let Transport::Tls(_) = connection.channel {
            return self.receive_encrypted(index);
        }
        let mut scratch = std::mem::take(&mut self.read_buffer);
        let unparsed_len = connection.unparsed.len();
        scratch[..unparsed_len].copy_from_slice(&connection.unparsed);
        connection.unparsed.clear();
        let mut none = [];
        let missing = connection.payload.as_mut().map_or(&mut none[..], |p| p.missing());
        let to_payload = missing.len().min(self.quantum as usize);
        // Bytes after the payload are received only with its last bytes, and not if they are
        // payload.
        let more = connection.incoming_split.as_ref().is_some_and(IncomingSplitWrite::has_more);
        let end = if more || to_payload < missing.len() { unparsed_len } else { RECEIVE_BYTES };
        let mut pieces = [
            IoSliceMut::new(&mut missing[..to_payload]),
            IoSliceMut::new(&mut scratch[unparsed_len..end]),
        ];
        let room = to_payload + end - unparsed_len;
        match connection.socket.receive(&mut pieces) {
            Ok(0) => {
                connection.input = ReadState::Eof;
                connection.payload = None;
            }
            Ok(got) => {
                connection.received(got, room);
                self.last_reader = index;
                let direct = got.min(to_payload);
                if let Some(payload) = &mut connection.payload {
                    payload.filled += direct;
                }
                self.mark_drained(index);
                let received = &scratch[..unparsed_len + got - direct];
                let half = self.half_batch_len(index, received);
                self.parse(index, received, half);
            }
            Err(rustix::io::Errno::AGAIN) => {
                connection.unparsed.extend_from_slice(&scratch[..unparsed_len]);
                connection.readable = false;
            }
            Err(rustix::io::Errno::INTR) => {
                connection.unparsed.extend_from_slice(&scratch[..unparsed_len])
            }
            Err(error) => connection.lose(error),
        }
        self.read_buffer = scratch;
    }

    /// `receive` for a TLS connection.
    fn receive_encrypted(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        let received = match connection.channel.has_ended() {
            true => Ok(0),
            false => connection.socket.receive(&mut [IoSliceMut::new(&mut self.read_buffer)]),
        };
        match received {
            Ok(0) => {
                connection.input = ReadState::Eof;
                connection.payload = None;
            }
            Ok(got) => {
                connection.received(got, RECEIVE_BYTES);
                self.last_reader = index;
                let mut plaintext = std::mem::take(&mut self.plaintext);
                plaintext.clear();
                plaintext.append(&mut connection.unparsed);
                connection.decrypt(&self.read_buffer[..got], &mut plaintext);
                self.mark_drained(index);
                self.parse(index, &plaintext, usize::MAX);
                self.plaintext = plaintext;
            }
            Err(rustix::io::Errno::AGAIN) => connection.readable = false,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => connection.lose(error),
        }
    }
}
