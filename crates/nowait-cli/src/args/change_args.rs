//! The command lines of `nowait create`, `resize` and `commit`, which need exclusive access to
//! images, and their help.
//!
//! Invariant: parsed values are in range.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use nowait_image::create::{Features, Preallocation};

use crate::args::image_args::{
    CompressionType, ImageArgs, format_of_new, parse_cluster_size, parse_image_format,
    parse_new_format,
};
use crate::args::remote_args::AuthArgs;
use nowait_daemon::size;

/// Create a new, empty disk image
///
/// IMAGE has its full size immediately, reads as zeros (or as its backing file), and takes space only
/// as it is written. It appears under its name when it is complete; a file that exists is never
/// overwritten.
#[derive(Debug, Args)]
#[command(after_help = CREATE_AFTER_HELP)]
pub(crate) struct CreateArgs {
    /// The file to make
    pub(crate) image: PathBuf,

    /// Bytes, or a whole number with K, M, G or T (powers of 1024), as in 512M or 10G
    ///
    /// A qcow2 disk is rounded up to a multiple of 512 bytes. With --backing it may be left out:
    /// then it is the size of the backing file's disk.
    #[arg(value_parser = size::parse_with_zero, required_unless_present = "backing")]
    pub(crate) size: Option<u64>,

    /// Format of IMAGE: raw (the disk's bytes and nothing else) or qcow2; without it qcow2 for a
    /// name that ends in .qcow2 or .qcow, else raw
    #[arg(short, long, value_name = "FORMAT", value_parser = parse_new_format)]
    format: Option<nowait_image::Format>,

    /// Backing file, read where IMAGE has nothing of its own (qcow2 only)
    ///
    /// FILE stands in IMAGE as it is given here: a relative path is relative to IMAGE's directory,
    /// not to the current one. It must not change as long as IMAGE stands on it. A URL of an object
    /// or of an export is opened later only with "--backing URL".
    #[arg(short, long, value_name = "FILE")]
    pub(crate) backing: Option<PathBuf>,

    /// Format of the backing file: raw, qcow2, vmdk or vhdx
    ///
    /// Without it raw, unless it begins like qcow2: then this must be given, because a guest
    /// that writes to a raw disk can make it begin like that.
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = parse_image_format)]
    #[arg(requires = "backing")]
    pub(crate) backing_format: Option<nowait_image::Format>,

    /// A directory that backing files may be in, in addition to IMAGE's own; can be given more than once
    ///
    /// In it, not below it. Without it the backing file must be in IMAGE's own directory, and no
    /// name that begins with a dot.
    #[arg(long, value_name = "DIR", requires = "backing")]
    pub(crate) backing_dir: Vec<PathBuf>,

    /// The file that has the data of the backing file, where that says that it is in another file;
    /// can be given more than once
    #[arg(long, value_name = "PATH", requires = "backing")]
    pub(crate) data_file: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) auth: AuthArgs,

    /// The unit in which IMAGE takes space: a power of two from 512 to 2M; 64K without it (qcow2
    /// only)
    #[arg(long, value_name = "SIZE", value_parser = parse_cluster_size)]
    pub(crate) cluster_size: Option<u64>,

    /// How programs compress clusters of IMAGE, where they do; zlib without it (qcow2 only)
    ///
    /// What is written to a disk that is served is not compressed; 'nowait copy --compress' makes an image
    /// that is.
    #[arg(long, value_name = "TYPE", value_enum)]
    pub(crate) compression: Option<CompressionType>,

    /// Let a write take a 32nd of a cluster of IMAGE: with a backing file less is copied (qcow2 only; for QEMU 5.2
    /// and later)
    #[arg(long)]
    pub(crate) extended_l2: bool,

    /// Space that is reserved from the beginning
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Preallocate::Off)]
    pub(crate) preallocation: Preallocate,

    /// Print one JSON object, for scripts
    #[arg(long)]
    pub(crate) json: bool,
}

impl CreateArgs {
    /// The optional features of IMAGE.
    pub(crate) fn features(&self) -> Features {
        let compression = self.compression.map(CompressionType::what);
        Features { compression, extended_l2: self.extended_l2 }
    }

    /// The format of IMAGE.
    pub(crate) fn format(&self) -> nowait_image::Format {
        self.format.unwrap_or_else(|| format_of_new(&self.image))
    }
}

/// The values of `--preallocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preallocate {
    /// Nothing
    Off,
    /// All tables, so that writing changes none later (qcow2 without backing file only)
    Metadata,
    /// The space too, so that writing never finds the file system full
    Falloc,
}

impl Preallocate {
    pub(crate) const fn what(self) -> Preallocation {
        match self {
            Self::Off => Preallocation::Off,
            Self::Metadata => Preallocation::Metadata,
            Self::Falloc => Preallocation::Falloc,
        }
    }
}

