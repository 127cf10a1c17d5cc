//! The part of the command line that is about an image and what it stands on.
//!
//! Invariant: as in args. Knows: size. Known by: args, image, map, check.

use std::path::PathBuf;

use clap::Args;
use nowait_image::create::CLUSTER_BYTES;

use crate::size;

/// An image that is opened with all that it stands on.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// The image
    pub(crate) image: PathBuf,

    /// What is inside IMAGE: raw or qcow2; without it qcow2 if it begins like that, else raw
    ///
    /// Say raw if IMAGE was ever served raw: whoever may write to a raw disk can make it begin
    /// like qcow2.
    #[arg(long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<nowait_image::Format>,

    /// A directory that backing files and data files may be below, beside IMAGE's own directory;
    /// can be given more than once
    ///
    /// Links are resolved first. A file elsewhere that IMAGE names is refused, so that an image
    /// from a stranger cannot have other files of this machine read.
    #[arg(long, value_name = "DIR")]
    pub(crate) backing_dir: Vec<PathBuf>,
}

/// Print which parts of a disk are data, zeros or nothing, and where, as JSON
///
/// The output is that of "qemu-img map --output=json" (QEMU 7.2). For each run: "depth", in which
/// image of the chain it is found (0 is IMAGE); "present", whether that image says anything of it;
/// "zero" and "data"; "offset", where it is in that image's file, if it is there as it is.
#[derive(Debug, Args)]
#[command(after_help = MAP_AFTER_HELP)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    pub(crate) image: ImageArgs,
}

/// Check whether the metadata of a qcow2 image holds together
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

    /// Print one JSON object with the keys of "qemu-img check --output=json"
    #[arg(long)]
    pub(crate) json: bool,
}

/// A format by its name.
pub(crate) fn parse_image_format(text: &str) -> Result<nowait_image::Format, &'static str> {
    match text {
        "raw" => Ok(nowait_image::Format::Raw),
        "qcow2" => Ok(nowait_image::Format::Qcow2),
        _ => Err("the formats are raw and qcow2"),
    }
}

/// Bytes of a cluster.
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
  nowait map disk.qcow2 | jq '[.[] | select(.depth == 0 and .data) | .length] | add'

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
  2   it is corrupt; or wrong command line
  3   nothing is corrupt, but clusters leaked";

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
