//! `nowait map`: prints where the parts of a disk are stored.
//!
//! Invariant: the output is that of `qemu-img map`; IMAGE is locked for reading.

use std::io::{self, BufWriter, Write};

use nowait_image::{ChainOptions, map};

use crate::args::image_args::{MapArgs, MapOutput};
use crate::open_chain;
use crate::output;
use nowait_daemon::error::CliError;

pub(crate) fn run(args: &MapArgs) -> Result<(), CliError> {
    let chain = open_chain::open(&args.image, ChainOptions::default())?;
    let mut out = BufWriter::new(io::stdout().lock());
    let written = match args.output() {
        MapOutput::Human => map::write_table(&chain, &mut out),
        MapOutput::Json => map::write_json(&chain, &mut out),
    };
    written.map_err(|error| CliError::of_image(&error))?;
    out.flush().map_err(|error| output::print_failure(&error))
}
