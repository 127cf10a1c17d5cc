//! Whether an answer comes fast enough.
//!
//! Invariant: it is late when the limit has passed since its begin, or since enough bytes of it had
//! come: one at least, and as many as the minimum rate wants of that time.

use std::time::{Duration, Instant};

/// The progress of one answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    since: Instant,
    /// Bytes that have come since then.
    bytes: u64,
    limit: Duration,
    /// Bytes that have to come within the limit.
    needed: u64,
}

impl Progress {
    /// The progress of an answer that is asked for now, of which `rate` bytes a second have to come within
    /// each `limit`.
    pub(super) fn new(limit: Duration, rate: u64) -> Self {
        let needed = u128::from(rate) * limit.as_millis() / 1000;
        let needed = u64::try_from(needed).unwrap_or(u64::MAX).max(1);
        Self { since: Instant::now(), bytes: 0, limit, needed }
    }

    /// The last moment at which it was fast enough, or its begin.
    pub(super) const fn since(&self) -> Instant {
        self.since
    }

    /// The moment at which it is late.
    pub(super) fn end(&self) -> tokio::time::Instant {
        (self.since + self.limit).into()
    }

    /// So many `bytes` have come at `now`.
    pub(super) fn came(&mut self, bytes: usize, now: Instant) {
        self.bytes += bytes as u64;
        if self.bytes >= self.needed {
            (self.since, self.bytes) = (now, 0);
        }
    }

    /// Why it is late: nothing has come, or so little.
    pub(super) fn late(&self) -> String {
        let seconds = self.limit.as_secs_f32();
        match self.bytes {
            0 => format!("the server has not answered for {seconds:.1} s"),
            bytes => format!("only {bytes} bytes of an answer came within {seconds:.1} s"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_late_when_too_few_bytes_came_within_the_limit() {
        let limit = Duration::from_secs(20);
        let mut progress = Progress::new(limit, 100);
        let begin = progress.since();
        let end = |seconds| tokio::time::Instant::from(begin + Duration::from_secs(seconds));
        progress.came(1999, begin + Duration::from_secs(19));
        assert_eq!(progress.end(), end(20));
        assert!(progress.late().contains("only 1999 bytes"));
        progress.came(1, begin + Duration::from_secs(19));
        assert_eq!(progress.end(), end(39));
        let mut progress = Progress::new(limit, 0);
        progress.came(1, progress.since() + Duration::from_secs(19));
        assert!(progress.late().contains("has not answered for 20.0 s"));
    }
}
