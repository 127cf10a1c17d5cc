//! The command-line options for dirty bitmaps.

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
}
