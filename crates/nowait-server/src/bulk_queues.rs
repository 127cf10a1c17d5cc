//! The scheduled bulk members of a thread, in the order of their turns: exports share by weight, the
//! members of an export take turns.
//!
//! Invariant: of two exports that always have bulk members, each moves bytes in proportion to its weight,
//! but for one service. An export that comes back has no claim for the time in which it had none.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use nowait::DEFAULT_WEIGHT;

/// The bulk members of one export.
#[derive(Default)]
struct ExportTurns {
    members: VecDeque<usize>,
    /// Bytes that it has moved, divided by its weight: the export with the fewest is next.
    time: u64,
    /// The remainder of that division.
    remainder: u64,
    is_queued: bool,
}

/// The scheduled bulk members, by number.
#[derive(Default)]
pub(crate) struct BulkQueues {
    /// By the index of the export, plus one; those without an export come first.
    exports: Vec<ExportTurns>,
    /// Exports with members: their times, a sequence number and their places in `exports`.
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    sequence: u64,
    /// The time of the export that was served last.
    now: u64,
    /// The export whose member is being serviced.
    current: Option<usize>,
    len: usize,
}

impl BulkQueues {
    /// Puts a member of `export` behind the others of that export.
    pub(crate) fn push(&mut self, export: u32, number: usize) {
        let place = export.wrapping_add(1) as usize;
        if self.exports.len() <= place {
            self.exports.resize_with(place + 1, ExportTurns::default);
        }
        let now = self.now;
        if let Some(turns) = self.exports.get_mut(place) {
            turns.members.push_back(number);
            turns.time = turns.time.max(now);
        }
        self.len += 1;
        self.queue(place);
    }

    fn queue(&mut self, place: usize) {
        let Some(turns) = self.exports.get_mut(place) else { return };
        if !turns.is_queued && !turns.members.is_empty() && self.current != Some(place) {
            turns.is_queued = true;
            self.sequence += 1;
            self.order.push(Reverse((turns.time, self.sequence, place)));
        }
    }

    /// Takes the member whose turn it is. [`BulkQueues::serviced`] has to be called after its service.
    pub(crate) fn pop(&mut self) -> Option<usize> {
        let Reverse((time, _, place)) = self.order.pop()?;
        let turns = self.exports.get_mut(place)?;
        turns.is_queued = false;
        let member = turns.members.pop_front()?;
        self.len -= 1;
        (self.now, self.current) = (time, Some(place));
        Some(member)
    }

    /// The member that was taken last has moved `bytes`; its export has this `weight`.
    pub(crate) fn serviced(&mut self, bytes: u64, weight: u32) {
        let Some(place) = self.current.take() else { return };
        if let Some(turns) = self.exports.get_mut(place) {
            let (scaled, weight) = (bytes * u64::from(DEFAULT_WEIGHT), u64::from(weight.max(1)));
            let owed = scaled + turns.remainder;
            turns.time += owed / weight;
            turns.remainder = owed % weight;
        }
        self.queue(place);
    }

    /// The number of members.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that each of the exports with these weights and numbers of members moves in 10,000 services of
    /// 1,000 bytes; the members of export n have numbers from 100 n on.
    fn moved(exports: &[(u32, usize)]) -> (Vec<u64>, Vec<u64>) {
        let mut queues = BulkQueues::default();
        for (export, (_, members)) in exports.iter().enumerate() {
            (0..*members).for_each(|n| queues.push(export as u32, 100 * export + n));
        }
        let (mut by_export, mut by_member) = (vec![0; exports.len()], vec![0; 100 * exports.len()]);
        for _ in 0..10_000 {
            let member = queues.pop().unwrap();
            let export = member / 100;
            queues.push(export as u32, member);
            queues.serviced(1000, exports[export].0);
            by_export[export] += 1000;
            by_member[member] += 1000;
        }
        (by_export, by_member)
    }

    #[test]
    fn exports_share_equally_however_many_members_they_have_and_members_take_turns() {
        let (exports, members) = moved(&[(100, 1), (100, 4)]);
        assert_eq!(exports, [5_000_000, 5_000_000]);
        assert_eq!(members[100..104], [1_250_000; 4]);
    }

    #[test]
    fn exports_share_by_weight() {
        let (exports, _) = moved(&[(100, 2), (300, 1), (600, 9)]);
        for (bytes, share) in exports.into_iter().zip([1_000_000, 3_000_000, 6_000_000_u64]) {
            assert!(bytes.abs_diff(share) <= 2000, "{bytes} of {share}");
        }
    }

    #[test]
    fn an_export_that_was_idle_has_no_claim_for_that_time() {
        let mut queues = BulkQueues::default();
        queues.push(0, 0);
        for _ in 0..100 {
            assert_eq!(queues.pop(), Some(0));
            queues.push(0, 0);
            queues.serviced(1000, 100);
        }
        queues.push(1, 100);
        let turns: Vec<_> = (0..4)
            .map(|_| {
                let member = queues.pop().unwrap();
                queues.push((member / 100) as u32, member);
                queues.serviced(1000, 100);
                member
            })
            .collect();
        assert_eq!(turns.iter().filter(|member| **member == 100).count(), 2, "{turns:?}");
        assert_eq!(queues.len(), 2);
    }

    #[test]
    fn a_queue_is_empty_once_its_members_were_taken() {
        let mut queues = BulkQueues::default();
        assert!(queues.is_empty() && queues.pop().is_none());
        queues.push(u32::MAX, 7);
        assert_eq!((queues.len(), queues.pop()), (1, Some(7)));
        queues.serviced(5, 0);
        assert!(queues.is_empty() && queues.pop().is_none());
    }
}
