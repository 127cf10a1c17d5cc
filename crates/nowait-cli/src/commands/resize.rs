//! `nowait resize`: makes a disk larger or smaller.
//!
//! Invariant: as in nowait_image::resize.

use nowait_image::resize::resize;
use nowait_image::{ChainOptions, Purpose};
use serde_json::json;

use crate::args::change_args::ResizeArgs;
use crate::open_chain;
use crate::output;
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::size::human;

pub(crate) fn run(args: &ResizeArgs) -> Result<(), CliError> {
    let options = ChainOptions {
        writable: true,
        purpose: Purpose::Resize,
        allow_mounted: args.allow_mounted,
        ..ChainOptions::default()
    };
    let chain = open_chain::open(&args.image, options)?;
    let path = &args.image.image;
    let old = chain.top().size;
    let Some(wanted) = args.change.of(old) else {
        return Err(CliError::at(
            path,
            format_args!("a disk of {old} bytes cannot be resized by that much"),
        ));
    };
    let size = resize(&chain, wanted, args.shrink).map_err(|error| CliError::of_image(&error))?;
    let text = if args.json {
        json!({
            "image": path.to_string_lossy(),
            "format": chain.top().format().name(),
            "old_size_bytes": old,
            "size_bytes": size,
        })
        .to_string()
    } else {
        plain(&format!("resized {}: {}, was {}", path.display(), human(size), human(old)))
    };
    output::print(
        text + "
",
    )
}
