//! The async interfaces in a closed loop: one thread, with a task for each request in flight.
//!
//! Invariant: when a loop returns without an error, none of its futures is left.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use fastrand::Rng;
use futures_util::future::Either;
use futures_util::stream::{FuturesUnordered, TryStreamExt};
use nowait::{Config, Error, Flags, IoBuffer, LocalDriver, OpenOptions, WorkerPool};

use crate::ablation::closed_loop::{Interval, StopCondition};
use crate::ablation::fixture::{Fixture, ring_of_this_thread, ring_tasks};
use crate::ablation::gain_table::Sample;
use crate::offsets::Offsets;
use crate::workload::{Direction, Workload};

/// The output of a future: the number of bytes, and its buffer.
pub(crate) type Answer = (Result<usize, Error>, IoBuffer);

/// One of the async interfaces.
#[derive(Clone, Copy)]
pub(crate) enum AsyncApi {
    /// `AsyncFile`, whose engine is on a thread of its own.
    AnyThread,
    /// `LocalAsyncFile`, driven by `LocalDriver`.
    ThisThread,
}

impl AsyncApi {
    pub(crate) fn name(self) -> &'static str {
        match self {
            AsyncApi::AnyThread => "AsyncFile",
            AsyncApi::ThisThread => "LocalAsyncFile",
        }
    }
}

/// Measures `load` on a ring. As in the other interfaces, every byte counts as mapped.
pub(crate) fn run(
    api: AsyncApi,
    fixture: &Fixture<'_>,
    load: &Workload,
    config: Config,
) -> io::Result<Sample> {
    let disk = fixture.cached_disk(fixture.path, OpenOptions::new())?;
    let workers = WorkerPool::default();
    let reads = load.direction == Direction::Read;
    match api {
        AsyncApi::AnyThread => {
            let file = ring_tasks(disk, workers, config)?;
            let transfer = |pos, buffer| match reads {
                true => Either::Left(file.read_at(buffer, pos)),
                false => Either::Right(file.write_at(buffer, pos, Flags::NONE)),
            };
            fixture.measure(load, true, |offsets, stop_condition| {
                block_on(drive(load, offsets, stop_condition, transfer))
            })
        }
        AsyncApi::ThisThread => {
            let driver = LocalDriver::new()?;
            let file = ring_of_this_thread(disk, workers, config)?;
            let transfer = |pos, buffer| match reads {
                true => Either::Left(file.read_at(buffer, pos)),
                false => Either::Right(file.write_at(buffer, pos, Flags::NONE)),
            };
            fixture.measure(load, true, |offsets, stop_condition| {
                driver.block_on(drive(load, offsets, stop_condition, transfer))
            })
        }
    }
}

/// Keeps `load.depth` futures of `transfer` in flight until `stop_condition` ends the loop or the
/// offsets run out.
///
/// # Errors
/// The error of a transfer, a short one, or that there is no memory.
async fn drive<F: Future<Output = Answer>>(
    load: &Workload,
    offsets: &mut Offsets,
    stop_condition: StopCondition<'_>,
    transfer: impl Fn(u64, IoBuffer) -> F,
) -> io::Result<Interval> {
    let (offsets, is_over) = (RefCell::new(offsets), Cell::new(false));
    let interval = RefCell::new(stop_condition.begin());
    let task = async |mut buffer| {
        while !is_over.get() {
            let Some(pos) = offsets.borrow_mut().next() else { break };
            let begin = Instant::now();
            let (bytes, filled) = transfer(pos, buffer).await;
            buffer = filled;
            if bytes? != load.block_bytes {
                return Err(io::Error::other("a transfer was cut short"));
            }
            // Requests that complete after the end are not counted.
            if !is_over.get() {
                let (now, mut interval) = (Instant::now(), interval.borrow_mut());
                interval.count(load.block_bytes as u64, now - begin);
                if stop_condition.is_over(&interval, now) {
                    is_over.set(true);
                    interval.end();
                }
            }
        }
        Ok(())
    };
    let tasks = FuturesUnordered::new();
    let mut random = Rng::with_seed(load.block_bytes as u64);
    for _ in 0..load.depth {
        let mut buffer = IoBuffer::zeroed(load.block_bytes)?;
        random.fill(&mut buffer);
        tasks.push(task(buffer));
    }
    tasks.try_collect::<()>().await?;
    let mut interval = interval.into_inner();
    if !is_over.get() {
        interval.end();
    }
    Ok(interval)
}

/// Runs `future` to its end on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cancel::CancelFlag;
    use crate::offsets::Region;
    use crate::workload::{Direction, Order};

    /// Completes at the second poll, after another thread has woken it.
    async fn two_polls() {
        let mut is_sent = false;
        std::future::poll_fn(|context| {
            if std::mem::replace(&mut is_sent, true) {
                return Poll::Ready(());
            }
            let waker = context.waker().clone();
            thread::spawn(|| waker.wake());
            Poll::Pending
        })
        .await;
    }

    /// Reads 32 blocks once, five in flight, where each read returns `bytes`. Returns the result of
    /// the loop, the number of requests in flight at its end, and the maximum in flight.
    fn read_once(bytes: usize, duration: Duration) -> (io::Result<Interval>, usize, usize) {
        let (in_flight, max_in_flight) = (Cell::new(0), Cell::new(0));
        let (direction, order) = (Direction::Read, Order::Sequential);
        let (durable, beside) = (false, None);
        let load = Workload { direction, order, block_bytes: 512, depth: 5, durable, beside };
        let region = Region { start: 0, bytes: 32 * 512, block: 512 };
        let mut offsets = Offsets::once(load.order, region, 1);
        let stop = CancelFlag::default();
        let stop_condition = StopCondition { duration, stop: &stop, timed: true };
        let read = |_, buffer| {
            let (in_flight, max_in_flight) = (&in_flight, &max_in_flight);
            async move {
                in_flight.set(in_flight.get() + 1);
                max_in_flight.set(max_in_flight.get().max(in_flight.get()));
                two_polls().await;
                in_flight.set(in_flight.get() - 1);
                (Ok(bytes), buffer)
            }
        };
        let interval = block_on(drive(&load, &mut offsets, stop_condition, read));
        (interval, in_flight.get(), max_in_flight.get())
    }

    #[test]
    fn each_offset_is_read_once_with_the_requested_depth() {
        let (interval, left, max_in_flight) = read_once(512, Duration::MAX);
        let interval = interval.unwrap();
        assert_eq!((interval.requests, interval.bytes), (32, 32 * 512));
        assert_eq!((left, max_in_flight), (0, 5));
    }

    #[test]
    fn a_finished_loop_waits_for_the_requests_in_flight() {
        let (interval, left, max_in_flight) = read_once(512, Duration::ZERO);
        assert!(interval.unwrap().requests > 0);
        assert_eq!((left, max_in_flight), (0, 5));
    }

    #[test]
    fn a_short_transfer_ends_the_loop() {
        let (interval, ..) = read_once(511, Duration::MAX);
        assert_eq!(interval.err().unwrap().to_string(), "a transfer was cut short");
    }
}
