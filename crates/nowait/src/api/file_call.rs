//! Calls to a file that may block, as futures: a thread of the process makes the call and wakes the
//! task.
//!
//! Invariant: a call that was sent runs to its end, also when its future is dropped; the file is open
//! until then.

use std::future::poll_fn;
use std::sync::{Arc, LazyLock};

use crate::api::handle_disk::HandleDisk;
use crate::api::oneshot::oneshot;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::sync_io;
use crate::blocking::worker_pool::WorkerPool;
use crate::memory::io_buffer::IoBuffer;
use crate::threads::thread_pool::ThreadPool;
use crate::threads::work_item::WorkItem;
use crate::types::error::{Error, Operation};
use crate::types::io_cursor::WriteCursor;
use crate::types::request::Flags;

/// Takes its device's turn among the calls of all files.
struct FileCall {
    device: u64,
    run: Box<dyn FnOnce() + Send>,
}

impl WorkItem for FileCall {
    fn device(&self) -> u64 {
        self.device
    }

    fn client(&self) -> u64 {
        0
    }
}

fn run(calls: &mut Vec<FileCall>) {
    for call in calls.drain(..) {
        (call.run)();
    }
}

/// Runs a call that may block on a thread of the process; the calls of one `device` take its turns.
pub(crate) fn start(device: u64, run: Box<dyn FnOnce() + Send>) {
    static THREADS: LazyLock<ThreadPool<FileCall>> =
        LazyLock::new(|| ThreadPool::of_devices(WorkerPool::DEFAULT_LIMIT, self::run));
    THREADS.push([FileCall { device, run }]);
}

/// Makes a call to `disk` when it is first polled.
///
/// # Errors
/// `EIO` if the call has panicked.
pub(crate) async fn call<T: Send + 'static>(
    disk: HandleDisk,
    make: impl FnOnce(&BlockDevice<dyn BlockMap>) -> T + Send + 'static,
) -> Result<T, Error> {
    let (sender, mut receiver) = oneshot();
    let device = Arc::as_ptr(&disk).cast::<()>() as u64;
    let run = move || {
        let result = make(&disk);
        // A lock that ends with this call has ended when the task learns of it.
        drop(disk);
        sender.complete(result);
    };
    start(device, Box::new(run));
    let answer = poll_fn(|context| receiver.poll(context.waker())).await;
    answer.ok_or(Error::new(libc::EIO, Operation::Wait))
}

/// Like [`call`], with the result of the call itself.
///
/// # Errors
/// Those of the call; `EIO` if it has panicked.
pub(crate) async fn call_fallible<T: Send + 'static>(
    disk: HandleDisk,
    make: impl FnOnce(&BlockDevice<dyn BlockMap>) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    call(disk, make).await.and_then(|done| done)
}

/// Appends `buffer`, and gives it back with the position of its first byte.
pub(crate) async fn append(
    disk: HandleDisk,
    buffer: IoBuffer,
    flags: Flags,
) -> (Result<u64, Error>, IoBuffer) {
    let append = move |disk: &BlockDevice<dyn BlockMap>| {
        (sync_io::append(disk, &mut WriteCursor::from(&buffer[..]), flags), buffer)
    };
    let appended = call(disk, append).await;
    appended.unwrap_or_else(|error| (Err(error), IoBuffer::default()))
}
