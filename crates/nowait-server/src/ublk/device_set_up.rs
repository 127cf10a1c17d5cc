//! How a device comes to a server: added, or found waiting for its next one.
//!
//! Invariant: only a device of the same image is taken over. The buffers of all queues stay within
//! their bound.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nowait_image::Image;

use crate::block_size::BlockSize;
use crate::ublk::control_commands::delete_device;
use crate::ublk::control_ring::{ControlRing, character_device, node};
use crate::ublk::device_parameters::{Parameters, block_in};
use crate::ublk::ublk_cmd::{
    ControlOp, DeviceInfo, DeviceState, F_CMD_IOCTL_ENCODE, F_QUIESCE, F_UNPRIVILEGED_DEV,
    F_UPDATE_SIZE, F_USER_RECOVERY, F_USER_RECOVERY_REISSUE, F_ZERO_COPY,
};
use crate::ublk::ublk_error::UblkError;

/// The most requests of a queue in flight.
/// Beyond it: requests wait in the kernel.
const MAX_DEPTH: u16 = 128;
const MIN_DEPTH: u16 = 16;
/// The longest request, in bytes, where there are few queues and where there are many.
/// Beyond it: the kernel makes several requests.
const MAX_IO_BYTES: u32 = 512 << 10;
const MIN_IO_BYTES: u32 = 64 << 10;
/// Bytes of the buffers of all queues together: each tag has one of the longest request.
/// Beyond it: requests are shorter, then queues less deep.
const MAX_BUFFER_BYTES: u64 = 64 << 20;
/// How long a device's last server may take to end once it was killed, and a new node to appear.
/// Beyond it: the start fails.
pub(crate) const APPEAR_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a wait looks again.
pub(crate) const RETRY: Duration = Duration::from_millis(50);

/// Options that a node is made from.
#[derive(Clone, Debug)]
pub struct UblkOptions {
    /// Its number; any free one without it.
    pub id: Option<u32>,
    /// Queues, one for each thread; the kernel has at most one for each processor.
    pub queues: u16,
    /// Tell the image from others, and those below it: a server that takes over a node must have the
    /// one with which it was made, or one above it, as after a snapshot. None if the server before this
    /// one has told of the node.
    pub image_ids: Vec<u64>,
    /// The bytes of its blocks; without it those of a block device, else 512. A node that is taken over
    /// stays as it was made.
    pub block_size: Option<BlockSize>,
    /// Whether data may go without a copy, where the driver and the image can. A node that is taken
    /// over stays as it was made.
    pub zero_copy: bool,
}

/// The device of number `id` if it waits for a server. One without a node, which a server has left
/// that ended too early, is deleted.
pub(crate) fn existing(
    control: &mut ControlRing,
    id: u32,
) -> Result<Option<DeviceInfo>, UblkError> {
    let deadline = Instant::now() + APPEAR_TIMEOUT;
    loop {
        let info = control.info(id).map_err(|errno| UblkError::os(node(id), errno))?;
        let Some(info) = info else { return Ok(None) };
        let expired = Instant::now() >= deadline;
        match info.state {
            DeviceState::Quiesced | DeviceState::FailIo => return Ok(Some(info)),
            DeviceState::Dead => match open_once(id) {
                Ok(opened) => {
                    drop(opened);
                    delete_device(&info)?;
                    return Ok(None);
                }
                Err(_) if expired => {
                    let what = "another server is making or removing it (take another number)";
                    return Err(UblkError::new(format!("{}: {what}", node(id))));
                }
                Err(_) => {}
            },
            // A server that was killed needs a moment to end.
            DeviceState::Live | DeviceState::Other(_) if expired => {
                let (node, pid) = (node(id), info.pid);
                return Err(UblkError::new(format!(
                    "{node}: process {pid} serves it (take another number)"
                )));
            }
            DeviceState::Live | DeviceState::Other(_) => {}
        }
        std::thread::sleep(RETRY);
    }
}

