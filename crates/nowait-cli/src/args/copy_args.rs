//! The command line of `nowait copy`, and its help.
//!
//! Invariant: parsed values are in range.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nowait_copy::{Changes, Increment, IncrementTarget, Location};
use nowait_image::{Compression, Format};

use crate::args::image_args::{
    CompressionType, OtherFiles, format_of_new, parse_cluster_size, parse_image_format,
    parse_new_format,
};
use crate::args::remote_args::AuthArgs;
use nowait_daemon::config::start_bitmap::parse_name;
use nowait_daemon::size;

/// The largest block of the search for zeros, in bytes.
const MAX_SPARSE_BYTES: u64 = 1 << 20;

/// The default number of connections to a server.
const CONNECTIONS: u16 = 4;

/// Copy a disk: between files, qcow2 images, block devices, NBD exports, images of Ceph clusters and
/// objects of stores
///
/// FROM and TO are each a file, a block device, an image of a Ceph cluster (rbd:POOL/IMAGE) or the URI
/// of an NBD export: nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH, with %XX for special
/// characters; with nbds in place of nbd for TLS; or an object of a store: s3://BUCKET/KEY,
/// gs://BUCKET/KEY or az://CONTAINER/KEY. FROM may also be a file of a web server (https://HOST/PATH).
/// Of a qcow2 image the disk that is in it is copied, with all that it stands on. A new qcow2 image has no backing
/// file.
///
/// Holes are not read. What reads as zeros in FROM is a hole in a new file; in a block device or an
/// export it is made zero without sending zeros where that is possible, and skipped where the export
/// tells that it is zero already. Everything is flushed at the end: after exit status 0 the copy
/// survives a power cut.
///
/// A file is written as TO.partial, which only its owner can read, and gets its name when it is
/// complete and on storage. A copy that fails, or is interrupted, removes it. One that is killed
/// leaves TO.partial, and the next copy to TO begins it again. A block device or an export that was
/// copied to in part stays so.
///
/// An object is uploaded in parts, with zeros for holes, and is there when all of it is: a copy that
/// fails, or is interrupted, has the store drop the parts, and an object that was there stays.
///
/// A target that is smaller than FROM is refused. In a larger block device or export, what is behind
/// the end of FROM is left as it is.
///
/// Files are locked in the way QEMU does: FROM may not be in use for writing, TO not at all.
#[derive(Debug, Args)]
#[command(after_help = COPY_AFTER_HELP)]
pub(crate) struct CopyArgs {
    /// Source of the copy; it is only read
    #[arg(value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| Location::parse(&text)))]
    pub(crate) from: Location,

    /// Where to copy it to
    #[arg(value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| Location::parse(&text)))]
    pub(crate) to: Location,

    /// Overwrite TO where it is a file that is not empty, a block device, or an object
    ///
    /// A file keeps its permissions, and, as an object, its old content until the copy is complete. An export is
    /// overwritten without --force: it is there to be written to.
    #[arg(long)]
    pub(crate) force: bool,

    /// Write to a block device though it is mounted, or something else uses it
    ///
    /// What is written below a mounted file system is likely to destroy it.
    #[arg(long)]
    pub(crate) allow_mounted: bool,

    /// Read both sides again after the copy, and compare them
    ///
    /// A file that differs does not get its name. An object is compared when it is there, and stays if it
    /// differs. Not with --rescue: a failing source is read once, and
    /// may read otherwise the next time.
    #[arg(long)]
    pub(crate) verify: bool,

    /// Copy what can be read of a damaged FROM, and leave zeros for the rest
    ///
    /// A read that fails is tried again in pieces of 64 KiB, then of 4 KiB, so that only what cannot
    /// be read is lost: sectors of a failing disk, clusters that were cut off a qcow2 image, what a
    /// server answers with EIO. Exit status 4 says that something is missing; the ranges are on
    /// standard error (the first 20), and with --json all of them, up to 10000.
    ///
    /// Where the first bytes of FROM cannot be read, say what is in it with --from-format. A qcow2
    /// image whose header cannot be read is not opened.
    #[arg(long, conflicts_with = "verify")]
    pub(crate) rescue: bool,

    /// Format of FROM: raw, qcow2, vmdk or vhdx; without it qcow2 if it begins like that, vmdk or vhdx
    /// if its name ends so, too, else raw
    ///
    /// Say raw if FROM was ever served raw: a guest that writes to a raw disk can make it begin like
    /// qcow2.
    #[arg(short = 'f', long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) from_format: Option<Format>,

    #[command(flatten)]
    pub(crate) others: OtherFiles,

    #[command(flatten)]
    pub(crate) auth: AuthArgs,

    /// Format of TO: raw or qcow2; without it qcow2 for a file whose name ends in .qcow2 or .qcow,
    /// else raw
    ///
    /// A raw file that would begin like an image or a packed file is refused without this: its next
    /// user would take it for that. With "raw" it is marked as raw (the extended attribute
    /// user.nowait.format), so that nowait does not.
    ///
    /// Only a file can be qcow2; a block device, an export or an object gets the disk's bytes. To upload a
    /// qcow2 image as it is, say -f raw.
    #[arg(short = 'O', long, value_name = "FORMAT")]
    #[arg(value_parser = parse_new_format)]
    pub(crate) to_format: Option<Format>,

