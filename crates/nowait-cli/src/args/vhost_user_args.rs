//! The command-line option for vhost-user sockets.

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use nowait_daemon::config::vhost_user_spec::VhostUserSpec;

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
    /// server exits with that connection, unless there is another way to reach it. connect:PATH is a socket
    /// at which a VMM listens (QEMU: -chardev socket,path=PATH,server=on): the server tries to connect to
    /// it each second, and again when the VMM has left.
    #[arg(long = "vhost-user", value_name = "[EXPORT=]PATH")]
    #[arg(value_parser = OsStringValueParser::new().try_map(VhostUserSpec::parse))]
    pub(crate) sockets: Vec<VhostUserSpec>,
}
