//! `nowait check`: checks the metadata of a qcow2 image, and repairs it.
//!
//! Invariant: without --repair nothing is written; the exit status is that of qemu-img check.

use nowait_image::check::{Report, check};
use nowait_image::repair::{Repaired, repair};
use nowait_image::{ChainOptions, Format, Purpose};
use serde_json::json;

use crate::args::image_args::CheckArgs;
use crate::open_chain;
use crate::output;
use nowait_daemon::error::CliError;
use nowait_daemon::size::human;

const CORRUPT: u8 = 2;
const LEAKS: u8 = 3;
/// The format has no metadata to check.
const NOTHING_TO_CHECK: u8 = 63;

pub(crate) fn run(args: &CheckArgs) -> Result<u8, CliError> {
    let options = ChainOptions {
        damaged: true,
        writable: args.repair,
        purpose: Purpose::Repair,
        allow_mounted: args.allow_mounted,
        ..ChainOptions::default()
    };
    let chain = open_chain::open(&args.image, options)?;
    let format = chain.top().format();
    if !format.can_be_checked() {
        let why = match format.is_raw() {
            true => "raw images have no metadata that could be checked".to_owned(),
            false => format.cannot_be("checked"),
        };
        return Err(CliError::at(&args.image.image, why).with_status(NOTHING_TO_CHECK));
    }
    let bar = output::progress_bar("{bar:40} {percent}% {eta} left");
    let mut progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let done = if args.repair {
        repair(&chain, &mut progress)
    } else {
        let nothing = Repaired::default();
        check(&chain, &mut progress).map(|report| Repaired { report, ..nothing })
    };
    bar.finish_and_clear();
    let done = done.map_err(|error| CliError::of_image(&error))?;
    let text = if args.json { in_json(args, format, &done) } else { in_words(args.repair, &done) };
    output::print(text)?;
    Ok(match done.report {
        Report { corruptions: 1.., .. } => CORRUPT,
        Report { leaks: 1.., .. } => LEAKS,
        _ => 0,
    })
}

/// Like `qemu-img check --output=json`: counts that are 0 are left out where it leaves them out.
fn in_json(args: &CheckArgs, format: Format, done: &Repaired) -> String {
    let report = &done.report;
    let mut object = json!({
        "image-end-offset": report.image_end,
        "total-clusters": report.total_clusters,
        "check-errors": 0,
        "allocated-clusters": report.allocated_clusters,
        "filename": args.image.image.to_string_lossy(),
        "format": format.name(),
    });
    for (key, count) in [
        ("leaks", report.leaks),
        ("corruptions", report.corruptions),
        ("leaks-fixed", done.leaks_fixed),
        ("corruptions-fixed", done.corruptions_fixed),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if count > 0 {
            object[key] = json!(count);
        }
    }
    format!("{object}\n")
}

fn in_words(repaired: bool, done: &Repaired) -> String {
    let Repaired { report, corruptions_fixed, leaks_fixed } = done;
    let mut text = String::new();
    if corruptions_fixed + leaks_fixed > 0 {
        text += &format!("repaired: {corruptions_fixed} corruptions, {leaks_fixed} leaks\n");
    }
    text += &match (report.corruptions, report.leaks) {
        (0, 0) => "no errors were found\n".to_owned(),
        (0, leaks) if repaired => {
            format!("{leaks} leaked clusters are left: they only take space\n")
        }
        (corruptions, leaks) if repaired => format!(
            "{corruptions} corruptions and {leaks} leaked clusters are left, which cannot be put \
             right: data is lost (nowait copy --rescue takes what can be read)\n"
        ),
        (0, leaks) => {
            format!("{leaks} leaked clusters: they only take space (--repair gives them back)\n")
        }
        (corruptions, leaks) => format!(
            "{corruptions} corruptions and {leaks} leaked clusters: data may be wrong \
             (copy what you can, then use --repair)\n"
        ),
    };
    let share = |part: u64, whole: u64| part as f64 * 100.0 / whole.max(1) as f64;
    let allocated = report.allocated_clusters;
    text += &format!(
        "{allocated} of {} clusters allocated ({:.2} %), {:.2} % of them fragmented, \
         {:.2} % compressed\nthe last cluster in use ends at {}\n",
        report.total_clusters,
        share(allocated, report.total_clusters),
        share(report.fragmented_clusters, allocated),
        share(report.compressed_clusters, allocated),
        human(report.image_end),
    );
    text
}
