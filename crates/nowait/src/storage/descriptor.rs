//! The system calls on an open file, made on its descriptor or on a simulated device.
//!
//! Invariant: an interrupted call is repeated; any other errno is returned unchanged.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{Result, retry_on_intr};

use crate::queue;
use crate::types::transfer::{Outcome, Transfer};

/// One open file description, or its simulation.
pub(crate) struct Descriptor {
    fd: OwnedFd,
    #[cfg(feature = "sim")]
    simulated: Option<simulated::Simulated>,
}

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self {
            fd,
            #[cfg(feature = "sim")]
            simulated: None,
        }
    }
}

/// Makes the call on the simulated device if there is one, else on the descriptor; repeats it on
/// `EINTR`.
macro_rules! call {
    ($self:ident, $simulated:ident => $on_device:expr, $on_file:expr) => {{
        #[cfg(feature = "sim")]
        if let Some($simulated) = &$self.simulated {
            return retry_on_intr(|| $on_device);
        }
        retry_on_intr(|| $on_file)
    }};
}

impl Descriptor {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// preadv2(2) or pwritev2(2).
    ///
    /// # Safety
    /// As for [`queue::transfer`].
    #[inline]
    pub(crate) unsafe fn transfer(&self, transfer: &Transfer) -> Outcome {
        #[cfg(feature = "sim")]
        if let Some(device) = &self.simulated {
            // SAFETY: as promised by the caller.
            return unsafe { device.transfer(transfer) };
        }
        // SAFETY: as promised by the caller.
        unsafe { queue::transfer(self.fd(), transfer) }
    }

    pub(crate) fn preadv(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize> {
        call!(self, it => it.preadv(bufs, pos), rustix::io::preadv(&self.fd, bufs, pos))
    }

    pub(crate) fn pwritev(&self, bufs: &[IoSlice<'_>], pos: u64) -> Result<usize> {
        call!(self, it => it.pwritev(bufs, pos), rustix::io::pwritev(&self.fd, bufs, pos))
    }

    pub(crate) fn fallocate(&self, mode: FallocateFlags, pos: u64, len: u64) -> Result<()> {
        call!(self, it => it.fallocate(mode, pos, len), {
            rustix::fs::fallocate(&self.fd, mode, pos, len)
        })
    }

    pub(crate) fn fdatasync(&self) -> Result<()> {
        call!(self, it => it.fdatasync(), rustix::fs::fdatasync(&self.fd))
    }

    pub(crate) fn ftruncate(&self, bytes: u64) -> Result<()> {
        call!(self, it => it.ftruncate(bytes), rustix::fs::ftruncate(&self.fd, bytes))
    }

    pub(crate) fn seek(&self, to: SeekFrom) -> Result<u64> {
        call!(self, it => it.seek(to), rustix::fs::seek(&self.fd, to))
    }
}

#[cfg(feature = "sim")]
mod simulated {
    use std::sync::Arc;

    use rustix::io::Errno;

    use super::*;
    use crate::sim::SimDevice;
    use crate::types::byte_range::ByteRange;

    pub(crate) struct Simulated {
        device: Arc<SimDevice>,
        /// The number of the file on the device; 0 is the writable one.
        file: u16,
        /// Whether it was opened with `O_DIRECT`.
        direct: bool,
    }

    impl Descriptor {
        /// A handle on a file of `device`; `fd` takes its place where a real descriptor is needed.
        pub(crate) fn simulated(
            fd: OwnedFd,
            device: Arc<SimDevice>,
            file: u16,
            direct: bool,
        ) -> Self {
            Self { fd, simulated: Some(Simulated { device, file, direct }) }
        }
    }

    fn errno(errno: i32) -> Errno {
        Errno::from_raw_os_error(errno)
    }

    impl Simulated {
        /// # Safety
        /// As for [`queue::transfer`].
        pub(crate) unsafe fn transfer(&self, transfer: &Transfer) -> Outcome {
            loop {
                let transfer = Transfer { file: self.file, ..*transfer };
                // SAFETY: as promised by the caller.
                let outcome = unsafe { self.device.transfer(&transfer, self.direct) };
                if outcome != -libc::EINTR {
                    return outcome;
                }
            }
        }

        /// One transfer of the segments at `bufs`.
        ///
        /// # Safety
        /// `bufs` points to `count` entries of `struct iovec`, whose memory is valid and `total`
        /// bytes long.
        unsafe fn vectored(
            &self,
            bufs: *const u8,
            count: usize,
            total: usize,
            pos: u64,
            write: bool,
        ) -> Result<usize> {
            let transfer = Transfer {
                base: bufs.cast_mut(),
                pos,
                len: total as u32,
                segments: count as u16,
                file: self.file,
                write,
                ..Transfer::NONE
            };
            // SAFETY: as promised by the caller.
            let outcome = unsafe { self.device.transfer(&transfer, self.direct) };
            usize::try_from(outcome).map_err(|_| errno(-outcome))
        }

        pub(crate) fn preadv(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize> {
            let total = bufs.iter().map(|buf| buf.len()).sum();
            // SAFETY: the slices are laid out as `struct iovec`, and borrowed for the call.
            unsafe { self.vectored(bufs.as_ptr().cast(), bufs.len(), total, pos, false) }
        }

        pub(crate) fn pwritev(&self, bufs: &[IoSlice<'_>], pos: u64) -> Result<usize> {
            let total = bufs.iter().map(|buf| buf.len()).sum();
            // SAFETY: as above; a write only reads them.
            unsafe { self.vectored(bufs.as_ptr().cast(), bufs.len(), total, pos, true) }
        }

        pub(crate) fn fallocate(&self, mode: FallocateFlags, pos: u64, len: u64) -> Result<()> {
            if self.file > 0 {
                return Err(Errno::BADF);
            }
            let keep = mode.contains(FallocateFlags::ZERO_RANGE);
            self.device.allocate(ByteRange::new(pos, len), keep).map_err(errno)
        }

        pub(crate) fn fdatasync(&self) -> Result<()> {
            self.device.sync().map_err(errno)
        }

        pub(crate) fn ftruncate(&self, bytes: u64) -> Result<()> {
            if self.file > 0 {
                return Err(Errno::BADF);
            }
            self.device.resize(bytes).map_err(errno)
        }

        pub(crate) fn seek(&self, to: SeekFrom) -> Result<u64> {
            match to {
                SeekFrom::Data(pos) => self.device.seek(self.file, pos, true).map_err(errno),
                SeekFrom::Hole(pos) => self.device.seek(self.file, pos, false).map_err(errno),
                _ => Err(Errno::INVAL),
            }
        }
    }
}
