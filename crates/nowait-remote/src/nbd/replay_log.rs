//! The replay log: changes that have ended and that no flush has made durable yet, so that they can be
//! asked again if the server dies and loses them.
//!
//! Invariant: a change is in the log from its end until a flush that was asked after it has succeeded;
//! two changes that overlap are in the order in which the server made them. Its memory is bounded: the
//! log asks for a flush in time, and takes no change beyond its bound.

use std::collections::VecDeque;

use nowait::ByteRange;

use crate::nbd::job::{Command, Job, Origin};

/// The bytes, and the number of changes, from which on the log asks for a flush.
const TRIM_BYTES: u64 = 32 << 20;
const TRIM_CHANGES: usize = 4096;
/// The bytes, and the number of changes, from which on no change is begun.
const MAX_BYTES: u64 = 64 << 20;
const MAX_CHANGES: usize = 16384;

struct Change {
    number: u64,
    command: Command,
    range: ByteRange,
    data: Vec<u8>,
}

/// The changes since the last flush.
pub(super) struct ReplayLog {
    changes: VecDeque<Change>,
    bytes: u64,
    next: u64,
    /// A change was lost that had ended: no flush may succeed.
    lost: bool,
}

impl ReplayLog {
    pub(super) const fn new() -> Self {
        Self { changes: VecDeque::new(), bytes: 0, next: 0, lost: false }
    }

    /// Adds a change that has ended.
    pub(super) fn push(&mut self, command: Command, range: ByteRange, data: Vec<u8>) {
        if self.lost {
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
        self.lost = true;
        self.changes.clear();
        self.bytes = 0;
    }

    pub(super) const fn has_lost(&self) -> bool {
        self.lost
    }

    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    pub(super) fn wants_flush(&self) -> bool {
        self.bytes >= TRIM_BYTES || self.changes.len() >= TRIM_CHANGES
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes >= MAX_BYTES || self.changes.len() >= MAX_CHANGES
    }

    /// Takes all changes out, as jobs that ask for them again.
    pub(super) fn take_jobs(&mut self) -> impl Iterator<Item = Job> + use<> {
        self.bytes = 0;
        std::mem::take(&mut self.changes).into_iter().map(|change| Job {
            command: change.command,
            range: change.range,
            durable: false,
            data: change.data,
            origin: Origin::Replay,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(log: &mut ReplayLog, pos: u64, len: usize) {
        log.push(Command::Write, ByteRange::new(pos, len as u64), vec![1; len]);
    }

    #[test]
    fn a_flush_ends_the_changes_before_it_and_no_others() {
        let mut log = ReplayLog::new();
        write(&mut log, 0, 10);
        write(&mut log, 10, 10);
        let asked = log.next();
        write(&mut log, 20, 10);
        log.forget(asked);
        let left: Vec<_> = log.take_jobs().map(|job| job.range.pos).collect();
        assert_eq!((left, log.is_empty(), log.bytes), (vec![20], true, 0));
    }

    #[test]
    fn the_log_asks_for_a_flush_before_it_is_full() {
        let mut log = ReplayLog::new();
        while !log.wants_flush() {
            write(&mut log, 0, 1 << 20);
        }
        assert!(!log.is_full());
        while !log.is_full() {
            write(&mut log, 0, 1 << 20);
        }
        assert_eq!(log.bytes, MAX_BYTES);
        log.forget(log.next());
        assert!(!log.wants_flush() && log.is_empty());
    }

    #[test]
    fn after_a_loss_nothing_is_kept() {
        let mut log = ReplayLog::new();
        write(&mut log, 0, 10);
        log.lose();
        write(&mut log, 0, 10);
        assert!(log.has_lost() && log.is_empty());
    }
}
