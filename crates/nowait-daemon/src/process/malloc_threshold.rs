//! The memory of answers of object stores, which goes back to the system when they have been read.
//!
//! By default the C library has a mapping only for memory that is larger than any with a mapping that was freed before.
//! Other memory is in heaps of its threads, which keep it: with many images some megabytes each.
//!
//! Invariant: the limit is set before the threads start that read from stores.
#![allow(unsafe_code)]

/// The size in bytes from which memory has a mapping of its own: the default, which does not grow any more.
#[cfg(target_env = "gnu")]
const OWN_MAPPING: libc::c_int = 128 << 10;

/// From now on memory of 128 KiB and more goes back to the system when it is freed.
pub(crate) fn return_when_freed() {
    // SAFETY: the call sets a number. A thread that allocates meanwhile sees the old or the new one.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING);
    }
}
