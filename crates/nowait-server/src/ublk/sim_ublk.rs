//! The ublk driver's side of one queue, for simulations: it takes the commands of the frontend, gives
//! it requests, and copies their data, as the kernel does.
//!
//! Invariant: a buffer is accessed only while its tag's command is the driver's, and before its
//! server was dropped.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;

use nowait::sim::{SimCommand, SimCommands};
use nowait::{Error, Op, Operation, Token};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::ublk::ublk_cmd::{
    ABORTED, COMMIT_AND_FETCH_REQ, DESCRIPTOR_BYTES, IO_FUA, IO_NO_UNMAP, OP_DISCARD, OP_FLUSH,
    OP_READ, OP_WRITE, OP_WRITE_ZEROES, field,
};
use crate::ublk::ublk_device::UblkDevice;

/// A request for the driver's queue.
#[derive(Clone, Copy, Debug)]
pub struct SimUblkRequest {
    /// The operation, which is not a status.
    pub op: Op,
    /// It is durable when it is answered.
    pub fua: bool,
    /// A zeroed range keeps its storage.
    pub no_unmap: bool,
    /// Position in bytes, a multiple of 512.
    pub pos: u64,
    /// Length in bytes, the same.
    pub len: u64,
}

/// The queue.
pub(crate) struct SimUblkQueue {
    commands: SimCommands,
    descriptors: File,
    /// The driver's command of each tag: its token and the address of the buffer.
    fetched: Vec<Option<(Token, u64)>>,
    max_io_bytes: u32,
}

impl SimUblkQueue {
    /// A queue of `depth` tags with the device for its frontend, which pushes to `commands`.
    pub(crate) fn new(
        commands: SimCommands,
        depth: u16,
        max_io_bytes: u32,
    ) -> Result<(Self, UblkDevice), Error> {
        let failed = |e: rustix::io::Errno| Error::new(e.raw_os_error(), Operation::SetUp);
        let file = memfd_create("ublk", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&file, 64 << 10).map_err(failed)?;
        let other = rustix::io::fcntl_dupfd_cloexec(&file, 0).map_err(failed)?;
        let fetched = (0..depth).map(|_| None).collect();
        let queue = Self { commands, descriptors: file.into(), fetched, max_io_bytes };
        Ok((queue, UblkDevice::simulated(other, (depth, max_io_bytes), 0)))
    }

    /// Takes the commands of the frontend. Returns the tags whose requests were answered, with the
    /// results.
    pub(crate) fn take(&mut self) -> Vec<(u16, i32)> {
        let mut answered = Vec::new();
        for SimCommand { op, arguments, token } in self.commands.take_submitted() {
            let tag = u16::from_ne_bytes(field(&arguments, 2));
            let address = u64::from_ne_bytes(field(&arguments, 8));
            if let Some(fetched) = self.fetched.get_mut(usize::from(tag)) {
                *fetched = Some((token, address));
            }
            if op == COMMIT_AND_FETCH_REQ {
                answered.push((tag, i32::from_ne_bytes(field(&arguments, 4))));
            }
        }
        answered
    }

    /// Whether the queue takes a request of `tag`.
    pub(crate) fn is_free(&self, tag: u16) -> bool {
        self.fetched.get(usize::from(tag)).is_some_and(Option::is_some)
    }

    /// Gives a request to the frontend, with the data of a write.
    pub(crate) fn give(&mut self, tag: u16, request: SimUblkRequest, data: &[u8]) {
        let fetched = self.fetched.get_mut(usize::from(tag)).and_then(Option::take);
        let Some((token, address)) = fetched else { return };
        let len = data.len().min(self.max_io_bytes as usize);
        let base = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: the buffer is as long as the longest request, and the driver's.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), base, len) };
        let op = match request.op {
            Op::Read | Op::Status => OP_READ,
            Op::Write => OP_WRITE,
            Op::Flush => OP_FLUSH,
            Op::Discard => OP_DISCARD,
            Op::Zero => OP_WRITE_ZEROES,
        };
        let fua = if request.fua { IO_FUA } else { 0 };
        let no_unmap = if request.no_unmap { IO_NO_UNMAP } else { 0 };
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &(u32::from(op) | fua | no_unmap).to_ne_bytes());
        put(4, &((request.len >> 9) as u32).to_ne_bytes());
        put(8, &(request.pos >> 9).to_ne_bytes());
        let at = u64::from(tag) * DESCRIPTOR_BYTES as u64;
        let outcome = match self.descriptors.write_all_at(&bytes, at) {
            Ok(()) => 0,
            Err(_) => -libc::EIO,
        };
        self.commands.end(token, outcome);
    }

    /// The first `len` bytes of the buffer of `tag`, which is the driver's.
    pub(crate) fn data(&self, tag: u16, len: usize) -> Vec<u8> {
        let Some(&Some((_, address))) = self.fetched.get(usize::from(tag)) else {
            return Vec::new();
        };
        let base = std::ptr::with_exposed_provenance::<u8>(address as usize);
        // SAFETY: as above, and its bytes are initialised.
        unsafe { std::slice::from_raw_parts(base, len.min(self.max_io_bytes as usize)) }.to_vec()
    }

    /// Ends the commands of tags that have no request, as a driver does that keeps requests back.
    pub(crate) fn abort_idle(&mut self) {
        for (token, _) in self.fetched.iter_mut().filter_map(Option::take) {
            self.commands.end(token, ABORTED);
        }
    }

    /// The server has died, and only the first `reach` of the commands that it has not submitted
    /// reach the driver.
    pub(crate) fn die(&mut self, reach: usize) {
        self.commands.die(reach);
    }
}
