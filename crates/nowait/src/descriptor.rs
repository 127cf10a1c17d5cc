//! The calls that an open file takes, made on its descriptor or on a simulated device.
//!
//! Invariant: an interrupted call is made again; any other errno is returned as it is.
//! Knows: error, io, queue (the plain call), sim. Known by: storage.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{Result, retry_on_intr};

use crate::io::{Outcome, Transfer};
use crate::queue;

/// An open file, as somebody has opened it.
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

/// Makes the call on the simulated device, if that is what it is; else on the descriptor. What was
/// interrupted is made again.
macro_rules! call {
    ($self:ident, $simulated:ident => $there:expr, $here:expr) => {{
        #[cfg(feature = "sim")]
        if let Some($simulated) = &$self.simulated {
            return retry_on_intr(|| $there);
        }
        retry_on_intr(|| $here)
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
    use crate::error::Range;
    use crate::sim::SimDevice;

    pub(super) struct Simulated {
        device: Arc<SimDevice>,
        /// Which of its files.
        file: u16,
        /// Whether it was opened with `O_DIRECT`.
        direct: bool,
    }

    impl Descriptor {
        /// A handle on a file of `device`; `fd` stands for it where a descriptor is asked for.
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
        pub(super) unsafe fn transfer(&self, transfer: &Transfer) -> Outcome {
            loop {
                let transfer = Transfer { file: self.file, ..*transfer };
                // SAFETY: as promised by the caller.
                let outcome = unsafe { self.device.transfer(&transfer, self.direct) };
                if outcome != -libc::EINTR {
                    return outcome;
                }
            }
        }

        /// One call for `bufs`, which are laid out as segments.
        ///
        /// # Safety
        /// `bufs` is `count` entries of `struct iovec`, whose memory is `total` bytes and valid.
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

        pub(super) fn preadv(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize> {
            let total = bufs.iter().map(|buf| buf.len()).sum();
            // SAFETY: the slices are laid out as `struct iovec`, and borrowed for the call.
            unsafe { self.vectored(bufs.as_ptr().cast(), bufs.len(), total, pos, false) }
        }

        pub(super) fn pwritev(&self, bufs: &[IoSlice<'_>], pos: u64) -> Result<usize> {
            let total = bufs.iter().map(|buf| buf.len()).sum();
            // SAFETY: as above; a write only reads them.
            unsafe { self.vectored(bufs.as_ptr().cast(), bufs.len(), total, pos, true) }
        }

        pub(super) fn fallocate(&self, mode: FallocateFlags, pos: u64, len: u64) -> Result<()> {
            if self.file > 0 {
                return Err(Errno::BADF);
            }
            let keep = mode.contains(FallocateFlags::ZERO_RANGE);
            self.device.allocate(Range::new(pos, len), keep).map_err(errno)
        }

        pub(super) fn fdatasync(&self) -> Result<()> {
            self.device.sync().map_err(errno)
        }

        pub(super) fn ftruncate(&self, bytes: u64) -> Result<()> {
            if self.file > 0 {
                return Err(Errno::BADF);
            }
            self.device.resize(bytes).map_err(errno)
        }

        pub(super) fn seek(&self, to: SeekFrom) -> Result<u64> {
            match to {
                SeekFrom::Data(pos) => self.device.seek(self.file, pos, true).map_err(errno),
                SeekFrom::Hole(pos) => self.device.seek(self.file, pos, false).map_err(errno),
                SeekFrom::End(0) => Ok(self.device.bytes_of(self.file)),
                _ => Err(Errno::INVAL),
            }
        }
    }
}
