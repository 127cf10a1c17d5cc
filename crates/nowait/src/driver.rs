//! The thread behind the async face: it owns an engine and serves what comes to its inbox.
//!
//! Invariant: the memory of a request is in `flights` from before the engine sees it until the
//! engine has given it back, and nobody else can reach it (C45); every job is answered once, also
//! when the queue fails or this thread panics.
//! Knows: inbox, memory, engine. Known by: future.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::config::Config;
use crate::disk::Disk;
use crate::engine::Engine;
use crate::error::{Doing, Error};
use crate::inbox::{Inbox, Job, Phase};
use crate::io::{Flags, Op};
use crate::iov::Segment;
use crate::map::Extents;
use crate::queue::{Interest, Queue, Token, WATCHED};
use crate::worker::Workers;

/// The token under which the inbox is watched.
const INBOX: Token = WATCHED | 1 << 59;

pub(crate) struct Driver<Q: Queue> {
    engine: Engine<Q, Extents>,
    inbox: Arc<Inbox>,
    /// Taken from the inbox, not yet submitted: the engine had no slot.
    jobs: VecDeque<Job>,
    /// What the engine has, by tag.
    flights: HashMap<u64, Job>,
    next_tag: u64,
    phase: Phase,
    /// What is said to those who are still there when this ends.
    last_word: Error,
}

impl<Q: Queue> Driver<Q> {
    /// To be made on the thread that runs it: a ring may belong to the thread that made it.
    pub(crate) fn new(
        disk: Arc<Disk<Extents>>,
        workers: Workers,
        queue: Q,
        config: Config,
        inbox: Arc<Inbox>,
    ) -> Result<Self, Error> {
        let mut engine = Engine::new(disk, workers, queue, config)?;
        engine.watch(inbox.fd(), INBOX, Interest::Readable)?;
        Ok(Self {
            engine,
            inbox,
            jobs: VecDeque::new(),
            flights: HashMap::new(),
            next_tag: 0,
            phase: Phase::Open,
            last_word: Error::new(libc::EIO, Doing::Wait),
        })
    }

    /// Serves until the inbox is closed and everything in flight has ended, or the queue fails.
    pub(crate) fn run(mut self) {
        if let Err(error) = self.serve() {
            self.last_word = error;
        }
    }

    fn serve(&mut self) -> Result<(), Error> {
        loop {
            self.submit_all();
            if self.phase == Phase::Closed && self.jobs.is_empty() && self.flights.is_empty() {
                return Ok(());
            }
            // Hands over what was submitted, and sleeps, with one system call.
            self.engine.wait(None, &mut |_, _| {})?;
            self.complete();
        }
    }

    /// Submits all that has come, until the engine has no slot or the inbox was seen empty: what
    /// comes after that wakes the next `wait`.
    fn submit_all(&mut self) {
        loop {
            while let Some(job) = self.jobs.pop_front() {
                if let Some(job) = self.submit(job) {
                    self.jobs.push_front(job);
                    return;
                }
            }
            self.phase = self.inbox.take(&mut self.jobs);
            if self.jobs.is_empty() {
                return;
            }
        }
    }

    /// Submits one job. It comes back if that must wait until something in flight has ended.
    fn submit(&mut self, job: Job) -> Option<Job> {
        let tag = self.next_tag;
        self.next_tag += 1;
        let Job { io, buffer, .. } = self.flights.entry(tag).insert_entry(job).into_mut();
        let io = *io;
        let submitted = match io.op {
            Op::Read | Op::Write => {
                let segment = Segment { base: buffer.as_mut_ptr(), len: buffer.len() };
                // SAFETY: the buffer stays where it is, in `flights`, until the engine gives the
                // request back; if the engine goes before that, `drop` has leaked the memory.
                unsafe { self.engine.submit_segments(io, &[segment], tag) }
            }
            Op::Flush | Op::Discard | Op::Zero | Op::Status => self.engine.submit_bare(io, tag),
        };
        let error = submitted.err()?.error;
        let job = self.flights.remove(&tag)?;
        let may_wait = !io.flags.has(Flags::NOWAIT) && self.engine.in_flight() > 0;
        if error.errno() == libc::EAGAIN && may_wait {
            return Some(job);
        }
        job.refuse(error);
        None
    }

    /// Answers what has ended.
    fn complete(&mut self) {
        while let Some(completion) = self.engine.next() {
            let Some(job) = self.flights.remove(&completion.tag) else { continue };
            let result = completion.result().map(|bytes| bytes as usize);
            job.completer.complete((result, job.buffer));
        }
    }
}

impl<Q: Queue> Drop for Driver<Q> {
    /// Answers everybody who is left. Memory that is still in flight is leaked: the queue has
    /// failed, and the kernel may write to it at any time (C45).
    fn drop(&mut self) {
        for job in self.flights.values_mut() {
            std::mem::forget(std::mem::take(&mut job.buffer));
        }
        self.inbox.fail(self.last_word);
        let left = self.jobs.drain(..).chain(self.flights.drain().map(|(_, job)| job));
        left.for_each(|job| job.refuse(self.last_word));
    }
}
