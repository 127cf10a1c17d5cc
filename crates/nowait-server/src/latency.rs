//! How long requests take: one in [`SAMPLE_EVERY`] is timed, from its submission to the engine to its
//! completion, and what the storage takes of that.
//!
//! Invariant: a request that is not timed costs a count and a bit of its tag; no clock is read for
//! it. Samples are taken by number, not by time, so that slow requests are as likely as fast ones.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Every so many requests one is timed, on each thread.
pub(crate) const SAMPLE_EVERY: u32 = 16;
/// Marks the tag of a timed request; frontends use fewer bits for their keys.
pub(crate) const TIMED: u64 = 1 << 31;
/// The most timed requests of a thread in flight.
/// Beyond it: the oldest one is timed no longer.
const MAX_TIMED: usize = 64;
/// Buckets of a histogram: bucket n is for less than 2^n microseconds, the last one for the rest.
const BUCKETS: usize = 26;

/// Decides which requests of a thread are timed.
pub(crate) struct Sampler {
    until_next: u32,
    /// The timed requests in flight, the oldest first.
    timed: Vec<Timed>,
    /// Some of them have not gone to the storage.
    has_new: bool,
    /// When the engine was asked last for what the storage has done.
    drained: Option<Instant>,
}

/// A timed request in flight.
struct Timed {
    tag: u64,
    submitted: Instant,
    /// When it went to the storage.
    at_device: Option<Instant>,
}

/// How long a request took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// From its submission to its completion.
    pub(crate) whole: Duration,
    /// From the submission to the storage, with all that waits for it, to the moment at which the
    /// thread has taken the result. Of a request that needs no storage about none.
    pub(crate) device: Duration,
}

impl Default for Sampler {
    fn default() -> Self {
        let timed = Vec::with_capacity(MAX_TIMED);
        Self { until_next: SAMPLE_EVERY, timed, has_new: false, drained: None }
    }
}

impl Sampler {
    /// The tag for a request that is submitted now: `tag`, marked if the request is timed.
    #[inline]
    pub(crate) fn mark(&mut self, tag: u64) -> u64 {
        debug_assert_eq!(tag & TIMED, 0);
        self.until_next -= 1;
        if self.until_next == 0 { self.begin(tag | TIMED) } else { tag }
    }

    #[cold]
    fn begin(&mut self, tag: u64) -> u64 {
        self.until_next = SAMPLE_EVERY;
        // A request that was rejected has left its tag here.
        self.timed.retain(|timed| timed.tag != tag);
        if self.timed.len() == MAX_TIMED {
            self.timed.remove(0);
        }
        self.timed.push(Timed { tag, submitted: Instant::now(), at_device: None });
        self.has_new = true;
        tag
    }

    /// The requests that were collected go to the storage now.
    #[inline]
    pub(crate) fn begin_device(&mut self) {
        if self.has_new {
            self.begin_at_device();
        }
    }

    #[cold]
    fn begin_at_device(&mut self) {
        self.has_new = false;
        let now = Instant::now();
        let new = self.timed.iter_mut().rev().take_while(|timed| timed.at_device.is_none());
        new.for_each(|timed| timed.at_device = Some(now));
    }

    /// The thread has taken results; the completions are looked at later.
    #[inline]
    pub(crate) fn end_device(&mut self) {
        if !self.timed.is_empty() {
            self.drained = Some(Instant::now());
        }
    }

    /// The times of the request of a marked `tag`, if it was not given up.
    #[cold]
    pub(crate) fn end(&mut self, tag: u64) -> Option<Times> {
        let at = self.timed.iter().position(|timed| timed.tag == tag)?;
        let Timed { submitted, at_device, .. } = self.timed.remove(at);
        let whole = submitted.elapsed();
        let device = match (at_device, self.drained) {
            (Some(from), Some(to)) => to.saturating_duration_since(from),
            _ => Duration::ZERO,
        };
        Some(Times { whole, device: device.min(whole) })
    }
}

/// The counters of a histogram that one thread changes.
#[derive(Default)]
pub(crate) struct LatencyCounters {
    buckets: [AtomicU64; BUCKETS],
    nanoseconds: AtomicU64,
}

impl LatencyCounters {
    /// Counts a request that took `time`. To be called by the thread itself.
    pub(crate) fn record(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let bucket = (u64::BITS - (nanoseconds / 1000).leading_zeros()) as usize;
        let add = |counter: &AtomicU64, count| {
            counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
        };
        add(&self.buckets[bucket.min(BUCKETS - 1)], 1);
        add(&self.nanoseconds, nanoseconds);
    }

