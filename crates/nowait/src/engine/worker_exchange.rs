//! The exchange with the workers: slots go to them as jobs, once for each submission of the queue, and
//! come back through the engine's list of completions.
//!
//! Invariant: from [`WorkerExchange::add`] until [`WorkerExchange::take_returned`] a slot is the worker's;
//! its segments and extents stay where they are.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::blocking::worker_pool::{JobDevice, WorkerJob, WorkerPool, WorkerTask};
use crate::engine::slot::{RequestSlot, State};
use crate::threads::completion_list::CompletionList;
use crate::types::error::Error;
use crate::types::request::ExtentStatus;
use crate::types::token;

/// The jobs of one engine, and the slots that come back.
pub(crate) struct WorkerExchange {
    /// Jobs that the workers get with the next submission.
    jobs: Vec<WorkerJob>,
    completions: Arc<CompletionList>,
    workers: WorkerPool,
    /// The switch [`crate::Config::merge`].
    merge: bool,
    /// Results of status requests that were given back, by tag.
    extents: Vec<(u64, Vec<ExtentStatus>)>,
}

impl WorkerExchange {
    /// An exchange for `slots` slots.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the descriptor could not be made.
    pub(crate) fn new(workers: WorkerPool, slots: u32, merge: bool) -> Result<Self, Error> {
        let completions = Arc::new(CompletionList::new(slots)?);
        Ok(Self { jobs: Vec::with_capacity(64), completions, workers, merge, extents: Vec::new() })
    }

    /// Readable when a slot has come back.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.completions.fd()
    }

    /// Clears the descriptor; to be called before [`WorkerExchange::take_returned`].
    pub(crate) fn acknowledge(&self) {
        self.completions.clear_wake();
    }

    /// Gives `request`, which is in `slot`, to the workers with the next [`WorkerExchange::submit`].
    pub(crate) fn add(
        &mut self,
        slot: u32,
        request: &mut RequestSlot,
        device: Arc<dyn JobDevice>,
        task: WorkerTask,
    ) {
        request.set_state(State::Worker);
        self.completions.set_stop(slot, 0);
        self.jobs.push(WorkerJob {
            task,
            io: request.io,
            segments: request.segments.as_slice(),
            extents: &raw mut request.extents,
            slot,
            client: token::client_of(request.tag),
            merge: self.merge && task == WorkerTask::Run,
            completions: self.completions.clone(),
            device,
        });
    }

    /// Ends the job of `request`, which is in `slot`, with `errno` if it has not begun. It comes back as others do.
    pub(crate) fn stop(&mut self, slot: u32, request: &RequestSlot, device: u64, errno: i32) {
        let Self { jobs, completions, workers, .. } = self;
        // A worker may be about to begin.
        completions.set_stop(slot, errno.unsigned_abs());
        let waiting = jobs.iter().position(|job| job.slot == slot && job.task == WorkerTask::Run);
        let client = token::client_of(request.tag);
        let is_back = match waiting {
            Some(at) => {
                jobs.remove(at);
                true
            }
            None => workers.remove(device, client, completions, slot),
        };
        if is_back {
            completions.push(slot, -i64::from(errno));
        }
    }

    /// Whether a slot waits for [`WorkerExchange::submit`].
    pub(crate) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// Hands the collected jobs to the workers.
    #[inline]
    pub(crate) fn submit(&mut self) {
        if self.has_jobs() {
            self.workers.push(self.jobs.drain(..));
        }
    }

    /// Whether a slot has come back.
    #[inline]
    pub(crate) fn has_returned(&self) -> bool {
        self.completions.is_not_empty()
    }

    /// Passes the slots that have come back to `sink`, each with its result. It returns the extents of a
    /// status request with its tag.
    pub(crate) fn take_returned(
        &mut self,
        mut sink: impl FnMut(u32, i64) -> Option<(u64, Vec<ExtentStatus>)>,
    ) {
        let Self { completions, extents, .. } = self;
        completions.take(|slot, result| {
            if let Some((tag, found)) = sink(slot, result) {
                extents.retain(|(of, _)| *of != tag);
                extents.push((tag, found));
            }
        });
    }

    /// The extents of the status request with this tag, once.
    pub(crate) fn take_extents(&mut self, tag: u64) -> Vec<ExtentStatus> {
        let found = self.extents.iter().position(|(of, _)| *of == tag);
        found.map(|n| self.extents.swap_remove(n).1).unwrap_or_default()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::engine::slot::Role;
    use crate::types::byte_range::ByteRange;
    use crate::types::request::{Flags, Op, Request};
    use crate::types::token::Target;

    /// A device whose jobs end with 100 and the slot's number, and leave an extent.
    struct Answering;

    impl JobDevice for Answering {
        fn number(&self) -> u64 {
            0
        }

        fn weight(&self) -> u32 {
            1
        }

        fn run(&self, jobs: &mut Vec<WorkerJob>) {
            for job in jobs.drain(..) {
                job.completions.push(job.slot, 100 + i64::from(job.slot));
            }
        }
    }

    fn status(tag: u64) -> RequestSlot {
        let mut slot = RequestSlot::new();
        let io = Request { op: Op::Status, flags: Flags::NONE, range: ByteRange::new(0, 1) };
        slot.begin(Role::Split, State::Submitting, Target::new(0, 0), io, None, tag);
        slot
    }

    fn wait(exchange: &mut WorkerExchange) -> Vec<(u32, i64)> {
        let mut returned = Vec::new();
        while returned.len() < 2 {
            let timeout = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                exchange.fd(),
                rustix::event::PollFlags::IN,
            )];
            assert_eq!(rustix::event::poll(&mut fds, Some(&timeout)), Ok(1));
            exchange.acknowledge();
            exchange.take_returned(|slot, result| {
                returned.push((slot, result));
                Some((7, vec![ExtentStatus::top(u64::from(slot), true)]))
            });
        }
        returned.sort_unstable();
        returned
    }

    #[test]
    fn slots_go_to_the_workers_with_the_submission_and_come_back_once() {
        let mut exchange = WorkerExchange::new(WorkerPool::new(2), 8, true).unwrap();
        let mut slots = [status(7), status(7)];
        for (number, slot) in slots.iter_mut().enumerate() {
            exchange.add(number as u32, slot, Arc::new(Answering), WorkerTask::Run);
        }
        assert!(exchange.has_jobs() && !exchange.has_returned());
        exchange.submit();
        assert!(!exchange.has_jobs());
        assert_eq!(wait(&mut exchange), [(0, 100), (1, 101)]);
        assert!(!exchange.has_returned());
        // The later result of a tag replaces the earlier one.
        assert_eq!(exchange.take_extents(7).len(), 1);
        assert_eq!(exchange.take_extents(7), []);
    }
}
