//! `nowait export move`: the disk of an export goes to another place while it is served.
//!
//! Invariant: a command that waits for its move and is interrupted cancels it.

use std::io::{self, IsTerminal};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use nowait_control::{Client, MoveInfo, StartMove};
use nowait_daemon::endpoints::signals;
use nowait_daemon::error::{CliError, os_message, plain};
use nowait_daemon::size::human;

use crate::args::control_args::MoveCommand;
use crate::control_client::{ask, failed, image_name, print_json, the_client};
use crate::output;

/// How often a command that waits asks for the state of its move.
const ASK_INTERVAL: Duration = Duration::from_millis(200);
const STYLE: &str = "{msg:9} [{bar:24}] {bytes} of {total_bytes}";

/// Begins, follows or cancels a move.
///
/// # Errors
/// No server or more than one runs, or it has refused; the move has failed or was cancelled.
pub(crate) fn run(command: &MoveCommand) -> Result<(), CliError> {
    let (name, server) = (&command.export, &command.server);
    let Some(target) = &command.target else {
        return ask(server, |client| client.cancel_move(name), in_words);
    };
    let start = StartMove {
        target: image_name(target)?,
        format: command.format.map(|format| format.name().to_owned()),
        overwrite_device: command.overwrite_device,
        max_pause_ms: command.max_pause,
        rate_bytes: command.rate,
    };
    if command.detach {
        return ask(server, |client| client.start_move(name, &start), in_words);
    }
    let client = the_client(server)?;
    let info = follow(&client, name, &start, server.json)?;
    match info.state.as_str() {
        "completed" if server.json => print_json(&info),
        "completed" => output::print(in_words(&info)),
        _ => Err(CliError::new(in_words(&info).trim_end())),
    }
}

/// Begins a move and waits for its end; a signal cancels it.
fn follow(
    client: &Client,
    name: &str,
    start: &StartMove,
    json: bool,
) -> Result<MoveInfo, CliError> {
    let cannot = |error| CliError::new(format!("cannot handle signals: {}", os_message(&error)));
    let interrupted = signals::flag().map_err(cannot)?;
    let refused = |error| failed(client.place(), &error);
    let mut info = client.start_move(name, start).map_err(refused)?;
    let bar = bar(!json && io::stderr().is_terminal());
    while info.running {
        show(&bar, &info);
        thread::sleep(ASK_INTERVAL);
        let asked = match interrupted.swap(false, Ordering::Relaxed) {
            true => client.cancel_move(name),
            false => client.disk_move(name),
        };
        info = asked.map_err(refused)?;
    }
    bar.finish_and_clear();
    Ok(info)
}

fn bar(is_shown: bool) -> ProgressBar {
    if !is_shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(STYLE) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

fn show(bar: &ProgressBar, info: &MoveInfo) {
    if bar.message() != info.state {
        bar.set_message(info.state.clone());
    }
    bar.set_length(info.total_bytes);
    bar.set_position(info.total_bytes.saturating_sub(info.left_bytes));
}

fn in_words(info: &MoveInfo) -> String {
    let target = plain(&info.target);
    let line = match info.state.as_str() {
        "completed" => format!(
            "moved to {target}: {} copied, a pause of {:.1} ms; serve it from there the next time",
            human(info.copied_bytes),
            info.pause_ms.unwrap_or_default()
        ),
        "failed" => {
            let why = info.failure.as_deref().map(plain).unwrap_or_default();
            format!("not moved: {why}")
        }
        "cancelled" => format!("the move to {target} was cancelled: the disk is where it was"),
        _ => format!("moving to {target}: {} left", human(info.left_bytes)),
    };
    let notes = info.notes.iter().map(|note| format!("; {}", plain(note)));
    std::iter::once(line).chain(notes).collect::<String>() + "\n"
}
