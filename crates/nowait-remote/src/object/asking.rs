//! Requests to a store that are made until they are answered, or given up.
//!
//! Invariant: a request is given up when it, or all of the store, has failed for the time that the
//! user has allowed; a store that asks for fewer requests gets fewer.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::fault_log::{FaultLog, LONG};
use crate::object::fault::Fault;
use crate::object::store::{Object, Version};
use crate::policy::{BLOCK_BYTES, BackOff, Pace};
use crate::store_counters::StoreCounters;

/// Why a request fails that could not be made in time.
const REFUSES: &str = "the store asks for fewer requests";

/// A time in which the store does not answer.
struct Outage {
    since: Instant,
    /// The log has a line of its begin.
    told: bool,
    /// Its end was told of: requests fail until the store answers again.
    gave_up: bool,
}

/// Everything that a request needs to be made again.
pub(super) struct Asking {
    object: Object,
    pub(super) version: Version,
    pub(super) place: String,
    reconnect: Duration,
    outage: RefCell<Option<Outage>>,
    log: RefCell<FaultLog>,
    pace: RefCell<Pace>,
    begun: Instant,
    last_answer: Cell<Instant>,
    pub(super) counters: Arc<StoreCounters>,
}

impl Asking {
    pub(super) fn new(
        (object, version): (Object, Version),
        reconnect: Duration,
        counters: Arc<StoreCounters>,
    ) -> Self {
        let (place, begun) = (object.url().to_string(), Instant::now());
        Self {
            object,
            version,
            log: RefCell::new(FaultLog::new(place.clone())),
            place,
            reconnect,
            outage: RefCell::default(),
            pace: RefCell::default(),
            begun,
            last_answer: Cell::new(begun),
            counters,
        }
    }

    /// Reads the blocks of `run`, again and again until `reconnect` is over.
    pub(super) async fn fetch(&self, run: &Range<u64>) -> Result<Vec<u8>, Fault> {
        let pos = run.start * BLOCK_BYTES;
        let len = (run.end * BLOCK_BYTES).min(self.version.size()) - pos;
        let begun = Instant::now();
        let mut first_failure = None;
        let (mut failed, mut why) = (0, REFUSES.to_owned());
        loop {
            let left = || match failed {
                // One attempt is made also when the time of an outage has passed before.
                0 if self.outage.borrow().is_some() => self.time_left_since(begun),
                0 => Duration::MAX,
                _ => self.time_left(first_failure),
            };
            if !self.wait_for_slot(left).await {
                self.give_up(&why);
                return Err(Fault::Transient(why));
            }
            let asked = Instant::now();
            let deadline = first_failure.unwrap_or(asked) + self.reconnect;
            let mut progress = self.object.progress(deadline.saturating_duration_since(asked));
            let result = self.object.read(&self.version, (pos, len), &mut progress).await;
            let bytes = result.as_ref().map_or(0, |data| data.len() as u64);
            self.counters.request(asked.elapsed(), bytes);
            why = match result {
                Err(Fault::Transient(why)) => {
                    first_failure.get_or_insert(progress.since());
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
            self.note_outage(&why, progress.since());
            failed += 1;
            let pause = BackOff::STORE.pause(failed, fastrand::u64(..));
            tokio::time::sleep(pause.min(self.time_left(first_failure))).await;
            if self.time_left(first_failure).is_zero() {
                self.give_up(&why);
                return Err(Fault::Transient(why));
            }
            self.counters.count(|counts| counts.retries += 1);
        }
    }

    /// Waits until a request may be made, as long as there is time `left`, which is asked again then.
    /// Returns whether it may be.
    async fn wait_for_slot(&self, left: impl Fn() -> Duration) -> bool {
        loop {
            let now = self.begun.elapsed();
            let (free, left) = (self.pace.borrow().free_at(now), left());
            if free <= now {
                // Only a request that is made takes a slot.
                self.pace.borrow_mut().slot(now);
                return true;
            }
            if left.is_zero() {
                return false;
            }
            tokio::time::sleep((free - now).min(left)).await;
        }
    }

    /// Notes that the store has not answered a request since `since`, for the reason `why`.
    fn note_outage(&self, why: &str, since: Instant) {
        let mut outage = self.outage.borrow_mut();
        let outage = outage.get_or_insert_with(|| {
            let told = self.log.borrow_mut().begins(why, self.begun.elapsed());
            if told {
                tracing::warn!("{}: {why}; asking again", self.place);
            }
            Outage { since: since.max(self.last_answer.get()), told, gave_up: false }
        });
        let lasts = outage.since.elapsed();
        if !outage.told && lasts >= LONG {
            outage.told = true;
            let seconds = lasts.as_secs();
            tracing::warn!("{}: {why}; asking again since {seconds} s", self.place);
        }
    }

    /// How long a request that has failed since `first_failure`, refusals not counted, is made again: a
    /// store that is busy and answers other requests will answer this one.
    fn time_left(&self, first_failure: Option<Instant>) -> Duration {
        let outage = self.outage.borrow().as_ref().map(|outage| outage.since);
        time_left(self.reconnect, Instant::now(), outage, first_failure)
    }

    fn time_left_since(&self, since: Instant) -> Duration {
        time_left(self.reconnect, Instant::now(), None, Some(since))
    }

    fn give_up(&self, why: &str) {
        if let Some(outage) = &mut *self.outage.borrow_mut()
            && !std::mem::replace(&mut outage.gave_up, true)
            && outage.told
        {
            tracing::error!("{}: {why}; reads fail until it answers again", self.place);
        }
    }

    /// Whether requests have failed for so long that they fail until the store answers again.
    pub(super) fn gave_up(&self) -> bool {
        self.outage.borrow().as_ref().is_some_and(|outage| outage.gave_up)
    }

    fn answered(&self) {
        self.pace.borrow_mut().answered(self.begun.elapsed());
        self.last_answer.set(Instant::now());
        if let Some(outage) = self.outage.take().filter(|outage| outage.told) {
            let lost = outage.since.elapsed().as_millis();
            tracing::warn!("{}: it answers again, after {lost} ms", self.place);
        }
        self.log.borrow_mut().pass(self.begun.elapsed());
    }
}

/// How much of the time for the reconnect is left at `now` for a request that has failed since
/// `first_failure`, refusals not counted, in an `outage` that has begun with the last answer.
fn time_left(
    reconnect: Duration,
    now: Instant,
    outage: Option<Instant>,
    first_failure: Option<Instant>,
) -> Duration {
    let since = first_failure.into_iter().chain(outage).min();
    since.map_or(Duration::MAX, |since| (since + reconnect).saturating_duration_since(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_only_refused_is_not_given_up_while_others_are_answered() {
        let (reconnect, begin) = (Duration::from_secs(30), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let left = |outage: Option<u64>, first: Option<u64>, now| {
            time_left(reconnect, at(now), outage.map(at), first.map(at)).as_secs()
        };
        // The last answer to another request came after 99 s.
        assert_eq!(left(Some(99), None, 100), 29);
        assert_eq!(left(Some(99), None, 129), 0);
        assert_eq!(left(Some(99), Some(71), 100), 1);
        assert_eq!(left(None, Some(70), 100), 0);
        assert_eq!(time_left(reconnect, at(200), None, None), Duration::MAX);
    }
}
