//! `nowait export bitmap`: the dirty bitmaps of an export of a running server.
//!
//! Invariant: as of the other commands that ask a server.

use nowait_control::{AddBitmap, BitmapInfo, Client, ClientError, MergeBitmaps, PatchBitmap};

use crate::args::control_args::{BitmapAction, BitmapCommand, OneBitmap, ServerArgs};
use crate::control_client::{ask, tell};
use nowait_daemon::error::{CliError, plain};
use nowait_daemon::size::short;

/// The note for a user who has not asked for a bitmap in memory and gets one.
const IN_MEMORY: &str = "in memory only, and lost when the server exits: no bitmap of this image can be stored \
     (for a raw disk: serve --allow-dir or --bitmap-dir; --temporary leaves this note out)\n";

/// Lists or changes bitmaps.
///
/// # Errors
/// No server or more than one runs, or it has refused.
pub(crate) fn run(command: &BitmapCommand) -> Result<(), CliError> {
    match &command.action {
        BitmapAction::Add { export, bitmap, granularity, disabled, temporary, server } => {
            let added = AddBitmap {
                name: bitmap.clone(),
                granularity_bytes: *granularity,
                enabled: disabled.then_some(false),
                persistent: temporary.then_some(false),
            };
            let words = |added: &BitmapInfo| match *temporary || added.persistent {
                true => String::new(),
                false => IN_MEMORY.to_owned(),
            };
            ask(server, |client| client.add_bitmap(export, &added), words)
        }
        BitmapAction::List { export, server } => {
            ask(server, |client| client.bitmaps(export), |bitmaps| table(bitmaps))
        }
        BitmapAction::Clear(OneBitmap { export, bitmap, server }) => {
            tell(server, |client| client.clear_bitmap(export, bitmap))
        }
        BitmapAction::Merge { export, bitmap, sources, server } => {
            let merge = MergeBitmaps { sources: sources.clone() };
            tell_or_print(server, |client| client.merge_bitmaps(export, bitmap, &merge))
        }
        BitmapAction::Enable(one) => enable(one, true),
        BitmapAction::Disable(one) => enable(one, false),
        BitmapAction::Remove(OneBitmap { export, bitmap, server }) => {
            tell(server, |client| client.remove_bitmap(export, bitmap))
        }
    }
}

fn enable(one: &OneBitmap, enabled: bool) -> Result<(), CliError> {
    let OneBitmap { export, bitmap, server } = one;
    let change = PatchBitmap { enabled: Some(enabled) };
    tell_or_print(server, |client| client.change_bitmap(export, bitmap, &change))
}

/// Has the server of `server` change a bitmap, and prints it only as JSON.
fn tell_or_print(
    server: &ServerArgs,
    request: impl FnOnce(&Client) -> Result<BitmapInfo, ClientError>,
) -> Result<(), CliError> {
    ask(server, request, |_| String::new())
}

fn table(bitmaps: &[BitmapInfo]) -> String {
    let line = |bitmap: &BitmapInfo| {
        format!(
            "  {:<24} {:>11} {:>10} {:<7} {}\n",
            plain(&bitmap.name),
            short(bitmap.granularity_bytes),
            short(bitmap.dirty_bytes),
            if bitmap.enabled { "yes" } else { "no" },
            match bitmap {
                BitmapInfo { inconsistent: true, .. } => "yes, inconsistent",
                BitmapInfo { persistent: true, .. } => "yes",
                _ => "no",
            },
        )
    };
    let head = "  bitmap                   granularity      dirty enabled stored\n";
    std::iter::once(head.to_owned()).chain(bitmaps.iter().map(line)).collect()
}
