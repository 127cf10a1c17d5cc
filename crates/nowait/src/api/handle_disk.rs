//! The device of an async file, and the lock that ends with the file's handles.
//!
//! Invariant: a file that a handle has opened itself is unlocked with the last of its `HandleDisk`s. The
//! threads that serve the file have the device without one, and may keep it for longer.

use std::ops::Deref;
use std::sync::Arc;

use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;

/// The device of a handle, of its clones, and of its calls.
#[derive(Clone)]
pub(crate) struct HandleDisk {
    disk: Arc<BlockDevice<dyn BlockMap>>,
    /// `None`: the device was given to the handle, and others may rely on its lock.
    _lock: Option<Arc<LockEnd>>,
}

/// Ends the lock when it is dropped.
struct LockEnd(Arc<BlockDevice<dyn BlockMap>>);

impl HandleDisk {
    /// A device that no other handle has.
    pub(crate) fn opened(disk: Arc<BlockDevice<dyn BlockMap>>) -> Self {
        Self { _lock: Some(Arc::new(LockEnd(disk.clone()))), disk }
    }

    /// A device that others may use.
    pub(crate) const fn given(disk: Arc<BlockDevice<dyn BlockMap>>) -> Self {
        Self { disk, _lock: None }
    }
}

impl Deref for HandleDisk {
    type Target = Arc<BlockDevice<dyn BlockMap>>;

    fn deref(&self) -> &Self::Target {
        &self.disk
    }
}

impl Drop for LockEnd {
    fn drop(&mut self) {
        self.0.end_lock();
    }
}
