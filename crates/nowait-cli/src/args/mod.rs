//! The command line, and the help that `--help` prints.
//!
//! Invariant: parsed values are in range; the methods here return the defaults that the help
//! states.

mod help_texts;
pub(crate) mod tls_args;
mod remote_args;
pub(crate) mod image_args;
pub(crate) mod info_args;
pub(crate) mod copy_args;
pub(crate) mod change_args;
mod switch;
mod address_args;
pub(crate) mod control_args;
mod lifetime_args;
mod message_args;
mod sandbox_args;
pub(crate) mod setup_args;
pub(crate) mod ublk_args;
pub(crate) mod upgrade_args;
pub(crate) mod top_args;
pub(crate) mod vhost_user_args;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench_args::BenchArgs;
use crate::export_spec;
use crate::export_spec::{ExportArg, NamedExport};
use crate::size;
use address_args::AddressArgs;
use change_args::{CommitArgs, CreateArgs, ResizeArgs};
use control_args::{ConnectionsArgs, ExportCommand, ServeControlArgs, StatusArgs};
use copy_args::CopyArgs;
use help_texts::{AFTER_HELP, SERVE_AFTER_HELP};
use image_args::{CheckArgs, MapArgs, OtherFiles, parse_image_format};
use info_args::InfoArgs;
use lifetime_args::LifetimeArgs;
use message_args::MessageArgs;
use nowait_remote::Location;
use nowait_server::BlockSize;
use remote_args::RemoteArgs;
use sandbox_args::SandboxArgs;
use setup_args::{CompletionsArgs, ManArgs};
pub(crate) use switch::Switch;
use tls_args::TlsArgs;
use top_args::TopArgs;
use ublk_args::{UblkArgs, UblkCommand};
use upgrade_args::UpgradeArgs;
use vhost_user_args::VhostUserArgs;

/// The exit status for a wrong command line.
pub(crate) const USAGE_STATUS: u8 = 2;
/// The same for `check`, whose status 2 means a corrupt image (EX_USAGE of sysexits.h).
pub(crate) const CHECK_USAGE_STATUS: u8 = 64;

const MAX_THREADS: u16 = 256;
/// The most serving threads that are started without that.
const MOST_BY_DEFAULT: u16 = 8;
const MAX_CONNECTIONS: u32 = 1 << 20;

/// Serve disk images and block devices to other programs and machines, by direct I/O
#[derive(Debug, Parser)]
#[command(name = "nowait", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(Box<ServeArgs>),
    Create(CreateArgs),
    Info(InfoArgs),
    Map(MapArgs),
    Check(CheckArgs),
    Copy(Box<CopyArgs>),
    Resize(ResizeArgs),
    Commit(CommitArgs),
    Ublk(UblkCommand),
    Status(StatusArgs),
    Export(ExportCommand),
    Connections(ConnectionsArgs),
    Upgrade(UpgradeArgs),
    Top(TopArgs),
    Bench(BenchArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

impl Command {
    /// Its name on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Serve(_) => "serve",
            Self::Create(_) => "create",
            Self::Info(_) => "info",
            Self::Map(_) => "map",
            Self::Check(_) => "check",
            Self::Copy(_) => "copy",
            Self::Resize(_) => "resize",
            Self::Commit(_) => "commit",
            Self::Ublk(_) => "ublk",
            Self::Status(_) => "status",
            Self::Export(_) => "export",
            Self::Connections(_) => "connections",
            Self::Upgrade(_) => "upgrade",
            Self::Top(_) => "top",
            Self::Bench(_) => "bench",
            Self::Completions(_) => "completions",
            Self::Man(_) => "man",
        }
    }

    /// Whether it is for a running server, by its control interface.
    pub(crate) const fn asks_a_server(&self) -> bool {
        matches!(
            self,
            Self::Status(_)
                | Self::Export(_)
                | Self::Connections(_)
                | Self::Upgrade(_)
                | Self::Top(_)
        )
    }

    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self {
            Self::Serve(args) => args.check(),
            Self::Map(args) => args.image.check(),
            Self::Check(args) => args.image.check(),
            Self::Copy(args) => args.check(),
            Self::Resize(args) => args.image.check(),
            Self::Commit(args) => args.image.check(),
            Self::Bench(args) => args.check(),
            Self::Create(_) | Self::Info(_) | Self::Ublk(_) => Ok(()),
            Self::Status(_)
            | Self::Export(_)
            | Self::Connections(_)
            | Self::Upgrade(_)
            | Self::Top(_) => Ok(()),
            Self::Completions(_) | Self::Man(_) => Ok(()),
        }
    }
}

