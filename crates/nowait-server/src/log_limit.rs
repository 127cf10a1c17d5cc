//! Limits how often the log repeats itself.
//!
//! Invariant: the first message of a kind is always due, and then at most one in
//! [`REPEAT_INTERVAL`]; the others are counted, and the next message of the kind says how many. There
//! are as many kinds as the code has, whatever clients send.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::locking::lock;

/// How long messages of a kind are only counted.
/// Beyond it: the next line says how many were left out.
pub(crate) const REPEAT_INTERVAL: Duration = Duration::from_secs(30);

struct Entry<K> {
    kind: K,
    reported_at: Instant,
    left_out: u64,
}

/// The messages of several kinds.
pub(crate) struct LogLimit<K>(Mutex<Vec<Entry<K>>>);

impl<K> Default for LogLimit<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K> LogLimit<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<K: Copy + PartialEq> LogLimit<K> {
    /// Whether to log a message of `kind` at `now`: the number left out since the last one.
    pub(crate) fn due(&self, kind: K, now: Instant) -> Option<u64> {
        let mut entries = lock(&self.0);
        let Some(entry) = entries.iter_mut().find(|entry| entry.kind == kind) else {
            entries.push(Entry { kind, reported_at: now, left_out: 0 });
            return Some(0);
        };
        if now.saturating_duration_since(entry.reported_at) < REPEAT_INTERVAL {
            entry.left_out += 1;
            return None;
        }
        entry.reported_at = now;
        Some(std::mem::take(&mut entry.left_out))
    }

    /// Takes the kinds with messages that were only counted, and how many.
    pub(crate) fn take_left_out(&self) -> Vec<(K, u64)> {
        let mut entries = lock(&self.0);
        let counted = entries.iter_mut().filter(|entry| entry.left_out > 0);
        counted.map(|entry| (entry.kind, std::mem::take(&mut entry.left_out))).collect()
    }
}

/// The end of a message before which `count` were left out.
pub(crate) fn left_out_note(count: u64) -> String {
    match count {
        0 => String::new(),
        count => format!(" ({count} more since the last line)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_logged_at_once_and_then_counted_for_a_while() {
        let (limit, begin) = (LogLimit::new(), Instant::now());
        let due = |kind, seconds| limit.due(kind, begin + Duration::from_secs(seconds));
        assert_eq!(due('a', 0), Some(0));
        assert_eq!(due('b', 0), Some(0));
        for _ in 0..7 {
            assert_eq!(due('a', 29), None);
        }
        assert_eq!(due('a', 30), Some(7));
        assert_eq!(due('a', 31), None);
        assert_eq!(due('b', 60), Some(0));
        assert_eq!(limit.take_left_out(), [('a', 1)]);
        assert_eq!(limit.take_left_out(), []);
    }
}
