//! The command line, and the manual that `--help` prints.
//!
//! Invariant: what parses is in range; what the help promises as a default is what the methods
//! here return.
//! Knows: bench_args, change_args, copy_args, export, image_args, listen, size, tls_args. Known by:
//! main and the commands.

use std::path::PathBuf;
use std::thread;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::bench_args::BenchArgs;
use crate::change_args::{CommitArgs, CreateArgs, ResizeArgs};
use crate::copy_args::CopyArgs;
use crate::export::{self, Given, Named};
use crate::image_args::{CheckArgs, MapArgs, parse_image_format};
use crate::listen::Listen;
use crate::tls_args::TlsArgs;

const MAX_QUEUES: u16 = 256;
const MAX_CONNECTIONS: u32 = 1 << 20;

/// Serve disk images and block devices over the network, by direct I/O
#[derive(Debug, Parser)]
#[command(name = "nowait", version, arg_required_else_help = true, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(ServeArgs),
    Create(CreateArgs),
    Info(InfoArgs),
    Map(MapArgs),
    Check(CheckArgs),
    Copy(CopyArgs),
    Resize(ResizeArgs),
    Commit(CommitArgs),
    Bench(BenchArgs),
}

/// Serve disk images and block devices over NBD until told to stop
///
/// Clients (a virtual machine, nbd-client, qemu-img, nbdcopy, …) see IMAGE as a disk. The line
/// "serving URI" appears on standard output as soon as they can connect; warnings and errors go
/// to standard error. Several IMAGEs are several exports of one server: a client asks for one of
/// them by name, and gets the first if it names none. IMAGE is read and written by direct I/O where its file system can, past the
/// host's page cache; requests of any position and length are served all the same.
///
/// IMAGE is locked while it is served, in the way QEMU does: it is refused here while QEMU or
/// another nowait uses it, and they refuse it while it is served. Any number of servers can serve
/// one IMAGE with --read-only.
///
/// On SIGINT or SIGTERM it takes no more requests, finishes those it has, flushes IMAGE and exits
/// with status 0.
#[derive(Debug, Args)]
#[command(after_help = SERVE_AFTER_HELP)]
pub(crate) struct ServeArgs {
    /// The files or block devices to serve, each with the name that clients ask for
    ///
    /// Without NAME the first has the empty name, which is what clients ask for when they are told
    /// none, and each other one the name of its file. The first is always what they get that ask
    /// for no name. What begins with /, ./ or ../ is a path as a whole, also with a '=' in it. All
    /// options hold for every IMAGE.
    ///
    /// Without IMAGE: nowait/nowait.img in $XDG_STATE_HOME (else in ~/.local/state), which is
    /// made as a sparse file of 1 GiB if it is not there.
    #[arg(value_name = "[NAME=]IMAGE")]
    #[arg(value_parser = OsStringValueParser::new().try_map(Given::parse))]
    images: Vec<Given>,

    /// What is inside IMAGE: raw or qcow2; without it qcow2 if it begins like that, else raw
    ///
    /// An image that was guessed to be raw is kept from beginning like qcow2: a write that would do
    /// that is refused (EPERM). Otherwise whoever may write to it could make the next server take
    /// it for qcow2. Give the format of what others have written to, and of what clients have to
    /// be able to write anything to.
    #[arg(long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<nowait_image::Format>,

    /// A directory that backing files and data files may be below, beside IMAGE's own directory;
    /// can be given more than once
    ///
    /// Links are resolved first. A file elsewhere that a qcow2 IMAGE names is refused, so that an
    /// image from a stranger cannot have other files of this machine served.
    #[arg(long, value_name = "DIR")]
    pub(crate) backing_dir: Vec<PathBuf>,

    /// Where to listen: unix:PATH or tcp:HOST:PORT; can be given more than once
    ///
    /// An IPv6 address goes into brackets: `tcp:[::1]:10809`. Port 0 is any free port; the URI
    /// tells which. Without TLS (see --tls-certs) there is neither encryption nor a password: who
    /// reaches the address has the disk. So listen on TCP on 127.0.0.1 or in a network you trust
    /// only.
    ///
    /// Sockets that a service manager hands over (LISTEN_FDS) are served too. Without them and without
    /// --nbd: a Unix socket named after IMAGE in $XDG_RUNTIME_DIR/nowait, else in a new
    /// temporary directory; only you can enter either.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) nbd: Vec<Listen>,

