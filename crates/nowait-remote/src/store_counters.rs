//! Counts of what was asked of a store, and of how it answered.
//!
//! Invariant: only the storage's own thread counts; every thread may read.

#[cfg(any(test, feature = "object-stores"))]
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nowait::internal::Counted;
use serde::{Deserialize, Serialize};

use crate::open_list::OpenList;

/// Buckets of the histogram: bucket n is for less than 2^n ms, the last one for the rest.
const STORE_LATENCY_BUCKETS: usize = 18;

static OPEN: OpenList<StoreCounters> = OpenList::new();

/// The counts of all storages of this process that are open, by their URLs; those of one URL
/// together.
#[must_use]
pub fn open_stores() -> Vec<(String, StoreCounts)> {
    let mut all: Vec<(String, StoreCounts)> = Vec::new();
    for (url, counters) in OPEN.all() {
        match all.iter_mut().find(|(known, _)| *known == url) {
            Some((_, sum)) => sum.add(&counters.counts()),
            None => all.push((url, counters.counts())),
        }
    }
    all
}

nowait::counts! {
    /// The counts of one storage, since it was opened.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct StoreCounts {
        /// Blocks that reads had from memory or from the cache.
        pub hits: u64 => Counter "nowait_store_hits",
        /// Blocks that reads had from the store.
        pub misses: u64 => Counter "nowait_store_misses",
        /// Blocks of the cache that were corrupt, and were fetched again.
        pub corrupt: u64 => Counter "nowait_store_corrupt",
        /// Blocks that were written to the cache.
        pub stored: u64 => Counter "nowait_store_stored",
        /// Bytes that came from the store.
        pub fetched_bytes: u64 => Counter "nowait_store_fetched" "bytes",
        /// Requests to the store that were made again.
        pub retries: u64 => Counter "nowait_store_retries",
        /// How many requests took a time of each bucket.
        #[serde(skip)]
        latencies: [u64; STORE_LATENCY_BUCKETS],
        /// How long the requests took together.
        #[serde(skip)]
        pub latency_sum: Duration,
    }
}

nowait::counts! {
    /// The memory for blocks of the objects of all stores.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct MemoryCounts {
        /// Bytes of memory that blocks of objects have.
        pub block_memory_bytes: u64 => Gauge "nowait_block_memory" "bytes",
        /// The most bytes of memory that blocks of objects may have.
        pub max_block_memory_bytes: u64 => Gauge "nowait_block_memory_limit" "bytes",
    }
}

/// The counters of one storage.
#[derive(Debug, Default)]
pub struct StoreCounters(Mutex<StoreCounts>);

impl StoreCounters {
    /// Counters of the storage at `url`, which are listed as long as they are used.
    #[cfg(any(test, feature = "object-stores"))]
    pub(crate) fn listed(url: String) -> Arc<Self> {
        OPEN.add(url)
    }

    /// Counts something.
    #[cfg(any(test, feature = "object-stores"))]
    pub(crate) fn count(&self, count: impl FnOnce(&mut StoreCounts)) {
        count(&mut self.lock());
    }

    /// Counts a request that took `time`, with an answer of `bytes` or with none.
    #[cfg(any(test, feature = "object-stores"))]
    pub(crate) fn request(&self, time: Duration, bytes: u64) {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - ms.leading_zeros()) as usize;
        self.count(|counts| {
            counts.latencies[bucket.min(STORE_LATENCY_BUCKETS - 1)] += 1;
            counts.latency_sum = counts.latency_sum.saturating_add(time);
            counts.fetched_bytes += bytes;
        });
    }

    /// The counts as of now.
    #[must_use]
    pub fn counts(&self) -> StoreCounts {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, StoreCounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoreCounts {
    fn add(&mut self, other: &Self) {
        self.add_counts(other);
        self.latency_sum = self.latency_sum.saturating_add(other.latency_sum);
        let buckets = self.latencies.iter_mut().zip(&other.latencies);
        buckets.for_each(|(sum, count)| *sum += count);
    }

    /// Requests to the store.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.latencies.iter().sum()
    }

    /// The histogram of how long requests took: an upper bound in seconds, infinite for the last, and
    /// how many requests took less than that and not less than the bound before.
    pub fn latencies(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let bound = |bucket| match bucket + 1 == STORE_LATENCY_BUCKETS {
            true => f64::INFINITY,
            false => (1u64 << bucket) as f64 / 1e3,
        };
        self.latencies.iter().enumerate().map(move |(bucket, count)| (bound(bucket), *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_storages_that_are_open_are_listed_and_those_of_one_url_together() {
        let [one, two] = ["test:a", "test:a"].map(|url| StoreCounters::listed(url.into()));
        let listed = || open_stores().into_iter().find(|(url, _)| url == "test:a");
        one.request(Duration::ZERO, 3);
        two.request(Duration::ZERO, 4);
        assert_eq!(listed().unwrap().1.fetched_bytes, 7);
        drop(one);
        assert_eq!(listed().unwrap().1.fetched_bytes, 4);
        drop(two);
        assert!(listed().is_none());
    }

    #[test]
    fn a_request_is_in_the_bucket_of_its_time() {
        let counters = StoreCounters::default();
        for ms in [0, 1, 3, 4, 100_000_000] {
            counters.request(Duration::from_millis(ms), 10);
        }
        let counts = counters.counts();
        let filled: Vec<_> = counts.latencies().filter(|(_, count)| *count > 0).collect();
        let infinite = f64::INFINITY;
        assert_eq!(filled, [(0.001, 1), (0.002, 1), (0.004, 1), (0.008, 1), (infinite, 1)]);
        assert_eq!((counts.requests(), counts.fetched_bytes), (5, 50));
    }
}
