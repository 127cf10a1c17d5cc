//! Limits on what an export, and what each of its clients may do: requests and bytes a second, by token
//! buckets.
//!
//! Invariant: a request takes its tokens when it is submitted, even where there are fewer, and no
//! further one is taken before the debt is paid: so the rate is kept over time, whatever the size of a
//! request. A request in flight is never held up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::locking::lock;

/// A bucket that holds at most `size` tokens and is filled from empty in `refill_time`: a request
/// takes one token, or as many as it has bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    /// The most tokens that it holds, at least 1: so much can be done together after a pause.
    pub size: u64,
    /// Tokens beside these that are there once, in the beginning.
    pub one_time_burst: u64,
    /// The time in which an empty bucket is filled, from 1 ms to one day.
    pub refill_time: Duration,
}

impl TokenBucket {
    /// A bucket for `rate` tokens a second that lets through a tenth of a second's tokens together, or as few more as the
    /// exact rate takes.
    #[must_use]
    pub fn per_second(rate: u64) -> Self {
        // Of times of whole milliseconds, the shortest one that gives a whole number of tokens.
        let is_whole = |time: &u64| (rate % 1000 * time).is_multiple_of(1000);
        let times = (100..1000).filter(|time| rate >= 100 && is_whole(time));
        let time = times.min().unwrap_or(1000);
        let size = u128::from(rate) * u128::from(time) / 1000;
        let size = u64::try_from(size).unwrap_or(u64::MAX);
        Self { size, one_time_burst: 0, refill_time: Duration::from_millis(time) }
    }

    /// The shortest time to refill a bucket.
    pub const MIN_REFILL_TIME: Duration = Duration::from_millis(1);
    /// The longest time to refill the token bucket of a limit.
    /// Beyond it: the limit is refused.
    pub const MAX_REFILL_TIME: Duration = Duration::from_secs(86_400);

    /// Whether its values are within their ranges.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let times = Self::MIN_REFILL_TIME..=Self::MAX_REFILL_TIME;
        self.size > 0 && times.contains(&self.refill_time)
    }
}

/// The limits of an export, which all its frontends and clients share; or those of each client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of requests; `None` for no limit.
    pub requests: Option<TokenBucket>,
    /// Of the bytes that are read and written; `None` for no limit.
    pub bytes: Option<TokenBucket>,
}

impl Limits {
    /// Whether all buckets are within their ranges.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        [self.requests, self.bytes].iter().flatten().all(TokenBucket::is_valid)
    }

    /// Whether there is any limit.
    fn is_some(&self) -> bool {
        *self != Self::default()
    }
}

/// The limits of an export and of its clients as its threads see them.
#[derive(Default)]
pub(crate) struct SharedLimits {
    current: Mutex<CurrentLimits>,
    /// How many times the limits were changed.
    changes: AtomicU64,
}

/// The limits at a moment.
#[derive(Clone, Default)]
pub(crate) struct CurrentLimits {
    /// The limiter of the export; `None` without limits.
    pub(crate) export: Option<Arc<Limiter>>,
    /// The limits of each client; `None` without.
    pub(crate) of_clients: Option<ClientLimits>,
}

/// The limits of each client, and which ones these are: later ones have a greater number.
#[derive(Clone, Copy)]
pub(crate) struct ClientLimits {
    limits: Limits,
    number: u64,
}

impl SharedLimits {
    /// How many times the limits were changed: a thread that has seen the number asks for them only
    /// when it has changed.
    #[inline]
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(crate) fn current(&self) -> CurrentLimits {
        lock(&self.current).clone()
    }

    /// The limits of the export.
    pub(crate) fn get(&self) -> Limits {
        lock(&self.current).export.as_ref().map(|limiter| limiter.limits).unwrap_or_default()
    }

    /// The limits of each client.
    pub(crate) fn of_clients(&self) -> Limits {
        lock(&self.current).of_clients.map(|of_clients| of_clients.limits).unwrap_or_default()
    }

