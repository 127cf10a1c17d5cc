//! Transfers of callers, and the requests that are not such.

use std::pin::pin;
use std::sync::{PoisonError, RwLock};
use std::task::{Context, Poll, Waker};

use nowait_testkit::wait_until;
use pollster::block_on;

use super::*;
use crate::api::async_file::channel::Channel;
use crate::api::async_file::{AsyncFile, TURN};
use crate::block::device::BlockDevice;
use crate::blocking::worker_pool::WorkerPool;
use crate::memory::io_buffer::IoBuffer;
use crate::queue::auto::QueueKind;
use crate::storage::open_options::OpenOptions;
use crate::types::byte_range::ByteRange;
use crate::types::config::Config;
use crate::types::error::{Error, Operation};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 16;

/// A file of blocks of the bytes 1, 2, and so on; `None`, with a message, where callers submit nothing of it.
fn file(dir: &tempfile::TempDir) -> Option<AsyncFile> {
    let path = dir.path().join("file");
    let bytes: Vec<u8> = (0..BLOCKS as usize * BLOCK).map(|at| (at / BLOCK) as u8 + 1).collect();
    std::fs::write(&path, bytes).unwrap();
    let file = AsyncFile::open(&path, OpenOptions::default()).unwrap();
    let disk = &file.shared.disk;
    if file.shared.channel.callers.is_none() || !disk.is_direct() || !disk.supports_nowait() {
        nowait_testkit::say_skipped("no AIO, no direct I/O or no RWF_NOWAIT");
        return None;
    }
    // The file system knows from now on where the blocks are.
    for n in 0..BLOCKS {
        let read = file.read_at(IoBuffer::zeroed(BLOCK).unwrap(), n * BLOCK as u64);
        assert_eq!(block_on(read).0, Ok(BLOCK));
    }
    forget_refusals(&file);
    Some(file)
}

fn forget_refusals(file: &AsyncFile) {
    file.shared.refusals.count(false);
    file.shared.refusals.left.store(0, Ordering::Relaxed);
    wait_for_the_driver(file);
}

/// Waits until the driver has no request of the file.
fn wait_for_the_driver(file: &AsyncFile) {
    let AsyncFileInner { channel, number, .. } = &*file.shared;
    wait_until("a driver without requests", || channel.begin_transfer(*number));
    channel.callers.as_ref().unwrap().end();
}

/// Held for reading by each attempt, and for writing while a test uses up the room that all files of the channel share.
static ROOM: RwLock<()> = RwLock::new(());

/// Tries a request while there is room; its answer, if the caller has submitted it.
fn attempt(file: &AsyncFile, op: Op, flags: Flags, pos: u64, len: usize) -> Option<u8> {
    let _room = ROOM.read().unwrap_or_else(PoisonError::into_inner);
    attempt_in_any_room(file, op, flags, pos, len)
}

fn attempt_in_any_room(file: &AsyncFile, op: Op, flags: Flags, pos: u64, len: usize) -> Option<u8> {
    let (sender, mut receiver) = crate::api::oneshot::oneshot();
    let range = ByteRange::new(pos, len as u64);
    let buffer = IoBuffer::zeroed(len).unwrap();
    let request = AsyncRequest { io: Request { op, flags, range }, buffer, sender };
    let Attempt::Submitted = file.shared.submit(request) else { return None };
    file.shared.channel.watch_callers();
    wait_until("an answer", || receiver.has_ended());
    let Poll::Ready(Some((done, buffer))) = receiver.poll(Waker::noop()) else { return None };
    assert_eq!(done, Ok(len));
    Some(buffer[0])
}

