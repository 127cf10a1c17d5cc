//! Messages between the program that hands over and the one that takes over, in this order:
//! [`Begin`], [`Answer`], [`Drained`], [`Answer`], [`Go`].
//!
//! Invariant: a field that a later version adds is optional; a change that an earlier version would
//! misunderstand has another [`PROTOCOL`].

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nowait_control::{PatchExport, StartReplication};
use nowait_nbd::Address;
use nowait_server::{BitmapSpec, Listener, SplitState, VmmSetup};
use serde::{Deserialize, Serialize};

/// The version of these messages.
pub(crate) const PROTOCOL: u32 = 4;
/// The version before, which knows no dirty bitmaps.
const WITHOUT_BITMAPS: u32 = 3;
/// The one before that, which knows no nodes but that of the first export, and connects to no VMM.
const FIRST_NODE: u32 = 2;

/// Old to new: what will be handed over. The listeners' files come with it, then the control socket's.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Begin {
    pub(crate) protocol: u32,
    /// The default export first.
    pub(crate) exports: Vec<ExportState>,
    pub(crate) listeners: Vec<ListenerState>,
    /// The control socket, if there is one at a path that was given.
    pub(crate) control: Option<ListenerState>,
    /// Sockets of the control interface on TCP; their files come last.
    #[serde(default)]
    pub(crate) control_tcp: Vec<ListenerState>,
    /// The number of the local block device that the first export is.
    pub(crate) ublk: Option<u32>,
    /// The numbers of all of them, each with the index of its export; none from a program that knows only the one.
    #[serde(default)]
    pub(crate) nodes: Vec<(usize, u32)>,
}

impl Begin {
    /// The version in which a server is told of that has `nodes`, `connects` to VMMs and has dirty bitmaps: the first one
    /// that says all.
    pub(crate) fn protocol_for(nodes: &[(usize, u32)], connects: bool, has_bitmaps: bool) -> u32 {
        match (nodes, connects, has_bitmaps) {
            (_, _, true) => PROTOCOL,
            ([] | [(0, _)], false, _) => FIRST_NODE,
            _ => WITHOUT_BITMAPS,
        }
    }

    /// Whether this program understands the message.
    pub(crate) fn is_understood(&self) -> bool {
        (FIRST_NODE..=PROTOCOL).contains(&self.protocol)
    }

    /// Numbers of the local block devices, each with the index of its export.
    pub(crate) fn nodes(&self) -> Vec<(usize, u32)> {
        match self.nodes.is_empty() {
            true => self.ublk.map(|id| (0, id)).into_iter().collect(),
            false => self.nodes.clone(),
        }
    }
}

/// An export and its image.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ExportState {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    /// Absolute.
    pub(crate) image: OsString,
    /// The format that was asked for; without it the image is looked at, as it was.
    pub(crate) format: Option<String>,
    /// Without a format: it was found to be raw, and a guest may have written to it since.
    #[serde(default)]
    pub(crate) settled_raw: bool,
    pub(crate) read_only: bool,
    pub(crate) backing_dirs: Vec<OsString>,
    /// The URLs that images may name as those below them.
    #[serde(default)]
    pub(crate) backing: Vec<String>,
    /// Settings that were changed while it was served.
    pub(crate) changes: PatchExport,
    /// Its dirty bitmaps; their bits come later.
    #[serde(default)]
    pub(crate) bitmaps: Vec<BitmapMessage>,
    /// Its replication, which begins again; a program that does not know it ends it.
    #[serde(default)]
    pub(crate) replication: Option<StartReplication>,
}

/// A dirty bitmap, as [`BitmapSpec`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BitmapMessage {
    pub(crate) name: String,
    pub(crate) granularity: u64,
    pub(crate) enabled: bool,
}

impl From<BitmapSpec> for BitmapMessage {
    fn from(spec: BitmapSpec) -> Self {
        let BitmapSpec { name, granularity, enabled } = spec;
        Self { name, granularity, enabled }
    }
}

impl From<BitmapMessage> for BitmapSpec {
    fn from(message: BitmapMessage) -> Self {
        let BitmapMessage { name, granularity, enabled } = message;
        Self { name, granularity, enabled }
    }
}

/// A socket that listens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ListenerState {
    /// The path of a Unix socket; `None` for TCP.
    pub(crate) path: Option<OsString>,
    /// Host and port of TCP, as given.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Whether the server removes the socket when it ends.
    pub(crate) is_own: bool,
    /// The directory that it removes with it.
    pub(crate) temporary: Option<OsString>,
}

impl ListenerState {
    /// The state of `listener`, whose address was given as `address`, and a copy of its socket.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn of(
        listener: &Listener,
        address: &Address,
        temporary: Option<&Path>,
    ) -> io::Result<(Self, OwnedFd)> {
        let socket = listener.as_fd().try_clone_to_owned()?;
        Ok((Self::at(address, listener.is_own(), temporary), socket))
    }

    /// The state of a socket at `address`.
    pub(crate) fn at(address: &Address, is_own: bool, temporary: Option<&Path>) -> Self {
        let (path, host, port) = match address {
            Address::Unix(path) => (Some(path.clone().into()), String::new(), 0),
            Address::Tcp { host, port } => (None, host.clone(), *port),
        };
        let temporary = temporary.map(|path| path.as_os_str().to_owned());
        Self { path, host, port, is_own, temporary }
    }
}

