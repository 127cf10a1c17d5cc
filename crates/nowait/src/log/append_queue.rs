//! The records that wait to be written, and who writes them.
//!
//! Records gather in a group while the one before it is written. One caller at a time leads: it takes the
//! group, writes it, and hands over to a caller whose record is in the next one, or, if only tasks wait for
//! that, to a thread of the process.
//!
//! Invariant: while a group has records, a leader has begun or a caller that waits for one of them will.
//! The lock is never held during I/O.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::log::group_buffer::GroupBuffer;
use crate::log::group_end::GroupEnd;
use crate::log::log_position::LogPosition;
use crate::log::log_writer::LogWriter;
use crate::log::segments::{Segments, WriteFailure};
use crate::sim_hooks::yield_point;
use crate::types::error::Error;

/// A leader waits for more records at most this part of the time that the last write took.
const GATHERING_PART: u32 = 4;
/// No shorter sleep is worth its cost: the kernel's timers are late by up to 50 µs.
const LEAST_SLEEP: Duration = Duration::from_micros(50);
/// While a write that takes no longer is made, its callers let other threads run: to sleep and to be woken takes as long.
const MOST_YIELDING: Duration = Duration::from_micros(20);
const LEAST_YIELDS: u32 = 8;
/// Threads that wait for the log run no longer at a time.
const LONG_YIELD: Duration = Duration::from_millis(1);
/// After a long yield so many waits sleep.
const WAITS_AT_REST: u32 = 1024;

/// One of so many writes of a lone caller is timed: reading the clock twice takes time, too.
const TIMED_LONE_WRITES: u32 = 16;

/// Runs a job that may block, on another thread.
pub(crate) type Spawn = Arc<dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// The group that records are added to.
#[derive(Default)]
struct Group {
    buffer: GroupBuffer,
    end: Arc<GroupEnd>,
    /// The callers that block until it ends.
    threads: u32,
}

#[derive(Default)]
struct State {
    group: Group,
    /// Memory for the next group.
    memory: GroupBuffer,
    /// Records of the group that was taken last.
    last_records: usize,
    /// How long its write and sync took.
    last_write: Duration,
    /// Writes since then that were not timed.
    untimed: u32,
    /// A record found no room in the group, and its caller waits for some.
    is_full: bool,
    /// The leader waits for more records.
    is_gathering: bool,
    /// A spare segment is being made.
    is_preparing: bool,
    /// The segment for which one was made last.
    prepared_for: u64,
    /// The reason why the log takes nothing more.
    broken: Option<Error>,
    /// Tasks that wait for room in the group.
    tasks: Vec<Waker>,
    /// Threads that wait until the queue is idle, or a spare segment is made.
    waiting: u32,
}

/// A record that was added to a group, and its place in it.
pub(crate) struct Added {
    group: Arc<GroupEnd>,
    at: u32,
}

impl Added {
    fn result(&self) -> Option<Result<LogPosition, Error>> {
        let position = |group: u64| LogPosition::new(group + u64::from(self.at));
        self.group.result().map(|result| result.map(position))
    }
}

/// The queue of a log.
pub(crate) struct AppendQueue {
    state: Mutex<State>,
    /// Changed with the lock.
    is_led: AtomicBool,
    /// So many waits sleep, in place of letting others run.
    resting: AtomicU32,
    /// A group was taken, so that the next one has room.
    room: Condvar,
    /// The group has as many records as the one before, or is full.
    gathered: Condvar,
    /// There is no leader, or a spare segment was made.
    idle: Condvar,
    /// Locked by the leader.
    writer: Mutex<LogWriter>,
    /// The position after the last durable group.
    durable: AtomicU64,
    pub(crate) segments: Segments,
    spawn: Spawn,
    prepares_ahead: bool,
}

impl AppendQueue {
    pub(crate) fn new(
        writer: LogWriter,
        segments: Segments,
        spawn: Spawn,
        prepares_ahead: bool,
    ) -> Self {
        Self {
            durable: AtomicU64::new(writer.end()),
            state: Mutex::default(),
            is_led: AtomicBool::new(false),
            resting: AtomicU32::new(0),
            room: Condvar::new(),
            gathered: Condvar::new(),
            idle: Condvar::new(),
            writer: Mutex::new(writer),
            segments,
            spawn,
            prepares_ahead,
        }
    }

