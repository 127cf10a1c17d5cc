//! State that all handles of one file in this process share.
//!
//! Invariant: two handles of one file, whatever their paths, share one `SharedInode` while both are open.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use crate::read_ahead::ahead_reads::AheadReads;
use crate::types::byte_range::ByteRange;

/// A file or block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum InodeNumber {
    File {
        device: u64,
        number: u64,
    },
    /// The number of the device itself, which may have several nodes.
    Device(u64),
}

/// A file or block device that is open in this process.
pub struct SharedInode {
    number: InodeNumber,
    /// Made for the first handle that reads ahead.
    ahead: OnceLock<Arc<AheadReads>>,
    /// Whether it was made.
    reads_ahead: AtomicBool,
}

/// Whether [`SharedInode::ahead`] was called for any file of the process.
static ANY_READS_AHEAD: AtomicBool = AtomicBool::new(false);

/// Whether a file of the process may have been read ahead.
#[inline(always)]
pub(crate) fn any_reads_ahead() -> bool {
    ANY_READS_AHEAD.load(Ordering::Acquire)
}

type Inodes = HashMap<InodeNumber, Weak<SharedInode>>;

fn inodes() -> MutexGuard<'static, Inodes> {
    static INODES: LazyLock<Mutex<Inodes>> = LazyLock::new(Mutex::default);
    INODES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedInode {
    /// The file with this number, of which a handle is open.
    pub(crate) fn of(number: InodeNumber) -> Arc<Self> {
        let mut inodes = inodes();
        if let Some(open) = inodes.get(&number).and_then(Weak::upgrade) {
            return open;
        }
        let inode =
            Arc::new(Self { number, ahead: OnceLock::new(), reads_ahead: AtomicBool::new(false) });
        inodes.insert(number, Arc::downgrade(&inode));
        inode
    }

    /// Its read-ahead, which is made if it has none.
    pub(crate) fn ahead(&self) -> Arc<AheadReads> {
        let ahead = self.ahead.get_or_init(AheadReads::new).clone();
        self.reads_ahead.store(true, Ordering::Release);
        ANY_READS_AHEAD.store(true, Ordering::Release);
        ahead
    }

    /// Drops what was read ahead of `changed`. To be called when a change has ended, before the request is
    /// answered.
    #[inline]
    pub(crate) fn changed(&self, changed: ByteRange) {
        if self.reads_ahead.load(Ordering::Acquire) {
            self.forget(changed);
        }
    }

    #[cold]
    fn forget(&self, changed: ByteRange) {
        if let Some(ahead) = self.ahead.get() {
            ahead.forget(changed);
        }
    }
}

impl Drop for SharedInode {
    fn drop(&mut self) {
        let mut inodes = inodes();
        // Another handle may have been opened meanwhile, with an inode of its own.
        if inodes.get(&self.number).is_some_and(|inode| inode.strong_count() == 0) {
            inodes.remove(&self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_one_file_share_its_inode_until_the_last_one_is_closed() {
        let number = InodeNumber::File { device: u64::MAX, number: 1 };
        let (one, other) = (SharedInode::of(number), SharedInode::of(number));
        assert!(Arc::ptr_eq(&one, &other));
        let another = SharedInode::of(InodeNumber::Device(u64::MAX));
        assert!(!Arc::ptr_eq(&one, &another));
        drop(one);
        assert!(inodes().contains_key(&number));
        drop(other);
        assert!(!inodes().contains_key(&number));
    }
}
