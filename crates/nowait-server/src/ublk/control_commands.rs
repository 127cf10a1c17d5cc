//! Commands to a running device through its driver: another size, hand-over to the next server, stop,
//! delete.
//!
//! Invariant: each call ends within a bound, and is made on a thread of its own: the driver may wait
//! for requests of the device. A node in use is taken away only by [`stop_device`].

use std::time::Duration;

use crate::ublk::control_ring::{node, within};
use crate::ublk::node_users;
use crate::ublk::ublk_cmd::{
    ControlOp, DeviceInfo, F_QUIESCE, F_SAFE_STOP_DEV, F_UNPRIVILEGED_DEV, F_UPDATE_SIZE,
};
use crate::ublk::ublk_error::UblkError;

/// How long the driver may take to stop a device, which includes writing what it has cached.
/// Beyond it: the command fails.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the driver may take for a new size, or to keep requests back for the next server.
/// Beyond it: the change fails.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Tells the users of the node that it has `sectors` sectors of 512 bytes now. False where the driver
/// cannot do that.
///
/// # Errors
/// The errno of the driver.
pub(crate) fn update_size(info: &DeviceInfo, sectors: u64) -> Result<bool, UblkError> {
    if info.features & F_UPDATE_SIZE == 0 {
        return Ok(false);
    }
    change(info, ControlOp::UPDATE_SIZE, sectors, "its size cannot be changed").map(|()| true)
}

/// Has the driver keep further requests for the next server. The queues get none from then on, and
/// their threads answer what they have. False where the driver cannot do that.
///
/// # Errors
/// The errno of the driver; `EBUSY` if the requests in flight have left it no room to do so in time.
pub(crate) fn quiesce(info: &DeviceInfo) -> Result<bool, UblkError> {
    if info.features & F_QUIESCE == 0 {
        return Ok(false);
    }
    let bound = CHANGE_TIMEOUT.as_millis() as u64 / 2;
    change(info, ControlOp::QUIESCE_DEV, bound, "its requests are not kept back").map(|()| true)
}

fn change(info: &DeviceInfo, op: ControlOp, data: u64, failure: &str) -> Result<(), UblkError> {
    let (id, by_path) = (info.id, info.features & F_UNPRIVILEGED_DEV != 0);
    let changed =
        within(CHANGE_TIMEOUT, move |control| control.command(op, id, data, by_path, &mut []))?;
    match changed {
        Some(Ok(_)) => Ok(()),
        Some(Err(errno)) => Err(UblkError::os(format!("{}: {failure}", node(id)), errno)),
        None => Err(UblkError::new(format!("{}: {failure} in time", node(id)))),
    }
}

/// Takes the node of a device away if nothing uses it; otherwise returns what does, one text for each
/// user.
///
/// # Errors
/// The errno of the driver.
pub(crate) fn stop_if_unused(info: &DeviceInfo) -> Result<Vec<String>, UblkError> {
    let users = node_users::visible(info.id);
    if !users.is_empty() {
        return Ok(users);
    }
    if info.features & F_SAFE_STOP_DEV == 0 {
        let users = node_users::of(info.id);
        return if users.is_empty() { stop_device(info).map(|()| users) } else { Ok(users) };
    }
    let stopped = stop_by(info, ControlOp::TRY_STOP_DEV)?;
    Ok(if stopped { Vec::new() } else { vec![node_users::INVISIBLE.into()] })
}

/// Takes the node of a device away. Its server must serve meanwhile, as the kernel writes what it
/// has cached.
pub(crate) fn stop_device(info: &DeviceInfo) -> Result<(), UblkError> {
    stop_by(info, ControlOp::STOP_DEV).map(|_| ())
}

/// False if the device has users, which is what only `TRY_STOP_DEV` says.
fn stop_by(info: &DeviceInfo, op: ControlOp) -> Result<bool, UblkError> {
    let (id, by_path) = (info.id, info.features & F_UNPRIVILEGED_DEV != 0);
    let stopped =
        within(STOP_TIMEOUT, move |control| control.command(op, id, 0, by_path, &mut []))?;
    match stopped {
        // It has no node.
        Some(Err(libc::ENODEV)) if op == ControlOp::TRY_STOP_DEV => Ok(true),
        Some(Ok(_)) => Ok(true),
        Some(Err(libc::EBUSY)) if op == ControlOp::TRY_STOP_DEV => Ok(false),
        Some(Err(errno)) => Err(UblkError::os(format!("{}: cannot be stopped", node(id)), errno)),
        None => {
            let seconds = STOP_TIMEOUT.as_secs();
            Err(UblkError::new(format!("{}: not stopped within {seconds} s", node(id))))
        }
    }
}

/// Deletes a device that has no node.
pub(crate) fn delete_device(info: &DeviceInfo) -> Result<(), UblkError> {
    let (id, by_path) = (info.id, info.features & F_UNPRIVILEGED_DEV != 0);
    let deleted = within(STOP_TIMEOUT, move |control| {
        control.command(ControlOp::DEL_DEV, id, 0, by_path, &mut [])
    })?;
    match deleted {
        // Its server has deleted it.
        None | Some(Ok(_) | Err(libc::ENODEV)) => Ok(()),
        Some(Err(errno)) => Err(UblkError::os(format!("{}: cannot be deleted", node(id)), errno)),
    }
}