    pub(crate) fn add_to(&self, latencies: &mut Latencies) {
        for (total, counter) in latencies.buckets.iter_mut().zip(&self.buckets) {
            *total += counter.load(Ordering::Relaxed);
        }
        latencies.nanoseconds += self.nanoseconds.load(Ordering::Relaxed);
    }
}

/// How long requests took, of those that were timed: one in sixteen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Latencies {
    buckets: [u64; BUCKETS],
    nanoseconds: u64,
}

impl Latencies {
    /// Requests that were timed.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The time that they took together.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds)
    }

    /// The buckets: an upper bound in seconds, infinite for the last, and how many requests took less
    /// than that and not less than the bound before.
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        self.buckets.iter().enumerate().map(|(at, count)| (bound(at), *count))
    }

    /// An upper bound in seconds, by at most a factor of two, of the time that `share` (0 to 1) of the
    /// requests stayed within; `None` if none was timed.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let wanted = (share.clamp(0.0, 1.0) * count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let mut buckets = self.buckets();
        let (bound, _) = buckets.find(|(_, requests)| {
            seen += requests;
            seen >= wanted
        })?;
        Some(bound)
    }
}

/// The upper bound of bucket `at` in seconds.
fn bound(at: usize) -> f64 {
    if at == BUCKETS - 1 { f64::INFINITY } else { (1u64 << at) as f64 / 1e6 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: &[u64]) -> Latencies {
        let (counters, mut latencies) = (LatencyCounters::default(), Latencies::default());
        times.iter().for_each(|nanoseconds| counters.record(Duration::from_nanos(*nanoseconds)));
        counters.add_to(&mut latencies);
        latencies
    }

    #[test]
    fn a_time_is_below_the_bound_of_its_bucket_and_not_below_the_one_before() {
        for nanoseconds in [0, 1, 999, 1000, 1001, 1999, 2000, 65_536_000, 16_777_215_999, u64::MAX]
        {
            let latencies = of(&[nanoseconds]);
            let at = latencies.buckets.iter().position(|count| *count == 1).unwrap();
            let seconds = nanoseconds as f64 / 1e9;
            assert!(seconds < bound(at), "{nanoseconds}: {at}");
            assert!(at == 0 || seconds >= bound(at - 1), "{nanoseconds}: {at}");
        }
    }

    #[test]
    fn a_quantile_is_the_bound_of_the_bucket_in_which_that_share_is_reached() {
        let latencies = of(&[1500, 1500, 1500, 3_000_000]);
        let quantiles = [0.0, 0.5, 0.75, 0.76, 1.0].map(|share| latencies.quantile(share).unwrap());
        assert_eq!(quantiles, [2e-6, 2e-6, 2e-6, 4.096e-3, 4.096e-3]);
        assert_eq!((latencies.count(), latencies.sum()), (4, Duration::from_nanos(3_004_500)));
        assert_eq!(of(&[]).quantile(0.5), None);
    }

    #[test]
    fn one_request_in_sixteen_is_timed_and_its_tag_says_so() {
        let mut sampler = Sampler::default();
        let tags: Vec<u64> = (0..64).map(|tag| sampler.mark(tag)).collect();
        let timed: Vec<u64> = tags.into_iter().filter(|tag| tag & TIMED != 0).collect();
        assert_eq!(timed, [15, 31, 47, 63].map(|tag| tag | TIMED));
        assert!(sampler.end(31 | TIMED).is_some() && sampler.end(31 | TIMED).is_none());
    }

    #[test]
    fn the_time_of_the_storage_is_a_part_of_the_whole_and_begins_with_the_submission_to_it() {
        let pause = || std::thread::sleep(Duration::from_millis(2));
        let mut sampler = Sampler::default();
        let tag = (0..16).map(|tag| sampler.mark(tag)).last().unwrap();
        pause();
        sampler.begin_device();
        // A later one does not change when the first one went to the storage.
        let later = (16..32).map(|tag| sampler.mark(tag)).last().unwrap();
        pause();
        sampler.begin_device();
        sampler.end_device();
        pause();
        let times = sampler.end(tag).unwrap();
        assert!(times.device >= Duration::from_millis(2), "{times:?}");
        assert!(times.whole >= times.device + Duration::from_millis(4), "{times:?}");
        assert!(sampler.end(later).unwrap().device < times.device);
        // One that never went to the storage.
        let none = (32..48).map(|tag| sampler.mark(tag)).last().unwrap();
        assert_eq!(sampler.end(none).unwrap().device, Duration::ZERO);
    }

    #[test]
    fn requests_that_never_complete_do_not_pile_up() {
        let mut sampler = Sampler::default();
        for tag in 0..100_000 {
            sampler.mark(tag % (1 << 20));
        }
        assert_eq!(sampler.timed.len(), MAX_TIMED);
    }
}
