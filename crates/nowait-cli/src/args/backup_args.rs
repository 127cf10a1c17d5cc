//! The command lines of `nowait backup` and `nowait restore`, and their help.
//!
//! Invariant: parsed values are in range.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use nowait_backup::{ChainPlace, Contents, Keep};
use nowait_copy::Location;
use nowait_image::Format;

use crate::args::image_args::{OtherFiles, format_of_new, parse_image_format, parse_new_format};
use crate::args::remote_args::AuthArgs;
use nowait_daemon::config::start_bitmap::parse_name;

/// Add a point to a chain of backups of a disk, or list, verify and prune the points of a chain
///
/// DISK is all that 'nowait copy' can read: an image, a block device, an NBD export of any server, an object. DIR is a
/// directory with one chain of one disk; it is made if it is absent. A directory with other files is refused. It may also
/// be a folder of an object store: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or az://CONTAINER/FOLDER, with the credentials of
/// the environment, as 'nowait copy' takes them. A DISK with the name of a command, as list, is ./list.
///
/// The first point is whole. A later one has the blocks (64 KiB; larger for disks of more than 512 GiB) that differ from
/// the point before: with --bitmap only what has changed is read, without it all of DISK is read and compared by
/// checksums. Blocks are compressed; zeros and holes take nothing. A disk that has another size than before gets a whole
/// point.
///
/// A point is there when all of it is on storage. A backup that fails, or is interrupted or killed, leaves none. The next one
/// reads the disk again, and takes from it each 64 MiB of stored blocks that were complete, as far as the disk still has
/// their content. One backup writes to a chain at a time.
///
/// A disk that is written to meanwhile is backed up at no single moment: 'nowait export backup start' has one as of an
/// instant (docs/backup.md).
#[derive(Debug, Args)]
#[command(after_help = BACKUP_AFTER_HELP)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct BackupArgs {
    #[command(subcommand)]
    pub(crate) action: Option<ChainAction>,

    #[command(flatten)]
    pub(crate) new: NewPointArgs,
}

/// The keys of an encrypted chain.
#[derive(Debug, Args)]
pub(crate) struct IdentityArgs {
    /// The file with an identity of age (AGE-SECRET-KEY-1…), for a chain that is encrypted; can be given more than once
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) identity: Vec<PathBuf>,
}

/// A new point.
#[derive(Debug, Args)]
pub(crate) struct NewPointArgs {
    /// The disk to back up; it is only read
    #[arg(value_hint = clap::ValueHint::FilePath, required = true)]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| Location::parse(&text)))]
    pub(crate) disk: Option<Location>,

    /// The directory of the chain, or its folder in an object store
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath, required = true)]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| ChainPlace::parse(&text)))]
    pub(crate) directory: Option<ChainPlace>,

    /// Read only what the dirty bitmap NAME of DISK, an NBD export, says has changed since the last point
    ///
    /// The first point is whole also with a bitmap, which has to be there before. Clear the bitmap, or commit the backup
    /// of a server, after exit status 0 only.
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    bitmap: Option<String>,

    /// Encrypt the chain for this recipient of age (age1…); can be given more than once
    ///
    /// All points of a chain are encrypted, or none. Its recipients stay, and those of a later point are added to them for what is
    /// written from then on. A later point needs --identity, too, because it is compared with the one before.
    #[arg(long, value_name = "RECIPIENT")]
    pub(crate) recipient: Vec<String>,

    #[command(flatten)]
    pub(crate) keys: IdentityArgs,

    /// Make a whole point, as after 'nowait backup verify' has found damage in the points before
    #[arg(long, conflicts_with = "bitmap")]
    whole: bool,

    /// Format of DISK: raw, qcow2, vmdk or vhdx; without it as 'nowait copy' finds it
    #[arg(short, long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<Format>,

    #[command(flatten)]
    pub(crate) others: OtherFiles,

    #[command(flatten)]
    pub(crate) auth: AuthArgs,

    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
}

/// The connection of a backup or a restore, and its report.
#[derive(Debug, Args)]
pub(crate) struct TransferArgs {
    /// For nbds: the directory with ca-cert.pem and, where the server asks for them, client-cert.pem and client-key.pem
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_certs: Option<PathBuf>,

    /// Show no progress bar, also on a terminal
    #[arg(long)]
    pub(crate) no_progress: bool,

    /// Print one JSON object at the end, for scripts
    #[arg(long)]
    pub(crate) json: bool,
}