#[test]
fn a_caller_submits_what_one_transfer_serves_and_leaves_the_rest_to_the_driver() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = file(&dir) else { return };
    let (block, read) = (BLOCK as u64, Op::Read);
    for n in [0, 7, BLOCKS - 1] {
        assert_eq!(attempt(&file, read, Flags::NONE, n * block, BLOCK), Some(n as u8 + 1));
    }
    assert_eq!(attempt(&file, Op::Write, Flags::NONE, block, BLOCK), Some(0));
    // The kernel may have refused the write, for pages of the file in its cache.
    forget_refusals(&file);
    assert_eq!(attempt(&file, read, Flags::NONE, block, BLOCK), Some(0));
    // A part of a block, what crosses the end or is behind it, polled I/O, and what has no data.
    assert_eq!(attempt(&file, read, Flags::NONE, 100, BLOCK), None);
    assert_eq!(attempt(&file, read, Flags::NONE, (BLOCKS - 1) * block, 2 * BLOCK), None);
    assert_eq!(attempt(&file, Op::Write, Flags::NONE, BLOCKS * block, BLOCK), None);
    assert_eq!(attempt(&file, read, Flags::HIPRI, 0, BLOCK), None);
    assert_eq!(attempt(&file, Op::Flush, Flags::NONE, 0, 0), None);
    // The range is locked by none of them.
    assert_eq!(attempt(&file, Op::Write, Flags::NONE, 0, BLOCK), Some(0));
    assert_eq!(file.shared.transfers.load(Ordering::Relaxed), 0);
}

#[test]
fn a_caller_submits_nothing_while_the_file_has_its_share_or_the_driver_has_requests_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = file(&dir) else { return };
    let tried = || attempt(&file, Op::Read, Flags::NONE, 0, BLOCK);
    let AsyncFileInner { transfers, is_slow, .. } = &*file.shared;
    for (slow, most, pause) in [(false, MOST_OF_FILE, 0), (true, 1, CROWDED_PAUSE)] {
        is_slow.store(slow, Ordering::Relaxed);
        transfers.store(most, Ordering::Relaxed);
        assert_eq!(tried(), None);
        transfers.store(most - 1, Ordering::Relaxed);
        assert!((0..pause).all(|_| tried().is_none()), "{slow}");
        assert_eq!(tried(), Some(1), "{slow}");
    }
    transfers.store(0, Ordering::Relaxed);
    let callers = file.shared.channel.callers.as_ref().unwrap();
    let _room = ROOM.write().unwrap_or_else(PoisonError::into_inner);
    let tried = || attempt_in_any_room(&file, Op::Read, Flags::NONE, 0, BLOCK);
    // Other tests have files of this channel, whose futures submit without an attempt of a test.
    callers.in_flight.fetch_add(MOST, Ordering::Relaxed);
    is_slow.store(false, Ordering::Relaxed);
    assert_eq!(tried(), None);
    callers.in_flight.fetch_sub(1, Ordering::Relaxed);
    wait_until("room for one", || tried() == Some(1));
    callers.in_flight.fetch_sub(MOST - 1, Ordering::Relaxed);
}

/// A handle with a queue of its own keeps its requests in that queue.
#[test]
fn a_file_with_a_queue_of_its_own_has_no_transfers_of_callers() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = file(&dir) else { return };
    let (config, disk) = (Config::default(), Arc::clone(&file.shared.disk));
    let make = move || QueueKind::Auto.open(config.slots);
    let own = AsyncFile::with_queue(disk, WorkerPool::new(1), config, make).unwrap();
    assert_eq!(attempt(&own, Op::Read, Flags::NONE, 0, BLOCK), None);
    assert_eq!(block_on(own.read_at(IoBuffer::zeroed(BLOCK).unwrap(), 0)).0, Ok(BLOCK));
}

#[test]
fn a_transfer_that_is_cut_short_is_made_again_and_the_file_is_left_to_the_driver_for_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = file(&dir) else { return };
    let path = dir.path().join("file");
    // Another program cuts the file off; the handle has seen its former size.
    let other = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    other.set_len(BLOCK as u64 + 100).unwrap();
    let read = |pos| block_on(file.read_at(IoBuffer::zeroed(BLOCK).unwrap(), pos)).0;
    assert_eq!(read(BLOCK as u64), Ok(100));
    let pause = file.shared.refusals.pause.load(Ordering::Relaxed);
    assert!(pause > 0);
    wait_for_the_driver(&file);
    for _ in 0..pause {
        assert_eq!(attempt(&file, Op::Read, Flags::NONE, 0, BLOCK), None);
    }
    assert_eq!(attempt(&file, Op::Read, Flags::NONE, 0, BLOCK), Some(1));
    assert_eq!(file.shared.refusals.pause.load(Ordering::Relaxed), 0);
}

