//! An image and all below it, opened as the command line says.
//!
//! Invariant: what is on a file system without locks is used with a warning.
//! Knows: image_args, error. Known by: map, check, create, resize, commit.

use std::io::{self, Write};

use nowait_image::{Chain, ChainOptions, ImageError};

use crate::error::CliError;
use crate::image_args::ImageArgs;

/// Opens the chain, locked for `options`; the format and the places are from `args`.
pub(crate) fn open(args: &ImageArgs, options: ChainOptions) -> Result<Chain, CliError> {
    let options =
        ChainOptions { format: args.format, backing_dirs: args.backing_dir.clone(), ..options };
    let chain = Chain::open(&args.image, &options).map_err(|error| failed(&error))?;
    for path in chain.unlocked() {
        let path = path.display();
        let _ = writeln!(
            io::stderr(),
            "nowait: warning: {path}: the file system does not support locks"
        );
    }
    Ok(chain)
}

/// The line for an error about an image.
pub(crate) fn failed(error: &ImageError) -> CliError {
    CliError::new(error.to_string())
}
