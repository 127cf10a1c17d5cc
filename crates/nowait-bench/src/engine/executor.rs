//! The async face in a closed loop, on the smallest executor that can drive it: one thread, which
//! parks while no future can go on.
//!
//! Invariant: when a loop returns well, none of its futures is left; the thread parks only after
//! the list of woken futures was seen empty, and whoever adds the first one unparks it.
//! Knows: drive, places. Known by: tables.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use nowait::{Buffer, Error};

use super::drive::{NAP, Pace, Stretch};
use super::places::Places;
use crate::workload::Workload;

/// What a read as a future comes to: bytes, and its memory.
pub(crate) type Answer = (Result<usize, Error>, Buffer);

/// Keeps `load.depth` futures of `read` in flight for as long as `pace` says or there are places.
///
/// # Errors
/// What a read said, that one was cut short, or that there is no memory.
pub(crate) fn drive<F: Future<Output = Answer> + Unpin>(
    load: &Workload,
    places: &mut Places,
    pace: Pace<'_>,
    mut read: impl FnMut(u64, Buffer) -> F,
) -> io::Result<Stretch> {
    let woken = Woken::of_this_thread();
    let buffers = (0..load.depth).map(|_| Buffer::zeroed(load.block_bytes));
    let buffers = buffers.collect::<Result<Vec<Buffer>, Error>>()?;
    let mut stretch = pace.begin();
    let mut lanes = Vec::with_capacity(load.depth);
    for (number, buffer) in buffers.into_iter().enumerate() {
        let future = places.next().map(|pos| read(pos, buffer));
        let waker = Waker::from(Arc::new(LaneWaker { number, woken: woken.clone() }));
        lanes.push(Lane { future, started: stretch.begin, waker });
    }
    // The first poll sends a request.
    let mut due: Vec<usize> = (0..lanes.len()).collect();
    while lanes.iter().any(|lane| lane.future.is_some()) && !pace.is_over(&stretch, Instant::now())
    {
        for number in due.drain(..) {
            let lane = &mut lanes[number];
            while let Some(buffer) = lane.poll(load.block_bytes)? {
                let now = Instant::now();
                stretch.count(load.block_bytes as u64, now - lane.started);
                lane.future = places.next().map(|pos| read(pos, buffer));
                lane.started = now;
            }
        }
        woken.wait(&mut due);
    }
    stretch.end();
    // What ends from here on is not counted.
    for lane in &mut lanes {
        while lane.future.is_some() && lane.poll(load.block_bytes)?.is_none() {
            woken.wait(&mut due);
            due.clear();
        }
    }
    Ok(stretch)
}

/// One for each request in flight.
struct Lane<F> {
    future: Option<F>,
    started: Instant,
    waker: Waker,
}

impl<F: Future<Output = Answer> + Unpin> Lane<F> {
    /// The memory of the request if it has ended; its future is then gone.
    fn poll(&mut self, block_bytes: usize) -> io::Result<Option<Buffer>> {
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

/// Which futures can go on, and the thread that is to know.
struct Woken {
    numbers: Mutex<Vec<usize>>,
    thread: Thread,
}

impl Woken {
    fn of_this_thread() -> Arc<Woken> {
        Arc::new(Woken { numbers: Mutex::default(), thread: thread::current() })
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

    /// Takes the list into `due`, which is empty. Sleeps if there is nothing in it, but not longer
    /// than it may take to see that the loop is to stop.
    fn wait(&self, due: &mut Vec<usize>) {
        if self.lock().is_empty() {
            thread::park_timeout(NAP);
        }
        std::mem::swap(&mut *self.lock(), due);
    }
}

/// Says which future it was that was woken.
struct LaneWaker {
    number: usize,
    woken: Arc<Woken>,
}

impl Wake for LaneWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.add(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::places::Region;
    use crate::stop::Stop;
    use crate::workload::{Direction, Order};
    use std::cell::Cell;
    use std::time::Duration;

    /// Ends at its second poll, for which another thread wakes it.
    struct TwoPolls<'a> {
        buffer: Option<Buffer>,
        sent: bool,
        bytes: usize,
        in_flight: &'a Cell<usize>,
        most: &'a Cell<usize>,
    }

    impl Future for TwoPolls<'_> {
        type Output = Answer;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Answer> {
            if !std::mem::replace(&mut self.sent, true) {
                self.in_flight.set(self.in_flight.get() + 1);
                self.most.set(self.most.get().max(self.in_flight.get()));
                let waker = context.waker().clone();
                thread::spawn(|| waker.wake());
                return Poll::Pending;
            }
            self.in_flight.set(self.in_flight.get() - 1);
            Poll::Ready((Ok(self.bytes), self.buffer.take().unwrap()))
        }
    }

    /// Reads 32 blocks once, five at a time, each of which comes to `bytes`. Returns what the loop
    /// did, and how many requests were in flight at its end and at most.
    fn read_once(bytes: usize, duration: Duration) -> (io::Result<Stretch>, usize, usize) {
        let (in_flight, most) = (Cell::new(0), Cell::new(0));
        let load = Workload {
            direction: Direction::Read,
            order: Order::Sequential,
            block_bytes: 512,
            depth: 5,
            beside: None,
        };
        let region = Region { start: 0, bytes: 32 * 512, block: 512 };
        let mut places = Places::once(load.order, region, 1);
        let stop = Stop::default();
        let pace = Pace { duration, stop: &stop, timed: true };
        let read = |_, buffer| TwoPolls {
            buffer: Some(buffer),
            sent: false,
            bytes,
            in_flight: &in_flight,
            most: &most,
        };
        let stretch = drive(&load, &mut places, pace, read);
        (stretch, in_flight.get(), most.get())
    }

    #[test]
    fn each_place_is_read_once_with_as_many_in_flight_as_asked_for() {
        let (stretch, left, most) = read_once(512, Duration::MAX);
        let stretch = stretch.unwrap();
        assert_eq!((stretch.requests, stretch.bytes), (32, 32 * 512));
        assert_eq!((left, most), (0, 5));
    }

    #[test]
    fn a_loop_that_is_over_waits_for_what_is_in_flight() {
        let (stretch, left, most) = read_once(512, Duration::ZERO);
        assert!(stretch.unwrap().requests > 0);
        assert_eq!((left, most), (0, 5));
    }

    #[test]
    fn a_read_that_is_cut_short_ends_the_loop() {
        let (stretch, ..) = read_once(511, Duration::MAX);
        assert_eq!(stretch.err().unwrap().to_string(), "a read was cut short");
    }
}