impl NewPointArgs {
    /// The contents of the point.
    pub(crate) fn contents(&self) -> Contents {
        match &self.bitmap {
            Some(name) => Contents::Bitmap(name.clone()),
            None if self.whole => Contents::Whole,
            None => Contents::Differences,
        }
    }
}

/// An action on a chain.
#[derive(Debug, Subcommand)]
pub(crate) enum ChainAction {
    /// List the points of a chain
    List {
        /// The directory of the chain, or its folder in an object store
        #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
        #[arg(value_parser = OsStringValueParser::new().try_map(|text| ChainPlace::parse(&text)))]
        directory: ChainPlace,
        #[command(flatten)]
        keys: IdentityArgs,
        /// Print one JSON object, for scripts
        #[arg(long)]
        json: bool,
    },
    /// Read all that points are restored from, and compare it with its checksums
    ///
    /// Each damaged range is printed with the point that has it, for each point that it makes unusable. Exit status 1 says
    /// that there is one.
    Verify {
        /// The directory of the chain, or its folder in an object store
        #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
        #[arg(value_parser = OsStringValueParser::new().try_map(|text| ChainPlace::parse(&text)))]
        directory: ChainPlace,
        /// The number of a point; all points without it
        point: Option<u32>,
        #[command(flatten)]
        keys: IdentityArgs,
        /// Show no progress bar, also on a terminal
        #[arg(long)]
        no_progress: bool,
        /// Print one JSON object, for scripts
        #[arg(long)]
        json: bool,
    },
    /// Remove older points
    ///
    /// A point stays if any of the options keeps it. What it needs of points that go becomes its own. When a prune is
    /// killed, at any step, every point that stays can be restored, and the next one goes on.
    Prune {
        /// The directory of the chain, or its folder in an object store
        #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
        #[arg(value_parser = OsStringValueParser::new().try_map(|text| ChainPlace::parse(&text)))]
        directory: ChainPlace,
        #[command(flatten)]
        keep: KeepArgs,
        #[command(flatten)]
        keys: IdentityArgs,
        /// Print one JSON object, for scripts
        #[arg(long)]
        json: bool,
    },
}

/// The points that stay.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct KeepArgs {
    /// Keep the last N points
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    keep: Option<u16>,

    /// Keep the last point of each of the last N days (UTC) that have one, and the last of all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    keep_daily: Option<u16>,

    /// Keep the last point of each of the last N weeks (from Monday, UTC) that have one, and the last of all
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    keep_weekly: Option<u16>,
}

impl KeepArgs {
    /// The rule.
    pub(crate) fn keep(&self) -> Keep {
        let count = |given: Option<u16>| given.unwrap_or(0).into();
        let Self { keep, keep_daily, keep_weekly } = self;
        Keep { last: count(*keep), daily: count(*keep_daily), weekly: count(*keep_weekly) }
    }
}

/// Restore a disk from a chain of backups
///
/// TO is a new file, a block device or an NBD export, written as 'nowait copy' writes it: a file gets its name when all of
/// it is there, durable and, with --verify, compared. Every block is compared with its checksum as it is read: a damaged
/// one is an error that names its bytes, and no such file is left.
#[derive(Debug, Args)]
#[command(after_help = RESTORE_AFTER_HELP)]
pub(crate) struct RestoreArgs {
    /// The directory of the chain, or its folder in an object store, and the number of a point; the last one without it
    #[arg(value_name = "DIR[@POINT]", value_hint = clap::ValueHint::DirPath)]
    #[arg(value_parser = OsStringValueParser::new().try_map(parse_point))]
    pub(crate) from: (ChainPlace, Option<u32>),

    /// Where to restore it to
    #[arg(value_hint = clap::ValueHint::FilePath, required_unless_present = "serve")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| Location::parse(&text)))]
    pub(crate) to: Option<Location>,

    /// In place of restoring the point, serve it by NBD on the Unix socket SOCKET, read-only, until a signal ends it
    ///
    /// It can be read immediately, without waiting for a restore: as the backing file of a qcow2 image that a machine is
    /// started on, which 'nowait export move' makes complete meanwhile (docs/backup.md). No point of a directory is pruned
    /// while it is served. Who may connect is decided by the permissions of the socket's directory.
    #[arg(long, value_name = "SOCKET", value_hint = clap::ValueHint::FilePath)]
    #[arg(conflicts_with_all = ["to", "force", "allow_mounted", "verify", "to_format", "tls_certs", "json"])]
    pub(crate) serve: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) keys: IdentityArgs,

    /// Overwrite TO where it is a file that is not empty, a block device, or an object
    #[arg(long)]
    pub(crate) force: bool,

    /// Write to a block device though it is mounted, or something else uses it
    #[arg(long)]
    pub(crate) allow_mounted: bool,

    /// Read both sides again at the end, and compare them
    #[arg(long)]
    pub(crate) verify: bool,

    /// Format of TO: raw or qcow2; without it qcow2 for a file named *.qcow2 or *.qcow, else raw
    ///
    /// A raw file that would begin like an image is refused without this.
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = parse_new_format)]
    to_format: Option<Format>,

    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
}

