//! Requests that change a store, each made again after transient faults.
//!
//! Invariant: a request is given up when it has failed for the time that was allowed, or would fail again.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::time::{Duration, Instant};

use crate::object::fault::{Failure, Fault};
use crate::policy::{BackOff, Pace};

/// How long a request without data is waited for.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(20);

/// The status of a request that the store will never understand.
pub(super) const NOT_IMPLEMENTED: u16 = 501;

/// The answer to a request.
pub(super) type Answer<T> = Result<T, Failure>;

/// The answer to `request`, or the fault that there is none within `time`.
pub(super) async fn within<T>(
    time: Duration,
    request: impl Future<Output = object_store::Result<T>>,
) -> Answer<T> {
    Ok(tokio::time::timeout(time, request).await.map_err(|_| late(time))??)
}

/// The failure of a request that has no answer within `time`.
pub(super) fn late(time: Duration) -> Failure {
    let text = format!("the server has not answered for {} s", time.as_secs());
    Failure { fault: Fault::Transient(text), status: None }
}

/// The attempts of requests to a store.
pub(super) struct Attempts {
    /// How long a request is made again after its first transient fault.
    pub(super) retry: Duration,
    begun: Instant,
    /// When the store has answered a request last.
    answered: Cell<Instant>,
    pace: RefCell<Pace>,
}

impl Attempts {
    pub(super) fn new(retry: Duration) -> Self {
        let begun = Instant::now();
        Self { retry, begun, answered: Cell::new(begun), pace: RefCell::default() }
    }

    /// Forgets the delays that were computed for requests so far.
    pub(super) fn forget_pace(&self) {
        self.pace.take();
    }

    /// Makes a request again after transient faults, with pauses, until they last for `retry`. One that
    /// is only refused because there are too many is not given up while others are answered.
    pub(super) async fn again<T, F: Future<Output = Answer<T>>>(
        &self,
        request: impl Fn() -> F,
    ) -> Answer<T> {
        let mut first_failure = None;
        let mut failed = 0;
        loop {
            let slot = self.pace.borrow_mut().slot(self.begun.elapsed());
            tokio::time::sleep_until((self.begun + slot).into()).await;
            let failure = match request().await {
                Ok(answer) => {
                    self.answered.set(Instant::now());
                    self.pace.borrow_mut().answered(self.begun.elapsed());
                    return Ok(answer);
                }
                Err(failure) => failure,
            };
            if failure.status == Some(NOT_IMPLEMENTED) {
                return Err(failure);
            }
            failed += 1;
            let first = *first_failure.get_or_insert_with(Instant::now);
            let since = match &failure.fault {
                Fault::Busy(_) => {
                    self.pace.borrow_mut().refused(self.begun.elapsed());
                    first.max(self.answered.get())
                }
                Fault::Transient(_) => first,
                Fault::Changed(_) | Fault::Refused(_) => return Err(failure),
            };
            let left = self.retry.saturating_sub(since.elapsed());
            if left.is_zero() {
                return Err(failure);
            }
            tokio::time::sleep(BackOff::STORE.pause(failed, fastrand::u64(..)).min(left)).await;
        }
    }
}
