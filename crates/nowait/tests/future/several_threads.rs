//! The async API whose engine is on a thread of its own.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use nowait::{AsyncFile, ByteRange, Error, Flags, IoBuffer, IoQueue, OpenOptions};
use nowait_testkit::{BOUND, Random, TestQueueKind, required};

use crate::device_share::{Share, poll_once};
use crate::failing_queue::FailingQueue;
use crate::{COUNTED, Device, SIZE, SLOTS, TASKS, alive, image, open, wait_for_the_end};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => {
                let begin = Instant::now();
                thread::park_timeout(BOUND);
                assert!(begin.elapsed() < BOUND, "a future is not woken");
            }
        }
    }
}

/// The device on a queue of `kind`, with `SLOTS` slots; `None`, with a message, where the queue
/// cannot be made.
fn start(path: &std::path::Path, kind: TestQueueKind) -> Option<(AsyncFile, Weak<Device>)> {
    start_on(path, move || kind.try_queue(SLOTS))
}

/// Like `start`, on the queue that `make` makes.
fn start_on<Q: IoQueue>(
    path: &std::path::Path,
    make: impl FnOnce() -> Result<Q, Error> + Send + 'static,
) -> Option<(AsyncFile, Weak<Device>)> {
    let (disk, workers, config) = open(path);
    let weak = Arc::downgrade(&disk);
    let file = required("queue", AsyncFile::with_queue(disk, workers, config, make))?;
    Some((file, weak))
}

/// Like `start`, on io_uring or, without it, on threads.
fn start_on_any(path: &std::path::Path) -> (AsyncFile, Weak<Device>) {
    let [uring, threads] = TestQueueKind::REAL;
    start(path, uring).or_else(|| start(path, threads)).unwrap()
}

/// The device on a thread that files share; callers submit some of their requests themselves.
fn start_shared(path: &std::path::Path) -> (AsyncFile, Weak<Device>) {
    let (disk, ..) = open(path);
    let weak = Arc::downgrade(&disk);
    (AsyncFile::new(disk).unwrap(), weak)
}

/// `None` is a thread that files share.
fn agrees_on_a_runtime(kind: Option<TestQueueKind>) {
    let (_dir, path) = image(SIZE);
    let started = kind.map_or_else(|| Some(start_shared(&path)), |kind| start(&path, kind));
    let Some((file, disk)) = started else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let tasks: Vec<_> =
        (0..TASKS).map(|task| runtime.spawn(Share::new(file.clone(), task).run())).collect();
    drop(file);
    runtime.block_on(async {
        for task in tasks {
            task.await.unwrap();
        }
    });
    wait_for_the_end(&disk);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
}

fn agrees_without_a_runtime(kind: Option<TestQueueKind>) {
    let (_dir, path) = image(SIZE);
    let started = kind.map_or_else(|| Some(start_shared(&path)), |kind| start(&path, kind));
    let Some((file, disk)) = started else { return };
    thread::scope(|scope| {
        for task in 0..TASKS {
            let share = Share::new(file.clone(), task);
            scope.spawn(move || block_on(share.run()));
        }
    });
    drop(file);
    wait_for_the_end(&disk);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
}

#[test]
fn uring_on_a_runtime_agrees_with_the_model_while_futures_are_dropped() {
    agrees_on_a_runtime(Some(TestQueueKind::Uring));
}

#[test]
fn uring_without_a_runtime_agrees_with_the_model_while_futures_are_dropped() {
    agrees_without_a_runtime(Some(TestQueueKind::Uring));
}

#[test]
fn threads_on_a_runtime_agree_with_the_model_while_futures_are_dropped() {
    agrees_on_a_runtime(Some(TestQueueKind::Threads));
}

#[test]
fn threads_without_a_runtime_agree_with_the_model_while_futures_are_dropped() {
    agrees_without_a_runtime(Some(TestQueueKind::Threads));
}

#[test]
fn a_shared_thread_on_a_runtime_agrees_with_the_model_while_futures_are_dropped() {
    agrees_on_a_runtime(None);
}

#[test]
fn a_shared_thread_without_a_runtime_agrees_with_the_model_while_futures_are_dropped() {
    agrees_without_a_runtime(None);
}

