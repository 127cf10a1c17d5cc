//! The replay log: changes that have completed and that no flush has made durable yet, so that they can be
//! asked again if the server dies and loses them.
//!
//! Invariant: a change is in the log from its end until a flush that was asked after it has succeeded;
//! two changes that overlap are in the order in which the server made them. Its memory is bounded: the
//! log asks for a flush in time, and takes no change beyond its bound.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nowait::ByteRange;

use crate::nbd::injected_bug::{RemoteBug, injected};
use crate::nbd::job::{Command, Job, Origin};
use crate::nbd::limits::Limits;

struct Change {
    number: u64,
    command: Command,
    range: ByteRange,
    data: Vec<u8>,
}

impl Change {
    /// A job that asks again for the part `range` of it.
    fn part(&self, range: ByteRange) -> Job {
        let start = (range.pos - self.range.pos) as usize;
        let data = self.data.get(start..start + range.len as usize).unwrap_or_default().to_vec();
        let (command, origin) = (self.command, Origin::Replay);
        Job { command, range, durable: false, data, was_asked: false, origin }
    }
}

/// The changes since the last flush.
pub(super) struct ReplayLog {
    changes: VecDeque<Change>,
    bytes: u64,
    next: u64,
    /// A change was lost that had completed: no flush may succeed.
    lost: Arc<AtomicBool>,
    limits: Limits,
}

impl ReplayLog {
    pub(super) fn new(limits: Limits) -> Self {
        Self { changes: VecDeque::new(), bytes: 0, next: 0, lost: Arc::default(), limits }
    }

    /// Adds a change that has completed.
    pub(super) fn push(&mut self, command: Command, range: ByteRange, data: Vec<u8>) {
        if self.has_lost() {
            return;
        }
        self.bytes += data.len() as u64;
        self.changes.push_back(Change { number: self.next, command, range, data });
        self.next += 1;
    }

    /// The number of the next change: a flush that is asked now covers those before it.
    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    /// A flush has succeeded that covers the changes before `next`.
    pub(super) fn forget(&mut self, next: u64) {
        while self.changes.front().is_some_and(|change| change.number < next) {
            let first = self.changes.pop_front();
            self.bytes -= first.map_or(0, |change| change.data.len() as u64);
        }
    }

    /// A change was lost.
    pub(super) fn lose(&mut self) {
        self.lost.store(true, Ordering::Relaxed);
        self.changes.clear();
        self.bytes = 0;
    }

    pub(super) fn has_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Whether a change was lost, for other threads; told before any flush fails for that reason.
    pub(super) fn lost(&self) -> Arc<AtomicBool> {
        self.lost.clone()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The number of its changes.
    pub(super) fn len(&self) -> usize {
        self.changes.len()
    }

    /// The bytes of its changes.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn wants_flush(&self) -> bool {
        let (changes, bytes) = self.limits.trim;
        self.bytes >= bytes || self.changes.len() >= changes
    }

    pub(super) fn is_full(&self) -> bool {
        let (changes, bytes) = self.limits.most;
        self.bytes >= bytes || self.changes.len() >= changes
    }

    /// Takes all changes out, as jobs that ask for them again: no two of the same byte, each of which
    /// is made again by its last change alone. An earlier change, made again, could overwrite a durable
    /// one, and be there when the server and this program die before the durable one is made again.
    pub(super) fn take_jobs(&mut self) -> VecDeque<Job> {
        self.bytes = 0;
        let mut changes = std::mem::take(&mut self.changes);
        if injected(RemoteBug::ReplayOutOfOrder) {
            changes.make_contiguous().reverse();
        }
        let (mut jobs, mut covered) = (VecDeque::new(), BTreeMap::new());
        for change in changes.into_iter().rev() {
            let left = match injected(RemoteBug::ReplayOverwritten) {
                true => vec![change.range],
                false => cover(&mut covered, change.range),
            };
            left.into_iter().rev().for_each(|range| jobs.push_front(change.part(range)));
        }
        jobs
    }
}

/// Adds `range` to the ranges in `covered`, each a start with its end, and returns the parts of it that
/// were not covered, in order.
fn cover(covered: &mut BTreeMap<u64, u64>, range: ByteRange) -> Vec<ByteRange> {
    let (mut start, mut end) = (range.pos, range.end());
    let (mut left, mut pos) = (Vec::new(), start);
    // The first range that touches it may begin before it.
    let before = covered.range(..=start).next_back().map(|(&from, &to)| (from, to));
    let mut touched: Vec<_> = before.into_iter().filter(|&(_, to)| to >= start).collect();
    touched.extend(covered.range(start.saturating_add(1)..=end).map(|(&from, &to)| (from, to)));
    for (from, to) in touched {
        if pos < from {
            left.push(ByteRange::new(pos, from.min(end) - pos));
        }
        pos = pos.max(to);
        (start, end) = (start.min(from), end.max(to));
        covered.remove(&from);
    }
    if pos < range.end() {
        left.push(ByteRange::new(pos, range.end() - pos));
    }
    covered.insert(start, end);
    left
}

#[cfg(test)]
mod tests {
    use nowait_testkit::Random;

    use super::*;

    fn write(log: &mut ReplayLog, pos: u64, len: usize) {
        log.push(Command::Write, ByteRange::new(pos, len as u64), vec![1; len]);
    }

    #[test]
    fn a_flush_ends_the_changes_before_it_and_no_others() {
        let mut log = ReplayLog::new(Limits::DEFAULT);
        write(&mut log, 0, 10);
        write(&mut log, 10, 10);
        let asked = log.next();
        write(&mut log, 20, 10);
        log.forget(asked);
        let left: Vec<_> = log.take_jobs().into_iter().map(|job| job.range.pos).collect();
        assert_eq!((left, log.is_empty(), log.bytes), (vec![20], true, 0));
    }

    #[test]
    fn the_log_asks_for_a_flush_before_it_is_full() {
        let mut log = ReplayLog::new(Limits::DEFAULT);
        while !log.wants_flush() {
            write(&mut log, 0, 1 << 20);
        }
        assert!(!log.is_full());
        while !log.is_full() {
            write(&mut log, 0, 1 << 20);
        }
        assert_eq!(log.bytes, Limits::DEFAULT.most.1);
        log.forget(log.next());
        assert!(!log.wants_flush() && log.is_empty());
    }

    #[test]
    fn each_byte_is_made_again_by_its_last_change_alone() {
        let mut random = Random::from_seed(5);
        for _ in 0..200 {
            let (mut log, mut expected) = (ReplayLog::new(Limits::DEFAULT), vec![0u8; 64]);
            for value in 1..20 {
                let (pos, len) = (random.below(56), 1 + random.below(8));
                let data = vec![value; len as usize];
                expected[pos as usize..(pos + len) as usize].copy_from_slice(&data);
                log.push(Command::Write, ByteRange::new(pos, len), data);
            }
            let mut found = vec![0u8; 64];
            for job in log.take_jobs() {
                let range = job.range.pos as usize..job.range.end() as usize;
                assert!(found[range.clone()].iter().all(|&byte| byte == 0), "made again twice");
                found[range].copy_from_slice(&job.data);
            }
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn after_a_loss_nothing_is_kept() {
        let mut log = ReplayLog::new(Limits::DEFAULT);
        write(&mut log, 0, 10);
        log.lose();
        write(&mut log, 0, 10);
        assert!(log.has_lost() && log.is_empty());
    }
}
