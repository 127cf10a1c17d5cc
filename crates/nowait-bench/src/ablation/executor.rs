//! The async interface in a closed loop, on a minimal executor: one thread, which parks while no
//! future is ready.
//!
//! Invariant: when a loop returns without an error, none of its futures is left. The thread parks
//! only after it has seen the list of ready futures empty, and the waker that adds the first entry
//! unparks it.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use nowait::{Error, IoBuffer};

use crate::ablation::closed_loop::{Interval, StopCondition, WAIT_SLICE};
use crate::ablation::offsets::Offsets;
use crate::workload::Workload;

/// The output of a read future: the number of bytes, and its buffer.
pub(crate) type Answer = (Result<usize, Error>, IoBuffer);

/// Keeps `load.depth` futures of `read` in flight until `stop_condition` ends the loop or the
/// offsets run out.
///
/// # Errors
/// The error of a read, a short read, or that there is no memory.
pub(crate) fn drive<F: Future<Output = Answer> + Unpin>(
    load: &Workload,
    offsets: &mut Offsets,
    stop_condition: StopCondition<'_>,
    mut read: impl FnMut(u64, IoBuffer) -> F,
) -> io::Result<Interval> {
    let ready_list = ReadyList::of_this_thread();
    let buffers = (0..load.depth).map(|_| IoBuffer::zeroed(load.block_bytes));
    let buffers = buffers.collect::<Result<Vec<IoBuffer>, Error>>()?;
    let mut interval = stop_condition.begin();
    let mut tasks = Vec::with_capacity(load.depth);
    for (number, buffer) in buffers.into_iter().enumerate() {
        let future = offsets.next().map(|pos| read(pos, buffer));
        let waker = Waker::from(Arc::new(TaskWaker { number, ready_list: ready_list.clone() }));
        tasks.push(Task { future, started: interval.begin, waker });
    }
    // The first poll sends a request.
    let mut due: Vec<usize> = (0..tasks.len()).collect();
    while tasks.iter().any(|task| task.future.is_some())
        && !stop_condition.is_over(&interval, Instant::now())
    {
        for number in due.drain(..) {
            let task = &mut tasks[number];
            while let Some(buffer) = task.poll(load.block_bytes)? {
                let now = Instant::now();
                interval.count(load.block_bytes as u64, now - task.started);
                task.future = offsets.next().map(|pos| read(pos, buffer));
                task.started = now;
            }
        }
        ready_list.wait(&mut due);
    }
    interval.end();
    // Requests that complete from here on are not counted.
    for task in &mut tasks {
        while task.future.is_some() && task.poll(load.block_bytes)?.is_none() {
            ready_list.wait(&mut due);
            due.clear();
        }
    }
    Ok(interval)
}

/// One task for each request in flight.
struct Task<F> {
    future: Option<F>,
    started: Instant,
    waker: Waker,
}

impl<F: Future<Output = Answer> + Unpin> Task<F> {
    /// Returns the buffer of the request if it has completed; its future is then dropped.
    fn poll(&mut self, block_bytes: usize) -> io::Result<Option<IoBuffer>> {
        let Some(future) = &mut self.future else { return Ok(None) };
        match Pin::new(future).poll(&mut Context::from_waker(&self.waker)) {
            Poll::Pending => Ok(None),
            Poll::Ready((bytes, buffer)) => {
                self.future = None;
                if bytes? != block_bytes {
                    return Err(io::Error::other("a read was cut short"));
                }
                Ok(Some(buffer))
            }
        }
    }
}

/// The futures that are ready to be polled, and the thread to unpark.
struct ReadyList {
    numbers: Mutex<Vec<usize>>,
    thread: Thread,
}

impl ReadyList {
    fn of_this_thread() -> Arc<ReadyList> {
        Arc::new(ReadyList { numbers: Mutex::default(), thread: thread::current() })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, number: usize) {
        let mut numbers = self.lock();
        let is_first = numbers.is_empty();
        numbers.push(number);
        drop(numbers);
        if is_first {
            self.thread.unpark();
        }
    }

    /// Moves the list into `due`, which is empty. Sleeps if the list is empty, but at most until
    /// the stop condition must be checked again.
    fn wait(&self, due: &mut Vec<usize>) {
        if self.lock().is_empty() {
            thread::park_timeout(WAIT_SLICE);
        }
        std::mem::swap(&mut *self.lock(), due);
    }
}

/// Records which future was woken.
struct TaskWaker {
    number: usize,
    ready_list: Arc<ReadyList>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready_list.add(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ablation::offsets::Region;
    use crate::cancel::CancelFlag;
    use crate::workload::{Direction, Order};
    use std::cell::Cell;
    use std::time::Duration;

    /// A future that completes at its second poll; another thread wakes it.
    struct TwoPolls<'a> {
        buffer: Option<IoBuffer>,
        sent: bool,
        bytes: usize,
        in_flight: &'a Cell<usize>,
        max_in_flight: &'a Cell<usize>,
    }

    impl Future for TwoPolls<'_> {
        type Output = Answer;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
            if !std::mem::replace(&mut self.sent, true) {
                self.in_flight.set(self.in_flight.get() + 1);
                self.max_in_flight.set(self.max_in_flight.get().max(self.in_flight.get()));
                let waker = context.waker().clone();
                thread::spawn(|| waker.wake());
                return Poll::Pending;
            }
            self.in_flight.set(self.in_flight.get() - 1);
            Poll::Ready((Ok(self.bytes), self.buffer.take().unwrap()))
        }
    }

    /// Reads 32 blocks once, five in flight, where each read returns `bytes`. Returns the result of
    /// the loop, the number of requests in flight at its end, and the maximum in flight.
    fn read_once(bytes: usize, duration: Duration) -> (io::Result<Interval>, usize, usize) {
        let (in_flight, max_in_flight) = (Cell::new(0), Cell::new(0));
        let load = Workload {
            direction: Direction::Read,
            order: Order::Sequential,
            block_bytes: 512,
            depth: 5,
            beside: None,
        };
        let region = Region { start: 0, bytes: 32 * 512, block: 512 };
        let mut offsets = Offsets::once(load.order, region, 1);
        let stop = CancelFlag::default();
        let stop_condition = StopCondition { duration, stop: &stop, timed: true };
        let read = |_, buffer| TwoPolls {
            buffer: Some(buffer),
            sent: false,
            bytes,
            in_flight: &in_flight,
            max_in_flight: &max_in_flight,
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
