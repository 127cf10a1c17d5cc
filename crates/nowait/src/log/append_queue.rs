//! The records that wait to be written, and who writes them.
//!
//! Records gather in a group while the one before it is written. One caller at a time leads: it takes the
//! group, writes it, and hands over to a caller whose record is in the next one, or, if only tasks wait for
//! that, to a thread of the process.
//!
//! Invariant: while a group has records, a leader has begun or a caller that waits for one of them will.
//! The lock is never held during I/O.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::log::group_buffer::GroupBuffer;
use crate::log::log_position::LogPosition;
use crate::log::log_writer::LogWriter;
use crate::log::segments::{Segments, WriteFailure};
use crate::sim_hooks::yield_point;
use crate::types::error::Error;

/// A leader waits for more records at most this part of the time that the last write took.
const GATHERING_PART: u32 = 4;

/// Runs a job that may block, on another thread.
pub(crate) type Spawn = Arc<dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync>;

/// The end of a group.
#[derive(Default)]
struct GroupEnd {
    /// The position of the group.
    result: OnceLock<Result<u64, Error>>,
    ended: Condvar,
    /// The tasks that wait, by the place of their record in the group.
    wakers: Mutex<Vec<(u32, Waker)>>,
}

/// The group that records are added to.
#[derive(Default)]
struct Group {
    buffer: GroupBuffer,
    end: Arc<GroupEnd>,
    /// The callers that block until it ends.
    threads: usize,
}

#[derive(Default)]
struct State {
    group: Group,
    /// Memory for the next group.
    memory: GroupBuffer,
    is_led: bool,
    /// Records of the group that was taken last.
    last_records: usize,
    /// How long its write and sync took.
    last_write: Duration,
    /// A record found no room in the group.
    is_full: bool,
    /// A spare segment is being made.
    is_preparing: bool,
    /// The segment for which one was made last.
    prepared_for: u64,
    /// The reason why the log takes nothing more.
    broken: Option<Error>,
    /// Tasks that wait for room in the group.
    tasks: Vec<Waker>,
}

/// A record that was added to a group, and its place in it.
pub(crate) struct Added {
    group: Arc<GroupEnd>,
    at: u32,
}

impl Added {
    fn result(&self) -> Option<Result<LogPosition, Error>> {
        let position = |group: u64| LogPosition::new(group + u64::from(self.at));
        self.group.result.get().map(|result| result.map(position))
    }
}

/// The queue of a log.
pub(crate) struct AppendQueue {
    state: Mutex<State>,
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
        if state.group.buffer.records() == state.last_records {
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
        loop {
            if let Some(result) = added.result() {
                return result;
            }
            if state.is_led {
                let waited = added.group.ended.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
            } else {
                let goes_on;
                (state, goes_on) = self.lead(state);
                if goes_on {
                    self.spawn_leader(&mut state);
                }
            }
        }
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
                    if !state.is_led && state.group.threads == 0 {
                        self.spawn_leader(&mut state);
                    }
                    added.insert(new)
                }
            },
        };
        if let Some(result) = added.result() {
            return Poll::Ready(result);
        }
        let mut wakers = added.group.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        match wakers.iter_mut().find(|(at, _)| *at == added.at) {
            Some((_, old)) => old.clone_from(waker),
            None => wakers.push((added.at, waker.clone())),
        }
        Poll::Pending
    }

    /// Has another thread lead until no group waits that has no thread of its own.
    fn spawn_leader(self: &Arc<Self>, state: &mut State) {
        state.is_led = true;
        let queue = self.clone();
        (self.spawn)(Box::new(move || {
            let mut goes_on = true;
            while goes_on {
                let (mut state, again) = queue.lead(queue.lock());
                goes_on = again;
                state.is_led = goes_on;
                if !goes_on {
                    queue.idle.notify_all();
                }
            }
        }));
    }

    /// Writes the present group. Afterwards there is no leader; true if the next group has records, but no
    /// thread that could write it.
    fn lead<'a>(
        self: &'a Arc<Self>,
        mut state: MutexGuard<'a, State>,
    ) -> (MutexGuard<'a, State>, bool) {
        state.is_led = true;
        state = self.gather(state);
        let memory = std::mem::take(&mut state.memory);
        let next = Group { buffer: memory, ..Group::default() };
        let mut group = std::mem::replace(&mut state.group, next);
        (state.last_records, state.is_full) = (group.buffer.records(), false);
        self.room.notify_all();
        state.tasks.drain(..).for_each(Waker::wake);
        let broken = state.broken;
        drop(state);
        let begun = Instant::now();
        let result = match broken {
            Some(error) => Err(WriteFailure::Refused(error)),
            None => self.write(&mut group.buffer),
        };
        group.buffer.clear();
        let mut state = self.lock();
        state.last_write = begun.elapsed();
        state.memory = group.buffer;
        if let Err(WriteFailure::Broken(error)) = result {
            state.broken = Some(error);
        }
        let result = result.map_err(WriteFailure::error);
        // Only the leader sets it, once.
        let _ = group.end.result.set(result);
        group.end.ended.notify_all();
        let mut wakers = group.end.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.drain(..).for_each(|(_, waker)| waker.wake());
        drop(wakers);
        self.prepare(&mut state);
        state.is_led = false;
        if state.group.buffer.is_empty() {
            self.idle.notify_all();
        } else {
            state.group.end.ended.notify_one();
        }
        let goes_on = !state.group.buffer.is_empty() && state.group.threads == 0;
        (state, goes_on)
    }

    /// Waits, for a fraction of what a write takes, until the group has as many records as the one before: its
    /// callers were woken just now and append again. A group without them would have them wait for two writes.
    fn gather<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        if yield_point::is_simulated() {
            return state;
        }
        let is_small =
            |state: &mut State| state.group.buffer.records() < state.last_records && !state.is_full;
        let most = state.last_write / GATHERING_PART;
        let waited = self.gathered.wait_timeout_while(state, most, is_small);
        waited.unwrap_or_else(PoisonError::into_inner).0
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
                queue.lock().is_preparing = false;
                queue.idle.notify_all();
            }));
        }
    }

    fn write(&self, group: &mut GroupBuffer) -> Result<u64, WriteFailure> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.needs_segment(group, self.segments.layout) && !yield_point::is_simulated() {
            // A segment that is being made is soon there; making another one would take longer.
            let is_over = self.idle.wait_while(self.lock(), |state| state.is_preparing);
            drop(is_over);
        }
        let position = writer.write(group, &self.segments)?;
        self.durable.store(writer.end(), Ordering::Release);
        Ok(position)
    }

    /// Waits until no group is written, none waits, and no segment is made.
    pub(crate) fn wait_until_idle(&self) {
        let mut state = self.lock();
        while state.is_led || state.is_preparing || !state.group.buffer.is_empty() {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
