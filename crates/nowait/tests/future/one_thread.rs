//! The async API of one thread, by the driver of the library.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use nowait::{ByteRange, Flags, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions};
use nowait_testkit::{Random, TestQueueKind, required};

use crate::device_share::{Share, poll_once};
use crate::failing_queue::FailingQueue;
use crate::{COUNTED, Device, SIZE, SLOTS, TASKS, alive, image, open, wait_for_the_end};

/// The device on a queue of `kind`, with `SLOTS` slots; `None`, with a message, where the queue
/// cannot be made.
pub(crate) fn start(path: &Path, kind: TestQueueKind) -> Option<(LocalAsyncFile, Weak<Device>)> {
    let (disk, workers, config) = open(path);
    let weak = Arc::downgrade(&disk);
    let queue = required("queue", kind.try_queue(SLOTS))?;
    Some((LocalAsyncFile::with_queue(disk, workers, queue, config).unwrap(), weak))
}

/// Polls all of `futures` to their ends, those that are not done each time.
pub(crate) async fn join<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut futures: Vec<_> = futures.into_iter().map(|it| (Box::pin(it), None)).collect();
    poll_fn(|context| {
        for (future, output) in &mut futures {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    Poll::Ready(done) => *output = Some(done),
                    Poll::Pending => {}
                }
            }
        }
        match futures.iter().all(|(_, output)| output.is_some()) {
            true => Poll::Ready(futures.drain(..).filter_map(|(_, output)| output).collect()),
            false => Poll::Pending,
        }
    })
    .await
}

/// Runs `test` on each queue, and waits for the end of the device.
fn on_queues(test: impl Fn(&LocalDriver, LocalAsyncFile, &Path)) {
    for kind in TestQueueKind::REAL {
        let (_dir, path) = image(SIZE);
        let Some((file, disk)) = start(&path, kind) else { continue };
        test(&LocalDriver::new().unwrap(), file, &path);
        wait_for_the_end(&disk);
    }
}

pub(crate) fn filled(len: usize, byte: u8) -> IoBuffer {
    let mut buffer = IoBuffer::zeroed(len).unwrap();
    buffer.fill(byte);
    buffer
}

/// Polls once, with a waker that does nothing.
fn begin<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn tasks_agree_with_the_model_while_futures_are_dropped() {
    on_queues(|driver, file, path| {
        let shares = (0..TASKS).map(|task| Share::new(file.clone(), task).run());
        driver.block_on(join(shares.collect()));
        drop(file);
        assert_eq!(std::fs::metadata(path).unwrap().len(), SIZE);
    });
}

#[test]
fn two_files_are_driven_together_and_one_that_is_opened_later_too() {
    let [uring, threads] = TestQueueKind::REAL;
    for (one, other) in [(uring, uring), (uring, threads), (threads, threads)] {
        let ((_dir, path), (_other_dir, other_path)) = (image(SIZE), image(SIZE));
        let driver = LocalDriver::new().unwrap();
        let Some((file, disk)) = start(&path, one) else { continue };
        driver.block_on(async {
            assert_eq!(file.read_at(filled(512, 1), 0).await.0, Ok(512));
            let Some((later, later_disk)) = start(&other_path, other) else { return };
            let shares = [Share::new(file.clone(), 0), Share::new(later.clone(), 1)];
            join(shares.into_iter().map(Share::run).collect()).await;
            drop(later);
            wait_for_the_end(&later_disk);
            assert_eq!(file.read_at(filled(512, 1), 0).await.0, Ok(512));
        });
        drop(file);
        wait_for_the_end(&disk);
    }
}

#[test]
fn c45_a_dropped_future_leaves_its_memory_until_the_request_has_ended() {
    const ROUNDS: u64 = 200;
    on_queues(|driver, file, _| {
        let mut random = Random::from_seed(98);
        let before = alive(1);
        driver.block_on(async {
            for _ in 0..ROUNDS {
                for _ in 0..2 * SLOTS {
                    let pos = random.below(SIZE - COUNTED[1] as u64) & !4095;
                    poll_once(file.read_at(IoBuffer::zeroed(COUNTED[1]).unwrap(), pos)).await;
                    assert!(alive(1) - before <= SLOTS as usize);
                }
                assert!(alive(1) > before, "the requests were made");
                file.flush().await.unwrap();
            }
        });
        drop(file);
        assert_eq!(alive(1), before);
    });
}

