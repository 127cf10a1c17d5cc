//! `nowait commit`: what an overlay has, put into its backing file.
//!
//! Invariant: as in nowait_image::commit. Knows: change_args, error, image, size. Known by: main.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressStyle};
use nowait_image::commit::{Committed, Overlay, commit};
use nowait_image::{Chain, ChainOptions};
use serde_json::json;

use crate::change_args::CommitArgs;
use crate::error::{CliError, reason};
use crate::image;
use crate::size::human;

pub(crate) fn run(args: &CommitArgs) -> Result<(), CliError> {
    let overlay = if args.keep { Overlay::Kept } else { Overlay::Emptied };
    let writable = overlay == Overlay::Emptied;
    let options = ChainOptions { writable, backing_writable: true, ..ChainOptions::default() };
    let chain = image::open(&args.image, options)?;
    // Drawn only where standard error is a terminal.
    let bar = ProgressBar::new(0);
    let style = "{bar:40} {percent}% {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    let done = commit(&chain, overlay, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let done = done.map_err(|error| image::failed(&error))?;
    let text = if args.json { in_json(args, &chain, &done) } else { in_words(args, &chain, &done) };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|e| CliError::new(format!("standard output: {}", reason(&e))))
}

fn backing(chain: &Chain) -> String {
    let below = chain.layers().get(1);
    below.map_or(String::new(), |layer| layer.file.path().display().to_string())
}

fn in_json(args: &CommitArgs, chain: &Chain, done: &Committed) -> String {
    let object = json!({
        "image": args.image.image.to_string_lossy(),
        "backing": backing(chain),
        "data_bytes": done.data_bytes,
        "zero_bytes": done.zero_bytes,
        "old_size_bytes": done.old_size,
        "size_bytes": done.size,
        "emptied": !args.keep,
    });
    format!("{object}\n")
}

fn in_words(args: &CommitArgs, chain: &Chain, done: &Committed) -> String {
    let (image, backing) = (args.image.image.display(), backing(chain));
    let Committed { data_bytes, zero_bytes, old_size, size } = *done;
    let (data, zeros) = (human(data_bytes), human(zero_bytes));
    let mut text = format!("committed {image} to {backing}: {data} of data, {zeros} of zeros\n");
    if size > old_size {
        text += &format!("{backing} has grown to {}\n", human(size));
    }
    if !args.keep {
        text += &format!("{image} is empty now\n");
    }
    text
}