#[test]
fn c45_thousands_of_dropped_futures_hold_no_more_memory_than_the_bound_and_leave_none() {
    const ROUNDS: u64 = 1000;
    const DROPPED: u32 = SLOTS / 2;
    let (_dir, path) = image(SIZE);
    let Some((file, disk)) = start(&path, TestQueueKind::Threads) else { return };
    let mut random = Random::from_seed(99);
    let mut peak = 0;
    block_on(async {
        let mut ours = IoBuffer::zeroed(4096).unwrap();
        random.fill(&mut ours);
        let (written, ours) = file.write_at(ours, 0, Flags::NONE).await;
        assert_eq!(written.unwrap(), ours.len());
        let mut back = IoBuffer::zeroed(4096).unwrap();
        for _ in 0..ROUNDS {
            for _ in 0..DROPPED {
                let pos = 4096 + random.below(SIZE - 4096 - COUNTED[0] as u64);
                let buffer = IoBuffer::zeroed(COUNTED[0]).unwrap();
                if random.below(2) == 0 {
                    poll_once(file.read_at(buffer, pos)).await;
                } else {
                    poll_once(file.write_at(buffer, pos & !4095, Flags::NONE)).await;
                }
                peak = peak.max(alive(0));
            }
            let read;
            back.fill(0);
            (read, back) = file.read_at(back, 0).await;
            assert_eq!(read.unwrap(), ours.len());
            assert!(*back == *ours);
        }
    });
    drop(file);
    wait_for_the_end(&disk);
    assert_eq!(alive(0), 0);
    // In flight, taken by the driver, and in the channel; each at most as many as there are slots.
    assert!((1..=3 * SLOTS as usize).contains(&peak), "{peak} buffers simultaneously");
}

#[test]
fn c46_requests_in_flight_are_answered_after_the_last_handle_was_dropped_and_the_thread_ends() {
    let (_dir, path) = image(SIZE);
    let (file, disk) = start_on_any(&path);
    let write = |n: u64| {
        let mut buffer = IoBuffer::zeroed(8192).unwrap();
        buffer.fill(n as u8 + 1);
        file.write_at(buffer, n * 8192, Flags::NONE)
    };
    let mut sent: Vec<_> = (0..12).map(write).collect();
    let unsent = write(12);
    let mut context = Context::from_waker(Waker::noop());
    let answers: Vec<_> = sent.iter_mut().map(|it| pin!(it).poll(&mut context)).collect();
    drop(file);
    for (future, answer) in sent.into_iter().zip(answers) {
        let (written, buffer) = match answer {
            Poll::Ready(answer) => answer,
            Poll::Pending => block_on(future),
        };
        assert_eq!((written.unwrap(), buffer.len()), (8192, 8192));
    }
    // A future that was not sent yet keeps the driver running like a handle.
    assert_eq!(block_on(unsent).0.unwrap(), 8192);
    wait_for_the_end(&disk);
    let bytes = std::fs::read(&path).unwrap();
    for (n, block) in bytes.chunks(8192).take(13).enumerate() {
        assert!(block.iter().all(|&byte| byte as usize == n + 1), "block {n}");
    }
}

#[test]
fn c46_the_thread_ends_when_handle_and_futures_are_dropped_in_flight() {
    for round in 0..50 {
        let (_dir, path) = image(SIZE);
        let (file, disk) = start_on_any(&path);
        let mut context = Context::from_waker(Waker::noop());
        for n in 0..round {
            let mut read = file.read_at(IoBuffer::zeroed(10_000).unwrap(), n * 5000);
            let _ = pin!(&mut read).poll(&mut context);
        }
        drop(file);
        wait_for_the_end(&disk);
    }
}

#[test]
fn requests_beyond_the_slots_and_the_length_of_the_channel_all_end() {
    let (_dir, path) = image(SIZE);
    let (file, disk) = start_on_any(&path);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let done: usize = runtime.block_on(async {
        let read = |n| {
            let file = file.clone();
            tokio::spawn(async move {
                let buffer = IoBuffer::zeroed(4096).unwrap();
                file.read_at(buffer, n * 512).await.0.unwrap()
            })
        };
        let reads: Vec<_> = (0..40 * u64::from(SLOTS)).map(read).collect();
        let mut done = 0;
        for read in reads {
            done += read.await.unwrap();
        }
        done
    });
    assert_eq!(done, 40 * SLOTS as usize * 4096);
    drop(file);
    wait_for_the_end(&disk);
}

