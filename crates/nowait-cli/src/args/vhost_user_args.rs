//! The command-line option for vhost-user sockets.
//!
//! Invariant: after `check`, each socket has an export and a path of its own.

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use crate::export_spec::NamedExport;
use crate::vhost_user_spec;
use crate::vhost_user_spec::{DevicePlace, VhostUserArg};

/// Where virtual machines have their disks.
#[derive(Debug, Args)]
#[command(next_help_heading = "Addresses")]
pub(crate) struct VhostUserArgs {
    /// Make IMAGE a vhost-user-blk disk of virtual machines at the Unix socket PATH; can be given
    /// more than once
    ///
    /// EXPORT is the name of one of several IMAGEs; the first without it. The machine's memory has
    /// to be shared (QEMU: memory-backend-memfd,share=on). With only this no socket for NBD is made.
    /// A program that connects has the disk, as with --nbd; one at a time, others wait. In place of
    /// PATH, fd:N is a socket that was handed over as descriptor N and is connected already: the
    /// server ends with that connection, unless there is another way to reach it. connect:PATH is a socket
    /// at which a VMM listens (QEMU: -chardev socket,path=PATH,server=on): the server tries to connect to
    /// it each second, and again when the VMM has left.
    #[arg(long = "vhost-user", value_name = "[EXPORT=]PATH")]
    #[arg(value_parser = OsStringValueParser::new().try_map(VhostUserArg::parse))]
    pub(crate) sockets: Vec<VhostUserArg>,
}

impl VhostUserArgs {
    /// Whether VMMs are connected to.
    pub(crate) fn connects(&self) -> bool {
        self.sockets.iter().any(|it| matches!(it.socket, DevicePlace::ConnectsTo(_)))
    }

    /// Checks that there is an export for each socket among `exports`.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn check(&self, exports: &[NamedExport]) -> Result<(), String> {
        vhost_user_spec::check(&self.sockets, exports)
    }
}
