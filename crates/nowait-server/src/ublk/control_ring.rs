//! Control commands, which wait for their answer: a ring of its own with entries of 128 bytes.
//!
//! Invariant: a command's memory outlives it: the call returns after the driver has answered.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::channel;
use std::time::Duration;

use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};

use crate::ublk::ublk_cmd::{
    CONTROL_DEVICE, ControlArguments, ControlOp, DeviceInfo, F_CMD_IOCTL_ENCODE,
};
use crate::ublk::ublk_error::UblkError;

/// The longest path of a character device in bytes, with its NUL.
/// Beyond it: the command fails with `EINVAL`.
const MAX_PATH_BYTES: usize = 32;
/// The longest buffer of a command to the driver, in bytes.
/// Beyond it: the command fails with `EINVAL`.
const MAX_BUFFER_BYTES: usize = 128;

/// The driver's control device.
pub(crate) struct ControlRing {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    device: OwnedFd,
}

impl ControlRing {
    /// Opens the control device.
    ///
    /// # Errors
    /// The driver, the right to it, or io_uring is missing.
    pub(crate) fn open() -> Result<Self, UblkError> {
        let device = OpenOptions::new().read(true).write(true).open(CONTROL_DEVICE);
        let device = device.map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => UblkError::new(format!(
                "{CONTROL_DEVICE} is missing: there is no ublk driver (try 'modprobe ublk_drv', Linux 6.5 or later)"
            )),
            Some(libc::EACCES | libc::EPERM) => UblkError::new(format!(
                "{CONTROL_DEVICE}: permission denied (be root, or let the administrator open it to this user)"
            )),
            errno => UblkError::os(CONTROL_DEVICE, errno.unwrap_or(libc::EIO)),
        })?;
        let ring = IoUring::builder().build(4);
        let ring = ring.map_err(|error| {
            UblkError::os("a ublk device needs io_uring", error.raw_os_error().unwrap_or(libc::EIO))
        })?;
        Ok(Self { ring, device: device.into() })
    }

    /// The driver's features, `F_*`.
    ///
    /// # Errors
    /// The driver is too old to be asked.
    pub(crate) fn features(&mut self) -> Result<u64, UblkError> {
        let mut bytes = [0; 8];
        let asked = self.command(ControlOp::GET_FEATURES, u32::MAX, 0, false, &mut bytes);
        let features = asked.map(|_| u64::from_ne_bytes(bytes)).unwrap_or_default();
        match features & F_CMD_IOCTL_ENCODE {
            0 => Err(UblkError::new(
                "the kernel's ublk driver is too old (Linux 6.5 has a newer one)",
            )),
            _ => Ok(features),
        }
    }

    /// The state of device `id` in the driver; `None` if there is no such device.
    ///
    /// # Errors
    /// The errno of the driver: `EPERM`, `EACCES`.
    pub(crate) fn info(&mut self, id: u32) -> Result<Option<DeviceInfo>, i32> {
        let mut bytes = [0; DeviceInfo::BYTES];
        match self.command(ControlOp::GET_DEV_INFO2, id, 0, true, &mut bytes) {
            Ok(_) => Ok(Some(DeviceInfo::from_bytes(&bytes))),
            Err(libc::ENODEV) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Sends a command to device `id` and waits for the answer, a number of the command's own.
    /// `buffer` is read and written by the driver. With `by_path` the path of the character device
    /// is given, too, on which the caller's rights are checked.
    ///
    /// # Errors
    /// The errno of the driver or of io_uring_enter(2).
    pub(crate) fn command(
        &mut self,
        op: ControlOp,
        id: u32,
        data: u64,
        by_path: bool,
        buffer: &mut [u8],
    ) -> Result<i32, i32> {
        let mut memory = [0; MAX_PATH_BYTES + MAX_BUFFER_BYTES];
        let path = if by_path { format!("{}\0", character_device(id)) } else { String::new() };
        let (start, end) = (path.len(), path.len() + buffer.len());
        if start > MAX_PATH_BYTES || buffer.len() > MAX_BUFFER_BYTES {
            return Err(libc::EINVAL);
        }
        memory[..start].copy_from_slice(path.as_bytes());
        memory[start..end].copy_from_slice(buffer);
        let address = if end == 0 { 0 } else { memory.as_mut_ptr().expose_provenance() as u64 };
        let arguments =
            ControlArguments { id, buffer: (address, end as u16), data, path_len: start as u16 };
        let mut bytes = [0; 80];
        let arguments = arguments.to_bytes();
        bytes[..arguments.len()].copy_from_slice(&arguments);
        let entry = opcode::UringCmd80::new(types::Fd(self.device.as_raw_fd()), op.0).cmd(bytes);
        // SAFETY: `memory` outlives the command: this function does not return before its answer.
        unsafe { self.ring.submission().push(&entry.build()) }.map_err(|_| libc::EBUSY)?;
        let result = self.answer();
        buffer.copy_from_slice(&memory[start..end]);
        match result {
            0.. => Ok(result),
            _ => Err(-result),
        }
    }

    /// Waits for the answer to the only command. No error of the wait ends it: the driver may use
    /// the memory until it has answered.
    fn answer(&mut self) -> i32 {
        // The driver waits for users and servers of the device; that is not an I/O wait.
        let mut flags = EnterFlags::GETEVENTS;
        flags.set(EnterFlags::NO_IOWAIT, self.ring.params().is_feature_no_iowait());
        loop {
            let entries = self.ring.submission().len() as u32;
            let submitter = self.ring.submitter();
            // SAFETY: there is no argument, and the command's memory is as its push says.
            let entered =
                unsafe { submitter.enter::<libc::sigset_t>(entries, 1, flags.bits(), None) };
            if let Some(completion) = self.ring.completion().next() {
                return completion.result();
            }
            if entered.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// The path of the node of device `id`.
pub(crate) fn node(id: u32) -> String {
    format!("/dev/ublkb{id}")
}

/// The path of the character device through which device `id` is served.
pub(crate) fn character_device(id: u32) -> String {
    format!("/dev/ublkc{id}")
}

/// Calls `call` with a control ring on a thread of its own, and waits at most `timeout` for its
/// result; `None` if it has not come by then.
pub(crate) fn within<T: Send + 'static>(
    timeout: Duration,
    call: impl FnOnce(&mut ControlRing) -> T + Send + 'static,
) -> Result<Option<T>, UblkError> {
    let (sender, results) = channel();
    let mut control = ControlRing::open()?;
    let run = move || drop(sender.send(call(&mut control)));
    let thread = std::thread::Builder::new().name("nowait-ublk".into()).spawn(run);
    thread.map_err(|error| UblkError::new(error.to_string()))?;
    Ok(results.recv_timeout(timeout).ok())
}
