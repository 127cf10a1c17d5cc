//! The command-line options for the control socket, and the commands that use it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgAction, Args, Subcommand};

use nowait_daemon::size;
use nowait_nbd::Address;
use nowait_server::Limits;

use crate::args::change_args::{Change, parse_change};
use crate::args::help_texts::{BACKUP_START_AFTER_HELP, MOVE_AFTER_HELP};
use crate::args::image_args::parse_image_format;
use nowait_daemon::config;
use nowait_daemon::config::ServeConfig;
use nowait_daemon::config::allowed_uri::AllowedUri;
use nowait_daemon::config::control_address::ControlAddress;
use nowait_daemon::config::export_spec;
use nowait_daemon::config::listen_address;
use nowait_daemon::config::start_bitmap::{parse_granularity, parse_name};

/// How a server can be asked and changed.
#[derive(Debug, Args)]
#[command(next_help_heading = "Control")]
pub(crate) struct ServeControlArgs {
    /// Where 'nowait status' and other commands reach it: unix:PATH, or off; and tcp:HOST:PORT
    ///
    /// It speaks HTTP: docs/control.md and docs/control.openapi.json say what. The Unix socket is for
    /// you and for root only. Without this it is in $XDG_RUNTIME_DIR/nowait, else in /tmp/nowait-UID,
    /// where the commands find it. tcp: comes in addition to it: on a loopback address with a token, or on any with
    /// --control-tls-certs.
    #[arg(long, value_name = "ADDRESS", value_parser = OsStringValueParser::new().try_map(|text| ControlAddress::parse(&text)))]
    control: Vec<ControlAddress>,

    /// The file with the token for --control tcp:HOST:PORT, which only you can read
    ///
    /// Without it the server makes one, control-PORT.token beside the default Unix sockets, where the
    /// commands of its user find it.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, conflicts_with = "control_tls_certs")]
    pub(crate) control_token: Option<PathBuf>,

    /// Encrypt --control tcp:HOST:PORT, for clients with a certificate only; no token then
    ///
    /// The files are named as for --tls-certs, with ca-cert.pem. Take another authority than for
    /// clients of the disks, unless these may do everything.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) control_tls_certs: Option<PathBuf>,

    /// A directory from which 'nowait export add' may add images; can be given more than once
    ///
    /// Images in directories below it are allowed, too. Without this option no image can be added.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) allow_dir: Vec<PathBuf>,

    /// A URI that 'nowait export add' may name as an image, or with a slash at its end all plain names
    /// behind it, such as s3://bucket/; can be given more than once
    ///
    /// A plain name has none of the characters ?#%:;&= and no part "..". A URI with options, as of a
    /// socket or of certificates, is allowed only by itself, as a whole.
    #[arg(long, value_name = "URI")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| AllowedUri::parse(&text)))]
    pub(crate) allow_uri: Vec<AllowedUri>,

    #[command(flatten)]
    pub(crate) limits: LimitArgs,
}

impl ServeControlArgs {
    /// Puts what is given over `config`.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) {
        let Self { control, control_token, control_tls_certs, allow_dir, allow_uri, limits } = self;
        config.control.extend_from_slice(control);
        config.control_token = control_token.clone().or(config.control_token.take());
        config.control_tls_certs = control_tls_certs.clone().or(config.control_tls_certs.take());
        config.allow_dir.extend_from_slice(allow_dir);
        config.allow_uri.extend_from_slice(allow_uri);
        let LimitArgs {
            limit_iops,
            limit_bandwidth,
            limit_iops_per_client,
            limit_bandwidth_per_client,
        } = *limits;
        config.limit_iops = limit_iops.or(config.limit_iops);
        config.limit_bandwidth = limit_bandwidth.or(config.limit_bandwidth);
        config.limit_iops_per_client = limit_iops_per_client.or(config.limit_iops_per_client);
        config.limit_bandwidth_per_client =
            limit_bandwidth_per_client.or(config.limit_bandwidth_per_client);
    }
}

/// The address of a server's control interface: a path may stand alone.
fn parse_place(text: OsString) -> Result<Address, String> {
    match text.to_str() {
        Some(plain) if plain.starts_with("unix:") || plain.starts_with("tcp:") => {
            listen_address::parse(plain)
        }
        _ => Ok(Address::Unix(text.into())),
    }
}