    /// The name of the first IMAGE, at most 4096 bytes; another way to write NAME=
    #[arg(long, value_name = "NAME", value_parser = export::parse_name)]
    export: Option<String>,

    #[command(flatten)]
    pub(crate) tls: TlsArgs,

    /// Open IMAGE for reading only and refuse every write
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Whether IMAGE is read and written past the page cache
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Direct::Auto)]
    pub(crate) direct: Direct,

    /// The number of queues, 1 to 256: threads that serve connections, each with a queue of its own
    ///
    /// Without it: one for each processor that this process may run on.
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES)))]
    queues: Option<u16>,

    /// The most connections at once, 1 to 1048576; one more is closed as soon as it comes
    ///
    /// A client that is turned away learns so at once, where one left waiting would look like a
    /// server that hangs; a warning on standard error says it too. A client that has not chosen
    /// an export 10 s after it connected is disconnected, and leaves its place to others.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_CONNECTIONS)))]
    pub(crate) max_connections: u32,

    /// How requests get to the kernel
    ///
    /// Without it: uring, or threads (with a warning) where the system forbids io_uring.
    #[arg(long, value_name = "QUEUE", value_enum)]
    pub(crate) queue: Option<QueueKind>,

    /// Print the "serving" line as a JSON object, for scripts
    #[arg(long)]
    pub(crate) json: bool,

    /// Say on standard error what is found and done
    #[arg(long)]
    pub(crate) verbose: bool,

    /// Turn mechanisms off, for measuring what each is worth; results stay the same
    #[arg(long, value_name = "SWITCH", value_enum, value_delimiter = ',')]
    off: Vec<Switch>,
}

impl ServeArgs {
    /// What to serve, under which names; nothing means the default image, whose name is
    /// [`ServeArgs::default_name`].
    ///
    /// # Errors
    /// A name is given twice, or cannot be found: a usage error.
    pub(crate) fn exports(&self) -> Result<Vec<Named>, clap::Error> {
        export::named(&self.images, self.export.as_deref())
            .map_err(|why| Cli::command().error(ErrorKind::ValueValidation, why))
    }

    /// The name of the first export if it has none of its own.
    pub(crate) fn default_name(&self) -> &str {
        self.export.as_deref().unwrap_or_default()
    }

    /// How many queues to run, 1 to [`MAX_QUEUES`].
    pub(crate) fn queues(&self) -> u16 {
        self.queues.unwrap_or_else(|| {
            let processors = thread::available_parallelism().map_or(1, usize::from);
            u16::try_from(processors).unwrap_or(MAX_QUEUES).min(MAX_QUEUES)
        })
    }

    /// The engine's configuration: everything on but what `--off` names.
    pub(crate) fn config(&self) -> nowait::Config {
        let mut config = nowait::Config::default();
        for switch in &self.off {
            *match switch {
                Switch::Simple => &mut config.simple,
                Switch::InlineCompletion => &mut config.inline_completion,
                Switch::Vectored => &mut config.vectored,
                Switch::Pool => &mut config.pool,
                Switch::NowaitFirst => &mut config.nowait_first,
                Switch::Hint => &mut config.hint,
            } = false;
        }
        config
    }
}

/// Show what an image is and how it would be served
///
/// Size and allocated space, data and holes, whether direct I/O is possible and which alignment
/// it asks for, and which queue would be used; of a qcow2 image also what its header says. IMAGE
/// is only looked at, and may be in use.
#[derive(Debug, Args)]
#[command(after_help = INFO_AFTER_HELP)]
pub(crate) struct InfoArgs {
    /// The file or block device to look at
    pub(crate) image: PathBuf,

    /// What is inside IMAGE: raw or qcow2; without it qcow2 if it begins like that, else raw
    #[arg(long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<nowait_image::Format>,