/// Adds a device.
pub(crate) fn added(
    control: &mut ControlRing,
    features: u64,
    options: &UblkOptions,
) -> Result<DeviceInfo, UblkError> {
    let (depth, max_io_bytes) = sizes(options.queues);
    let wanted =
        F_CMD_IOCTL_ENCODE | F_USER_RECOVERY | F_USER_RECOVERY_REISSUE | F_UPDATE_SIZE | F_QUIESCE;
    let zero_copy = if features & F_ZERO_COPY == F_ZERO_COPY { F_ZERO_COPY } else { 0 };
    let info = DeviceInfo {
        queues: options.queues,
        depth,
        state: DeviceState::Dead,
        max_io_bytes,
        id: options.id.unwrap_or(u32::MAX),
        pid: 0,
        features: features & wanted | zero_copy,
        server_data: options.image_ids.first().copied().unwrap_or_default(),
    };
    let mut answer = add(control, info);
    if answer == Err(libc::EPERM) && features & F_UNPRIVILEGED_DEV != 0 {
        // Recovery is for privileged devices.
        let features = features & (F_CMD_IOCTL_ENCODE | F_UPDATE_SIZE) | F_UNPRIVILEGED_DEV;
        answer = add(control, DeviceInfo { features, ..info });
    }
    answer.map_err(|errno| match errno {
        libc::EPERM | libc::EACCES => {
            UblkError::new("this user may not add a ublk device (be root, CAP_SYS_ADMIN)")
        }
        errno => UblkError::os("a ublk device cannot be added", errno),
    })
}

fn add(control: &mut ControlRing, info: DeviceInfo) -> Result<DeviceInfo, i32> {
    let mut bytes = info.to_bytes();
    control.command(ControlOp::ADD_DEV, info.id, 0, false, &mut bytes)?;
    Ok(DeviceInfo::from_bytes(&bytes))
}

/// Tags of a queue and bytes of the longest request, so that the buffers stay within their bound.
fn sizes(queues: u16) -> (u16, u32) {
    let (mut depth, mut bytes) = (MAX_DEPTH, MAX_IO_BYTES);
    let all = |depth: u16, bytes: u32| u64::from(queues) * u64::from(depth) * u64::from(bytes);
    while all(depth, bytes) > MAX_BUFFER_BYTES && bytes > MIN_IO_BYTES {
        bytes /= 2;
    }
    while all(depth, bytes) > MAX_BUFFER_BYTES && depth > MIN_DEPTH {
        depth /= 2;
    }
    (depth, bytes)
}

/// Takes over a device whose server has ended. Also returns the bytes of its blocks.
pub(crate) fn recovered(
    control: &mut ControlRing,
    info: DeviceInfo,
    image: &Image,
    options: &UblkOptions,
) -> Result<(DeviceInfo, u32), UblkError> {
    let (node, id) = (node(info.id), info.id);
    let by_path = info.features & F_UNPRIVILEGED_DEV != 0;
    let parameters = Parameters::of(image, options.block_size, info.max_io_bytes);
    let mut bytes = parameters.to_bytes();
    let asked = control.command(ControlOp::GET_PARAMS, id, 0, by_path, &mut bytes);
    asked.map_err(|errno| UblkError::os(&node, errno))?;
    let can_grow = info.features & F_UPDATE_SIZE != 0;
    let fits = parameters.fits(&bytes, can_grow);
    let UblkOptions { image_ids, .. } = options;
    if !(image_ids.is_empty() || image_ids.contains(&info.server_data)) || !fits {
        return Err(UblkError::new(format!(
            "{node} waits for the server of another image ('nowait ublk stop {id}' removes it)"
        )));
    }
    Ok((info, block_in(&bytes)))
}

/// Opens the character device, which udev may have to make first.
pub(crate) fn open_character_device(id: u32) -> Result<OwnedFd, UblkError> {
    let deadline = Instant::now() + APPEAR_TIMEOUT;
    loop {
        match open_once(id) {
            Ok(opened) => return Ok(opened),
            Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                return Err(UblkError::os(character_device(id), errno));
            }
        }
    }
}

fn open_once(id: u32) -> io::Result<OwnedFd> {
    OpenOptions::new().read(true).write(true).open(character_device(id)).map(OwnedFd::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_buffers_of_all_queues_stay_within_their_bound() {
        assert_eq!(sizes(1), (128, 512 << 10));
        for queues in [1, 2, 3, 4, 8, 16, 64] {
            let (depth, bytes) = sizes(queues);
            let all = u64::from(queues) * u64::from(depth) * u64::from(bytes);
            assert!(all <= MAX_BUFFER_BYTES, "{queues}");
        }
    }
}