/// Serve disk images: over NBD, to virtual machines, or as a block device of this machine
///
/// Clients (a virtual machine, nbd-client, qemu-img, nbdcopy, …) see IMAGE as a disk. The line
/// "serving URI" appears on standard output as soon as they can connect (but not for sockets that
/// were handed over); warnings and errors go to standard error. Several IMAGEs are several exports
/// of one server: a client asks for one of them by name, and gets the first if it names none. IMAGE
/// is read and written by direct I/O where its file system can, past the host's page cache; requests
/// of any position and length are served all the same.
///
/// IMAGE is locked while it is served, in the way QEMU does: it is refused here while QEMU or
/// another nowait uses it, and they refuse it while it is served. Any number of servers can serve
/// one IMAGE with --read-only.
///
/// On SIGINT (Ctrl-C), SIGTERM or SIGQUIT it takes no more requests, finishes those it has, flushes
/// IMAGE and exits with status 0; one that comes more than a second later ends it at once, unflushed.
/// SIGHUP does the same where the server has a terminal (not under nohup); without one, as under
/// systemd or with --fork, it has files read again: the log file is opened anew, new connections get
/// the TLS files as they are now, and a raw file or a block device that has grown is served with its
/// new size.
#[derive(Debug, Args)]
#[command(after_help = SERVE_AFTER_HELP)]
pub(crate) struct ServeArgs {
    /// The files or block devices to serve, each with the name that clients ask for
    ///
    /// An IMAGE may also be an export of another NBD server: nbd://HOST/EXPORT,
    /// nbd+unix:///EXPORT?socket=PATH, and nbds for TLS with ?tls-certificates=DIR; or with --read-only
    /// an object: s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY, https://HOST/PATH; or an image
    /// of a Ceph cluster: rbd:POOL/IMAGE. It is raw
    /// unless --format says otherwise.
    ///
    /// Without NAME the first has the empty name, which is what clients ask for when they are told
    /// none, and each other one the name of its file. The first is always what they get that ask
    /// for no name. What begins with /, ./ or ../ is a path as a whole, also with a '=' in it. All
    /// options hold for every IMAGE.
    ///
    /// Without IMAGE: nowait/nowait.img in $XDG_STATE_HOME (else in ~/.local/state), which is
    /// made as a sparse file of 1 GiB if it is not there.
    #[arg(value_name = "[NAME=]IMAGE", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = OsStringValueParser::new().try_map(ExportArg::parse))]
    images: Vec<ExportArg>,

    /// Format of IMAGE: raw, qcow2, vmdk or vhdx; without it qcow2 for a file that begins like that,
    /// vmdk or vhdx if its name ends so, too, else raw. A block device is raw unless this says otherwise
    ///
    /// An image that was guessed to be raw is kept from beginning like qcow2: a write that would do
    /// that is refused (EPERM). Otherwise a client that writes to it could make the next server take
    /// it for qcow2. Give the format of what others have written to, and of what clients have to
    /// be able to write anything to.
    #[arg(help_heading = "Exports", short, long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<nowait_image::Format>,

    #[command(flatten, next_help_heading = "Exports")]
    pub(crate) others: OtherFiles,

    #[command(flatten)]
    pub(crate) addresses: AddressArgs,

    #[command(flatten)]
    pub(crate) ublk: UblkArgs,

    #[command(flatten)]
    pub(crate) vhost_user: VhostUserArgs,

