//! `nowait map`: prints where the parts of a disk are stored.
//!
//! Invariant: the output is that of `qemu-img map --output=json`; IMAGE is locked for reading.

use std::io::{self, BufWriter, Write};

use nowait_image::ChainOptions;

use crate::args::image_args::MapArgs;
use crate::{open_chain, output};
use nowait_cli::error::CliError;

pub(crate) fn run(args: &MapArgs) -> Result<(), CliError> {
    let chain = open_chain::open(&args.image, ChainOptions::default())?;
    let mut out = BufWriter::new(io::stdout().lock());
    nowait_image::map::write_json(&chain, &mut out).map_err(|error| open_chain::failed(&error))?;
    out.flush().map_err(|error| output::print_failure(&error))
}