    /// The unit in which a qcow2 TO takes space: a power of two from 512 to 2M; 64K without it
    #[arg(long, value_name = "SIZE", value_parser = parse_cluster_size)]
    pub(crate) cluster_size: Option<u64>,

    /// Compress the clusters of a qcow2 TO, on all processors; the image is read by every program that reads
    /// qcow2 images, and what is written to it later is not compressed
    #[arg(long)]
    pub(crate) compress: bool,

    /// How --compress does it; zlib without it
    #[arg(long, value_name = "TYPE", value_enum, requires = "compress")]
    compression: Option<CompressionType>,

    /// Copy only what has changed since an earlier copy: what the dirty bitmap NAME of FROM, an NBD export of this or
    /// another server, says
    ///
    /// The changes go into the earlier copy (--in-place), or into a new qcow2 image that stands on it (--to-backing). Both
    /// must be as large as FROM. What a bitmap is, and when to begin the next one: docs/backup.md.
    #[arg(long, value_name = "NAME", group = "changes", requires = "increment", value_parser = parse_name)]
    bitmap: Option<String>,

    /// Copy only what differs from an earlier copy, which is found by reading both, where there is no dirty bitmap
    ///
    /// The earlier copy is named as for --bitmap, and FROM may be all that is copied otherwise. Blocks of 4 KiB that differ
    /// are written, and no others; what is a hole in both is not read.
    #[arg(long, group = "changes", requires = "increment")]
    compare: bool,

    /// With --bitmap or --compare: TO is the earlier copy, which is brought up to date
    ///
    /// A copy that is interrupted leaves it between the two: repeat it, with the same bitmap.
    #[arg(long, group = "increment", requires = "changes")]
    #[arg(conflicts_with_all = ["compress", "cluster_size", "rescue"])]
    in_place: bool,

    /// With --bitmap or --compare: TO is a new qcow2 image with the changes that stands on IMAGE, the earlier copy
    ///
    /// IMAGE is recorded as given: a relative name is relative to the directory of TO. An image that is not in that
    /// directory needs --backing-dir.
    #[arg(long, value_name = "IMAGE", group = "increment", requires = "changes")]
    #[arg(conflicts_with_all = ["compress", "force", "rescue"])]
    to_backing: Option<PathBuf>,

    /// Format of the image of --to-backing: raw or qcow2; raw without it
    #[arg(long, value_name = "FORMAT", requires = "to_backing", value_parser = parse_image_format)]
    to_backing_format: Option<Format>,

    /// Look for zeros in FROM's data in blocks of SIZE, and leave holes for them; 0 for not at all
    ///
    /// Where TO is not known to be zero, zeros are made there without sending them if at least 64K
    /// of them lie together.
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse_sparse)]
    pub(crate) sparse: u64,

    /// For nbds: the directory with ca-cert.pem, which vouches for the server, and, where the server
    /// asks for them, client-cert.pem and client-key.pem
    ///
    /// "?tls-certificates=DIR" in a URI is for that server alone. Over TCP the server's certificate
    /// must be for the host that the URI names, or for that of "tls-hostname=NAME"; on a Unix socket
    /// only for the latter.
    #[arg(long, value_name = "DIR")]
    pub(crate) tls_certs: Option<PathBuf>,

    /// Connections to a server that allows several, 1 to 64; 4 without it
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    connections: Option<u16>,

    /// Requests of 1 MiB in flight, 1 to 1024; of smaller ones there are more
    ///
    /// More than 8 help where each takes long, as over a network with long ways.
    #[arg(long, value_name = "N", default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) requests: u16,

    /// Flush TO at the end; this is always done
    #[arg(long)]
    flush: bool,

    /// Show no progress bar, also on a terminal
    #[arg(long)]
    pub(crate) no_progress: bool,

    /// Print one JSON object at the end, for scripts
    #[arg(long)]
    pub(crate) json: bool,
}

