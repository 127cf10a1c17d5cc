//! The command line of `nowait info`.

use std::path::PathBuf;

use clap::Args;

use crate::args::image_args::parse_image_format;
use crate::args::remote_args::AuthArgs;

/// Show what an image is and how it would be served
///
/// Size and allocated space, data and holes, whether direct I/O is possible and which alignment
/// it asks for, and which queue would be used; of a qcow2 image also what its header says. IMAGE
/// is only looked at, and may be in use.
#[derive(Debug, Args)]
#[command(after_help = INFO_AFTER_HELP)]
pub(crate) struct InfoArgs {
    /// The file or block device to look at, or the URI of an NBD export or of an object
    pub(crate) image: PathBuf,

    /// Format of IMAGE: raw, qcow2, vmdk or vhdx; without it qcow2 if it begins like that, vmdk or
    /// vhdx if its name ends so, too, else raw
    #[arg(short, long, value_name = "FORMAT", value_parser = parse_image_format)]
    pub(crate) format: Option<nowait_image::Format>,

    #[command(flatten)]
    pub(crate) auth: AuthArgs,

    /// Print one JSON object, for scripts
    #[arg(long)]
    pub(crate) json: bool,
}

const INFO_AFTER_HELP: &str = "\
Examples:
  nowait info disk.img
  nowait info /dev/vdb --json | jq .offset_alignment_bytes

JSON keys (null where not known):
  image, kind (\"regular_file\", \"block_device\", \"nbd_export\" or \"object\"; of the latter two
  also read_only and abilities, of an object store, object_version, store_requests, store_seconds
  and store_retries), size_bytes, allocated_bytes,
  data_extents, data_bytes, hole_bytes, direct_io (true or false), direct_io_reason,
  memory_alignment_bytes, offset_alignment_bytes, read_offset_alignment_bytes,
  queue (\"uring\" or \"threads\"), queue_reason, qcow2_header (true or false),
  registered_bytes_limit (of buffers; null without io_uring, and where none applies),
  and those of \"qemu-img info --output=json\": filename, format, virtual-size, actual-size,
  cluster-size, dirty-flag, backing-filename, full-backing-filename, backing-filename-format,
  format-specific, snapshots; and snapshots_count

Exit status:
  0   success
  1   IMAGE cannot be opened or is not a disk
  2   wrong command line";
