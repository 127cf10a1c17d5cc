//! A queue of jobs for a thread pool, round robin over clients.
//!
//! Invariant: a job is taken once; jobs of one client are taken in the order of their push. At most
//! `limit` jobs of a client run at the same time; jobs that join count as one.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use crate::threads::work_item::WorkItem;

/// The greatest number of empty lists that are kept for new clients, to save allocations.
const SPARE: usize = 64;

/// The jobs of one client.
struct ClientQueue<J> {
    items: VecDeque<J>,
    /// Runs of jobs that were taken and have not ended.
    running: usize,
    /// Whether the client is in `FairQueue::ready`.
    listed: bool,
}

/// Jobs of clients, which are identified by number.
pub(crate) struct FairQueue<J> {
    clients: HashMap<u64, ClientQueue<J>>,
    /// Clients of which a job may be taken, the next one first.
    ready: VecDeque<u64>,
    spare: Vec<VecDeque<J>>,
    queued: usize,
    limit: usize,
}

impl<J: WorkItem> FairQueue<J> {
    /// A queue that lets at most `limit` jobs of a client run at the same time; at least 1.
    pub(crate) fn new(limit: usize) -> Self {
        let (clients, ready, spare) = (HashMap::new(), VecDeque::new(), Vec::new());
        Self { clients, ready, spare, queued: 0, limit: limit.max(1) }
    }

    /// Jobs that were not taken yet.
    pub(crate) fn len(&self) -> usize {
        self.queued
    }

    /// Whether a job may be taken now.
    pub(crate) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Queues `job`. False if it may run together with the one before it.
    pub(crate) fn push(&mut self, client: u64, job: J) -> bool {
        let Self { clients, ready, spare, queued, limit } = self;
        let queue = clients.entry(client).or_insert_with(|| ClientQueue {
            items: spare.pop().unwrap_or_default(),
            running: 0,
            listed: false,
        });
        let last = queue.items.back();
        let begins = last.is_none_or(|last| !J::joins(std::slice::from_ref(last), &job));
        queue.items.push_back(job);
        *queued += 1;
        list(queue, client, *limit, ready);
        begins
    }

    /// Takes the first job of the client whose turn it is, and those that join it, into `run`,
    /// which is empty; returns the client. The caller calls [`FairQueue::ended`] when they have
    /// ended.
    pub(crate) fn pop(&mut self, run: &mut Vec<J>) -> Option<u64> {
        let Self { clients, ready, queued, limit, .. } = self;
        let client = ready.pop_front()?;
        let queue = clients.get_mut(&client)?;
        queue.listed = false;
        run.push(queue.items.pop_front()?);
        while queue.items.front().is_some_and(|next| J::joins(run, next)) {
            run.extend(queue.items.pop_front());
        }
        queue.running += 1;
        *queued -= run.len();
        list(queue, client, *limit, ready);
        Some(client)
    }

    /// The jobs of `client` that were taken together have ended.
    pub(crate) fn ended(&mut self, client: u64) {
        let Self { clients, ready, spare, limit, .. } = self;
        let Entry::Occupied(mut entry) = clients.entry(client) else { return };
        let queue = entry.get_mut();
        queue.running -= 1;
        if queue.running > 0 || !queue.items.is_empty() {
            return list(queue, client, *limit, ready);
        }
        let items = entry.remove().items;
        if spare.len() < SPARE {
            spare.push(items);
        }
    }

    /// Takes all jobs, in no order between clients.
    pub(crate) fn drain(&mut self) -> Vec<J> {
        self.ready.clear();
        self.queued = 0;
        self.clients.values_mut().for_each(|queue| queue.listed = false);
        self.clients.values_mut().flat_map(|queue| queue.items.drain(..)).collect()
    }
}

/// Puts `client`, whose jobs are `queue`, into `ready`, if it has a queued job and is below the
/// limit.
fn list<J>(queue: &mut ClientQueue<J>, client: u64, limit: usize, ready: &mut VecDeque<u64>) {
    if !queue.listed && !queue.items.is_empty() && queue.running < limit {
        queue.listed = true;
        ready.push_back(client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Jobs join from 100 on, up to three with numbers in a row.
    impl WorkItem for u32 {
        fn client(&self) -> u64 {
            0
        }

        fn joins(run: &[u32], next: &u32) -> bool {
            run.len() < 3 && run[0] >= 100 && *next == run[0] + run.len() as u32
        }
    }

    fn pop(queue: &mut FairQueue<u32>) -> Option<(u64, Vec<u32>)> {
        let mut run = Vec::new();
        queue.pop(&mut run).map(|client| (client, run))
    }

    fn popped(queue: &mut FairQueue<u32>) -> Vec<u32> {
        std::iter::from_fn(|| pop(queue)).flat_map(|(_, run)| run).collect()
    }

    #[test]
    fn clients_take_turns_and_the_jobs_of_each_stay_in_order() {
        let mut queue = FairQueue::new(10);
        (0..4).for_each(|n| assert!(queue.push(1, n)));
        queue.push(2, 10);
        queue.push(3, 20);
        queue.push(2, 11);
        assert_eq!(popped(&mut queue), [0, 10, 20, 1, 11, 2, 3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn a_client_at_its_limit_of_running_jobs_continues_when_one_ends() {
        let mut queue = FairQueue::new(2);
        (0..5).for_each(|n| assert!(queue.push(1, n)));
        assert_eq!(popped(&mut queue), [0, 1]);
        queue.push(2, 10);
        assert_eq!(popped(&mut queue), [10]);
        queue.ended(1);
        assert_eq!((popped(&mut queue), queue.len()), (vec![2], 2));
        queue.ended(2);
        (0..2).for_each(|_| queue.ended(1));
        assert_eq!(popped(&mut queue), [3, 4]);
    }

    #[test]
    fn jobs_that_join_are_taken_together_and_count_as_one_that_runs() {
        let mut queue = FairQueue::new(1);
        let begins = [7, 100, 101, 102, 103, 200].map(|job| queue.push(1, job));
        // What the one before it allows: the pop may still find that a run is full.
        assert_eq!(begins, [true, true, false, false, false, true]);
        for run in [vec![7], vec![100, 101, 102], vec![103], vec![200]] {
            assert_eq!((pop(&mut queue), pop(&mut queue)), (Some((1, run)), None));
            queue.ended(1);
        }
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn a_client_without_jobs_is_removed() {
        let mut queue = FairQueue::new(2);
        for client in 0..1000 {
            queue.push(client, 0);
            assert_eq!(pop(&mut queue), Some((client, vec![0])));
            queue.ended(client);
        }
        assert!(queue.clients.is_empty() && queue.ready.is_empty() && queue.spare.len() == 1);
    }
}