#[test]
fn c46_a_file_that_is_dropped_with_requests_in_flight_waits_for_them() {
    on_queues(|driver, file, _| {
        for round in 0..50 {
            driver.block_on(async {
                for n in 0..round {
                    poll_once(file.read_at(filled(10_000, 1), n * 5000)).await;
                    poll_once(file.write_at(filled(10_000, 1), SIZE / 2 + n * 5000, Flags::NONE))
                        .await;
                }
            });
        }
        poll_once_without_driver(file);
    });
}

/// Leaves requests in flight that no driver has submitted to the kernel.
fn poll_once_without_driver(file: LocalAsyncFile) {
    let mut reads: Vec<_> =
        (0..2 * u64::from(SLOTS)).map(|n| file.read_at(filled(4096, 1), n * 4096)).collect();
    for read in &mut reads {
        assert!(begin(Pin::new(read)).is_pending());
    }
    drop(file);
}

#[test]
fn requests_beyond_the_slots_all_end_and_those_that_must_not_wait_are_refused() {
    on_queues(|driver, file, _| {
        let all = 40 * u64::from(SLOTS);
        let reads = driver.block_on(async {
            let reads: Vec<_> = (0..all).map(|n| file.read_at(filled(4096, 1), n * 512)).collect();
            let mut reads: Vec<_> = reads.into_iter().map(Box::pin).collect();
            for read in &mut reads {
                assert!(
                    poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await.is_pending()
                );
            }
            let full = file.write_at(filled(4096, 0), 0, Flags::NOWAIT).await;
            assert_eq!((full.0.unwrap_err().errno(), full.1.len()), (libc::EAGAIN, 4096));
            join(reads).await
        });
        assert_eq!(reads.len() as u64, all);
        assert!(reads.iter().all(|(read, _)| *read == Ok(4096)));
    });
}

#[test]
fn errors_come_with_their_errno_and_give_the_buffer_back() {
    let (_dir, path) = image(SIZE);
    let options = OpenOptions::new().read_only(true);
    let file = LocalAsyncFile::open(&path, options).unwrap();
    assert_eq!(file.size(), SIZE);
    LocalDriver::new().unwrap().block_on(async {
        let (written, buffer) = file.write_at(filled(512, 1), 0, Flags::NONE).await;
        assert_eq!((written.unwrap_err().errno(), buffer.len()), (libc::EROFS, 512));
        let (read, buffer) = file.read_at(buffer, u64::MAX - 3).await;
        assert_eq!((read.unwrap_err().errno(), buffer.len()), (libc::EINVAL, 512));
        let (read, buffer) = file.read_at(buffer, SIZE - 100).await;
        assert_eq!((read, buffer.len()), (Ok(100), 512));
        assert_eq!(file.read_at(buffer, SIZE).await.0, Ok(0));
        assert_eq!(file.read_at(IoBuffer::default(), 0).await.0, Ok(0));
        let discarded = file.discard(ByteRange::new(0, 4096)).await;
        assert_eq!(discarded.unwrap_err().errno(), libc::EROFS);
    });
}

#[test]
fn c46_when_the_queue_fails_requests_in_flight_and_later_ones_end_with_its_error() {
    let (_dir, path) = image(SIZE);
    let (disk, workers, config) = open(&path);
    let fails = Arc::new(AtomicBool::new(false));
    let queue = TestQueueKind::Threads.try_queue(SLOTS).unwrap();
    let queue = FailingQueue { queue, fails: fails.clone(), has_dropped: false };
    let file = LocalAsyncFile::with_queue(disk, workers, queue, config).unwrap();
    let other = file.another(open(&path).0).unwrap();
    LocalDriver::new().unwrap().block_on(async {
        let (written, buffer) = file.write_at(filled(4096, 1), 0, Flags::NONE).await;
        assert_eq!(written, Ok(4096));
        fails.store(true, Ordering::SeqCst);
        poll_once(file.read_at(filled(4096, 1), 8192)).await;
        let (read, buffer) = file.read_at(buffer, 0).await;
        assert_eq!(read.unwrap_err().errno(), libc::ENXIO);
        assert_eq!(buffer.len(), 0, "the memory belongs to the kernel");
        let (read, buffer) = file.read_at(filled(4096, 1), 0).await;
        assert_eq!((read.unwrap_err().errno(), buffer.len()), (libc::ENXIO, 4096));
        assert_eq!(file.flush().await.unwrap_err().errno(), libc::ENXIO);
        // It is the queue of the other file as well.
        let (read, buffer) = other.read_at(filled(4096, 1), 0).await;
        assert_eq!((read.unwrap_err().errno(), buffer.len()), (libc::ENXIO, 4096));
        assert_eq!(file.another(open(&path).0).unwrap_err().errno(), libc::ENXIO);
    });
}

