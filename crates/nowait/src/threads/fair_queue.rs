//! A queue of jobs for a thread pool, round robin over clients.
//!
//! Invariant: a job is taken once; jobs of one client are taken in the order of their push. At most
//! `limit` jobs of a client run at the same time.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

/// The greatest number of empty lists that are kept for new clients, to save allocations.
const SPARE: usize = 64;

/// The jobs of one client.
struct ClientQueue<J> {
    items: VecDeque<J>,
    /// Jobs that were taken and have not ended.
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

impl<J> FairQueue<J> {
    /// A queue that lets at most `limit` jobs of a client run at the same time; at least 1.
    pub(crate) fn new(limit: usize) -> Self {
        let (clients, ready, spare) = (HashMap::new(), VecDeque::new(), Vec::new());
        Self { clients, ready, spare, queued: 0, limit: limit.max(1) }
    }

    /// Jobs that were not taken yet.
    pub(crate) fn len(&self) -> usize {
        self.queued
    }

    pub(crate) fn push(&mut self, client: u64, job: J) {
        let Self { clients, ready, spare, queued, limit } = self;
        let queue = clients.entry(client).or_insert_with(|| ClientQueue {
            items: spare.pop().unwrap_or_default(),
            running: 0,
            listed: false,
        });
        queue.items.push_back(job);
        *queued += 1;
        list(queue, client, *limit, ready);
    }

    /// Takes the first job of the client whose turn it is. The caller calls [`FairQueue::ended`]
    /// when the job has ended.
    pub(crate) fn pop(&mut self) -> Option<(u64, J)> {
        let Self { clients, ready, queued, limit, .. } = self;
        let client = ready.pop_front()?;
        let queue = clients.get_mut(&client)?;
        queue.listed = false;
        let job = queue.items.pop_front()?;
        queue.running += 1;
        *queued -= 1;
        list(queue, client, *limit, ready);
        Some((client, job))
    }

    /// A job of `client` that was taken has ended.
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

    fn popped(queue: &mut FairQueue<u32>) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop().map(|(_, job)| job)).collect()
    }

    #[test]
    fn clients_take_turns_and_the_jobs_of_each_stay_in_order() {
        let mut queue = FairQueue::new(10);
        (0..4).for_each(|n| queue.push(1, n));
        queue.push(2, 10);
        queue.push(3, 20);
        queue.push(2, 11);
        assert_eq!(popped(&mut queue), [0, 10, 20, 1, 11, 2, 3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn a_client_at_its_limit_of_running_jobs_continues_when_one_ends() {
        let mut queue = FairQueue::new(2);
        (0..5).for_each(|n| queue.push(1, n));
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
    fn a_client_without_jobs_is_removed() {
        let mut queue = FairQueue::new(2);
        for client in 0..1000 {
            queue.push(client, 0);
            let (owner, _) = queue.pop().unwrap();
            assert_eq!(owner, client);
            queue.ended(client);
        }
        assert!(queue.clients.is_empty() && queue.ready.is_empty() && queue.spare.len() == 1);
    }
}
