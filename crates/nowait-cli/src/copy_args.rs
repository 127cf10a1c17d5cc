//! The command line of `nowait copy`, and its manual.
//!
//! Invariant: as in args. Knows: image_args, size. Known by: args, copy.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use nowait_copy::Place;
use nowait_image::Format;

use crate::image_args::{parse_cluster_size, parse_image_format};
use crate::size;

/// The largest block in which a copy looks for zeros, in bytes.
const MAX_SPARSE_BYTES: u64 = 1 << 20;

/// Copy a disk: between files, qcow2 images, block devices and NBD exports
///
/// FROM and TO are each a file, a block device or the URI of an NBD export:
/// nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH, with %XX for special characters; with
/// nbds in place of nbd for TLS.
/// Of a qcow2 image the disk that is in it is copied, with all that it stands on. A new one stands
/// on nothing.
///
/// Holes are not read. What reads as zeros in FROM is a hole in a new file; in a block device or an
/// export it is made zero without sending zeros where that is possible, and skipped where the export
/// tells that it is zero already. Everything is flushed at the end: after exit status 0 the copy
/// survives a power cut.
///
/// A file is written as TO.partial, which only its owner can read, and gets its name when it is
/// complete and on storage. A copy that fails, or is interrupted, removes it. One that is killed
/// leaves TO.partial, and the next copy to TO begins it anew. A block device or an export that was
/// copied to in part stays so.
///
/// A target that is smaller than FROM is refused. In a larger block device or export, what is behind
/// the end of FROM is left as it is.
///
/// Files are locked in the way QEMU does: FROM may not be in use for writing, TO not at all.
#[derive(Debug, Args)]
#[command(after_help = COPY_AFTER_HELP)]
pub(crate) struct CopyArgs {
    /// What to copy; it is only read
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| Place::parse(&text)))]
    pub(crate) from: Place,

    /// Where to copy it to
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| Place::parse(&text)))]
    pub(crate) to: Place,

    /// Overwrite TO where it is a file that is not empty, or a block device
    ///
    /// A file keeps its permissions, and its old content until the copy is complete. An export is
    /// overwritten without --force: it is there to be written to.
    #[arg(short, long)]
    pub(crate) force: bool,

    /// Read both sides again after the copy, and compare them
    ///
    /// A file that differs does not get its name.
    #[arg(long)]
    pub(crate) verify: bool,

    /// What is inside FROM: raw or qcow2; without it qcow2 if it begins like that, else raw
    ///
    /// Say raw if FROM was ever served raw: whoever may write to a raw disk can make it begin like
    /// qcow2.
    #[arg(long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) from_format: Option<Format>,

    /// A directory that FROM's backing files and data files may be below, beside FROM's own
    /// directory; can be given more than once
    #[arg(long, value_name = "DIR")]
    pub(crate) backing_dir: Vec<PathBuf>,

    /// What TO is to be: raw or qcow2; without it qcow2 for a file whose name ends in .qcow2, else
    /// raw
    ///
    /// Only a file can be qcow2; a block device or an export gets the disk's bytes.
    #[arg(short = 'O', long, visible_alias = "format", value_name = "FORMAT")]
    #[arg(value_parser = parse_image_format)]
    pub(crate) to_format: Option<Format>,

    /// The unit in which a qcow2 TO takes space: a power of two from 512 to 2M; 64K without it
    #[arg(long, value_name = "SIZE", value_parser = parse_cluster_size)]
    pub(crate) cluster_size: Option<u64>,

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

    /// Connections to a server that allows several, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) connections: u16,

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
    /// What TO is to be.
    pub(crate) fn to_format(&self) -> Format {
        let named = |path: &Path| path.extension().is_some_and(|extension| extension == "qcow2");
        let guessed = self.to.path().is_some_and(named);
        self.to_format.unwrap_or(if guessed { Format::Qcow2 } else { Format::Raw })
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

  Back up a disk that a server exports, and put it back:
    nowait copy nbd://backup.example/disk backup.img
    nowait copy backup.img 'nbd+unix:///disk?socket=/run/disk.sock'
    nowait copy nbds://backup.example/disk backup.img --tls-certs /etc/pki/client

JSON keys:
  from, to, to_format, size_bytes, to_size_bytes, data_bytes (written), zero_bytes (left or made zero),
  seconds, bytes_per_second, verified (true or false)

Exit status:
  0   the copy is complete, flushed and, with --verify, compared
  1   there is no copy; one line on standard error says why
  2   wrong command line";
