//! The ublk devices of this host, and taking one away by hand.
//!
//! Invariant: a node in use is taken away only if the caller says so.

use std::fs;
use std::time::Duration;

use crate::ublk::control_commands::{delete_device, stop_device, stop_if_unused};
use crate::ublk::control_ring::{ControlRing, node, within};
use crate::ublk::device_parameters::{Parameters, sectors_in};
use crate::ublk::node_users;
use crate::ublk::ublk_cmd::{
    ControlOp, DeviceInfo, DeviceState, F_UNPRIVILEGED_DEV, FEATURE_NAMES,
};
use crate::ublk::ublk_error::UblkError;

/// How long the driver may take to answer a question.
/// Beyond it: the question fails.
const ASK_TIMEOUT: Duration = Duration::from_secs(5);

/// A ublk device of this host, of any server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkStatus {
    /// Its number.
    pub id: u32,
    /// The path of its node.
    pub node: String,
    /// Its state: `served`, `waiting` (for a server), `failing` (without one), `stopped`, or
    /// `unknown`.
    pub state: &'static str,
    /// The process that serves it.
    pub pid: Option<u32>,
    /// Size of the node in bytes.
    pub size: u64,
    /// Its queues.
    pub queues: u16,
    /// The most requests of a queue in flight.
    pub depth: u16,
    /// Users of the node, in words, as far as this process may see it.
    pub users: Vec<String>,
}

impl UblkStatus {
    fn of(info: &DeviceInfo, control: &mut ControlRing) -> Self {
        let by_path = info.features & F_UNPRIVILEGED_DEV != 0;
        let mut bytes = [0; Parameters::BYTES];
        // The driver returns as many bytes as are asked for in the first field.
        bytes[..4].copy_from_slice(&(Parameters::BYTES as u32).to_ne_bytes());
        let asked = control.command(ControlOp::GET_PARAMS, info.id, 0, by_path, &mut bytes);
        let state = match info.state {
            DeviceState::Dead => "stopped",
            DeviceState::Live => "served",
            DeviceState::Quiesced => "waiting",
            DeviceState::FailIo => "failing",
            DeviceState::Other(_) => "unknown",
        };
        let is_served = info.state == DeviceState::Live;
        Self {
            id: info.id,
            node: node(info.id),
            state,
            pid: u32::try_from(info.pid).ok().filter(|&pid| is_served && pid > 0),
            size: asked.map_or(0, |_| sectors_in(&bytes) << 9),
            queues: info.queues,
            depth: info.depth,
            users: node_users::visible(info.id),
        }
    }
}

/// The ublk devices of this host that the caller may see, by number.
///
/// # Errors
/// There is no driver, or no right to it.
pub fn ublk_devices() -> Result<Vec<UblkStatus>, UblkError> {
    let all = within(ASK_TIMEOUT, |control| {
        let status = |id: u32| {
            let info = control.info(id).ok().flatten()?;
            Some(UblkStatus::of(&info, control))
        };
        numbers().into_iter().filter_map(status).collect::<Vec<_>>()
    })?;
    all.ok_or_else(|| UblkError::new("the ublk driver does not answer"))
}

/// Features of the ublk driver of this host, by the names of its header (without `UBLK_F_`); a
/// feature of a newer header is its bit: `bit 30`.
///
/// # Errors
/// There is no driver, no right to it, or it is too old to be asked.
pub fn ublk_features() -> Result<Vec<String>, UblkError> {
    let features = within(ASK_TIMEOUT, ControlRing::features)?;
    let features = features.ok_or_else(|| UblkError::new("the ublk driver does not answer"))??;
    let name =
        |bit: usize| FEATURE_NAMES.get(bit).map_or(format!("bit {bit}"), |&name| name.into());
    Ok((0..64).filter(|bit| features >> bit & 1 == 1).map(name).collect())
}

/// The numbers of the character devices.
fn numbers() -> Vec<u32> {
    let Ok(all) = fs::read_dir("/sys/class/ublk-char") else { return Vec::new() };
    let names = all.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut numbers: Vec<u32> =
        names.filter_map(|name| name.strip_prefix("ublkc")?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

/// Takes the node of device `id` away and deletes the device, with or without a server. The kernel
/// writes what it has cached first, if there is a server.
///
/// # Errors
/// There is no such device, no right to it, or, without `force`, the node is in use.
pub fn ublk_stop(id: u32, force: bool) -> Result<(), UblkError> {
    let info = ControlRing::open()?.info(id).map_err(|errno| UblkError::os(node(id), errno))?;
    let info = info.ok_or_else(|| UblkError::new(format!("there is no ublk device {id}")))?;
    if force {
        stop_device(&info)?;
        return delete_device(&info);
    }
    let users = stop_if_unused(&info)?;
    if !users.is_empty() {
        let users = node_users::in_words(&users);
        return Err(UblkError::new(format!("{} is in use: {users} (try --force)", node(id))));
    }
    delete_device(&info)
}