#[test]
fn errors_come_with_their_errno_and_give_the_buffer_back() {
    let (_dir, path) = image(SIZE);
    let options = OpenOptions::new().read_only(true);
    let file = AsyncFile::open(&path, options).unwrap();
    assert_eq!(file.size(), SIZE);
    let (written, buffer) = block_on(file.write_at(IoBuffer::zeroed(512).unwrap(), 0, Flags::NONE));
    assert_eq!((written.unwrap_err().errno(), buffer.len()), (libc::EROFS, 512));
    let (read, buffer) = block_on(file.read_at(buffer, u64::MAX - 3));
    assert_eq!((read.unwrap_err().errno(), buffer.len()), (libc::EINVAL, 512));
    let (read, buffer) = block_on(file.read_at(buffer, SIZE - 100));
    assert_eq!((read.unwrap(), buffer.len()), (100, 512));
    assert_eq!(block_on(file.read_at(buffer, SIZE)).0.unwrap(), 0);
    assert_eq!(block_on(file.read_at(IoBuffer::default(), 0)).0.unwrap(), 0);
    let discarded = block_on(file.discard(ByteRange::new(0, 4096)));
    assert_eq!(discarded.unwrap_err().errno(), libc::EROFS);
}

#[test]
fn a_discarded_range_reads_as_zeros_where_holes_can_be_punched() {
    let (_dir, path) = image(SIZE);
    let (file, disk) = start(&path, TestQueueKind::Threads).unwrap();
    let punches = disk.upgrade().unwrap().supports_punch_hole();
    let mut buffer = IoBuffer::zeroed(8192).unwrap();
    buffer.fill(9);
    let (written, buffer) = block_on(file.write_at(buffer, 0, Flags::NONE));
    assert_eq!(written.unwrap(), 8192);
    match block_on(file.discard(ByteRange::new(0, 4096))) {
        Ok(()) => assert!(punches),
        Err(error) => assert_eq!((punches, error.errno()), (false, libc::EOPNOTSUPP)),
    }
    let (read, buffer) = block_on(file.read_at(buffer, 0));
    assert_eq!(read.unwrap(), 8192);
    assert!(buffer[..4096].iter().all(|&byte| byte == if punches { 0 } else { 9 }));
    assert!(buffer[4096..].iter().all(|&byte| byte == 9));
}

#[test]
fn c46_when_the_queue_fails_requests_in_flight_and_later_ones_end_with_its_error() {
    let (_dir, path) = image(SIZE);
    let fails = Arc::new(AtomicBool::new(false));
    let switch = fails.clone();
    let make = move || {
        TestQueueKind::Threads.try_queue(SLOTS).map(|queue| FailingQueue {
            queue,
            fails,
            has_dropped: false,
        })
    };
    let (file, disk) = start_on(&path, make).unwrap();
    let other = file.another(open(&path).0).unwrap();
    let (written, buffer) =
        block_on(file.write_at(IoBuffer::zeroed(4096).unwrap(), 0, Flags::NONE));
    assert_eq!(written.unwrap(), 4096);
    switch.store(true, Ordering::SeqCst);
    let (read, buffer) = block_on(file.read_at(buffer, 0));
    assert_eq!(read.unwrap_err().errno(), libc::ENXIO);
    assert_eq!(buffer.len(), 0, "the memory belongs to the kernel");
    let (read, buffer) = block_on(file.read_at(IoBuffer::zeroed(4096).unwrap(), 0));
    assert_eq!((read.unwrap_err().errno(), buffer.len()), (libc::ENXIO, 4096));
    assert_eq!(block_on(file.flush()).unwrap_err().errno(), libc::ENXIO);
    // It is the queue of the other file as well.
    let (read, buffer) = block_on(other.read_at(IoBuffer::zeroed(4096).unwrap(), 0));
    assert_eq!((read.unwrap_err().errno(), buffer.len()), (libc::ENXIO, 4096));
    assert_eq!(file.another(open(&path).0).unwrap_err().errno(), libc::ENXIO);
    drop((file, other));
    wait_for_the_end(&disk);
}