    /// Replaces the limits of the export. New buckets begin full, those that were there keep their tokens. The threads
    /// have to be woken up.
    pub(crate) fn set(&self, limits: Limits) {
        let mut current = lock(&self.current);
        let before = current.export.take();
        let limiter = || Arc::new(Limiter::after(before.as_deref(), limits, Instant::now()));
        current.export = limits.is_some().then(limiter);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Limits of each client.
    pub(crate) fn set_of_clients(&self, limits: Limits) {
        let mut current = lock(&self.current);
        let number = self.changes.fetch_add(1, Ordering::Release) + 1;
        current.of_clients = limits.is_some().then_some(ClientLimits { limits, number });
    }
}

/// The buckets of one client: a connection, a machine's device with all its queues, a block device of
/// this machine. Threads may share them.
#[derive(Default)]
pub(crate) struct ClientBuckets(Mutex<Option<(u64, Arc<Limiter>)>>);

impl ClientBuckets {
    /// The limiter of the client, whose buckets begin full, and keep their tokens when the limits change. A thread
    /// that has not seen the last change yet gets the limiter of that, too.
    pub(crate) fn limiter(&self, under: ClientLimits) -> Arc<Limiter> {
        let mut known = lock(&self.0);
        match &*known {
            Some((number, limiter)) if *number >= under.number => limiter.clone(),
            before => {
                let before = before.as_ref().map(|(_, limiter)| &**limiter);
                let limiter = Arc::new(Limiter::after(before, under.limits, Instant::now()));
                *known = Some((under.number, limiter.clone()));
                limiter
            }
        }
    }
}

/// Tokens of both kinds of buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
}

impl Tokens {
    /// Tokens without a limit.
    pub(crate) const ALL: Self = Self { requests: u64::MAX, bytes: u64::MAX };
    pub(crate) const NONE: Self = Self { requests: 0, bytes: 0 };

    /// The fewer of both, for each kind.
    pub(crate) fn min(self, other: Self) -> Self {
        let (requests, bytes) = (self.requests.min(other.requests), self.bytes.min(other.bytes));
        Self { requests, bytes }
    }

    /// An equal share of one among `count`, at least one of each kind.
    pub(crate) fn share(self, count: u64) -> Self {
        let share = |all: u64| all.div_ceil(count.max(1)).max(1);
        Self { requests: share(self.requests), bytes: share(self.bytes) }
    }
}

/// The buckets of an export or a client, shared by threads.
pub(crate) struct Limiter {
    limits: Limits,
    requests: Option<Mutex<Bucket>>,
    bytes: Option<Mutex<Bucket>>,
}

impl Limiter {
    /// The limiter of `limits`, in the place of another one whose buckets pass on their tokens.
    fn after(before: Option<&Self>, limits: Limits, now: Instant) -> Self {
        let bucket = |limit: Option<TokenBucket>, before: Option<&Mutex<Bucket>>| {
            limit.map(|limit| {
                Mutex::new(match before {
                    Some(before) => lock(before).with_limit(limit, now),
                    None => Bucket::new(limit, now),
                })
            })
        };
        let requests = bucket(limits.requests, before.and_then(|before| before.requests.as_ref()));
        let bytes = bucket(limits.bytes, before.and_then(|before| before.bytes.as_ref()));
        Self { limits, requests, bytes }
    }

    /// Takes the tokens of `tokens.requests` requests of `tokens.bytes` together.
    pub(crate) fn charge(&self, tokens: Tokens) {
        for (bucket, count) in [(&self.requests, tokens.requests), (&self.bytes, tokens.bytes)] {
            if let Some(bucket) = bucket {
                lock(bucket).take(count);
            }
        }
    }

    /// The time until another request may be taken; `None` if one may be taken now.
    pub(crate) fn wait_time(&self, now: Instant) -> Option<Duration> {
        let buckets = [&self.requests, &self.bytes].into_iter().flatten();
        buckets.filter_map(|bucket| lock(bucket).wait_time(now)).max()
    }

    /// Tokens in the buckets as of the last [`Limiter::wait_time`]: [`Tokens::ALL`] without a limit.
    pub(crate) fn tokens(&self) -> Tokens {
        let of = |bucket: &Option<Mutex<Bucket>>| {
            bucket.as_ref().map_or(u64::MAX, |bucket| lock(bucket).tokens())
        };
        Tokens { requests: of(&self.requests), bytes: of(&self.bytes) }
    }
}

struct Bucket {
    limit: TokenBucket,
    /// Tokens, times the nanoseconds of the refill time, so that nothing is lost by rounding;
    /// negative while a debt is being paid.
    level: i128,
    one_time_burst: u64,
    updated: Instant,
}

