//! C48, C88: the flags and the priority of a file's handle are those of each of its transfers.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use nowait::{
    AllocationCache, AsyncFile, BlockDevice, ByteRange, Config, Engine, Flags, IoBuffer,
    IoPriority, IoQueue, IoSegment, LocalAsyncFile, LocalDriver, Null, Op, OpenOptions,
    PriorityClass, QueueFull, Request, Token, Transfer, WorkerPool,
};

const BLOCK: usize = 4096;

/// Transfers, and those of them that were to be polled.
#[derive(Default)]
struct Counts {
    pushed: AtomicUsize,
    polled: AtomicUsize,
    /// The priority of each.
    priorities: Mutex<Vec<u16>>,
}

/// A queue that does nothing and counts.
struct Recording {
    queue: Null,
    counts: Arc<Counts>,
}

// SAFETY: tokens are reported as the inner queue reports them.
unsafe impl IoQueue for Recording {
    nowait_testkit::pass_on!(self.queue: attach detach submit drain_completions wait has_completions events);

    // SAFETY: passed on unchanged.
    unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Result<(), QueueFull> {
        self.counts.pushed.fetch_add(1, Ordering::Relaxed);
        self.counts.priorities.lock().unwrap().push(transfer.priority);
        let polled = transfer.rw_flags & libc::RWF_HIPRI != 0;
        self.counts.polled.fetch_add(usize::from(polled), Ordering::Relaxed);
        // SAFETY: as promised by the caller.
        unsafe { self.queue.push(transfer, token) }
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

const IDLE: u16 = 0x6000;

fn best_effort(level: u8) -> IoPriority {
    IoPriority::new(PriorityClass::BestEffort, level).unwrap()
}

/// A read and a write of a file of either API with a priority of its own, and a write with another one.
macro_rules! prioritized {
    ($file:ident) => {
        LocalDriver::new().unwrap().block_on(async {
            let file = $file.clone().with_priority(best_effort(1)).with_priority(best_effort(2));
            let buffer = IoBuffer::zeroed(BLOCK).unwrap();
            let (_, buffer) = file.read_at(buffer, 0).await;
            let (_, buffer) = file.write_at(buffer, 0, Flags::NONE).await;
            let idle = Flags::NONE.with_priority(IoPriority::IDLE);
            let (_, buffer) = file.write_at(buffer, 0, idle).await;
            $file.write_at(buffer, 0, Flags::NONE).await.0.unwrap();
        })
    };
}

#[test]
fn c88_each_transfer_of_a_file_has_its_priority_or_that_of_the_request() {
    let expected = [0x4002, 0x4002, IDLE, 0];
    counted(|disk, workers, counts| {
        let queue = Recording { queue: Null::new().unwrap(), counts: counts.clone() };
        let config = Config::default();
        let file = LocalAsyncFile::with_queue(disk, workers, queue, config).unwrap();
        prioritized!(file);
        assert_eq!(*counts.priorities.lock().unwrap(), expected);
    });
    counted(|disk, workers, counts| {
        let of_queue = counts.clone();
        let make = move || Ok(Recording { queue: Null::new()?, counts: of_queue });
        let file = AsyncFile::with_queue(disk, workers, Config::default(), make).unwrap();
        prioritized!(file);
        assert_eq!(*counts.priorities.lock().unwrap(), expected);
    });
}

#[test]
fn c88_neighbours_of_different_priorities_share_no_transfer_and_each_part_of_a_request_has_its_own()
{
    counted(|disk, workers, counts| {
        let queue = Recording { queue: Null::new().unwrap(), counts: counts.clone() };
        let mut engine = Engine::new(queue, workers, Config::default()).unwrap();
        let disk = engine.attach(disk).unwrap();
        let mut memory = vec![0u8; 8 * BLOCK];
        let base = memory.as_mut_ptr();
        let base = base.wrapping_add(base.align_offset(BLOCK));
        let mut submit = |priority: Option<IoPriority>, pos: usize, len: usize| {
            let flags = priority.map_or(Flags::NONE, |it| Flags::NONE.with_priority(it));
            let range = ByteRange::new(pos as u64, len as u64);
            let io = Request { op: Op::Read, flags, range };
            let segment = IoSegment { base: base.wrapping_add(pos), len };
            // SAFETY: the memory outlives the engine's requests, which `settle` waits for.
            assert!(unsafe { engine.submit_user_memory(&disk, io, &[segment], 0) }.is_ok());
        };
        // The first one begins a run at the latest with its neighbour; those of one priority may share.
        for (n, level) in [0, 0, 1].into_iter().enumerate() {
            submit(Some(best_effort(level)), n * BLOCK, BLOCK);
        }
        submit(Some(IoPriority::IDLE), 100, BLOCK);
        engine.settle().unwrap();
        let priorities = counts.priorities.lock().unwrap();
        assert_eq!(priorities.iter().filter(|&&it| it == 0x4001).count(), 1, "{priorities:x?}");
        assert!(priorities.contains(&0x4000) && priorities.contains(&IDLE), "{priorities:x?}");
        assert!(priorities.iter().all(|it| [0x4000, 0x4001, IDLE].contains(it)), "{priorities:x?}");
    });
}
