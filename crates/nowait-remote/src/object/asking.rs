//! Requests to a store that are made until they are answered, or given up.
//!
//! Invariant: a request is given up when it, or all of the store, has failed for the time that the
//! user has allowed; a store that asks for fewer requests gets fewer.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::object::fault::Fault;
use crate::object::store::{Object, Version};
use crate::object::store_counters::{StoreCounters, add};
use crate::policy::{BLOCK_BYTES, BackOff, Pace};

/// Since when the store has not answered.
#[derive(Default)]
struct Outage {
    since: Option<Instant>,
    /// Its end was told of: requests fail until the store answers again.
    gave_up: bool,
}

/// What a request needs to be made again.
pub(super) struct Asking {
    object: Object,
    pub(super) version: Version,
    pub(super) place: String,
    reconnect: Duration,
    outage: RefCell<Outage>,
    pace: RefCell<Pace>,
    begun: Instant,
    pub(super) counters: Arc<StoreCounters>,
}

impl Asking {
    pub(super) fn new(
        (object, version): (Object, Version),
        reconnect: Duration,
        counters: Arc<StoreCounters>,
    ) -> Self {
        let place = object.url().to_string();
        let (outage, pace) = (RefCell::default(), RefCell::default());
        Self { object, version, place, reconnect, outage, pace, begun: Instant::now(), counters }
    }

    /// Reads the blocks of `run`, again and again until `reconnect` is over.
    pub(super) async fn fetch(&self, run: &Range<u64>) -> Result<Vec<u8>, Fault> {
        let pos = run.start * BLOCK_BYTES;
        let len = (run.end * BLOCK_BYTES).min(self.version.size()) - pos;
        let mut first_failure = None;
        let mut failed = 0;
        loop {
            self.wait_for_slot().await;
            let begun = Instant::now();
            let result = self.object.read(&self.version, pos, len).await;
            let bytes = result.as_ref().map_or(0, |data| data.len() as u64);
            self.counters.request(begun.elapsed(), bytes);
            let why = match result {
                Err(Fault::Transient(why)) => {
                    first_failure.get_or_insert_with(Instant::now);
                    why
                }
                Err(Fault::Busy(why)) => {
                    self.pace.borrow_mut().refused(self.begun.elapsed());
                    why
                }
                Ok(data) => {
                    self.answered();
                    return Ok(data);
                }
                fault => return fault,
            };
            if !self.tries_again(&why, first_failure) {
                return Err(Fault::Transient(why));
            }
            failed += 1;
            tokio::time::sleep(BackOff::STORE.pause(failed, fastrand::u64(..))).await;
            add(&self.counters.retries, 1);
        }
    }

    async fn wait_for_slot(&self) {
        let now = self.begun.elapsed();
        let slot = self.pace.borrow_mut().slot(now);
        if slot > now {
            tokio::time::sleep(slot - now).await;
        }
    }

    /// Whether a request is made again that has failed since `first_failure`, apart from refusals: a
    /// store that is busy and answers other requests will answer this one.
    fn tries_again(&self, why: &str, first_failure: Option<Instant>) -> bool {
        let mut outage = self.outage.borrow_mut();
        let begun = *outage.since.get_or_insert_with(|| {
            tracing::warn!("{}: {why}; asking again", self.place);
            Instant::now()
        });
        if !is_over(self.reconnect, Instant::now(), begun, first_failure) {
            return true;
        }
        if !std::mem::replace(&mut outage.gave_up, true) {
            tracing::error!("{}: {why}; reads fail until it answers again", self.place);
        }
        false
    }

    fn answered(&self) {
        self.pace.borrow_mut().answered(self.begun.elapsed());
        let outage = std::mem::take(&mut *self.outage.borrow_mut());
        if let Some(since) = outage.since {
            let lost = since.elapsed().as_millis();
            tracing::warn!("{}: it answers again, after {lost} ms", self.place);
        }
    }
}

/// Whether the time for the reconnect is over at `now`, in an outage that has begun with the last
/// answer, for a request that has failed since `first_failure`, refusals not counted.
fn is_over(
    reconnect: Duration,
    now: Instant,
    outage: Instant,
    first_failure: Option<Instant>,
) -> bool {
    let since = first_failure.map_or(outage, |first| first.min(outage));
    now.duration_since(since) >= reconnect
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_only_refused_is_not_given_up_while_others_are_answered() {
        let (reconnect, begin) = (Duration::from_secs(30), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        // The last answer to another request came after 99 s.
        assert!(!is_over(reconnect, at(100), at(99), None));
        assert!(is_over(reconnect, at(129), at(99), None));
        assert!(!is_over(reconnect, at(100), at(99), Some(at(71))));
        assert!(is_over(reconnect, at(100), at(99), Some(at(70))));
    }
}
