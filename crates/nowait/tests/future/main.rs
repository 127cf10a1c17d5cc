//! The async APIs against a model, with futures dropped at random, with and without a runtime.
//!
//! Invariant: each task has ranges of its own, so that each request has one right result. A write
//! that is dropped in flight may be done at any time, so it goes to a range that is never compared.
#![allow(unsafe_code)]

mod device_share;
mod failing_queue;
mod several_threads;
mod one_thread;
mod one_thread_on_tokio;
mod many_files;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use nowait::{AllocationCache, BlockDevice, Config, OpenOptions, WorkerPool};
use nowait_testkit::wait_until;

/// A task's share of the device, in bytes, and the part of it that is never compared.
pub(crate) const SHARE: u64 = 1 << 20;
pub(crate) const SCRATCH: u64 = SHARE / 4 - 777;
pub(crate) const TASKS: u64 = 4;
/// The device ends inside a block.
pub(crate) const SIZE: u64 = TASKS * SHARE - 300;
pub(crate) const STEPS: u32 = 600;
pub(crate) const LONGEST: u64 = 40_000;
/// Lengths of the buffers that are counted; no other allocation of this program has such a length.
pub(crate) const COUNTED: [usize; 3] = [13 * 4096, 17 * 4096, 19 * 4096];
pub(crate) const SLOTS: u32 = 16;

/// The system's allocator, counting the live buffers of the lengths `COUNTED`.
struct Counting;

/// Live buffers of each of the lengths.
static ALIVE: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

/// Live buffers of the length `COUNTED[n]`.
pub(crate) fn alive(n: usize) -> usize {
    ALIVE[n].load(Ordering::SeqCst)
}

/// The counter of such memory, if it is counted.
fn counter(layout: Layout) -> Option<&'static AtomicUsize> {
    ALIVE.iter().zip(COUNTED).find(|(_, len)| *len == layout.size()).map(|(alive, _)| alive)
}

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller's promise is passed on.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        counter(layout).inspect(|alive| _ = alive.fetch_add(1, Ordering::SeqCst));
        // SAFETY: as promised by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    // SAFETY: the caller's promise is passed on.
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        counter(layout).inspect(|alive| _ = alive.fetch_sub(1, Ordering::SeqCst));
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

pub(crate) fn image(size: u64) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    (dir, path)
}

/// A device of its own for each file, which tells when all of it has ended.
pub(crate) type Device = BlockDevice<AllocationCache>;

/// The image at `path`, its workers, and `SLOTS` slots.
pub(crate) fn open(path: &std::path::Path) -> (Arc<Device>, WorkerPool, Config) {
    let disk = Arc::new(BlockDevice::open(path, OpenOptions::default()).unwrap());
    let workers = WorkerPool::new(4);
    (disk, workers, Config { slots: SLOTS, ..Config::default() })
}

/// Waits until drivers and workers have ended and have dropped the device.
pub(crate) fn wait_for_the_end(disk: &Weak<Device>) {
    wait_until("the end of driver and workers", || disk.strong_count() == 0);
}
