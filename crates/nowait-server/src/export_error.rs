//! Why a change of the exports of a server is refused, or has failed.
//!
//! Invariant: each variant is one reason, which says by itself what its caller may do; only the last two come
//! from the system.

use std::fmt;

use nowait::Error;

/// Why an export cannot be added, removed, paused or changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportError {
    /// There is no such export, or not any more.
    NotFound,
    /// Another export that clients can choose has the name.
    NameTaken,
    /// The export is the default one, which is served as long as its server.
    IsDefault,
    /// The export is a local block device with a node, which has to be removed first.
    HasNode {
        /// The path of the node.
        node: String,
        /// The number of the device.
        id: u32,
    },
    /// The export has a backup, which has to be committed or aborted first.
    HasBackup {
        /// The name of the export that the backup is.
        backup: String,
    },
    /// The export is a backup, which ends by being committed or aborted.
    IsBackup {
        /// The name of the export that it is a backup of.
        of: String,
    },
    /// Clients use an export that was to be removed only without.
    HasClients {
        /// Connections that have chosen it, or the queues of virtual machines; at least 1.
        count: usize,
    },
    /// The export was removed, and clients are left at the end of the time: it ends with the last one.
    ClientsLeft,
    /// Limits are not [valid](crate::Limits::is_valid).
    InvalidLimits,
    /// A weight is not one of [`crate::Exports::WEIGHTS`].
    InvalidWeight,
    /// The image was opened for reading only.
    ReadOnly,
    /// Another size is not possible: smaller, of a block device, or below the smallest block.
    FixedSize,
    /// In place of a paused export another one was given that has another name.
    OtherName,
    /// Requests, or a message of a virtual machine's VMM, have not ended in the time that a pause may take.
    DoesNotEnd,
    /// It is paused already.
    AlreadyPaused,
    /// The driver of a local block device cannot keep requests back, as a pause demands.
    CannotKeepBack,
    /// The server is stopping.
    Stopping,
    /// The system has refused a thread, a descriptor or memory: `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`.
    System(Error),
    /// The storage has failed to flush or to grow.
    Storage(Error),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotFound => "there is no such export",
            Self::NameTaken => "there is an export of that name",
            Self::IsDefault => "the default export cannot be removed",
            Self::HasNode { node, .. } => return write!(f, "it is {node}"),
            Self::HasBackup { backup } => {
                return write!(f, "it has a backup, {backup:?}: commit or abort that first");
            }
            Self::IsBackup { of } => {
                return write!(f, "it is the backup of {of:?}: commit or abort that");
            }
            Self::HasClients { count: 1 } => "1 client uses it",
            Self::HasClients { count } => return write!(f, "{count} clients use it"),
            Self::ClientsLeft => "clients are left; it ends with the last one",
            Self::InvalidLimits => {
                "a limit has a size of at least 1 and a refill_time of 1 to 86400000"
            }
            Self::InvalidWeight => "a weight is 1 to 10000",
            Self::ReadOnly => "its image was opened for reading only",
            Self::FixedSize => "a block device gets another size elsewhere",
            Self::OtherName => "the export in its place has another name",
            Self::DoesNotEnd => "requests in flight do not end",
            Self::AlreadyPaused => "it is paused already",
            Self::CannotKeepBack => {
                "the ublk driver of this kernel cannot keep requests back (Linux 6.16 can)"
            }
            Self::Stopping => "the server is stopping",
            Self::System(error) | Self::Storage(error) => return error.fmt(f),
        })
    }
}

impl std::error::Error for ExportError {}