    /// The position after the last durable group.
    pub(crate) fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_led(&self) -> bool {
        self.is_led.load(Ordering::SeqCst)
    }

    fn set_led(&self, is_led: bool) {
        self.is_led.store(is_led, Ordering::SeqCst);
    }

    /// Adds a record to the present group, if that has room.
    fn add(&self, state: &mut State, data: &[u8], check: u64) -> Result<Option<Added>, Error> {
        if let Some(error) = state.broken {
            return Err(error);
        }
        if !state.group.buffer.has_room(data.len(), self.segments.layout) {
            state.is_full = true;
            self.gathered.notify_one();
            return Ok(None);
        }
        let at = state.group.buffer.push(data, check)?;
        if state.is_gathering && state.group.buffer.records() == state.last_records {
            self.gathered.notify_one();
        }
        Ok(Some(Added { group: state.group.end.clone(), at }))
    }

    /// Appends a record, whose data has the check `check`, and waits until it is durable.
    ///
    /// # Errors
    /// The errors of [`crate::Log::append`].
    pub(crate) fn append(self: &Arc<Self>, data: &[u8], check: u64) -> Result<LogPosition, Error> {
        let mut state = self.lock();
        let added = loop {
            match self.add(&mut state, data, check)? {
                Some(added) => break added,
                None => state = self.room.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        state.group.threads += 1;
        let yields = state.last_write <= MOST_YIELDING;
        let mut locked = Some(state);
        loop {
            let seen = added.group.changes();
            if let Some(result) = added.result() {
                return result;
            }
            if self.is_led() {
                drop(locked.take());
                if !(yields && self.yields(&added.group)) {
                    added.group.sleep(seen);
                }
                continue;
            }
            let state = locked.take().unwrap_or_else(|| self.lock());
            if added.result().is_none() && !self.is_led() && self.lead(state) {
                self.spawn_leader();
            }
        }
    }

    /// Lets other threads run until `group` has ended or there is no leader. False if that takes long, or if it took
    /// long until this one ran again: then others compute, and the scheduler has those that yield give up their time.
    fn yields(&self, group: &GroupEnd) -> bool {
        let resting = self.resting.load(Ordering::Relaxed);
        if resting > 0 {
            // A lost count does not matter.
            self.resting.store(resting - 1, Ordering::Relaxed);
            return false;
        }
        let mut now = Instant::now();
        let (mut count, until) = (0, now + MOST_YIELDING);
        while count < LEAST_YIELDS || now < until {
            if group.result().is_some() || !self.is_led() {
                return true;
            }
            thread::yield_now();
            let yielded = std::mem::replace(&mut now, Instant::now());
            if now - yielded > LONG_YIELD {
                self.resting.store(WAITS_AT_REST, Ordering::Relaxed);
                break;
            }
            count += 1;
        }
        false
    }

    /// Polls for the end of a record that a task appends; `added` is kept between the polls.
    ///
    /// # Errors
    /// The errors of [`crate::Log::append_async`].
    pub(crate) fn poll_append(
        self: &Arc<Self>,
        added: &mut Option<Added>,
        (data, check): (&[u8], u64),
        context: &Context<'_>,
    ) -> Poll<Result<LogPosition, Error>> {
        let mut state = self.lock();
        let waker = context.waker();
        let added = match added {
            Some(added) => added,
            None => match self.add(&mut state, data, check) {
                Err(error) => return Poll::Ready(Err(error)),
                Ok(None) => {
                    if !state.tasks.iter().any(|task| task.will_wake(waker)) {
                        state.tasks.push(waker.clone());
                    }
                    return Poll::Pending;
                }
                Ok(Some(new)) => {
                    if !self.is_led() && state.group.threads == 0 {
                        self.set_led(true);
                        self.spawn_leader();
                    }
                    added.insert(new)
                }
            },
        };
        if let Some(result) = added.result() {
            return Poll::Ready(result);
        }
        added.group.register(added.at, waker);
        Poll::Pending
    }

    /// Has another thread lead, in place of this one, until no group waits that has no thread of its own.
    fn spawn_leader(self: &Arc<Self>) {
        let queue = self.clone();
        (self.spawn)(Box::new(move || while queue.lead(queue.lock()) {}));
    }

    /// Writes the present group. Afterwards there is no leader; but if the next group has records, and no thread that
    /// could write it, this one still leads: true.
    fn lead<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>) -> bool {
        self.set_led(true);
        state = self.gather(state);
        let memory = std::mem::take(&mut state.memory);
        let next = Group { buffer: memory, ..Group::default() };
        let mut group = std::mem::replace(&mut state.group, next);
        state.last_records = group.buffer.records();
        let is_lone = group.threads == 1 && group.buffer.records() == 1;
        let is_timed = !is_lone || state.untimed + 1 >= TIMED_LONE_WRITES;
        state.untimed = if is_timed { 0 } else { state.untimed + 1 };
        if std::mem::take(&mut state.is_full) {
            self.room.notify_all();
        }
        state.tasks.drain(..).for_each(Waker::wake);
        let broken = state.broken;
        drop(state);
        let begun = is_timed.then(Instant::now);
        let result = match broken {
            Some(error) => Err(WriteFailure::Refused(error)),
            None => self.write(&mut group.buffer),
        };
        let last_write = begun.map(|begun| begun.elapsed());
        group.buffer.clear();
        let mut state = self.lock();
        state.last_write = last_write.unwrap_or(state.last_write);
        state.memory = group.buffer;
        if let Err(WriteFailure::Broken(error)) = result {
            state.broken = Some(error);
        }
        group.end.end(result.map_err(WriteFailure::error));
        self.prepare(&mut state);
        let goes_on = !state.group.buffer.is_empty() && state.group.threads == 0;
        self.set_led(goes_on);
        if state.group.buffer.is_empty() {
            self.notify_idle(&state);
        }
        let next =
            (state.group.threads > 0).then(|| (state.group.end.clone(), state.group.threads));
        drop(state);
        if let Some((end, threads)) = next {
            end.wake_leader(threads);
        }
        group.end.wake_all();
        goes_on
    }

    /// Waits, for a fraction of what a write takes, until the group has as many records as the one before: its
    /// callers were woken just now and append again. A group without them would have them wait for two writes.
    fn gather<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let most = state.last_write / GATHERING_PART;
        if most < LEAST_SLEEP || yield_point::is_simulated() {
            return state;
        }
        let is_small =
            |state: &mut State| state.group.buffer.records() < state.last_records && !state.is_full;
        state.is_gathering = true;
        let waited = self.gathered.wait_timeout_while(state, most, is_small);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.is_gathering = false;
        state
    }

