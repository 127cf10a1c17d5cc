//! The requests of a queue, in memory that the driver writes.
//!
//! Invariant: the memory is mapped for reading only, and unmapped when this is dropped. A descriptor
//! is stable from the completion of its tag's fetch command until the next one.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::ublk::ublk_cmd::{DESCRIPTOR_BYTES, Descriptor, QUEUE_STRIDE};

/// The mapped descriptors of one queue.
pub(crate) struct Descriptors {
    base: NonNull<u8>,
    bytes: usize,
    depth: u16,
}

impl Descriptors {
    /// Descriptors of queue `queue`, which has `depth` tags, of the character device.
    ///
    /// # Errors
    /// The errno of mmap(2).
    pub(crate) fn map(device: BorrowedFd<'_>, queue: u16, depth: u16) -> Result<Self, i32> {
        // The kernel rounds it up to whole pages, here and in munmap(2).
        let bytes = usize::from(depth) * DESCRIPTOR_BYTES;
        let (flags, offset) =
            (MapFlags::SHARED.union(MapFlags::POPULATE), QUEUE_STRIDE * u64::from(queue));
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, device, offset) };
        let base = mapped.map_err(|errno| errno.raw_os_error())?;
        let base = NonNull::new(base.cast()).ok_or(libc::ENOMEM)?;
        Ok(Self { base, bytes, depth })
    }

    /// The request of `tag`; `None` for a tag that the queue does not have.
    #[inline]
    pub(crate) fn get(&self, tag: u16) -> Option<Descriptor> {
        if tag >= self.depth {
            return None;
        }
        let at = usize::from(tag) * DESCRIPTOR_BYTES;
        // SAFETY: the mapping holds `depth` descriptors and is aligned to a page, so that each
        // field is aligned.
        let word =
            |offset: usize| unsafe { self.base.add(at + offset).cast::<u32>().read_volatile() };
        Some(Descriptor {
            op_flags: word(0),
            sectors: word(4),
            start_sector: u64::from(word(8)) | u64::from(word(12)) << 32,
        })
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and nothing borrows from it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
