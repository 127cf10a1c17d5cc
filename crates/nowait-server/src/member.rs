//! The members of a thread: connections and queues, and the order in which they are serviced.
//!
//! Invariant: a member is in one run queue at most. Bulk members take turns, those of each export by its
//! weight.

use std::rc::Rc;
use std::sync::Arc;

use crate::bulk_queues::BulkQueues;
use crate::fairness::Quantum;
use crate::rate_limit::ClientBuckets;
use crate::served_export::ServedExport;
use crate::shared_export::ExportUse;

/// In place of an index: a member that uses no export yet.
pub(crate) const NO_EXPORT: u32 = u32::MAX;

/// The state that the event loop keeps for a connection or a queue of a frontend: a member of its run queues.
#[derive(Default)]
pub(crate) struct Member {
    /// It is in the run queues.
    pub(crate) scheduled: bool,
    /// Bytes that it may move in this service.
    pub(crate) quantum: Quantum,
    /// Bytes of the buffer budget that it holds.
    pub(crate) budget_used: u64,
    /// The limits of the client that it belongs to.
    pub(crate) client: Arc<ClientBuckets>,
    /// It waits until it may go on under the limits.
    pub(crate) is_held: bool,
    /// It waits for a slot or for memory, with nothing in flight.
    pub(crate) is_blocked: bool,
    /// The export that it uses, as its thread serves it; `None` before it has chosen one.
    pub(crate) served: Option<Rc<ServedExport>>,
    /// Its use of the export.
    pub(crate) used: Option<ExportUse>,
}

impl Member {
    /// One of several members of a client.
    pub(crate) fn of(client: Arc<ClientBuckets>) -> Self {
        Self { client, ..Self::default() }
    }

    /// The export that it uses.
    #[inline(always)]
    pub(crate) fn served(&self) -> Option<&ServedExport> {
        self.served.as_deref()
    }

    /// The index of its export among those of its thread, or [`NO_EXPORT`].
    pub(crate) fn export(&self) -> u32 {
        self.served().map_or(NO_EXPORT, |served| served.index())
    }
}

/// The scheduled members, by number.
#[derive(Default)]
pub(crate) struct RunQueues {
    /// Interactive members: all are serviced in each iteration.
    pub(crate) interactive: Vec<usize>,
    /// Bulk members, which take turns by the weights of their exports.
    pub(crate) bulk: BulkQueues,
    /// An empty list that keeps its memory.
    spare: Vec<usize>,
}

impl RunQueues {
    #[inline]
    pub(crate) fn schedule(&mut self, number: usize, member: &mut Member) {
        if std::mem::replace(&mut member.scheduled, true) {
            return;
        }
        match member.quantum.is_bulk() {
            true => self.bulk.push(member.export(), number),
            false => self.interactive.push(number),
        }
    }

    /// Takes the list of interactive members.
    #[inline]
    pub(crate) fn take_interactive(&mut self) -> Vec<usize> {
        std::mem::replace(&mut self.interactive, std::mem::take(&mut self.spare))
    }

    /// Keeps the memory of a list that was taken, which is empty now.
    #[inline]
    pub(crate) fn keep(&mut self, list: Vec<usize>) {
        debug_assert!(list.is_empty());
        self.spare = list;
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.interactive.is_empty() && self.bulk.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fairness::quantum_among;

    /// The quantum of a connection that moved `bytes` in each of its last ten services.
    fn moving(bytes: u64) -> Quantum {
        let mut quantum = Quantum::default();
        for _ in 0..10 {
            quantum.begin(quantum_among(2));
            quantum.moved(bytes);
        }
        quantum
    }

    #[test]
    fn a_connection_that_moves_a_quantum_in_each_service_is_bulk_and_one_that_moves_little_is_not()
    {
        let mut queues = RunQueues::default();
        for (number, bytes) in [(1, quantum_among(2)), (2, 16 * 4096), (3, 1 << 20)] {
            let mut member = Member { quantum: moving(bytes), ..Member::default() };
            queues.schedule(number, &mut member);
            // It is in one queue once.
            queues.schedule(number, &mut member);
        }
        let RunQueues { interactive, mut bulk, .. } = queues;
        let mut order = Vec::new();
        while let Some(number) = bulk.pop() {
            order.push(number);
            bulk.serviced(1, 100);
        }
        assert_eq!((interactive, order), (vec![2], vec![1, 3]));
    }
}
