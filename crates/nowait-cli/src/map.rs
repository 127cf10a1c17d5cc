//! `nowait map`: which parts of a disk are where.
//!
//! Invariant: the output is that of `qemu-img map --output=json`; IMAGE is locked as a reader's.
//! Knows: image_args, error, image. Known by: main.

use std::io::{self, BufWriter, Write};

use nowait_image::ChainOptions;

use crate::error::{CliError, reason};
use crate::image;
use crate::image_args::MapArgs;

pub(crate) fn run(args: &MapArgs) -> Result<(), CliError> {
    let chain = image::open(&args.image, ChainOptions::default())?;
    let mut out = BufWriter::new(io::stdout().lock());
    nowait_image::map::write_json(&chain, &mut out).map_err(|error| image::failed(&error))?;
    out.flush().map_err(|e| CliError::new(format!("standard output: {}", reason(&e))))
}