/// The server that a command is for.
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// The control socket of the server, or tcp:HOST:PORT; without it the only server of this user
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = OsStringValueParser::new().try_map(parse_place))]
    pub(crate) control: Option<Address>,

    /// The file with the token for tcp:HOST:PORT
    ///
    /// Without it NOWAIT_CONTROL_TOKEN is the token, else the file that a server of this user has made.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    #[arg(requires = "control", conflicts_with = "control_tls_certs")]
    pub(crate) control_token: Option<PathBuf>,

    /// The directory with ca-cert.pem, client-cert.pem and client-key.pem for tcp:HOST:PORT
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath, requires = "control")]
    pub(crate) control_tls_certs: Option<PathBuf>,

    /// Print JSON, for scripts
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show the running servers of this user, their exports and what these do
///
/// Each server is asked at its control socket, which is found automatically.
#[derive(Debug, Args)]
#[command(after_help = STATUS_AFTER_HELP)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// Show the connections of a running server, or close one
#[derive(Debug, Args)]
#[command(after_help = CONNECTIONS_AFTER_HELP)]
pub(crate) struct ConnectionsArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,

    /// Close the connection with this number; its client gets no more answers
    #[arg(long, value_name = "ID")]
    pub(crate) close: Option<u64>,
}

/// List, add, change and remove the exports of a running server
#[derive(Debug, Args)]
#[command(after_help = EXPORT_AFTER_HELP)]
pub(crate) struct ExportCommand {
    #[command(subcommand)]
    pub(crate) action: ExportAction,
}

/// How much an export may do.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LimitArgs {
    /// The most requests a second, of all clients of an export together
    #[arg(help_heading = "Limits", long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit_iops: Option<u64>,

    /// The most bytes a second that are read and written, such as 100M
    #[arg(help_heading = "Limits", long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) limit_bandwidth: Option<u64>,

    /// The most requests a second of each client: an NBD connection, a virtual machine, a ublk node
    #[arg(help_heading = "Limits", long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit_iops_per_client: Option<u64>,

    /// The most bytes a second of each client, such as 10M
    #[arg(help_heading = "Limits", long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) limit_bandwidth_per_client: Option<u64>,
}

impl LimitArgs {
    /// The limits of all clients together.
    pub(crate) fn limits(&self) -> Limits {
        config::limits(self.limit_iops, self.limit_bandwidth)
    }

    /// Limits of each client.
    pub(crate) fn limits_per_client(&self) -> Limits {
        config::limits(self.limit_iops_per_client, self.limit_bandwidth_per_client)
    }
}