    /// Print one JSON object, for scripts
    #[arg(long)]
    pub(crate) json: bool,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    /// The short way of a request that is one transfer
    Simple,
    /// Finishing a request on the thread that learns of its end
    InlineCompletion,
    /// Having all transfers of one request under way together
    Vectored,
    /// Reusing the memory of finished requests
    Pool,
    /// Trying without waiting before handing a request to a worker thread
    NowaitFirst,
    /// Remembering which ranges of the image hold data
    Hint,
}

const AFTER_HELP: &str = "\
Examples:
  nowait serve                        try it out: a 1 GiB disk on a private socket
  nowait create disk.img 10G          make an image
  nowait serve disk.img               serve it
  nowait info disk.img                look at it
  nowait check disk.qcow2             look for damage in it
  nowait copy disk.img copy.img       copy it
  nowait resize disk.qcow2 +10G       make it larger
  nowait commit overlay.qcow2         put what an overlay has into its backing file

'nowait COMMAND --help' is the manual of a command.

Exit status:
  0   success
  1   failure; one line on standard error says of what, and what to do
  2   wrong command line";

const SERVE_AFTER_HELP: &str = "\
Examples:
  Serve an image on a socket of its own, and start a virtual machine on it:
    nowait serve disk.img --nbd unix:/run/disk.sock
    qemu-system-x86_64 -drive 'file=nbd+unix:///?socket=/run/disk.sock,format=raw,if=virtio'

  Serve what is in a qcow2 image, with its backing file in another directory:
    nowait serve overlay.qcow2 --backing-dir /srv/golden

  Serve a block device to this machine, and have it as /dev/nbd0:
    nowait serve /dev/vdb --nbd tcp:127.0.0.1:10809
    nbd-client 127.0.0.1 10809 /dev/nbd0

  Serve a golden image read-only under a name, at two addresses:
    nowait serve golden.img --read-only --export golden \\
        --nbd unix:/run/golden.sock --nbd 'tcp:[::1]:10809'
    qemu-img convert -O qcow2 'nbd://[::1]:10809/golden' copy.qcow2

  Serve two disks at one address; the first is what a client gets that names none:
    nowait serve root=root.img data=/dev/vdc --nbd unix:/run/disks.sock
    qemu-img info 'nbd+unix:///data?socket=/run/disks.sock'

  Serve it to other machines, encrypted, to clients with a certificate only:
    nowait serve disk.img --nbd tcp:0.0.0.0:10809 --tls-certs /etc/pki/nbd --tls-verify-peer
    nbdinfo 'nbds://server.example/?tls-certificates=/etc/pki/client'

  Measure what two of the mechanisms are worth:
    nowait serve disk.img --off simple,pool

Environment:
  XDG_STATE_HOME    where the default image is kept
  XDG_RUNTIME_DIR   where the default socket is made
  LISTEN_FDS        sockets handed over, to serve on (with LISTEN_PID, as by systemd)
  NOTIFY_SOCKET     whom to tell of READY, STATUS and STOPPING

Exit status:
  0   stopped by SIGINT or SIGTERM, everything flushed
  1   an IMAGE cannot be opened, is in use or failed, or the address is taken
  2   wrong command line";

const INFO_AFTER_HELP: &str = "\
Examples:
  nowait info disk.img
  nowait info /dev/vdb --json | jq .offset_alignment_bytes

