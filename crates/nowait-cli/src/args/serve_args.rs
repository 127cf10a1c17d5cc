//! The command line of `nowait serve`, and the configuration that results from it.
//!
//! Invariant: each option reaches the configuration; what the file of `--config` says stays where no option is over it.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nowait_server::BlockSize;

use crate::args::address_args::AddressArgs;
use crate::args::bitmap_args::ServeBitmapArgs;
use crate::args::control_args::ServeControlArgs;
use crate::args::help_texts::SERVE_AFTER_HELP;
use crate::args::image_args::{OtherFiles, parse_image_format};
use crate::args::lifetime_args::LifetimeArgs;
use crate::args::message_args::MessageArgs;
use crate::args::remote_args::RemoteArgs;
use crate::args::sandbox_args::SandboxArgs;
use crate::args::tls_args::TlsArgs;
use crate::args::ublk_args::UblkArgs;
use crate::args::vhost_user_args::VhostUserArgs;
use nowait_daemon::config::export_spec;
use nowait_daemon::config::export_spec::ExportSpec;
use nowait_daemon::config::{
    MAX_CONNECTIONS, MAX_THREADS, ServeConfig, choices, config_file, notation,
};

/// Serve disk images: over NBD, to virtual machines, or as a local block device
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
/// IMAGE and exits with status 0; one that comes more than a second later terminates it immediately, unflushed.
/// SIGHUP does the same where the server has a terminal (not under nohup); without one, as under
/// systemd or with --fork, it has files read again: the log file is reopened, new connections get
/// the TLS files as they are now, and a raw file or a block device that has grown is served with its
/// new size.
#[derive(Debug, Args)]
#[command(after_help = SERVE_AFTER_HELP)]
pub(crate) struct ServeArgs {
    /// Read options from FILE (TOML), which has a key for each of these options
    ///
    /// A key has the name of its long option, and its value the notation of the command line: a size or a time is
    /// a string ("10G", "500ms"), a number a number, a switch true or false, and what can be given more than
    /// once an array. Each IMAGE is a table [[export]] with the keys name, image and description. A key that is
    /// not known is refused.
    ///
    /// Options of the command line go over the file: one with a value replaces it, one that can be given more
    /// than once adds to it (so do IMAGEs), and a switch is turned on by either. --export and --description
    /// are for the first export. Relative paths are relative to the directory that the server is started in. FILE is
    /// a regular file; it is read when the server starts, before the sandbox, and again by an upgrade.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: Option<PathBuf>,

    /// Print the options in effect as a file for --config, and exit: nothing is opened or checked on disk
    #[arg(long)]
    pub(crate) print_config: bool,

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
    #[arg(value_parser = OsStringValueParser::new().try_map(ExportSpec::parse))]
    images: Vec<ExportSpec>,

    /// Format of IMAGE: raw, qcow2, vmdk or vhdx; without it qcow2 for a file that begins like that,
    /// vmdk or vhdx if its name ends so, too, else raw. A block device is raw unless this says otherwise
    ///
    /// An image that was guessed to be raw is kept from beginning like qcow2: a write that would do
    /// that is refused (EPERM). Otherwise a client that writes to it could make the next server take
    /// it for qcow2. Give the format of what others have written to, and of what clients have to
    /// be able to write anything to.
    #[arg(help_heading = "Exports", short, long, value_name = "FORMAT", value_parser = parse_image_format)]
    format: Option<nowait_image::Format>,

    #[command(flatten, next_help_heading = "Exports")]
    others: OtherFiles,

    #[command(flatten)]
    addresses: AddressArgs,

    #[command(flatten)]
    ublk: UblkArgs,

    #[command(flatten)]
    vhost_user: VhostUserArgs,

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

    /// Description of the first IMAGE for clients, at most 4096 bytes; the name of its file without it
    #[arg(help_heading = "Exports", short = 'D', long, value_name = "TEXT", value_parser = export_spec::parse_name)]
    description: Option<String>,

    #[command(flatten)]
    bitmaps: ServeBitmapArgs,

    #[command(flatten)]
    tls: TlsArgs,

    #[command(flatten)]
    control: ServeControlArgs,

    #[command(flatten)]
    lifetime: LifetimeArgs,

    #[command(flatten)]
    sandbox: SandboxArgs,

    #[command(flatten)]
    messages: MessageArgs,

    #[command(flatten)]
    remote: RemoteArgs,

    /// Open IMAGE for reading only and refuse every write
    #[arg(help_heading = "Exports", short, long)]
    read_only: bool,

    /// The bytes that clients read and write as a whole: 512 or 4096 (4K)
    ///
    /// NBD tells it as the smallest block and refuses other requests (EINVAL); a disk of a virtual machine
    /// and a ublk node have it as their logical block. IMAGE has to be a multiple of it. Without it NBD takes
    /// requests of any position and length, and the others have 512, or what a block device has. A node that
    /// waits for a server keeps what it has.
    #[arg(help_heading = "Exports", long, value_name = "BYTES", value_parser = notation::parse_block_size)]
    block_size: Option<BlockSize>,

    /// Whether IMAGE is read and written past the page cache [default: auto]
    #[arg(help_heading = "Speed", long, value_name = "WHEN", value_enum)]
    direct: Option<choices::Direct>,

    /// Serve a block device for writing though it is mounted, or something else uses it
    ///
    /// What is written below a mounted file system is likely to destroy it. With --read-only a
    /// device that is in use can be served without this.
    #[arg(long)]
    allow_mounted: bool,