    /// The name of the first IMAGE, at most 4096 bytes; another way to write NAME=
    #[arg(
        help_heading = "Exports",
        short = 'x',
        long,
        visible_alias = "export-name",
        value_name = "NAME"
    )]
    #[arg(value_parser = export_spec::parse_name)]
    export: Option<String>,

    /// What clients are told of the first IMAGE, at most 4096 bytes; the name of its file without it
    #[arg(help_heading = "Exports", short = 'D', long, value_name = "TEXT", value_parser = export_spec::parse_name)]
    pub(crate) description: Option<String>,

    #[command(flatten)]
    pub(crate) tls: TlsArgs,

    #[command(flatten)]
    pub(crate) control: ServeControlArgs,

    #[command(flatten)]
    pub(crate) lifetime: LifetimeArgs,

    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(crate) messages: MessageArgs,

    #[command(flatten)]
    pub(crate) remote: RemoteArgs,

    /// Open IMAGE for reading only and refuse every write
    #[arg(help_heading = "Exports", short, long)]
    pub(crate) read_only: bool,

    /// The bytes that clients read and write as a whole: 512 or 4096 (4K)
    ///
    /// NBD tells it as the smallest block and refuses other requests (EINVAL); a disk of a virtual machine
    /// and a ublk node have it as their logical block. IMAGE has to be a multiple of it. Without it NBD takes
    /// requests of any position and length, and the others have 512, or what a block device has. A node that
    /// waits for a server keeps what it has.
    #[arg(help_heading = "Exports", long, value_name = "BYTES", value_parser = parse_block_size)]
    pub(crate) block_size: Option<BlockSize>,

    /// Whether IMAGE is read and written past the page cache
    #[arg(help_heading = "Speed", long, value_name = "WHEN", value_enum, default_value_t = Direct::Auto)]
    pub(crate) direct: Direct,

    /// Serve a block device for writing though it is mounted, or something else uses it
    ///
    /// What is written below a mounted file system is likely to destroy it. With --read-only a
    /// device that is in use can be served without this.
    #[arg(long)]
    pub(crate) allow_mounted: bool,

    /// For disks that this host itself uses: memory for this server never waits for them
    ///
    /// A host that is short of memory first writes to its disks what programs have changed. If one of these disks is
    /// served here, as /dev/nbdN of nbd-client is, a thread of this server that asks for memory could wait
    /// for itself. With this option none does: prctl(2), PR_SET_IO_FLUSHER. It needs the capability
    /// CAP_SYS_RESOURCE, which root has outside of containers. --ublk does the same, with a warning where
    /// it cannot.
    #[arg(long)]
    pub(crate) io_flusher: bool,

    /// The number of serving threads, 1 to 256, each with an engine for all exports
    ///
    /// Connections, queues of virtual machines and queues of ublk devices are spread over them. Without
    /// it: one for each processor that this process may run on, at most 8. --queues is its former name.
    #[arg(help_heading = "Speed", long, value_name = "N", alias = "queues")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_THREADS)))]
    threads: Option<u16>,

    /// The most connections at once, 1 to 1048576; one more is closed as soon as it comes
    ///
    /// A client that is turned away learns so at once, where one left waiting would look like a
    /// server that hangs; a warning on standard error says it too. A client that has not chosen
    /// an export 10 s after it connected is disconnected, and leaves its place to others.
    #[arg(
        help_heading = "Addresses",
        short = 'e',
        long,
        visible_alias = "shared",
        value_name = "N",
        default_value_t = 1024
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONNECTIONS)))]
    pub(crate) max_connections: u32,

    /// How requests get to the kernel
    ///
    /// Without it: uring, or threads (with a warning) where the system forbids io_uring.
    #[arg(help_heading = "Speed", long, value_name = "QUEUE", value_enum)]
    pub(crate) queue: Option<QueueKind>,

    /// Poll the device for the end of each request, instead of sleeping until its interrupt comes
    ///
    /// Saves microseconds on a fast device; costs a processor as long as requests are in flight. It
    /// needs io_uring (so no --queue), direct I/O, and a device with queues for polling, as NVMe has
    /// with nvme.poll_queues (then /sys/block/NAME/queue/io_poll is 1); another IMAGE is refused. If
    /// a device stops polling later, its requests complete by interrupt.
    #[arg(help_heading = "Speed", long, conflicts_with = "queue")]
    pub(crate) poll: bool,

    /// Print the "serving" line as a JSON object, for scripts
    #[arg(help_heading = "Messages", long)]
    pub(crate) json: bool,

    /// Say on standard error what is found and done, and which clients come and leave
    #[arg(help_heading = "Messages", short, long)]
    pub(crate) verbose: bool,

    /// Turn mechanisms off, for measuring what each is worth; results stay the same
    #[arg(help_heading = "Speed", long, value_name = "SWITCH", value_enum, value_delimiter = ',')]
    off: Vec<Switch>,

    /// What a server does anyway, for qemu-nbd's sake: it tells which image of a chain has what
    #[arg(short = 'A', long, hide = true)]
    allocation_depth: bool,
}

