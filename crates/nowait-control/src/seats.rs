//! The connections of a socket: those of clients that have shown who they are, and those that have not.
//!
//! Invariant: there are at most [`PROVEN`] of the first kind and [`UNPROVEN`] of the second, whose oldest leaves for a new
//! one: they keep no other client out.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The most connections at once of clients that have shown who they are.
const PROVEN: usize = 64;
/// The same of others.
const UNPROVEN: usize = 16;

/// The seats of a socket.
pub(crate) struct Seats {
    proven: Arc<Semaphore>,
    /// In the order in which they came.
    unproven: Mutex<VecDeque<Weak<Seat>>>,
}

/// The seat of a connection, until it is dropped.
pub(crate) struct Seat {
    /// That of a client which has shown who it is.
    permit: OnceLock<OwnedSemaphorePermit>,
    seats: Arc<Seats>,
    /// Another one needs it.
    taken: Notify,
}

impl Seats {
    pub(crate) fn new() -> Arc<Self> {
        let proven = Arc::new(Semaphore::new(PROVEN));
        Arc::new(Self { proven, unproven: Mutex::default() })
    }

    /// Waits for a seat of a client that will have shown who it is when it is accepted.
    pub(crate) async fn proven(self: &Arc<Self>) -> Arc<Seat> {
        let seat = self.seat();
        if let Ok(permit) = self.proven.clone().acquire_owned().await {
            // It has none before.
            let _ = seat.permit.set(permit);
        }
        seat
    }

    /// A seat of a client that has not shown who it is: that of the oldest, if there is no other.
    pub(crate) fn unproven(self: &Arc<Self>) -> Arc<Seat> {
        let seat = self.seat();
        let mut unproven = self.lock();
        unproven.retain(|seat| seat.upgrade().is_some_and(|seat| seat.permit.get().is_none()));
        if unproven.len() == UNPROVEN
            && let Some(oldest) = unproven.pop_front().as_ref().and_then(Weak::upgrade)
        {
            oldest.taken.notify_one();
        }
        unproven.push_back(Arc::downgrade(&seat));
        seat
    }

    /// Waits until no client is left that has shown who it is.
    pub(crate) async fn all_left(&self) {
        // It is never closed.
        let _ = self.proven.acquire_many(PROVEN as u32).await;
    }

    fn seat(self: &Arc<Self>) -> Arc<Seat> {
        Arc::new(Seat { permit: OnceLock::new(), seats: self.clone(), taken: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Weak<Seat>>> {
        self.unproven.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Its client has shown who it is. Returns whether there is a seat for it.
    pub(crate) fn prove(&self) -> bool {
        if self.permit.get().is_none()
            && let Ok(permit) = self.seats.proven.clone().try_acquire_owned()
        {
            // Another request of the same connection may have been faster.
            let _ = self.permit.set(permit);
        }
        self.permit.get().is_some()
    }

    /// Waits until the connection loses the seat: when another one needs it, or its client has not shown within `time` who
    /// it is. Without an end once it has.
    pub(crate) async fn lost(&self, time: Duration) {
        let _ = tokio::time::timeout(time, self.taken.notified()).await;
        if self.permit.get().is_some() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(2);

    async fn is_lost(seat: &Seat) -> bool {
        tokio::time::timeout(TIME / 2, seat.lost(TIME)).await.is_ok()
    }

    fn in_virtual_time(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
    }

    #[test]
    fn the_oldest_client_that_is_not_known_leaves_for_a_new_one() {
        in_virtual_time(async {
            let seats = Seats::new();
            let all: Vec<_> = (0..UNPROVEN).map(|_| seats.unproven()).collect();
            assert!(!is_lost(&all[0]).await);
            assert!(all[1].prove());
            let one_more = seats.unproven();
            assert!(!is_lost(&all[0]).await, "one had left that kind");
            let another = seats.unproven();
            assert!(is_lost(&all[0]).await);
            for kept in [&all[1], &all[2], &one_more, &another] {
                assert!(!is_lost(kept).await);
            }
        });
    }

    #[test]
    fn a_client_is_known_in_time_or_leaves() {
        in_virtual_time(async {
            let seats = Seats::new();
            let (slow, known) = (seats.unproven(), seats.unproven());
            assert!(known.prove());
            let begun = tokio::time::Instant::now();
            slow.lost(TIME).await;
            assert_eq!(begun.elapsed(), TIME);
            assert!(tokio::time::timeout(100 * TIME, known.lost(TIME)).await.is_err());
        });
    }

    #[test]
    fn there_are_as_many_known_clients_as_seats() {
        in_virtual_time(async {
            let seats = Seats::new();
            let mut all = Vec::new();
            for n in 0..PROVEN {
                all.push(if n % 2 == 0 { seats.proven().await } else { seats.unproven() });
                assert!(all[n].prove());
            }
            let one_more = seats.unproven();
            assert!(!one_more.prove());
            assert!(tokio::time::timeout(TIME, seats.proven()).await.is_err());
            assert!(tokio::time::timeout(TIME, seats.all_left()).await.is_err());
            all.pop();
            assert!(one_more.prove());
            drop((all, one_more));
            seats.all_left().await;
        });
    }
}