    /// Has another thread make a spare segment if one will be needed; once for each segment, also if that fails.
    fn prepare(self: &Arc<Self>, state: &mut State) {
        let (end, is_done) = (self.durable(), state.is_preparing || state.broken.is_some());
        let (last, _) = self.segments.layout.place_of(end);
        if !self.prepares_ahead || is_done || state.prepared_for == last {
            return;
        }
        if self.segments.needs_spare(end) {
            (state.is_preparing, state.prepared_for) = (true, last);
            let queue = self.clone();
            (self.spawn)(Box::new(move || {
                // Without one the append that needs a segment makes it, and has the error.
                let _ = queue.segments.make_spare(last);
                let mut state = queue.lock();
                state.is_preparing = false;
                queue.notify_idle(&state);
            }));
        }
    }

    fn notify_idle(&self, state: &State) {
        if state.waiting > 0 {
            self.idle.notify_all();
        }
    }

    /// Waits for [`AppendQueue::notify_idle`] while `is_busy`.
    fn wait_while(&self, is_busy: impl Fn(&State) -> bool) {
        let mut state = self.lock();
        state.waiting += 1;
        let waited = self.idle.wait_while(state, |state| is_busy(state));
        waited.unwrap_or_else(PoisonError::into_inner).waiting -= 1;
    }

    fn write(&self, group: &mut GroupBuffer) -> Result<u64, WriteFailure> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.needs_segment(group, self.segments.layout) && !yield_point::is_simulated() {
            // A segment that is being made is soon there; making another one would take longer.
            self.wait_while(|state| state.is_preparing);
        }
        let position = writer.write(group, &self.segments)?;
        self.durable.store(writer.end(), Ordering::Release);
        Ok(position)
    }

    /// Waits until no group is written, none waits, and no segment is made.
    pub(crate) fn wait_until_idle(&self) {
        self.wait_while(|state| {
            self.is_led() || state.is_preparing || !state.group.buffer.is_empty()
        });
    }
}
