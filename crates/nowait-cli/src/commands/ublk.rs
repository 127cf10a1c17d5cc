//! `nowait ublk`: the ublk devices of this machine. And the device of `nowait serve --ublk`.
//!
//! Invariant: a device in use is removed only if the user says so.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use nowait_server::{
    UblkError, UblkNode, UblkOptions, UblkStatus, ublk_devices, ublk_features, ublk_stop,
};
use serde_json::json;
use tracing::warn;

use crate::args::ServeArgs;
use crate::args::ublk_args::{UblkAction, UblkCommand};
use crate::error::{CliError, plain};
use crate::open_disk::OpenedDisk;
use crate::output;

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

/// The device of `serve --ublk`, for the first image; `None` without that option. That of another
/// program, which has given it back, if it has handed over its number.
///
/// # Errors
/// There is no driver, no right to it, or the number is taken.
pub(crate) fn open(
    args: &ServeArgs,
    first: &OpenedDisk,
    handed_over: Option<u32>,
) -> Result<Option<UblkNode>, CliError> {
    let Some(id) = args.ublk.ublk else { return Ok(None) };
    let image = &first.named.image;
    let image_ids = if handed_over.is_some() { Vec::new() } else { image_ids(first)? };
    let (id, queues, zero_copy) = (handed_over.or(id), args.threads(), args.zero_copy());
    let options = UblkOptions { id, queues, image_ids, zero_copy };
    let node = UblkNode::open(&first.image, options).map_err(|error| CliError::at(image, error))?;
    let (node_bytes, image_bytes) = (node.device().size(), first.image.size());
    if node_bytes < image_bytes {
        let bytes = image_bytes - node_bytes;
        warn!("{}: its last {bytes} bytes are no whole block and are not served", image.display());
    }
    Ok(Some(node))
}

/// Tell the image and those below it from other files and devices of this machine; never 0.
fn image_ids(opened: &OpenedDisk) -> Result<Vec<u64>, CliError> {
    let image = &opened.named.image;
    let failed = |error: io::Error| CliError::at(image, error);
    let mut ids = vec![image_id(&fs::metadata(image).map_err(failed)?)];
    for file in opened.image.held_files() {
        let file = file.try_clone_to_owned().map(File::from).map_err(failed)?;
        ids.push(image_id(&file.metadata().map_err(failed)?));
    }
    Ok(ids)
}

fn image_id(meta: &Metadata) -> u64 {
    let (device, file) = match meta.file_type().is_block_device() {
        true => (meta.rdev(), 0),
        false => (meta.dev(), meta.ino()),
    };
    (device.rotate_left(40) ^ file) | 1 << 63
}
