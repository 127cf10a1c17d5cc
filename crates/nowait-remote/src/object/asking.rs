//! Requests to a store that are made until they are answered, or given up.
//!
//! Invariant: a request is given up when it, or all of the store, has failed for the time that the
//! user has allowed; a store that asks for fewer requests gets fewer.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::object::block_memory::BLOCK_BYTES;
use crate::object::fault::Fault;
use crate::object::store::{Object, Version};
use crate::object::store_counters::{StoreCounters, add};
use crate::policy::{BackOff, Pace};

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
                Err(Fault::Transient(why)) => why,
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
            let since = *first_failure.get_or_insert_with(Instant::now);
            if !self.tries_again(&why, since) {
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

    /// Whether a request that has failed since `since` is made again.
    fn tries_again(&self, why: &str, since: Instant) -> bool {
        let mut outage = self.outage.borrow_mut();
        let begun = *outage.since.get_or_insert_with(|| {
            tracing::warn!("{}: {why}; asking again", self.place);
            Instant::now()
        });
        if begun.min(since).elapsed() < self.reconnect {
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