#[test]
fn pauses_after_refusals_double_up_to_a_bound() {
    let refusals = Refusals::default();
    let mut pauses = Vec::new();
    for _ in 0..12 {
        refusals.count(true);
        pauses.push((0..).take_while(|_| !refusals.lets_try()).count());
    }
    assert_eq!(pauses[..4], [1, 3, 7, 15]);
    assert_eq!(pauses[9..], [LONGEST_PAUSE as usize; 3]);
    refusals.count(false);
    assert!(refusals.lets_try());
    refusals.count(true);
    assert!(!refusals.lets_try() && refusals.lets_try());
}

#[test]
fn a_driver_waits_for_transfers_when_one_is_left_and_stops_after_many_wake_ups_in_vain() {
    let mut watch = CallersWatch::default();
    assert!(!watch.begins(false));
    assert!(watch.begins(true) && !watch.begins(true));
    for _ in 0..3 {
        assert!((1..IN_VAIN).all(|_| !watch.woke(0)));
        assert!(!watch.woke(1));
    }
    assert!((1..IN_VAIN).all(|_| !watch.woke(0)) && watch.woke(0));
    watch.ended();
    assert!(watch.begins(true));
}

#[test]
fn c45_futures_dropped_in_flight_leave_no_transfer_and_the_file_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, vec![1; BLOCKS as usize * BLOCK]).unwrap();
    for round in 0..200 {
        let disk = Arc::new(BlockDevice::open_file(&path, OpenOptions::default()).unwrap());
        let weak = Arc::downgrade(&disk);
        let file = AsyncFile::new(disk).unwrap();
        for n in 0..=round % 4 {
            let mut read = file.read_at(IoBuffer::zeroed(BLOCK).unwrap(), n * BLOCK as u64);
            let _ = pin!(&mut read).poll(&mut Context::from_waker(Waker::noop()));
        }
        drop(file);
        wait_until("the end of the file", || weak.strong_count() == 0);
    }
}

#[test]
fn a_task_whose_requests_end_while_they_are_submitted_lets_others_run_in_turn() {
    let dir = tempfile::tempdir().unwrap();
    let Some(file) = file(&dir) else { return };
    block_on(async {
        let mut buffer = IoBuffer::zeroed(BLOCK).unwrap();
        let ended = || file.shared.ended_inline.load(Ordering::Relaxed);
        let mut inline = 0;
        for n in 0..40 * u64::from(TURN) {
            let before = ended();
            let mut read = file.read_at(buffer, n % BLOCKS * BLOCK as u64);
            let first = std::future::poll_fn(|context| {
                Poll::Ready(std::pin::Pin::new(&mut read).poll(context))
            });
            let answer = match first.await {
                // Also the driver may have been so fast.
                Poll::Ready(answer) => {
                    inline += ended() - before;
                    answer
                }
                Poll::Pending => read.await,
            };
            assert_eq!(answer.0, Ok(BLOCK));
            buffer = answer.1;
        }
        let ended = ended();
        assert!(inline <= ended - ended / TURN, "{inline} of {ended} without a turn of others");
    });
}

/// A driver that stops with an error: here there is none, so nothing else drains.
#[test]
fn c46_after_a_failure_no_transfer_begins_and_those_in_flight_are_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let Some(shared) = file(&dir) else { return };
    let channel = Arc::new(Channel::new(8, CallerTransfers::new()).unwrap());
    let file = AsyncFile::on(channel.clone(), Arc::clone(&shared.shared.disk)).unwrap();
    let mut read = file.read_at(IoBuffer::zeroed(BLOCK).unwrap(), BLOCK as u64);
    let begun = pin!(&mut read).poll(&mut Context::from_waker(Waker::noop()));
    channel.fail(Error::new(libc::ENXIO, Operation::Wait));
    channel.callers.as_ref().unwrap().settle();
    assert!(!channel.callers.as_ref().unwrap().is_busy());
    let (read, buffer) = match begun {
        Poll::Ready(answer) => answer,
        Poll::Pending => block_on(read),
    };
    // A read that the kernel has refused would have been made again by the driver.
    match read {
        Ok(bytes) => assert_eq!((bytes, buffer[0]), (BLOCK, 2)),
        Err(error) => assert_eq!(error.errno(), libc::ENXIO),
    }
    let (later, buffer) = block_on(file.read_at(buffer, 0));
    assert_eq!((later.unwrap_err().errno(), buffer.len()), (libc::ENXIO, BLOCK));
}
