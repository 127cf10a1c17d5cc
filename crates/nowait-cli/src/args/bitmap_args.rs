//! The command-line options for dirty bitmaps.

use std::path::PathBuf;

use clap::Args;

use nowait_daemon::config::start_bitmap::StartBitmap;

/// Dirty bitmaps that are there from the start.
#[derive(Debug, Args)]
#[command(next_help_heading = "Exports")]
pub(crate) struct ServeBitmapArgs {
    /// Record what clients change, from the start on, in a dirty bitmap with this name; can be given more than once
    ///
    /// EXPORT is the name of one of several IMAGEs; the first without it. A NAME with an equals sign in it
    /// needs EXPORT, which may be empty. A bit stands for 64 KiB; 'nowait export bitmap add' has other sizes.
    /// The bitmap is lost when the server exits, unless the image has a stored one of this name, which is taken then.
    /// docs/backup.md says what it is for.
    #[arg(long = "bitmap", value_name = "[EXPORT=]NAME")]
    pub(crate) bitmaps: Vec<StartBitmap>,

    /// The directory in which dirty bitmaps of raw files and block devices are stored
    ///
    /// Each disk has a file there, whose name is the path of the image, or for a block device its name in
    /// /dev/disk/by-id. Without this option a raw file has it beside it, IMAGE.bitmaps.qcow2, if that is in a directory of --allow-dir,
    /// and the bitmaps of a block device are lost when the server exits. Give it at each start: what is written without
    /// it is in no bitmap there.
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) bitmap_dir: Option<PathBuf>,
}
