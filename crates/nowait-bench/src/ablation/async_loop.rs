//! The async interface in a closed loop: one thread, which parks while no future is ready.
//!
//! Invariant: when a loop returns without an error, none of its futures is left.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use futures_util::stream::{FuturesUnordered, StreamExt};
use nowait::{Error, IoBuffer};

use crate::ablation::closed_loop::{Interval, StopCondition};
use crate::offsets::Offsets;
use crate::workload::Workload;

/// The output of a read future: the number of bytes, and its buffer.
pub(crate) type Answer = (Result<usize, Error>, IoBuffer);

/// Keeps `load.depth` futures of `read` in flight until `stop_condition` ends the loop or the
/// offsets run out.
///
/// # Errors
/// The error of a read, a short read, or that there is no memory.
pub(crate) fn drive<F: Future<Output = Answer>>(
    load: &Workload,
    offsets: &mut Offsets,
    stop_condition: StopCondition<'_>,
    read: impl Fn(u64, IoBuffer) -> F,
) -> io::Result<Interval> {
    let start = |pos, buffer| {
        let (begin, future) = (Instant::now(), read(pos, buffer));
        async move {
            let (bytes, buffer) = future.await;
            match bytes {
                Ok(bytes) if bytes == load.block_bytes => Ok((buffer, begin)),
                Ok(_) => Err(io::Error::other("a read was cut short")),
                Err(error) => Err(error.into()),
            }
        }
    };
    let mut in_flight = FuturesUnordered::new();
    let mut interval = stop_condition.begin();
    for _ in 0..load.depth {
        let buffer = IoBuffer::zeroed(load.block_bytes)?;
        in_flight.extend(offsets.next().map(|pos| start(pos, buffer)));
    }
    block_on(async {
        while let Some(done) = in_flight.next().await {
            let (buffer, begin) = done?;
            let now = Instant::now();
            interval.count(load.block_bytes as u64, now - begin);
            if stop_condition.is_over(&interval, now) {
                break;
            }
            in_flight.extend(offsets.next().map(|pos| start(pos, buffer)));
        }
        interval.end();
        // Requests that complete from here on are not counted.
        while let Some(done) = in_flight.next().await {
            done?;
        }
        Ok(interval)
    })
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
    use std::cell::Cell;
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
        let interval = drive(&load, &mut offsets, stop_condition, read);
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
    fn a_short_read_ends_the_loop() {
        let (interval, ..) = read_once(511, Duration::MAX);
        assert_eq!(interval.err().unwrap().to_string(), "a read was cut short");
    }
}