impl CopyArgs {
    /// Connections to a server that allows several.
    pub(crate) fn connections(&self) -> u16 {
        self.connections.unwrap_or(CONNECTIONS)
    }

    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn check(&self) -> Result<(), String> {
        let is = |location: &Location, name: &str| {
            location.path().is_some_and(|path| path == Path::new(name))
        };
        if is(&self.from, "-") {
            return Err("FROM cannot be standard input, whose size is not known beforehand: put \
                        it into a file first (a file of that name is ./-)"
                .into());
        }
        if is(&self.to, "-") {
            return Err(
                "TO cannot be standard output: serve the disk, and nbdcopy URI - writes it \
                        there (a file of that name is ./-)"
                    .into(),
            );
        }
        let is_export = |location: &Location| matches!(location, Location::Nbd(_));
        let (from_export, to_export) = (is_export(&self.from), is_export(&self.to));
        let to_object = matches!(self.to, Location::Object(_));
        let has_others = self.others.given().is_some();
        let has_tls = self.from.asks_for_tls() || self.to.asks_for_tls();
        let is_raw = self.to_format().is_raw();
        let not_raw = format!(
            "--from-format {} does not go with an NBD URI: a server exports a disk's bytes",
            self.from_format.map_or("raw", Format::name)
        );
        for (is_wrong, why) in [
            (from_export && self.from_format.is_some_and(|it| !it.is_raw()), not_raw.as_str()),
            (
                from_export && has_others && self.increment().is_none(),
                "an NBD URI names no other files: --backing-dir, --backing and --data-file",
            ),
            (
                self.bitmap.is_some() && !from_export,
                "--bitmap is for NBD exports, and FROM is not one",
            ),
            (
                self.tls_certs.is_some() && !has_tls,
                "--tls-certs is for nbds:// and nbds+unix://, and neither FROM nor TO is one",
            ),
            (
                self.connections.is_some() && !from_export && !to_export,
                "--connections is for servers, and neither FROM nor TO is a URI",
            ),
            (
                to_object && self.allow_mounted,
                "--allow-mounted is for block devices, and TO is an object",
            ),
            (is_raw && self.compress, "--compress is for qcow2, and TO is raw (say -O qcow2)"),
            (
                is_raw && self.cluster_size.is_some(),
                "--cluster-size is for qcow2, and TO is raw (say -O qcow2)",
            ),
        ] {
            if is_wrong {
                return Err(why.into());
            }
        }
        self.others.check(self.from_format)
    }

    /// The increment, if not all of FROM is copied.
    pub(crate) fn increment(&self) -> Option<Increment> {
        let bitmap = self.bitmap.clone().map(Changes::Bitmap);
        let changes = bitmap.or(self.compare.then_some(Changes::Compared))?;
        let target = match &self.to_backing {
            Some(backing) => IncrementTarget::Overlay {
                backing: backing.clone(),
                format: self.to_backing_format,
            },
            None => IncrementTarget::InPlace,
        };
        Some(Increment { changes, target })
    }

    /// How TO is compressed, if it is.
    pub(crate) fn compression(&self) -> Option<Compression> {
        let given = self.compression.unwrap_or(CompressionType::Zlib);
        self.compress.then_some(given.what())
    }

    /// The format of TO.
    pub(crate) fn to_format(&self) -> Format {
        let by_name = || self.to.path().map_or(Format::Raw, format_of_new);
        self.to_format.unwrap_or_else(by_name)
    }
}

fn parse_sparse(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        _ => size::parse(text).and_then(|bytes| match bytes {
            512..=MAX_SPARSE_BYTES if bytes.is_power_of_two() => Ok(bytes),
            _ => Err("a power of two from 512 to 1M, or 0".into()),
        }),
    }
}

const COPY_AFTER_HELP: &str = "\
Examples:
  Make a sparse copy of an image, and check it:
    nowait copy disk.img copy.img --verify

  Put an image on a block device:
    nowait copy disk.img /dev/vdb --force

  Make a qcow2 image of a disk, and a raw one of an overlay with all below it:
    nowait copy disk.img disk.qcow2
    nowait copy overlay.qcow2 flat.img -O raw

  Make a small qcow2 image to hand over:
    nowait copy disk.img disk.qcow2 --compress --compression zstd

  Take what can be read of a failing disk, and the list of what is lost:
    nowait copy /dev/sdx rescued.img --rescue -O raw --json > rescued.json

  Back up a disk that a server exports, and put it back:
    nowait copy nbd://backup.example/disk backup.img
    nowait copy backup.img 'nbd+unix:///disk?socket=/run/disk.sock'
    nowait copy nbds://backup.example/disk backup.img --tls-certs /etc/pki/client

  Copy what has changed since Monday's copy, into that copy, or into an image of its own on it:
    nowait copy nbd://backup.example/disk backup.img --bitmap monday --in-place
    nowait copy nbd://backup.example/disk tuesday.qcow2 --bitmap monday --to-backing backup.img

  The same of a disk that is not served, by reading it and Monday's copy:
    nowait copy disk.img tuesday.qcow2 --compare --to-backing backup.img

  Put an image into a bucket, with credentials in the environment, and serve it from there:
    nowait copy disk.img s3://bucket/disk.img
    nowait serve s3://bucket/disk.img --read-only

JSON keys:
  from, to, to_format, size_bytes, to_size_bytes, data_bytes (written),
  zero_bytes (left or made zero), unchanged_bytes (left as the earlier copy has them),
  compared_bytes (of the earlier copy that --compare has read), seconds, bytes_per_second, verified (true or false),
  unreadable_bytes, unreadable (what is lost: an array of objects with offset and length, in bytes),
  unreadable_truncated (true where it has 10000 ranges and there were more)

Exit status:
  0   the copy is complete, flushed and, with --verify, compared
  1   there is no copy; one line on standard error says why
  2   wrong command line
  3   there is no copy, and TO, a block device or an export, is written in part
  4   the copy is complete but for what could not be read (--rescue), which is zeros in TO";
