//! C48: the flags of a file's handle are those of each of its transfers.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nowait::{
    AllocationCache, AsyncFile, BlockDevice, Config, Error, EventSource, Flags, IoBuffer, IoQueue,
    LocalAsyncFile, LocalDriver, Null, OpenOptions, Outcome, QueueFile, QueueFull, Token, Transfer,
    WorkerPool,
};

const BLOCK: usize = 4096;

/// Transfers, and those of them that were to be polled.
#[derive(Default)]
struct Counts {
    pushed: AtomicUsize,
    polled: AtomicUsize,
}

/// A queue that does nothing and counts.
struct Recording {
    queue: Null,
    counts: Arc<Counts>,
}

// SAFETY: tokens are reported as the inner queue reports them.
unsafe impl IoQueue for Recording {
    fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, Error> {
        self.queue.attach(files)
    }

    fn detach(&mut self, first: u32, count: u32) {
        self.queue.detach(first, count);
    }

    // SAFETY: passed on unchanged.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        self.counts.pushed.fetch_add(1, Ordering::Relaxed);
        let polled = transfer.rw_flags & libc::RWF_HIPRI != 0;
        self.counts.polled.fetch_add(usize::from(polled), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { self.queue.push(transfer, token) }
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.queue.submit()
    }

    fn drain_completions(&mut self, sink: impl FnMut(Token, Outcome)) -> usize {
        self.queue.drain_completions(sink)
    }

    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        self.queue.wait(timeout)
    }

    fn has_completions(&mut self) -> bool {
        self.queue.has_completions()
    }

    fn events(&self) -> &dyn EventSource {
        self.queue.events()
    }

    fn events_mut(&mut self) -> &mut dyn EventSource {
        self.queue.events_mut()
    }
}

/// Reads and writes a block of a file of either API.
macro_rules! read_and_write {
    ($file:ident) => {
        LocalDriver::new().unwrap().block_on(async {
            let (read, buffer) = $file.read_at(IoBuffer::zeroed(BLOCK).unwrap(), 0).await;
            let (written, _) = $file.write_at(buffer, BLOCK as u64, Flags::NONE).await;
            assert_eq!((read.unwrap(), written.unwrap()), (BLOCK, BLOCK));
        })
    };
}

/// A read and a write on the file that `serve` makes and runs them on; returns how many transfers
/// there were, and how many of them were to be polled.
fn counted(
    serve: impl FnOnce(Arc<BlockDevice<AllocationCache>>, WorkerPool, Arc<Counts>),
) -> (usize, usize) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, [7; 4 * BLOCK]).unwrap();
    let disk = Arc::new(BlockDevice::open(&path, OpenOptions::new().cache_holes(true)).unwrap());
    disk.scan();
    let workers = WorkerPool::new(1);
    let counts = Arc::new(Counts::default());
    serve(disk, workers, counts.clone());
    (counts.pushed.load(Ordering::SeqCst), counts.polled.load(Ordering::SeqCst))
}

#[test]
fn c48_each_transfer_of_a_local_file_with_hipri_has_it() {
    for (flags, polled) in [(Flags::HIPRI, 2), (Flags::NONE, 0)] {
        let counts = counted(|disk, workers, counts| {
            let queue = Recording { queue: Null::new().unwrap(), counts };
            let file = LocalAsyncFile::with_queue(disk, workers, queue, Config::default());
            let file = file.unwrap().with_flags(flags);
            read_and_write!(file);
        });
        assert_eq!(counts, (2, polled));
    }
}

#[test]
fn c48_each_transfer_of_an_async_file_with_hipri_has_it() {
    for (flags, polled) in [(Flags::HIPRI, 2), (Flags::NONE, 0)] {
        let counts = counted(|disk, workers, counts| {
            let make = move || Ok(Recording { queue: Null::new()?, counts });
            let file = AsyncFile::with_queue(disk, workers, Config::default(), make);
            let file = file.unwrap().with_flags(flags);
            read_and_write!(file);
        });
        assert_eq!(counts, (2, polled));
    }
}
