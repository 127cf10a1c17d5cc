//! An engine's descriptor in the event loop of its caller.
//!
//! Invariant: no test waits in the engine; a lost wake-up fails the test after its timeout.

use std::sync::Arc;

use nowait::{BlockDevice, ByteRange, Config, Flags, Op, OpenOptions, Request};
use nowait_testkit::{BOUND, TestQueueKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 256;

/// Writes each block into a hole, which a worker does, then reads it back, which the queue does;
/// each completion must wake a thread that sleeps on the descriptor.
#[test]
fn a_thread_that_sleeps_on_the_descriptor_is_woken_for_each_completion() {
    let bound = Timespec::try_from(BOUND).unwrap();
    for kind in TestQueueKind::REAL {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("disk.img");
        std::fs::File::create(&path).unwrap().set_len(BLOCKS * BLOCK).unwrap();
        let disk =
            Arc::new(BlockDevice::open(&path, OpenOptions::new().cache_holes(true)).unwrap());
        disk.scan();
        let Some(mut engine) = kind.engine(&disk, 1, Config::default()) else { continue };
        for op in [Op::Write, Op::Read] {
            for n in 0..BLOCKS {
                let io =
                    Request { op, flags: Flags::NONE, range: ByteRange::new(n * BLOCK, BLOCK) };
                let mut buffer = engine.buffer(io.range).unwrap();
                buffer.fill(n as u8);
                assert!(engine.submit(io, buffer, n).is_ok());
                engine.poll().unwrap();
                let completion = loop {
                    if let Some(completion) = engine.next() {
                        break completion;
                    }
                    if !engine.has_completions() {
                        let mut fds = [PollFd::from_borrowed_fd(engine.fd(), PollFlags::IN)];
                        assert_eq!(poll(&mut fds, Some(&bound)), Ok(1), "{op:?} {n}");
                    }
                    engine.poll().unwrap();
                };
                assert_eq!((completion.tag, completion.result().unwrap()), (n, BLOCK));
                assert!(completion.buf.unwrap().iter().all(|&byte| byte == n as u8));
            }
        }
        assert!(engine.stats().worker > 0 && engine.stats().simple > 0, "{:?}", engine.stats());
    }
}
