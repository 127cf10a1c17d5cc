//! The threads that serve the async files of the process, each with one engine.
//!
//! Invariant: a thread is listed for as long as files can be opened on it. It ends with its last file;
//! the next file then starts another one.

use std::num::NonZero;
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};

use crate::api::async_file::caller_transfers::CallerTransfers;
use crate::api::async_file::channel::Channel;
use crate::api::async_file::driver::Driver;
use crate::api::process_workers::process_workers;
use crate::block::block_map::BlockMap;
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::queue::IoQueue;
use crate::queue::auto::QueueKind;
use crate::threads::fork_mark;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};

/// The greatest number of threads that files share.
const MOST_THREADS: usize = 4;

/// Opens a file on a thread without files, or on the one with the fewest. Returns its channel, and its
/// number there.
///
/// # Errors
/// Like [`start`], if there is no thread yet.
pub(crate) fn open(disk: Arc<BlockDevice<dyn BlockMap>>) -> Result<(Arc<Channel>, u32), Error> {
    if fork_mark::is_child() {
        return Err(Error::new(libc::EOPNOTSUPP, Operation::SetUp));
    }
    static THREADS: Mutex<Vec<Weak<Channel>>> = Mutex::new(Vec::new());
    let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut error = Error::new(libc::EIO, Operation::SetUp);
    // Between the two looks at a thread its last file may have been closed, or its queue have failed.
    for _ in 0..=MOST_THREADS {
        let mut open: Vec<_> = threads.iter().filter_map(Weak::upgrade).collect();
        open.retain(|channel| channel.open_files().is_some());
        if open.len() < processors().min(MOST_THREADS) {
            let config = Config::default();
            let make = move || QueueKind::Auto.open(config.slots);
            match start(process_workers(), config, CallerTransfers::new(), make) {
                Ok(channel) => open.push(channel),
                Err(error) if open.is_empty() => return Err(error),
                // The others serve the file as well.
                Err(_) => {}
            }
        }
        *threads = open.iter().map(Arc::downgrade).collect();
        let least = open.into_iter().min_by_key(|channel| channel.open_files());
        match least.map(|channel| (channel.open(disk.clone()), channel)) {
            Some((Ok(Some(number)), channel)) => return Ok((channel, number)),
            Some((Err(failed), _)) => error = failed,
            Some((Ok(None), _)) | None => {}
        }
    }
    Err(error)
}

/// The processors that this process may use.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Starts a thread that serves a new channel on the queue that `make` makes there, and the transfers of `callers`. It
/// ends when the last file of the channel is closed.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: a descriptor or the thread could not be made; the error of
/// `make`.
pub(crate) fn start<Q: IoQueue>(
    workers: WorkerPool,
    config: Config,
    callers: Option<CallerTransfers>,
    make: impl FnOnce() -> Result<Q, Error> + Send + 'static,
) -> Result<Arc<Channel>, Error> {
    let channel = Arc::new(Channel::new(2 * config.slots as usize, callers)?);
    let (ready, made) = mpsc::channel();
    let served = channel.clone();
    let run = move || {
        // A ring may be bound to the thread that made it.
        match make().and_then(|queue| Driver::new(queue, workers, config, served)) {
            Ok(driver) => {
                let _ = ready.send(Ok(()));
                driver.run();
            }
            Err(error) => drop(ready.send(Err(error))),
        }
    };
    std::thread::Builder::new()
        .name("nowait-async".into())
        .spawn(run)
        .map_err(|e| Error::from_io(&e, Operation::SetUp))?;
    made.recv().unwrap_or(Err(Error::new(libc::EIO, Operation::SetUp)))?;
    Ok(channel)
}
