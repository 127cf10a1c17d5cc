//! Calls to a file that may block, as futures: a thread of the process makes the call and wakes the
//! task.
//!
//! Invariant: a call that was sent runs to its end, also when its future is dropped; the file is open
//! until then.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use crate::api::handle_disk::HandleDisk;
use crate::api::oneshot::oneshot;
use crate::api::timed_request::{Answer, TimedRequest};
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

/// A call as a future, of which some time after its first poll nothing is waited for.
pub(crate) type TimedCall<T> = TimedRequest<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Makes a call to `disk` when it is first polled.
///
/// # Errors
/// `EIO` if the call has panicked.
async fn call<T: Send + 'static>(
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
/// The errnos of the call; `EIO` if it has panicked, `ETIMEDOUT` after `timeout`.
pub(crate) fn call_fallible<T: Send + 'static>(
    disk: HandleDisk,
    timeout: Option<Duration>,
    make: impl FnOnce(&BlockDevice<dyn BlockMap>) -> Result<T, Error> + Send + 'static,
) -> TimedCall<Result<T, Error>> {
    let made = async { call(disk, make).await.and_then(|done| done) };
    TimedRequest::new(Box::pin(made), timeout)
}

/// Appends `buffer`, and gives it back with the position of its first byte; after `timeout` an empty one.
pub(crate) fn append(
    disk: HandleDisk,
    timeout: Option<Duration>,
    buffer: IoBuffer,
    flags: Flags,
) -> TimedCall<(Result<u64, Error>, IoBuffer)> {
    let append = move |disk: &BlockDevice<dyn BlockMap>| {
        (sync_io::append(disk, &mut WriteCursor::from(&buffer[..]), flags), buffer)
    };
    let appended = async { call(disk, append).await.unwrap_or_else(Answer::failed) };
    TimedRequest::new(Box::pin(appended), timeout)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::{Allocate, AsyncFile, ByteRange, LocalAsyncFile, LocalDriver, OpenOptions};
    use std::sync::RwLock;

    /// Calls of the device that wait until the lock is free: more than one device ever has threads for.
    const WAITING: usize = 640;

    /// The errnos of all calls of `$file`, an append first.
    macro_rules! errnos {
        ($driver:expr, $file:expr, $name:expr) => {{
            let (driver, file) = ($driver, $file);
            let data = IoBuffer::zeroed(1000).unwrap();
            let (appended, data) = driver.block_on(file.append(data, Flags::NONE));
            let range = ByteRange::new(0, 4096);
            let done = [
                appended.map(drop),
                driver.block_on(file.set_len(5000)),
                driver.block_on(file.allocate(range, Allocate::KeepSize)),
                driver.block_on(file.sync_all()),
                driver.block_on(file.metadata()).map(drop),
                driver.block_on(file.link($name)),
            ];
            (done.map(|done| done.err().map(|error| error.errno())), data.len())
        }};
    }

    #[test]
    fn c84_each_call_ends_when_its_time_is_over_and_is_made_nevertheless() {
        let dir = tempfile::tempdir_in(std::env::temp_dir()).unwrap();
        let driver = LocalDriver::new().unwrap();
        for local in [true, false] {
            let path = dir.path().join(local.to_string());
            let link = dir.path().join(format!("{local}-link"));
            let options = OpenOptions::new().create(true);
            let disk = Arc::new(BlockDevice::open_file(&path, options).unwrap());
            let gate = Arc::new(RwLock::new(()));
            let closed = gate.write().unwrap();
            let device = Arc::as_ptr(&disk).cast::<()>() as u64;
            for _ in 0..WAITING {
                let gate = gate.clone();
                start(device, Box::new(move || drop(gate.read())));
            }
            let late = Duration::from_millis(1);
            let (all, left) = if local {
                let file = LocalAsyncFile::new(disk.clone()).unwrap().with_timeout(late);
                errnos!(&driver, &file, &link)
            } else {
                let file = AsyncFile::new(disk.clone()).unwrap().with_timeout(late);
                errnos!(&driver, &file, &link)
            };
            assert_eq!((all, left), ([Some(libc::ETIMEDOUT); 6], 0), "{local}");
            assert_eq!(disk.size(), 0);
            drop(closed);
            nowait_testkit::wait_until("the calls are made", || {
                link.exists() && disk.size() >= 5000
            });
            let later = dir.path().join(format!("{local}-later"));
            let (all, left) = if local {
                let file = LocalAsyncFile::new(disk).unwrap().with_timeout(Duration::MAX);
                errnos!(&driver, &file, &later)
            } else {
                let hour = Duration::from_secs(3600);
                let file = AsyncFile::new(disk).unwrap().with_timeout(hour);
                errnos!(&driver, &file, &later)
            };
            assert_eq!((all, left), ([None; 6], 1000), "{local}");
        }
    }
}
