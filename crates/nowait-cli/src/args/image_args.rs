//! The command-line options for an image and its backing files; the command lines of `nowait map`
//! and `check`.
//!
//! Invariant: parsed values are in range.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use nowait_image::create::CLUSTER_BYTES;
use nowait_image::{Compression, formats};
use nowait_remote::Location;

use crate::args::remote_args::AuthArgs;
use nowait_daemon::config::ServeConfig;
use nowait_daemon::config::notation;
pub(crate) use nowait_daemon::config::notation::parse_format as parse_image_format;
use nowait_daemon::size;

/// An image that is opened with its backing chain.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// The image; IMAGE@NAME is an internal snapshot of a qcow2 image
    pub(crate) image: PathBuf,

    /// Format of IMAGE: raw, qcow2, vmdk or vhdx; without it qcow2 if it begins like that, vmdk or
    /// vhdx if its name ends so, too, else raw
    ///
    /// Say raw if IMAGE was ever served raw: a guest that writes to a raw disk can make it begin
    /// like qcow2.
    #[arg(short, long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<nowait_image::Format>,

    #[command(flatten)]
    pub(crate) others: OtherFiles,

    #[command(flatten)]
    pub(crate) auth: AuthArgs,
}

/// The files that an image may name beside itself.
#[derive(Debug, Args)]
pub(crate) struct OtherFiles {
    /// A directory that backing files may be in, in addition to the image's own; can be given more than once
    ///
    /// A qcow2 image names the file that it stands on. That file is opened, for reading, if it is in
    /// the image's own directory or in a DIR: in it, not below it. A name that begins with a dot is
    /// refused, and so is a link that leads elsewhere. An image that is a block device trusts no
    /// directory but a DIR, and only in a DIR can a block device be a backing file. So an image from
    /// a stranger cannot have other files of this host read.
    #[arg(long, value_name = "DIR")]
    pub(crate) backing_dir: Vec<PathBuf>,

    /// The URL of an object or of an export that a qcow2 image stands on, exactly as the image names
    /// it; can be given more than once
    ///
    /// No URL that an image names is opened unless it is given.
    #[arg(long, value_name = "URL")]
    #[arg(value_parser = OsStringValueParser::new().try_map(|text| notation::backing(&text)))]
    pub(crate) backing: Vec<Location>,

    /// The file that has the data of a qcow2 image, where the image says that it is in another file;
    /// can be given more than once
    ///
    /// No data file is opened that is not given, wherever it is, because it is written to.
    #[arg(long, value_name = "PATH")]
    pub(crate) data_file: Vec<PathBuf>,
}

impl ImageArgs {
    /// Checks rules that the parser does not.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.others.check(self.format)
    }
}

impl OtherFiles {
    /// One of the options that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        match (self.backing_dir.is_empty(), self.backing.is_empty(), self.data_file.is_empty()) {
            (true, true, true) => None,
            (false, _, _) => Some("--backing-dir"),
            (true, false, _) => Some("--backing"),
            (true, true, false) => Some("--data-file"),
        }
    }

    /// Puts what is given over `config`.
    pub(crate) fn put_over(&self, config: &mut ServeConfig) {
        let Self { backing_dir, backing, data_file } = self;
        config.backing_dir.extend_from_slice(backing_dir);
        config.backing.extend_from_slice(backing);
        config.data_file.extend_from_slice(data_file);
    }

    /// Refuses options for other files with format raw.
    ///
    /// # Errors
    /// A message for the user.
    pub(crate) fn check(&self, format: Option<nowait_image::Format>) -> Result<(), String> {
        let Some(given) = self.given() else { return Ok(()) };
        match format {
            Some(raw) if raw.is_raw() => {
                Err(format!("{given} does not go with format raw: a raw image names no other file"))
            }
            _ => Ok(()),
        }
    }
}