JSON keys (null where not known):
  image, kind (\"regular_file\" or \"block_device\"), size_bytes, allocated_bytes,
  data_extents, data_bytes, hole_bytes, direct_io (true or false), direct_io_reason,
  memory_alignment_bytes, offset_alignment_bytes, read_offset_alignment_bytes,
  queue (\"uring\" or \"threads\"), queue_reason, qcow2_header (true or false),
  and those of \"qemu-img info --output=json\": filename, format, virtual-size, actual-size,
  cluster-size, dirty-flag, backing-filename, full-backing-filename, backing-filename-format,
  format-specific; and snapshots_count

Exit status:
  0   success
  1   IMAGE cannot be opened or is no disk
  2   wrong command line";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::MAX_NAME_BYTES;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command)
    }

    fn serve(line: &str) -> ServeArgs {
        match parse(line).unwrap() {
            Command::Serve(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn serve_needs_nothing() {
        let args = serve("nowait serve");
        assert_eq!((args.exports().unwrap(), args.default_name()), (vec![], ""));
        assert_eq!(args.nbd, []);
        assert_eq!((args.direct, args.queue, args.format), (Direct::Auto, None, None));
        assert!(args.backing_dir.is_empty());
        assert!(!args.read_only && !args.json && !args.verbose);
    }

    #[test]
    fn serve_takes_every_option() {
        let args = serve(
            "nowait serve disk.img --format raw --backing-dir d --nbd unix:/a --nbd tcp:h:1 --export e \
             --read-only --direct on --queues 3 --queue threads --json --verbose \
             --max-connections 7",
        );
        let named = Named { name: "e".into(), image: "disk.img".into() };
        assert_eq!(args.exports().unwrap(), [named]);
        let tcp = Listen::Tcp { host: "h".into(), port: 1 };
        assert_eq!(args.nbd, [Listen::Unix("/a".into()), tcp]);
        assert_eq!((args.queues(), args.max_connections), (3, 7));
        assert_eq!((args.direct, args.queue), (Direct::On, Some(QueueKind::Threads)));
        assert_eq!(args.format, Some(nowait_image::Format::Raw));
        assert_eq!(args.backing_dir, [PathBuf::from("d")]);
        assert!(args.read_only && args.json && args.verbose);
    }

    #[test]
    fn without_queues_there_is_at_least_one() {
        assert!((1..=MAX_QUEUES).contains(&serve("nowait serve").queues()));
    }

    #[test]
    fn off_turns_off_what_it_names_and_nothing_else() {
        let all = nowait::Config::default();
        assert_eq!(serve("nowait serve").config(), all);
        let expected = nowait::Config { simple: false, hint: false, ..all };
        assert_eq!(serve("nowait serve --off simple,hint").config(), expected);
        assert_eq!(serve("nowait serve --off hint --off simple").config(), expected);
        let some = serve("nowait serve --off inline-completion,vectored,pool,nowait-first");
        let expected = nowait::Config {
            inline_completion: false,
            vectored: false,
            pool: false,
            nowait_first: false,
            ..all
        };
        assert_eq!(some.config(), expected);
    }

    #[test]
    fn a_wrong_value_is_a_usage_error_that_says_why() {
        let long = format!("nowait serve --export {}", "x".repeat(MAX_NAME_BYTES + 1));
        for (line, why) in [
            ("nowait create a 1G --format vmdk", "raw and qcow2"),
            ("nowait create a 1G --cluster-size 3000", "a power of two"),
            ("nowait create a 1G --preallocation full", "metadata"),
            ("nowait resize a -x", "as in 512M"),
            ("nowait resize a +", "as in 512M"),
            ("nowait serve a --format vmdk", "raw and qcow2"),
            ("nowait serve --nbd udp:a", "begins with unix: or tcp:"),
            ("nowait serve --queues 0", "1..=256"),
            ("nowait serve --queues 257", "1..=256"),
            ("nowait serve --max-connections 0", "1..=1048576"),
            ("nowait serve --off everything", "nowait-first"),
            ("nowait serve --queue aio", "threads"),
            ("nowait create a 0", "at least one byte"),
            ("nowait serve a=", "the image is missing"),
            ("nowait check a --format vmdk", "raw and qcow2"),
            (long.as_str(), "4097 bytes, the protocol allows 4096"),
        ] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.to_string().contains(why), "{line}: {error}");
        }
    }

    #[test]
    fn names_that_cannot_be_are_a_usage_error() {
        let error = serve("nowait serve a=x a=y").exports().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("have one name, 'a'"), "{error}");
    }

    #[test]
    fn a_missing_argument_is_a_usage_error() {
        for line in ["nowait create", "nowait create disk.img", "nowait info", "nowait map"] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::MissingRequiredArgument, "{line}");
            assert_eq!(error.exit_code(), 2, "{line}");
        }
        assert_eq!(parse("nowait").unwrap_err().exit_code(), 2);
    }
}
