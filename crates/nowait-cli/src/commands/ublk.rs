//! `nowait ublk`: the local ublk devices.
//!
//! Invariant: a device in use is removed only if the user says so.

use nowait_server::{UblkError, UblkStatus, ublk_devices, ublk_features, ublk_stop};
use serde_json::json;

use crate::args::ublk_args::{UblkAction, UblkCommand};
use crate::output;
use nowait_daemon::error::{CliError, plain};

/// Lists or removes devices.
///
/// # Errors
/// There is no driver, no right to it or no such device, or the device is in use.
pub(crate) fn run(command: &UblkCommand) -> Result<(), CliError> {
    match command.action {
        UblkAction::List { json } => {
            let devices = ublk_devices().map_err(failed)?;
            let text = if json { as_json(&devices) } else { as_table(&devices) };
            output::print(&text)
        }
        UblkAction::Features => {
            let features = ublk_features().map_err(failed)?;
            let lines: String = features.iter().map(|name| format!("{name}\n")).collect();
            output::print(&lines)
        }
        UblkAction::Stop { id, force } => ublk_stop(id, force).map_err(failed),
    }
}

fn failed(error: UblkError) -> CliError {
    CliError::new(error.to_string())
}

fn as_json(devices: &[UblkStatus]) -> String {
    let all = devices.iter().map(|device| {
        json!({
            "id": device.id,
            "node": device.node,
            "state": device.state,
            "pid": device.pid,
            "size_bytes": device.size,
            "queues": device.queues,
            "depth": device.depth,
            "users": device.users,
        })
    });
    format!("{}\n", json!(all.collect::<Vec<_>>()))
}

fn as_table(devices: &[UblkStatus]) -> String {
    let line = |device: &UblkStatus| {
        let pid = device.pid.map_or("-".into(), |pid| pid.to_string());
        let users = match device.users.as_slice() {
            [] => "-".into(),
            users => plain(&users.join(", ")),
        };
        let UblkStatus { node, state, size, queues, depth, .. } = device;
        format!("{node:<14} {state:<8} {pid:>8} {size:>16} {queues:>3} x {depth:<4} {users}\n")
    };
    let head = "node           state         pid       size_bytes   queues  used by\n";
    match devices {
        [] => String::new(),
        _ => std::iter::once(head.to_owned()).chain(devices.iter().map(line)).collect(),
    }
}