    /// For disks that this host itself uses: memory for this server never waits for them
    ///
    /// A host that is short of memory first writes to its disks what programs have changed. If one of these disks is
    /// served here, as /dev/nbdN of nbd-client is, a thread of this server that asks for memory could wait
    /// for itself. With this option none does: prctl(2), PR_SET_IO_FLUSHER. It needs the capability
    /// CAP_SYS_RESOURCE, which root has outside of containers. --ublk does the same, with a warning where
    /// it cannot.
    #[arg(long)]
    io_flusher: bool,

    /// The number of serving threads, 1 to 256, each with an engine for all exports
    ///
    /// Connections, queues of virtual machines and queues of ublk devices are spread over them. Without
    /// it: one for each processor that this process may run on, at most 8. --queues is its former name.
    #[arg(help_heading = "Speed", long, value_name = "N", alias = "queues")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_THREADS)))]
    threads: Option<u16>,

    /// The most connections, 1 to 1048576; one more is closed as soon as it comes [default: 1024]
    ///
    /// A client that is turned away learns so immediately, where one left waiting would look like a
    /// server that hangs; a warning on standard error says it too. A client that has not chosen
    /// an export 10 s after it connected is disconnected, and leaves its place to others.
    #[arg(
        help_heading = "Addresses",
        short = 'e',
        long,
        visible_alias = "shared",
        value_name = "N"
    )]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONNECTIONS)))]
    max_connections: Option<u32>,

    /// How requests get to the kernel
    ///
    /// Without it: uring, or threads (with a warning) where the system forbids io_uring.
    #[arg(help_heading = "Speed", long, value_name = "QUEUE", value_enum)]
    queue: Option<choices::QueueChoice>,

    /// Poll the device for the completion of each request, instead of sleeping until its interrupt comes
    ///
    /// Saves microseconds on a fast device; costs a processor as long as requests are in flight. It
    /// needs io_uring (so no --queue), direct I/O, and a device with queues for polling, as NVMe has
    /// with nvme.poll_queues (then /sys/block/NAME/queue/io_poll is 1); another IMAGE is refused. If
    /// a device stops polling later, its requests complete by interrupt.
    #[arg(help_heading = "Speed", long)]
    poll: bool,

    /// Print the "serving" line as a JSON object, for scripts
    #[arg(help_heading = "Messages", long)]
    json: bool,

    /// Say on standard error what is found and done, and which clients come and leave
    #[arg(help_heading = "Messages", short, long)]
    verbose: bool,

    /// Turn mechanisms off, for measuring what each is worth; results stay the same
    #[arg(help_heading = "Speed", long, value_name = "SWITCH", value_enum, value_delimiter = ',')]
    off: Vec<choices::Mechanism>,

    /// For qemu-nbd's sake; a server tells in any case which image of a chain has what
    #[arg(short = 'A', long, hide = true)]
    allocation_depth: bool,
}

impl ServeArgs {
    /// The configuration in effect: that of the file, if there is one, with the options over it.
    ///
    /// # Errors
    /// A message for the user: the file cannot be read, or options do not go together.
    pub(crate) fn config(&self) -> Result<ServeConfig, String> {
        let mut config = match &self.config {
            Some(path) => config_file::read(path)?,
            None => ServeConfig::default(),
        };
        self.put_over(&mut config)?;
        config.check()?;
        if let Some(path) = &self.config {
            config_file::check_place(path, &config)?;
        }
        Ok(config)
    }

    fn put_over(&self, config: &mut ServeConfig) -> Result<(), String> {
        let Self { config: _, print_config: _, images, format, others, addresses, .. } = self;
        let Self { ublk, vhost_user, export, description, bitmaps, tls, control, .. } = self;
        let Self { lifetime, sandbox, messages, remote, read_only, block_size, direct, .. } = self;
        let Self { allow_mounted, io_flusher, threads, max_connections, queue, poll, .. } = self;
        let Self { json, verbose, off, allocation_depth: _, .. } = self;
        put_exports(images, export.as_ref(), description.as_ref(), &mut config.export)?;
        config.format = format.or(config.format);
        others.put_over(config);
        addresses.put_over(config)?;
        config.ublk.extend_from_slice(&ublk.ublk);
        config.vhost_user.extend_from_slice(&vhost_user.sockets);
        config.bitmap.extend_from_slice(&bitmaps.bitmaps);
        config.bitmap_dir = bitmaps.bitmap_dir.clone().or(config.bitmap_dir.take());
        tls.put_over(config);
        control.put_over(config);
        lifetime.put_over(config)?;
        sandbox.put_over(config);
        messages.put_over(config);
        remote.put_over(config);
        config.read_only |= read_only;
        config.block_size = block_size.or(config.block_size);
        config.direct = direct.unwrap_or(config.direct);
        config.allow_mounted |= allow_mounted;
        config.io_flusher |= io_flusher;
        config.threads = threads.or(config.threads);
        config.max_connections = max_connections.unwrap_or(config.max_connections);
        config.queue = queue.or(config.queue);
        config.poll |= poll;
        config.json |= json;
        config.verbose |= verbose;
        config.off.extend(off);
        Ok(())
    }
}

/// Adds `images` to `exports`, whose first one gets the `name` and the `description`.
///
/// # Errors
/// A message for the user: the first of `images` has a name of its own.
fn put_exports(
    images: &[ExportSpec],
    name: Option<&String>,
    description: Option<&String>,
    exports: &mut Vec<ExportSpec>,
) -> Result<(), String> {
    let given_here = exports.is_empty();
    exports.extend_from_slice(images);
    if exports.is_empty() && (name.is_some() || description.is_some()) {
        exports.push(ExportSpec::default());
    }
    let Some(first) = exports.first_mut() else { return Ok(()) };
    if given_here && name.is_some() && first.name.is_some() {
        return Err("give the first image its name by NAME= or by --export, not both".into());
    }
    first.name = name.cloned().or(first.name.take());
    first.description = description.cloned().or(first.description.take());
    Ok(())
}
