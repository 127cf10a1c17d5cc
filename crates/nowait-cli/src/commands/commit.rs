//! `nowait commit`: writes the content of an overlay into its backing file.
//!
//! Invariant: as in nowait_image::commit.

use nowait_image::commit::{Committed, Overlay, commit};
use nowait_image::{Chain, ChainOptions, Format, Layer, Purpose};
use serde_json::json;

use crate::args::change_args::CommitArgs;
use crate::open_chain;
use crate::output;
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::size::human;

pub(crate) fn run(args: &CommitArgs) -> Result<(), CliError> {
    let overlay = if args.keep { Overlay::Kept } else { Overlay::Emptied };
    let writable = overlay == Overlay::Emptied;
    let options = ChainOptions {
        writable,
        backing_writable: true,
        purpose: Purpose::Commit,
        allow_mounted: args.allow_mounted,
        ..ChainOptions::default()
    };
    let chain = open_chain::open(&args.image, options)?;
    let below = chain.layers().get(1).map(Layer::format);
    if let (Some(given), Some(found)) = (args.backing_format, below)
        && given != found
    {
        let what = format_args!("its backing file is {}, as it says", found.name());
        return Err(CliError::at(&args.image.image, what));
    }
    let style = "{bar:40} {percent}% {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left";
    let bar = output::progress_bar(style);
    let raw_named = args.backing_format.is_some_and(Format::is_raw);
    let done = commit(&chain, overlay, raw_named, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let done = done.map_err(|error| CliError::of_image(&error))?;
    let text = if args.json { in_json(args, &chain, &done) } else { in_words(args, &chain, &done) };
    output::print(text)
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
    let image = plain(&args.image.image.display().to_string());
    let backing = plain(&backing(chain));
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
