//! The log of guest memory that the device has written to, by which a VMM migrates a running guest.
//!
//! Invariant: a page is logged after it was written and before the driver is told of the request.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use nowait::Error;
use serde::{Deserialize, Serialize};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

use crate::vhost_user::fault_guard::{FaultGuard, file_of, map_shared};

/// Bytes of a page of the log, which has a bit for each.
const PAGE_BYTES: u64 = 4096;

/// Where the log is in its file.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LogPlace {
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
}

/// A log shared with the VMM. The guard is dropped first.
pub(crate) struct DirtyLog {
    guard: FaultGuard,
    mapping: MmapRegion,
}

impl DirtyLog {
    /// Maps `bytes` bytes of `file` from `offset` on.
    ///
    /// # Errors
    /// `EINVAL`: the file is too short; the errno of mmap(2).
    pub(crate) fn map(file: File, offset: u64, bytes: u64) -> Result<Self, Error> {
        let (guard, mapping) = map_shared(file, offset, bytes)?;
        Ok(Self { guard, mapping })
    }

    /// Where it is, and a copy of its file.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub(crate) fn place(&self) -> io::Result<(LogPlace, OwnedFd)> {
        let file = self.mapping.file_offset();
        let offset = file.map_or(0, FileOffset::start);
        let bytes = self.mapping.size() as u64;
        Ok((LogPlace { bytes, offset }, file_of(file)?))
    }

    /// Logs `len` bytes at `address` of the guest. Pages that the log has no bit for are left out.
    pub(crate) fn mark(&self, address: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|last| address.saturating_add(last)) else {
            return;
        };
        let log = self.mapping.as_volatile_slice();
        let end = self.mapping.size() as u64 * 8;
        for page in (address / PAGE_BYTES..=last / PAGE_BYTES).take_while(|page| *page < end) {
            if let Ok(byte) = log.get_atomic_ref::<AtomicU8>((page / 8) as usize) {
                byte.fetch_or(1 << (page % 8), Ordering::AcqRel);
            }
        }
    }

    /// Whether the log was missing when it was accessed.
    pub(crate) fn has_faulted(&self) -> bool {
        self.guard.has_faulted()
    }
}

/// The log of a queue: data, and where its used ring is logged, if it is.
#[derive(Clone)]
pub(crate) struct QueueLog {
    pub(crate) log: Arc<DirtyLog>,
    /// The address in the guest under which the used ring is logged.
    pub(crate) used_ring: Option<u64>,
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn each_page_that_is_touched_has_its_bit_and_none_outside_of_the_log_is_written() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all_at(&[0; 16], 0).unwrap();
        let log = DirtyLog::map(file.try_clone().unwrap(), 0, 2).unwrap();
        log.mark(4095, 2);
        log.mark(9 * 4096, 1);
        log.mark(15 * 4096, 1 << 40);
        log.mark(u64::MAX, 9);
        log.mark(5 * 4096, 0);
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes[..3], [0b11, 0b1000_0010, 0]);
    }
}