impl BackupArgs {
    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn check(&self) -> Result<(), String> {
        let new = &self.new;
        let Some(disk) = &new.disk else { return Ok(()) };
        let is_export = matches!(disk, Location::Nbd(_));
        if new.bitmap.is_some() && !is_export {
            return Err("--bitmap is for NBD exports, and DISK is none".into());
        }
        if new.transfer.tls_certs.is_some() && !disk.asks_for_tls() {
            return Err("--tls-certs is for nbds:// and nbds+unix://, and DISK is neither".into());
        }
        new.others.check(new.format)
    }
}

impl RestoreArgs {
    /// The format of TO, and whether it was given.
    pub(crate) fn format(&self) -> (Format, bool) {
        let path = self.to.as_ref().and_then(Location::path);
        let by_name = || path.map_or(Format::Raw, format_of_new);
        (self.to_format.unwrap_or_else(by_name), self.to_format.is_some())
    }
}

/// The place of a chain, and the point if one is given. A directory may have a name like that of a point.
fn parse_point(text: OsString) -> Result<(ChainPlace, Option<u32>), String> {
    let parts = text.to_str().and_then(|text| text.rsplit_once('@'));
    match parts.and_then(|(place, number)| Some((place, number.parse().ok()?))) {
        Some((place, number)) if !Path::new(&text).is_dir() => {
            Ok((ChainPlace::parse(place.as_ref())?, Some(number)))
        }
        _ => Ok((ChainPlace::parse(&text)?, None)),
    }
}

const BACKUP_AFTER_HELP: &str = "\
Examples:
  Add a point of an image, or of a block device, that is not in use:
    nowait backup disk.img /srv/backups/disk

  Add a point of a disk that is in use, as of an instant; only what has changed is read:
    nowait export backup start vm --bitmap nightly
    nowait backup 'nbd+unix:///vm.backup?socket=/run/vm.sock' /srv/backups/vm --bitmap nightly &&
      nowait export backup commit vm || nowait export backup abort vm

  Look at the points, check them, and keep one of each of seven days and four weeks:
    nowait backup list /srv/backups/vm
    nowait backup verify /srv/backups/vm
    nowait backup prune /srv/backups/vm --keep-daily 7 --keep-weekly 4

  The same in an object store:
    nowait backup disk.img s3://backups/disk
    nowait backup verify s3://backups/disk

JSON keys:
  of a new point: disk, directory (as it was given), point, parent (null for a whole one), time, size_bytes, data_bytes (of its
  blocks), stored_bytes (as they are stored), bitmap, seconds, resumed_bytes (stored by a backup that was interrupted)
  of list: points, an array of the same keys from point to bitmap; of one that is damaged: point, damaged (why)
  of verify: sound (true or false), points, an array of objects with point, sound, unusable (why nothing can be
  restored, or null), damage, an array of objects with offset, length, point (that has the bytes) and why
  of prune: removed, kept (arrays of numbers), bytes_before, bytes

Exit status:
  0   the point is there and durable; all points are sound; older points are removed
  1   there is no new point, or one is damaged; one line on standard error says why
  2   wrong command line";

const RESTORE_AFTER_HELP: &str = "\
Examples:
  nowait restore /srv/backups/disk disk.img              # the last point
  nowait restore /srv/backups/disk@3 disk.qcow2          # an earlier one, of 'nowait backup list'
  nowait restore /srv/backups/disk /dev/vdb --force --verify
  nowait restore s3://backups/disk@3 disk.img
  nowait restore /srv/backups/disk@3 --serve /run/point.sock &   # an NBD export

JSON keys:
  from, to, to_format, size_bytes, data_bytes, zero_bytes, seconds, verified (true or false)

Exit status:
  0   the disk is restored, flushed and, with --verify, compared; a signal has ended --serve
  1   there is no such point, or it is damaged; there is no new file; one line on standard error says why
  2   wrong command line
  3   TO, a block device or an export, is written in part";