/// Make a disk larger or smaller
///
/// What it grows by reads as zeros, whatever a backing file has there. IMAGE is locked meanwhile,
/// and refused while it is in use. For a disk that is being served there is 'nowait export resize'.
#[derive(Debug, Args)]
#[command(after_help = RESIZE_AFTER_HELP)]
pub(crate) struct ResizeArgs {
    #[command(flatten)]
    pub(crate) image: ImageArgs,

    /// The new size, or by how much it changes: as in 20G, +10G or -512M
    ///
    /// Bytes, or a whole number with K, M, G or T (powers of 1024).
    ///
    /// A qcow2 disk is rounded up to a multiple of 512 bytes.
    #[arg(value_name = "[+|-]SIZE", value_parser = parse_change, allow_hyphen_values = true)]
    pub(crate) change: Change,

    /// Allow the disk to become smaller: what is behind its new end is lost
    #[arg(long)]
    pub(crate) shrink: bool,

    /// Write to a block device though it is mounted, or something else uses it
    ///
    /// What is written below a mounted file system is likely to destroy it.
    #[arg(long)]
    pub(crate) allow_mounted: bool,

    /// Print one JSON object, for scripts
    #[arg(long)]
    pub(crate) json: bool,
}

/// A change of a size, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    To(u64),
    Plus(u64),
    Minus(u64),
}

impl Change {
    /// The new size of a disk of `old` bytes; `None` for one that no disk can have.
    pub(crate) const fn of(self, old: u64) -> Option<u64> {
        match self {
            Self::To(size) => Some(size),
            Self::Plus(more) => old.checked_add(more),
            Self::Minus(less) => old.checked_sub(less),
        }
    }
}

/// Put what an overlay has into its backing file
///
/// The backing file grows if the overlay's disk is larger. When all is on storage there, the
/// overlay is emptied; it stays usable, and reads the same before, after and at any moment between,
/// also if the commit is killed or the power is cut. After an interruption, commit again.
///
/// Both are locked and must not be in use. Other overlays that stand on the backing file see it
/// change and become worthless: nowait cannot know of them.
#[derive(Debug, Args)]
#[command(after_help = COMMIT_AFTER_HELP)]
pub(crate) struct CommitArgs {
    #[command(flatten)]
    pub(crate) image: ImageArgs,

    /// Format of the backing file; the image says so itself, so this is needed only for raw
    ///
    /// A raw backing file that would begin like another format after the commit is refused without
    /// this: its next user would take it for that. With "raw" it is marked as raw (the extended
    /// attribute user.nowait.format), so that nowait does not.
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) backing_format: Option<nowait_image::Format>,

    /// Write to a block device though it is mounted, or something else uses it
    ///
    /// What is written below a mounted file system is likely to destroy it.
    #[arg(long)]
    pub(crate) allow_mounted: bool,

    /// Leave the overlay as it is
    #[arg(long)]
    pub(crate) keep: bool,

    /// Print one JSON object, for scripts
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn parse_change(text: &str) -> Result<Change, String> {
    match (text.strip_prefix('+'), text.strip_prefix('-')) {
        (Some(more), _) => size::parse(more).map(Change::Plus),
        (_, Some(less)) => size::parse(less).map(Change::Minus),
        _ => size::parse(text).map(Change::To),
    }
}

const CREATE_AFTER_HELP: &str = "\
Examples:
  nowait create disk.img 10G                        10 GiB, raw
  nowait create disk.qcow2 10G                      10 GiB, qcow2
  nowait create top.qcow2 --backing base.qcow2 --backing-format qcow2
  nowait create db.img 10G --preallocation falloc   with all its space

JSON keys:
  image, format, size_bytes

Exit status:
  0   the image is there
  1   it could not be made, and no part of it is left; an existing file is left alone
  2   wrong command line";

const RESIZE_AFTER_HELP: &str = "\
Examples:
  nowait resize disk.qcow2 20G
  nowait resize disk.qcow2 +10G
  nowait resize disk.img -512M --shrink

JSON keys:
  image, format, old_size_bytes, size_bytes

Exit status:
  0   the disk has the new size
  1   it has its old one: IMAGE cannot be opened, is in use, or cannot have the new one
  2   wrong command line";

const COMMIT_AFTER_HELP: &str = "\
Examples:
  nowait commit overlay.qcow2
  nowait commit overlay.qcow2 --keep && rm overlay.qcow2

JSON keys:
  image, backing, data_bytes and zero_bytes (what the overlay had), old_size_bytes and size_bytes
  (of the backing file's disk), emptied (true or false)

Exit status:
  0   all is in the backing file, on storage
  1   it is not, and the overlay still has it: commit again when what was wrong is put right
  2   wrong command line";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_a_size_with_or_without_a_sign() {
        assert_eq!(parse_change("20G"), Ok(Change::To(20 << 30)));
        assert_eq!(parse_change("+512"), Ok(Change::Plus(512)));
        assert_eq!(parse_change("-1M"), Ok(Change::Minus(1 << 20)));
        for text in ["", "+", "-", "++1", "--1G", "-0", "1-"] {
            assert!(parse_change(text).is_err(), "{text}");
        }
    }
}