/// Print which parts of a disk are data, zeros or nothing, and where
///
/// The output is that of "qemu-img map" (QEMU 7.2): a line for each run of data, with its place on
/// the disk, its length, and where it is in which file ("-" where it is not there as it is, as when
/// it is compressed). As JSON, "depth" says in which image of the chain each run is found (0 is
/// IMAGE); "present", whether that image says anything of it; then "zero" and "data"; and "offset",
/// where it is in that image's file, if it is there as it is.
#[derive(Debug, Args)]
#[command(after_help = MAP_AFTER_HELP)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    pub(crate) image: ImageArgs,

    /// The form of the output
    #[arg(long, value_name = "FORM", value_enum, default_value_t = MapOutput::Human)]
    output: MapOutput,

    /// Print JSON, for scripts; another way to write --output=json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl MapArgs {
    /// The form of the output.
    pub(crate) fn output(&self) -> MapOutput {
        if self.json { MapOutput::Json } else { self.output }
    }
}

/// The forms of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MapOutput {
    /// A table of what is data
    Human,
    /// An array of all runs
    Json,
}

/// Check whether the metadata of a qcow2 image is consistent
///
/// Counts leaks (clusters that only take space) and corruptions (anything that can lead to wrong
/// data), as qemu-img check does, and exits as it does. Images below IMAGE are not checked.
#[derive(Debug, Args)]
#[command(after_help = CHECK_AFTER_HELP)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) image: ImageArgs,

    /// Put right what can be: counts, flags, the marks "dirty" and "corrupt"
    ///
    /// Leaked clusters are given back only when nothing is corrupt any more. What needs new tables
    /// is left alone; "qemu-img check -r all" can do that.
    #[arg(long)]
    pub(crate) repair: bool,

    /// Repair what is on a block device though it is mounted, or something else uses it
    ///
    /// What is written below a mounted file system is likely to destroy it.
    #[arg(long, requires = "repair")]
    pub(crate) allow_mounted: bool,

    /// Print one JSON object with the keys of "qemu-img check --output=json"
    #[arg(long)]
    pub(crate) json: bool,
}

/// Parses the name of the format of a new image.
pub(crate) fn parse_new_format(text: &str) -> Result<nowait_image::Format, String> {
    let format = formats::by_name(text).filter(|format| format.can_be_made());
    format.ok_or_else(|| format!("the formats of new images are {}", formats::names(true)))
}

/// The format of a new image by its file name.
pub(crate) fn format_of_new(path: &Path) -> nowait_image::Format {
    formats::by_ending(path.extension().and_then(OsStr::to_str).unwrap_or_default())
}

/// The values of `--compression`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompressionType {
    /// Deflate, which programs of any age read
    Zlib,
    /// Zstandard, smaller and faster; for QEMU 5.1 and later
    Zstd,
}

impl CompressionType {
    pub(crate) const fn what(self) -> Compression {
        match self {
            Self::Zlib => Compression::Deflate,
            Self::Zstd => Compression::Zstd,
        }
    }
}

/// Parses the bytes of a cluster.
pub(crate) fn parse_cluster_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    if bytes.is_power_of_two() && CLUSTER_BYTES.contains(&bytes) {
        Ok(bytes)
    } else {
        Err("a power of two from 512 to 2M".into())
    }
}

const MAP_AFTER_HELP: &str = "\
Examples:
  nowait map disk.qcow2
  nowait map disk.qcow2 --json | jq '[.[] | select(.depth == 0 and .data) | .length] | add'

Exit status:
  0   success
  1   IMAGE, or an image below it, cannot be opened or is damaged
  2   wrong command line";

const CHECK_AFTER_HELP: &str = "\
Examples:
  nowait check disk.qcow2
  nowait check disk.qcow2 --repair

Exit status (after the repair, with --repair):
  0   nothing is wrong
  1   IMAGE cannot be opened, or the check could not be done
  2   it is corrupt
  3   nothing is corrupt, but clusters leaked
  63  it is a raw image, which has nothing that could be checked
  64  wrong command line";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_size_is_a_power_of_two_within_bounds() {
        assert_eq!(parse_cluster_size("512"), Ok(512));
        assert_eq!(parse_cluster_size("2M"), Ok(2 << 20));
        for text in ["256", "4M", "3000", "0", "64 K"] {
            assert!(parse_cluster_size(text).is_err(), "{text}");
        }
    }
}