#[test]
fn the_waker_of_the_last_poll_is_woken() {
    on_queues(|driver, file, _| {
        let mut read = pin!(file.read_at(filled(4096, 1), 0));
        assert!(begin(read.as_mut()).is_pending());
        assert_eq!(driver.block_on(read).0, Ok(4096));
    });
}

#[test]
fn another_thread_ends_the_sleep_of_the_driver() {
    let test = |driver: &LocalDriver| {
        let done = Arc::new(AtomicBool::new(false));
        let mut thread = None;
        driver.block_on(poll_fn(|context| {
            let (waker, set) = (context.waker().clone(), done.clone());
            thread.get_or_insert_with(|| {
                thread::spawn(move || {
                    thread::sleep(Duration::from_millis(20));
                    set.store(true, Ordering::SeqCst);
                    waker.wake();
                })
            });
            match done.load(Ordering::SeqCst) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        }));
        thread.unwrap().join().unwrap();
    };
    let driver = LocalDriver::new().unwrap();
    test(&driver);
    on_queues(|_, file, path| {
        test(&driver);
        let other = LocalAsyncFile::open(path, OpenOptions::default()).unwrap();
        test(&driver);
        driver.block_on(async { assert_eq!(other.read_at(filled(512, 1), 0).await.0, Ok(512)) });
        drop((file, other));
        // The descriptor of a driver that is gone is not watched any more.
        test(&LocalDriver::new().unwrap());
    });
}

#[test]
fn a_driver_inside_a_driver_leaves_no_task_of_the_outer_one_asleep() {
    on_queues(|driver, file, _| {
        driver.block_on(async {
            let outer = file.read_at(filled(4096, 1), 0);
            let inner = async { driver.block_on(file.read_at(filled(4096, 1), 4096)).0 };
            let ((outer, _), inner) = both(outer, inner).await;
            assert_eq!((outer, inner), (Ok(4096), Ok(4096)));
        });
    });
}

/// The outputs of both futures.
async fn both<A: Future, B: Future>(one: A, other: B) -> (A::Output, B::Output) {
    let (mut one, mut other) = (pin!(one), pin!(other));
    let (mut a, mut b) = (None, None);
    poll_fn(|context| {
        if a.is_none() {
            a = ready(one.as_mut().poll(context));
        }
        if b.is_none() {
            b = ready(other.as_mut().poll(context));
        }
        if a.is_some() && b.is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    (a.unwrap(), b.unwrap())
}

fn ready<T>(poll: Poll<T>) -> Option<T> {
    match poll {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

#[test]
fn a_waker_may_drop_every_future_and_the_file() {
    thread_local! {
        static HELD: RefCell<Vec<Box<dyn std::any::Any>>> = const { RefCell::new(Vec::new()) };
    }
    struct DropAll;
    impl std::task::Wake for DropAll {
        fn wake(self: Arc<Self>) {
            drop(HELD.take());
        }
    }
    on_queues(|driver, file, _| {
        for n in 0..2 * u64::from(SLOTS) {
            let mut read = Box::pin(file.read_at(filled(4096, 1), n * 4096));
            let waker = Waker::from(Arc::new(DropAll));
            assert!(read.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            HELD.with_borrow_mut(|held| held.push(Box::new(read)));
        }
        HELD.with_borrow_mut(|held| held.push(Box::new(file)));
        while HELD.with_borrow(|held| !held.is_empty()) {
            driver.wait(Some(Duration::from_secs(1)));
        }
    });
}