/// The blocks of the frontends.
///
/// # Errors
/// A message with the possible values.
fn parse_block_size(text: &str) -> Result<BlockSize, String> {
    BlockSize::of(size::parse(text)?).ok_or_else(|| "a block has 512 or 4096 bytes".into())
}

impl ServeArgs {
    /// The exports with their names; an empty list means the default image, whose name is
    /// [`ServeArgs::default_name`].
    ///
    /// # Errors
    /// A message for the user: a name is given twice, or cannot be derived from the file.
    pub(crate) fn exports(&self) -> Result<Vec<NamedExport>, String> {
        export_spec::named(&self.images, self.export.as_deref())
    }

    /// The exports with their names; the default image is there without its path.
    fn exports_or_default(&self) -> Result<Vec<NamedExport>, String> {
        let mut exports = self.exports()?;
        if exports.is_empty() {
            let name = self.default_name().to_owned();
            exports.push(NamedExport { name, image: PathBuf::new() });
        }
        Ok(exports)
    }

    /// Numbers of the local block devices, where they are given, by the names of their exports.
    ///
    /// # Errors
    /// A message for the user, as [`UblkArgs::nodes`].
    pub(crate) fn nodes(&self) -> Result<BTreeMap<String, Option<u32>>, String> {
        let exports = self.exports_or_default()?;
        let nodes = self.ublk.nodes(&exports)?.into_iter();
        Ok(nodes.map(|(at, id)| (exports[at].name.clone(), id)).collect())
    }

    /// Whether objects are served, or may be later.
    pub(crate) fn names_objects(&self) -> bool {
        let images = self.images.iter().filter_map(|image| image.location().ok());
        let later = self.control.allow_uri.iter().filter_map(|uri| uri.location().ok());
        let mut all = images.chain(later).chain(self.others.backing.iter().cloned());
        all.any(|location| matches!(location, Location::Object(_)))
    }

    /// Why another program cannot open the images as long as this one has them, if it cannot.
    pub(crate) fn cannot_open_twice(&self) -> Option<&'static str> {
        let is_ceph = |image: &ExportArg| matches!(image.location(), Ok(Location::Rbd(_)));
        if self.images.iter().any(is_ceph) && !self.read_only {
            return Some("an image of a Ceph cluster is locked by this process");
        }
        self.remote.record.as_ref().map(|_| "the record of the reads is this process's")
    }

    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user.
    fn check(&self) -> Result<(), String> {
        let exports = self.exports_or_default()?;
        self.vhost_user.check(&exports)?;
        self.addresses.check()?;
        self.others.check(self.format)?;
        self.ublk.check(&exports, self.queue)?;
        self.control.check()?;
        self.tls.check()
    }

    /// The name of the first export if it has none of its own.
    pub(crate) fn default_name(&self) -> &str {
        self.export.as_deref().unwrap_or_default()
    }

    /// The number of serving threads, 1 to [`MAX_THREADS`].
    pub(crate) fn threads(&self) -> u16 {
        self.threads.unwrap_or_else(|| {
            let processors = thread::available_parallelism().map_or(1, usize::from);
            u16::try_from(processors).unwrap_or(MOST_BY_DEFAULT).min(MOST_BY_DEFAULT)
        })
    }

    /// Whether a node's data may go without a copy.
    pub(crate) fn zero_copy(&self) -> bool {
        self.is_on(Switch::ZeroCopy)
    }

    /// Whether `--off` does not name `switch`.
    pub(crate) fn is_on(&self, switch: Switch) -> bool {
        !self.off.contains(&switch)
    }

    /// The engine's configuration: all mechanisms on except those that `--off` names.
    pub(crate) fn config(&self) -> nowait::Config {
        let mut config = nowait::Config::default();
        self.off.iter().for_each(|switch| switch.turn_off(&mut config));
        config
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Direct {
    /// Always; an image whose file system cannot is refused
    On,
    /// Never: through the page cache
    Off,
    /// Where the file system can, else through the page cache with a warning
    Auto,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QueueKind {
    /// io_uring: many requests in one system call
    Uring,
    /// Linux AIO, and plain reads and writes by a bounded number of threads; works everywhere
    Threads,
}

#[cfg(test)]
mod tests;