impl Bucket {
    fn new(limit: TokenBucket, now: Instant) -> Self {
        let one_time_burst = limit.one_time_burst;
        let mut bucket = Self { limit, level: 0, one_time_burst, updated: now };
        bucket.level = bucket.full();
        bucket
    }

    /// A bucket of another limit with the tokens, or the debt, of this one; at most as many as it holds.
    fn with_limit(&mut self, limit: TokenBucket, now: Instant) -> Self {
        // Fills it up to now.
        self.wait_time(now);
        let mut bucket = Self::new(limit, now);
        if limit.one_time_burst == self.limit.one_time_burst {
            bucket.one_time_burst = self.one_time_burst;
        }
        // In two steps, so that nothing is lost where the refill time stays.
        let (tokens, rest) = (self.level / self.unit(), self.level % self.unit());
        let level =
            tokens.saturating_mul(bucket.unit()).saturating_add(rest * bucket.unit() / self.unit());
        bucket.level = bucket.level.min(level);
        bucket
    }

    fn unit(&self) -> i128 {
        self.limit.refill_time.as_nanos().max(1) as i128
    }

    fn full(&self) -> i128 {
        i128::from(self.limit.size) * self.unit()
    }

    fn take(&mut self, count: u64) {
        let once = count.min(self.one_time_burst);
        self.one_time_burst -= once;
        self.level -= i128::from(count - once) * self.unit();
    }

    fn tokens(&self) -> u64 {
        let level = u64::try_from(self.level.max(0) / self.unit()).unwrap_or(u64::MAX);
        level.saturating_add(self.one_time_burst)
    }

