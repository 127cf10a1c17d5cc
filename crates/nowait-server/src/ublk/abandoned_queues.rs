//! Queues of a device whose last server was killed while it took the device over.
//!
//! The driver of Linux 6.12 expects that each queue was fetched in full when the next server begins: of a
//! device of which none was, it refuses a takeover once a server has mapped its descriptors
//! (`EINVAL`), and of one of which some were, a takeover makes it fail. Drivers with `QUIESCE`
//! (Linux 6.16) forget a server when it closes the device.
//!
//! Invariant: the driver has no memory to write to: requests wait meanwhile, and the address of each
//! command is none that can be mapped.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, squeue, types};

use crate::ublk::control_ring::node;
use crate::ublk::device_set_up::open_character_device;
use crate::ublk::ublk_cmd::{DeviceInfo, F_QUIESCE, F_USER_COPY, FETCH_REQ, io_arguments};
use crate::ublk::ublk_error::UblkError;

/// An address that is not 0 and never mapped.
const NO_MEMORY: u64 = 1;

/// Fetches, by a thread that ends immediately, what the last server has not fetched of a device that waits
/// for a server.
///
/// # Errors
/// The device cannot be opened, or there is no ring or no thread.
pub(crate) fn complete_queues(info: &DeviceInfo) -> Result<(), UblkError> {
    if info.features & F_QUIESCE != 0 {
        return Ok(());
    }
    let info = *info;
    let failed = move |error: io::Error| {
        UblkError::os(node(info.id), error.raw_os_error().unwrap_or(libc::EIO))
    };
    let fetch = move || -> Result<(), UblkError> {
        let device = open_character_device(info.id)?;
        let mut ring = IoUring::new(info.depth.into()).map_err(failed)?;
        for queue in 0..info.queues {
            for tag in 0..info.depth {
                let command = fetch(&info, queue, tag, device.as_raw_fd());
                // SAFETY: the command names no memory of this process.
                let pushed = unsafe { ring.submission().push(&command) };
                pushed.map_err(|_| UblkError::os(node(info.id), libc::EBUSY))?;
            }
            ring.submit().map_err(failed)?;
            // The driver refuses those that a server has fetched; the others stay in the ring.
            ring.completion().for_each(drop);
        }
        Ok(())
    };
    // The driver takes a server for dead when the thread that has fetched ends.
    let thread = std::thread::Builder::new().name("nowait-ublk".into()).spawn(fetch);
    let ended = thread.map_err(failed)?.join();
    ended.unwrap_or_else(|_| Err(UblkError::os(node(info.id), libc::EIO)))
}

fn fetch(info: &DeviceInfo, queue: u16, tag: u16, device: i32) -> squeue::Entry {
    // Where the server copies, a command has no address.
    let address = if info.features & F_USER_COPY == 0 { NO_MEMORY } else { 0 };
    let arguments = io_arguments(queue, tag, 0, address);
    opcode::UringCmd16::new(types::Fd(device), FETCH_REQ).cmd(arguments).build()
}