/// Commands for exports.
#[derive(Debug, Subcommand)]
pub(crate) enum ExportAction {
    /// Show the exports
    List {
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Open an image and serve it, too
    Add {
        /// The name by which clients choose it
        #[arg(value_parser = export_spec::parse_name)]
        name: String,
        /// The image: a file in a directory of the server's --allow-dir, or a URI of its --allow-uri
        image: PathBuf,
        /// Format of the image: raw, qcow2, vmdk or vhdx; without it the image is looked at
        #[arg(short, long, value_name = "FORMAT", value_parser = parse_image_format)]
        format: Option<nowait_image::Format>,
        /// Open it for reading only
        #[arg(short, long)]
        read_only: bool,
        /// The URL that a qcow2 image stands on, exactly as the image names it; can be given more than
        /// once
        ///
        /// It must be one of the server's --backing or --allow-uri. Exports that stand on the same one
        /// share what was read of it.
        #[arg(long, value_name = "URL")]
        backing: Vec<String>,
        /// Serve it to virtual machines, too, at this socket; can be given more than once
        ///
        /// It must be in a directory of the server's --allow-dir, or in that of its control sockets.
        #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
        vhost_user: Vec<PathBuf>,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Remove an export and close its image
    Remove {
        /// Its name, or @ID
        name: String,
        /// Remove it also while clients use it: they are disconnected
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Make the disk of an export larger or smaller while it is in use
    ///
    /// Virtual machines and local block devices see the new size immediately, clients of NBD
    /// when they connect again. A raw image grows beside its requests; for anything else the export
    /// pauses for some milliseconds.
    Resize {
        /// Its name, or @ID
        name: String,
        /// The new size, or by how much it changes: as in 20G, +10G or -512M
        #[arg(value_name = "[+|-]SIZE", value_parser = parse_change, allow_hyphen_values = true)]
        change: Change,
        /// Allow the disk to become smaller: what is behind its new end is lost
        #[arg(long)]
        shrink: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Keep the image of an export as it is, and have a new overlay for what is written from now on
    ///
    /// The overlay is a qcow2 image that stands on the present one. The export pauses for some
    /// milliseconds; its clients see the same disk, and all that was acknowledged is below the
    /// overlay. Serve the overlay the next time: a change of the image below makes it worthless.
    Snapshot {
        /// Its name, or @ID
        name: String,
        /// The image that is made, in a directory of the server's --allow-dir
        overlay: PathBuf,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Limit the requests and bytes a second of an export, all its clients together or each of them
    ///
    /// What is not given stays as it is. Prints the limits that hold then.
    Limit {
        /// Its name, or @ID
        name: String,
        /// Remove the limits that are not given
        #[arg(long)]
        clear: bool,
        #[command(flatten)]
        limits: LimitArgs,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Change an export's share of a thread that serves others, too
    ///
    /// Exports that always have much to move share the serving threads by their weights, whatever numbers
    /// of clients they have.
    Weight {
        /// Its name, or @ID
        name: String,
        /// 1 to 10000; each export begins with 100
        #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000))]
        weight: u32,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Make an export read-only from the next request on, or writable again
    ///
    /// Writes fail with EPERM, those of virtual machines with an I/O error. Clients are told that the
    /// disk is read-only when they connect again.
    ReadOnly {
        /// Its name, or @ID
        name: String,
        /// Refuse changes, or take them again if the image was opened for writing
        #[arg(value_name = "on|off", value_parser = parse_switch, action = ArgAction::Set)]
        read_only: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    Bitmap(BitmapCommand),
    Backup(BackupCommand),
    Move(MoveCommand),
    Replicate(ReplicateCommand),
    /// Make the completed writes of an export durable
    Flush {
        /// Its name, or @ID
        name: String,
        #[command(flatten)]
        server: ServerArgs,
    },
}

/// Add, list, clear, merge and remove dirty bitmaps: what was changed since when
///
/// A dirty bitmap has a bit for each piece of a disk, which is set when a client changes something in
/// it. NBD clients read it as the context qemu:dirty-bitmap:NAME. It stays when the disk is resized, when
/// a snapshot is taken and when another program takes over by 'nowait upgrade'. In a qcow2 image, and beside a
/// raw one, it is stored, and there again at the next start; of other images it is lost when the server exits.
/// docs/backup.md has examples.
#[derive(Debug, Args)]
pub(crate) struct BitmapCommand {
    #[command(subcommand)]
    pub(crate) action: BitmapAction,
}

/// An export and a bitmap of it.
#[derive(Debug, Args)]
pub(crate) struct OneBitmap {
    /// The name of the export, or @ID
    pub(crate) export: String,
    /// The name of the bitmap
    pub(crate) bitmap: String,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// The actions on bitmaps.
#[derive(Debug, Subcommand)]
pub(crate) enum BitmapAction {
    /// Add a bitmap, which records what is changed from now on
    Add {
        /// The name of the export, or @ID
        export: String,
        /// The name of the bitmap, 1 to 1023 bytes
        #[arg(value_parser = parse_name)]
        bitmap: String,
        /// The bytes that a bit stands for, a power of two from 512 to 64M; 64K without it
        #[arg(short, long, value_name = "SIZE", value_parser = parse_granularity)]
        granularity: Option<u64>,
        /// Record nothing until 'enable'
        #[arg(long)]
        disabled: bool,
        /// Keep it in memory only; without this it is stored in a qcow2 image, or in IMAGE.bitmaps.qcow2 beside a
        /// raw one (which takes serve --allow-dir of that directory), or in the directory of serve --bitmap-dir, if
        /// the image is written to
        #[arg(long)]
        temporary: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Show the bitmaps of an export
    List {
        /// The name of the export, or @ID
        export: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Forget what was noted in a bitmap
    Clear(OneBitmap),
    /// Note in a bitmap what is noted in others
    Merge {
        /// The name of the export, or @ID
        export: String,
        /// The bitmap that gets it
        bitmap: String,
        /// The bitmaps that have it, which stay as they are
        #[arg(required = true)]
        sources: Vec<String>,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Go on noting changes in a bitmap
    Enable(OneBitmap),
    /// Note no more changes in a bitmap, which keeps what it has
    Disable(OneBitmap),
    /// Remove a bitmap
    Remove(OneBitmap),
}

/// Begin, list, commit and abort backups: disks as they were at an instant
///
/// A backup is a read-only export of its own, EXPORT.backup, which NBD clients reach as they reach the
/// others. Before something is written to the disk, its old bytes are copied to a scratch file. It lasts
/// until 'commit' or 'abort'; clients that leave decide nothing. docs/backup.md has examples.
#[derive(Debug, Args)]
pub(crate) struct BackupCommand {
    #[command(subcommand)]
    pub(crate) action: BackupAction,
}

/// Exports whose backups end together.
#[derive(Debug, Args)]
pub(crate) struct EndedBackups {
    /// The names of the exports, or @ID
    #[arg(value_name = "EXPORT", required = true)]
    pub(crate) exports: Vec<String>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// The actions on backups.
#[derive(Debug, Subcommand)]
pub(crate) enum BackupAction {
    /// Begin backups of disks as they are at one instant; if one cannot begin, none does
    #[command(after_help = BACKUP_START_AFTER_HELP)]
    Start(StartedBackups),
    /// Finish backups that were read: the frozen bits are dropped
    Commit(EndedBackups),
    /// Drop backups: what was dirty at their instant is dirty in the bitmap again
    Abort(EndedBackups),
    /// Show the backups that have not ended
    List {
        #[command(flatten)]
        server: ServerArgs,
    },
}

/// Exports whose backups begin together.
#[derive(Debug, Args)]
pub(crate) struct StartedBackups {
    /// The names of the exports, or @ID
    #[arg(value_name = "EXPORT", required = true)]
    pub(crate) exports: Vec<String>,
    /// The name of the new export; EXPORT.backup without it, 'backup' for an export without a name
    ///
    /// For one EXPORT only.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Freeze this dirty bitmap: the backup offers its bits, and later changes go to a successor
    #[arg(long, value_name = "BITMAP")]
    pub(crate) bitmap: Option<String>,
    /// Keep and serve only what is dirty in the bitmap; reads of the rest fail with EPERM
    #[arg(long, requires = "bitmap")]
    pub(crate) only_dirty: bool,
    /// Let clients discard what they have read, which frees its scratch
    ///
    /// Reads of it fail with EIO from then on. The new export is not marked as read-only then, because
    /// clients discard nothing of one that is; writes fail with EPERM.
    #[arg(long)]
    pub(crate) discard: bool,
    /// The file for old bytes, which is made and has no name any more when this returns
    ///
    /// It is in a directory of --allow-dir of the server. Without this it is beside the image if that is
    /// in such a directory, and otherwise in the first one. For one EXPORT only.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) scratch: Option<PathBuf>,
    /// The most bytes of old data; a backup that needs more fails, and its disk goes on
    ///
    /// At least 64K. Without this the size of the disk, or half of what is free if that is less.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) scratch_size: Option<u64>,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// Move the disk of an export to another place while it is in use
///
/// The disk is copied, and what is changed meanwhile is copied again, until that is little. Then the export pauses, the rest
/// is copied, and clients go on with the disk in its new place. Until then it stays where it was: after 'cancel', an error,
/// or the end of the server nothing is at the new place, but on a device or an export what was written so far. The image
/// before stays as it was at the exchange. The server serves the new place from then on, but its command line and its
/// configuration name the old one: change them before its next start.
#[derive(Debug, Args)]
#[command(after_help = MOVE_AFTER_HELP)]
pub(crate) struct MoveCommand {
    /// The name of the export, or @ID
    #[arg(value_name = "EXPORT")]
    pub(crate) export: String,
    /// A new file in a directory of the server's --allow-dir, a block device there, or an NBD URI of its --allow-uri
    #[arg(required_unless_present = "cancel")]
    pub(crate) target: Option<PathBuf>,
    /// Format of a new file: raw or qcow2; without it qcow2 if its name ends with .qcow2, or else raw
    #[arg(short, long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<nowait_image::Format>,
    /// Overwrite the block device TARGET
    #[arg(long)]
    pub(crate) overwrite_device: bool,
    /// How long clients may wait for the exchange, in milliseconds, 10 to 60000; 2000 without it
    ///
    /// When the rest cannot be copied and flushed in that time, the export goes on, and the exchange is tried again later.
    /// The move of a disk that is written to faster than it is copied goes on until its writers are slower: limit them with
    /// 'nowait export limit', or move it with a longer pause.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub(crate) max_pause: Option<u64>,
    /// Copy at most so many bytes a second, such as 50M
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) rate: Option<u64>,
    /// Return when the move has begun; it goes on
    #[arg(long)]
    pub(crate) detach: bool,
    /// Cancel the move: the disk stays where it is
    #[arg(long, conflicts_with_all = ["target", "format", "overwrite_device", "max_pause", "rate", "detach"])]
    pub(crate) cancel: bool,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// Replicate the disk of an export to another server, again and again
///
/// In each round the target gets what has changed, as of one instant; the first one copies all. Between two rounds the target
/// is the disk as it was at the instant of the last one; during a round, and after one that was cut off, it is a mixture
/// of two instants. When the connection is lost, it is made again, and what was not durable on the target is copied again. After a
/// restart of the server begin it again: without --resume all is copied then. Without TARGET and --stop this shows how it goes. What to do on
/// the other side, and how to go on there: docs/backup.md.
#[derive(Debug, Args)]
pub(crate) struct ReplicateCommand {
    /// The name of the export, or @ID
    #[arg(value_name = "EXPORT")]
    pub(crate) export: String,
    /// An NBD URI of the server's --allow-uri: an export of the same size without another writer
    pub(crate) target: Option<String>,
    /// Seconds from the begin of a round to the next, 1 to 86400; 60 without it
    #[arg(long, value_name = "SECONDS", requires = "target", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) every: Option<u64>,
    /// Copy at most so many bytes a second, such as 50M
    #[arg(long, value_name = "SIZE", requires = "target", value_parser = size::parse)]
    pub(crate) rate: Option<u64>,
    /// Store what TARGET lacks with the disk, and go on from there after a restart instead of copying all
    ///
    /// A bitmap of the disk has TARGET in its name. It is stored as those of 'nowait export bitmap add' are, also through a kill. That
    /// nothing else has written to TARGET since is trusted; some places of it are compared with the disk, and if one differs, all is copied.
    #[arg(long, requires = "target")]
    pub(crate) resume: bool,
    /// Stop it; the target stays as it is
    #[arg(long, conflicts_with = "target")]
    pub(crate) stop: bool,
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off".into()),
    }
}

const STATUS_AFTER_HELP: &str = "\
Examples:
  nowait status
  nowait status --json | jq '.[].exports[].size_bytes'
  nowait status --control tcp:127.0.0.1:9000
  curl --unix-socket PATH http://localhost/metrics     the same for Prometheus

Exit status:
  0   a server answered
  1   no server of this user is running, or it does not answer
  2   wrong command line";

const CONNECTIONS_AFTER_HELP: &str = "\
Examples:
  nowait connections
  nowait connections --close 12

Exit status:
  0   done
  1   there is no such connection; or no server of this user is running
  2   wrong command line";

const EXPORT_AFTER_HELP: &str = "\
Examples:
  nowait serve disk.img --allow-dir /srv/images     a server that takes more images
  nowait serve disk.img --allow-uri s3://bucket/    and those of a bucket
  nowait export add data /srv/images/data.qcow2
  nowait export add vm7 /srv/images/vm7.qcow2 --backing s3://bucket/debian.qcow2
  nowait export list
  nowait export resize data +10G
  nowait export snapshot data /srv/images/data-tuesday.qcow2
  nowait export limit data --limit-iops 2000 --limit-bandwidth-per-client 100M
  nowait export read-only data on
  nowait export remove data

Exit status:
  0   done
  1   refused by the server, and why; or no server of this user is running
  2   wrong command line";