/// The sockets of the interface for a program that takes over: the Unix socket if it is at a path that
/// was given, and those of TCP.
#[derive(Default)]
pub(crate) struct ControlStates {
    pub(crate) unix: Option<(ListenerState, OwnedFd)>,
    pub(crate) tcp: Vec<(ListenerState, OwnedFd)>,
}

/// Old to new: no request is in flight, and everything is on storage. The files of the images come
/// with it, then the connections' sockets, then those of the devices, then the bits of bitmaps. The bytes are what was received
/// and not sent yet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Drained {
    /// Files of each export's image.
    pub(crate) files: Vec<usize>,
    pub(crate) connections: Vec<ConnectionMessage>,
    pub(crate) devices: Vec<DeviceMessage>,
    /// Whether there is a file with its bits, for each bitmap of each export.
    #[serde(default)]
    pub(crate) bitmaps: Vec<bool>,
}

/// A disk of virtual machines, at a socket that listens or one of VMMs. Its files are that of the listener, and those of the VMM: the socket,
/// the channel, and what belongs to its setup.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DeviceMessage {
    /// Index of the export.
    pub(crate) export: usize,
    pub(crate) listener: Option<ListenerState>,
    /// Where its VMMs listen.
    #[serde(default)]
    pub(crate) connects_to: Option<OsString>,
    pub(crate) vmm: Option<VmmMessage>,
}

/// A VMM that has connected.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VmmMessage {
    pub(crate) setup: VmmSetup,
    pub(crate) has_channel: bool,
    /// Files that belong to the setup.
    pub(crate) files: usize,
}

/// A connection in transmission.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ConnectionMessage {
    /// Index of the export.
    pub(crate) export: usize,
    /// Field of [`nowait_server::ConnectionState`].
    pub(crate) reply_mode: u8,
    pub(crate) contexts: u8,
    #[serde(default)]
    pub(crate) bitmaps: Vec<String>,
    pub(crate) discard: u64,
    pub(crate) split: Option<SplitMessage>,
    /// Bytes that were received and not parsed, and bytes that were not sent.
    pub(crate) unparsed: usize,
    pub(crate) unsent: usize,
    /// The client has disconnected.
    pub(crate) ended: bool,
}

/// State of a split write, [`SplitState`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SplitMessage {
    flags: u16,
    cookie: u64,
    offset: u64,
    length: u64,
    rest_offset: u64,
    rest_length: u64,
}

impl From<SplitState> for SplitMessage {
    fn from(split: SplitState) -> Self {
        let SplitState { flags, cookie, offset, length, rest_offset, rest_length } = split;
        Self { flags, cookie, offset, length, rest_offset, rest_length }
    }
}

impl From<SplitMessage> for SplitState {
    fn from(split: SplitMessage) -> Self {
        let SplitMessage { flags, cookie, offset, length, rest_offset, rest_length } = split;
        Self { flags, cookie, offset, length, rest_offset, rest_length }
    }
}

/// New to old. First: it has understood, and waits for the images. Then: they are open and the
/// threads run, but nothing is served yet.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Yes { version: String },
    No { why: String },
}

/// Old to new: serve. The old program touches nothing any more.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Go;

#[cfg(test)]
mod tests {
    use super::*;

    /// Block devices of a process of version `protocol`, as told by `ublk` and `nodes`.
    fn told(protocol: u32, nodes: &str) -> Begin {
        let text = format!(
            r#"{{"protocol":{protocol},"exports":[],"listeners":[],"control":null,{nodes}}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn a_server_is_told_of_in_the_first_version_that_says_all_of_it() {
        for (nodes, protocol) in
            [(&[][..], 2), (&[(0, 7)], 2), (&[(1, 7)], 3), (&[(0, 7), (1, 8)], 3)]
        {
            assert_eq!(Begin::protocol_for(nodes, false, false), protocol, "{nodes:?}");
            assert_eq!(Begin::protocol_for(nodes, true, false), 3, "{nodes:?}");
            assert_eq!(Begin::protocol_for(nodes, false, true), 4, "{nodes:?}");
        }
        let told = |protocol| told(protocol, r#""ublk":7"#).is_understood();
        assert_eq!([1, 2, 3, 4, 5].map(told), [false, true, true, true, false]);
    }

    #[test]
    fn both_versions_tell_of_nodes() {
        for (text, nodes) in [
            (r#""ublk":null"#, vec![]),
            (r#""ublk":7"#, vec![(0, 7)]),
            (r#""ublk":7,"nodes":[[0,7],[2,9]]"#, vec![(0, 7), (2, 9)]),
            (r#""ublk":null,"nodes":[[1,9]]"#, vec![(1, 9)]),
        ] {
            assert_eq!(told(2, text).nodes(), nodes, "{text}");
        }
    }
}
