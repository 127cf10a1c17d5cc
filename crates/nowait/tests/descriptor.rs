//! An engine's descriptor in the event loop of somebody else.
//!
//! Invariant: nothing here waits in the engine; a lost wake-up ends a test after its patience.
//! Knows: the public face of the engine.

use std::sync::Arc;

use nowait::{
    Config, Disk, Engine, Flags, Io, Op, OpenOptions, Queue, Range, Threads, Uring, Workers,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A lost wake-up shows after this.
const PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 256;

/// Each request is polled for twice: written where there is nothing, which a worker does, and read
/// back, which the queue does.
fn is_woken_for_each<Q: Queue>(
    make: impl Fn(&Disk<nowait::Extents>, Config) -> Result<Q, nowait::Error>,
) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(BLOCKS * BLOCK).unwrap();
    let disk = Arc::new(Disk::open(&path, OpenOptions::default()).unwrap());
    disk.scan();
    let config = Config::default();
    let queue = match make(&disk, config) {
        Ok(queue) => queue,
        Err(error) => return println!("skipped: {error}"),
    };
    let workers = Workers::new(&disk, 1);
    let mut engine = Engine::new(disk, workers, queue, config).unwrap();
    for op in [Op::Write, Op::Read] {
        for n in 0..BLOCKS {
            let io = Io { op, flags: Flags::NONE, range: Range::new(n * BLOCK, BLOCK) };
            let mut buffer = engine.buffer(io.range).unwrap();
            buffer.fill(n as u8);
            assert!(engine.submit(io, buffer, n).is_ok());
            engine.poll().unwrap();
            let completion = loop {
                if let Some(completion) = engine.next() {
                    break completion;
                }
                if !engine.pending() {
                    let mut fds = [PollFd::from_borrowed_fd(engine.fd(), PollFlags::IN)];
                    assert_eq!(poll(&mut fds, Some(&PATIENCE)), Ok(1), "{op:?} {n}");
                }
                engine.poll().unwrap();
            };
            assert_eq!((completion.tag, completion.result().unwrap()), (n, BLOCK));
            assert!(completion.buf.unwrap().iter().all(|&byte| byte == n as u8));
        }
    }
    assert!(engine.stats().worker > 0 && engine.stats().simple > 0, "{:?}", engine.stats());
}

#[test]
fn who_sleeps_on_the_descriptor_of_an_engine_on_a_ring_is_woken() {
    is_woken_for_each(|disk, _| Uring::new(disk.fd()));
}

#[test]
fn who_sleeps_on_the_descriptor_of_an_engine_on_threads_is_woken() {
    is_woken_for_each(|disk, config| Threads::new(disk.fd(), config.slots, !disk.is_direct()));
}