    fn wait_time(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.updated).as_nanos() as i128;
        self.updated = self.updated.max(now);
        // A token more is a unit more, and `size` tokens come in each refill time: in each
        // nanosecond the level rises by `size`.
        let size = i128::from(self.limit.size);
        self.level = self.level.saturating_add(passed.saturating_mul(size)).min(self.full());
        if self.level > 0 || self.one_time_burst > 0 {
            return None;
        }
        let nanoseconds = (1 - self.level + size - 1) / size;
        Some(Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn request_of(bytes: u64) -> Tokens {
        Tokens { requests: 1, bytes }
    }

    /// Requests of `bytes` that a limiter lets through in `time`, taken as soon as they may be.
    fn requests_in(limits: Limits, bytes: u64, time: Duration) -> u64 {
        let begin = Instant::now();
        let limiter = Limiter::after(None, limits, begin);
        let (mut now, mut requests) = (begin, 0);
        while now < begin + time {
            match limiter.wait_time(now) {
                Some(wait) => now += wait,
                None => {
                    limiter.charge(request_of(bytes));
                    requests += 1;
                }
            }
        }
        requests
    }

    fn bucket(size: u64, refill_time: Duration) -> Option<TokenBucket> {
        Some(TokenBucket { size, one_time_burst: 0, refill_time })
    }

    #[test]
    fn the_rate_is_the_size_by_the_refill_time_after_one_full_bucket() {
        let limits = Limits { requests: bucket(100, SECOND), bytes: None };
        assert_eq!(requests_in(limits, 4096, 10 * SECOND), 100 + 1000);
        let limits = Limits { requests: bucket(10, SECOND / 10), bytes: None };
        assert_eq!(requests_in(limits, 4096, 10 * SECOND), 10 + 1000);
    }

    #[test]
    fn a_request_larger_than_the_bucket_is_let_through_and_paid_for_later() {
        let limits = Limits { requests: None, bytes: bucket(1000, SECOND) };
        // 64 KiB cost 65.536 s each; the bucket's first 1000 bytes save one second.
        assert_eq!(requests_in(limits, 65536, 600 * SECOND), 10);
    }

    #[test]
    fn the_stricter_of_two_limits_holds() {
        let limits = Limits { requests: bucket(100, SECOND), bytes: bucket(4096 * 10, SECOND) };
        assert_eq!(requests_in(limits, 4096, 10 * SECOND), 10 + 100);
    }

    #[test]
    fn the_burst_is_there_once() {
        let limit = TokenBucket { size: 10, one_time_burst: 500, refill_time: SECOND };
        let limits = Limits { requests: Some(limit), bytes: None };
        assert_eq!(requests_in(limits, 1, 10 * SECOND), 500 + 10 + 100);
    }

    #[test]
    fn extreme_values_neither_overflow_nor_wait_for_ever() {
        let day = TokenBucket::MAX_REFILL_TIME;
        let limit = TokenBucket { size: u64::MAX, one_time_burst: u64::MAX, refill_time: day };
        let limiter = Limiter::after(
            None,
            Limits { requests: Some(limit), bytes: Some(limit) },
            Instant::now(),
        );
        (0..1000).for_each(|_| limiter.charge(request_of(u64::MAX)));
        let wait = limiter.wait_time(Instant::now()).expect("a debt");
        assert!(wait <= day * 1000, "{wait:?}");
        assert!(!TokenBucket { size: 0, ..limit }.is_valid());
        assert!(!TokenBucket { refill_time: Duration::ZERO, ..limit }.is_valid());
    }

    #[test]
    fn a_rate_in_requests_a_second_is_kept_exactly() {
        for rate in [1, 99, 100, 109, 111, 250, 1000, 1001, 2500, 100 << 20] {
            let TokenBucket { size, refill_time, .. } = TokenBucket::per_second(rate);
            assert_eq!(
                u128::from(size) * 1000,
                u128::from(rate) * refill_time.as_millis(),
                "{rate}"
            );
        }
        assert!(TokenBucket::per_second(u64::MAX).is_valid());
    }

    #[test]
    fn limits_that_are_set_again_let_no_more_through() {
        let limits =
            |size| Limits { requests: bucket(size, SECOND), bytes: bucket(1 << 30, SECOND) };
        let begin = Instant::now();
        let mut limiter = Limiter::after(None, limits(1000), begin);
        let mut requests = 0;
        // Fifty times a second, each time with as many requests as are let through.
        for step in 1..=50 {
            let now = begin + SECOND * step / 50;
            while limiter.wait_time(now).is_none() {
                limiter.charge(request_of(1));
                requests += 1;
            }
            limiter = Limiter::after(Some(&limiter), limits(1000), now);
        }
        assert!((1980..=2000).contains(&requests), "{requests}");
        // A smaller bucket holds no more than its size, and a debt has to be paid.
        let now = begin + SECOND * 10;
        limiter = Limiter::after(Some(&limiter), limits(10), now);
        (0..30).for_each(|_| limiter.charge(request_of(1)));
        assert!(limiter.wait_time(now).is_some());
        limiter = Limiter::after(Some(&limiter), limits(1000), now);
        assert!(limiter.wait_time(now).is_some(), "the debt is there");
        assert!(limiter.wait_time(now + SECOND / 10).is_none());
    }

    #[test]
    fn changed_limits_are_noticed() {
        let shared = SharedLimits::default();
        assert!(shared.current().export.is_none());
        let limits = Limits { requests: bucket(1, SECOND), bytes: None };
        shared.set(limits);
        assert_eq!((shared.changes(), shared.get()), (1, limits));
        let limiter = shared.current().export;
        assert!(limiter.is_some_and(|limiter| limiter.wait_time(Instant::now()).is_none()));
        shared.set(Limits::default());
        assert!(shared.current().export.is_none() && shared.changes() == 2);
        shared.set_of_clients(limits);
        assert_eq!(
            (shared.changes(), shared.get(), shared.of_clients()),
            (3, Limits::default(), limits)
        );
    }

    #[test]
    fn each_client_has_buckets_of_its_own_which_its_threads_share_and_only_a_change_replaces() {
        let shared = SharedLimits::default();
        let limits = |size| Limits { requests: bucket(size, SECOND), bytes: None };
        shared.set_of_clients(limits(1));
        let (one, other) = (ClientBuckets::default(), ClientBuckets::default());
        let old = shared.current().of_clients.expect("limits");
        (0..2).for_each(|_| one.limiter(old).charge(request_of(0)));
        let waits = |client: &ClientBuckets, under| client.limiter(under).wait_time(Instant::now());
        assert!(waits(&one, old).is_some() && waits(&other, old).is_none());
        shared.set(limits(1));
        let same = shared.current().of_clients.expect("limits");
        assert!(waits(&one, same).is_some(), "the limits of the export are others");
        shared.set_of_clients(limits(2));
        let new = shared.current().of_clients.expect("limits");
        assert!(waits(&one, new).is_some() && waits(&other, new).is_none(), "a debt stays");
        assert!(Arc::ptr_eq(&one.limiter(old), &one.limiter(new)), "a thread is late");
    }
}
