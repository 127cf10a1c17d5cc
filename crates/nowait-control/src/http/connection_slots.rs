//! Limits on the number of authenticated and unauthenticated connections of a socket.
//!
//! Invariant: a socket has at most [`MAX_AUTHENTICATED`] and [`MAX_UNAUTHENTICATED`] connections. A new connection closes the
//! oldest unauthenticated one if these are too many, so unauthenticated clients block no other client.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Maximum number of authenticated connections.
/// Beyond it: further ones wait; on TCP they are refused.
const MAX_AUTHENTICATED: usize = 64;
/// Maximum number of unauthenticated connections.
/// Beyond it: the oldest one is closed.
const MAX_UNAUTHENTICATED: usize = 16;

/// The connection slots of one socket.
pub(crate) struct ConnectionSlots {
    authenticated: Arc<Semaphore>,
    /// The oldest first.
    unauthenticated: Mutex<VecDeque<Weak<ConnectionSlot>>>,
}

/// The slot of a connection, until it is dropped.
pub(crate) struct ConnectionSlot {
    /// Set once the client is authenticated.
    permit: OnceLock<OwnedSemaphorePermit>,
    slots: Arc<ConnectionSlots>,
    /// Notified when a newer connection takes the slot.
    taken: Notify,
}

impl ConnectionSlots {
    pub(crate) fn new() -> Arc<Self> {
        let authenticated = Arc::new(Semaphore::new(MAX_AUTHENTICATED));
        Arc::new(Self { authenticated, unauthenticated: Mutex::default() })
    }

    /// Waits for a free slot, for a client that is authenticated when it is accepted.
    pub(crate) async fn authenticated(self: &Arc<Self>) -> Arc<ConnectionSlot> {
        let slot = self.slot();
        if let Ok(permit) = self.authenticated.clone().acquire_owned().await {
            // The slot is new, so it had no permit.
            let _ = slot.permit.set(permit);
        }
        slot
    }

    /// Takes a slot for an unauthenticated client; if none is free, the oldest unauthenticated connection loses its slot.
    pub(crate) fn unauthenticated(self: &Arc<Self>) -> Arc<ConnectionSlot> {
        let slot = self.slot();
        let mut unauthenticated = self.lock();
        unauthenticated
            .retain(|slot| slot.upgrade().is_some_and(|slot| slot.permit.get().is_none()));
        if unauthenticated.len() == MAX_UNAUTHENTICATED
            && let Some(oldest) = unauthenticated.pop_front().as_ref().and_then(Weak::upgrade)
        {
            oldest.taken.notify_one();
        }
        unauthenticated.push_back(Arc::downgrade(&slot));
        slot
    }

    /// Waits until no authenticated connection is left.
    pub(crate) async fn all_left(&self) {
        // The semaphore is never closed.
        let _ = self.authenticated.acquire_many(MAX_AUTHENTICATED as u32).await;
    }

    fn slot(self: &Arc<Self>) -> Arc<ConnectionSlot> {
        Arc::new(ConnectionSlot {
            permit: OnceLock::new(),
            slots: self.clone(),
            taken: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Weak<ConnectionSlot>>> {
        self.unauthenticated.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Marks the client as authenticated. Returns false if all slots of authenticated clients are taken.
    pub(crate) fn authenticate(&self) -> bool {
        if self.permit.get().is_none()
            && let Ok(permit) = self.slots.authenticated.clone().try_acquire_owned()
        {
            // Another request of the same connection may have been faster.
            let _ = self.permit.set(permit);
        }
        self.permit.get().is_some()
    }

    /// Waits until the connection loses its slot: a newer connection took it, or the client was not authenticated within
    /// `time`. Never ends for an authenticated client.
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

    async fn is_lost(slot: &ConnectionSlot) -> bool {
        tokio::time::timeout(TIME / 2, slot.lost(TIME)).await.is_ok()
    }

    fn in_virtual_time(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
    }

    #[test]
    fn the_oldest_client_that_is_not_known_leaves_for_a_new_one() {
        in_virtual_time(async {
            let slots = ConnectionSlots::new();
            let all: Vec<_> = (0..MAX_UNAUTHENTICATED).map(|_| slots.unauthenticated()).collect();
            assert!(!is_lost(&all[0]).await);
            assert!(all[1].authenticate());
            let one_more = slots.unauthenticated();
            assert!(!is_lost(&all[0]).await, "one had left that kind");
            let another = slots.unauthenticated();
            assert!(is_lost(&all[0]).await);
            for kept in [&all[1], &all[2], &one_more, &another] {
                assert!(!is_lost(kept).await);
            }
        });
    }

    #[test]
    fn a_client_is_known_in_time_or_leaves() {
        in_virtual_time(async {
            let slots = ConnectionSlots::new();
            let (slow, known) = (slots.unauthenticated(), slots.unauthenticated());
            assert!(known.authenticate());
            let begun = tokio::time::Instant::now();
            slow.lost(TIME).await;
            assert_eq!(begun.elapsed(), TIME);
            assert!(tokio::time::timeout(100 * TIME, known.lost(TIME)).await.is_err());
        });
    }

    #[test]
    fn there_are_as_many_known_clients_as_slots() {
        in_virtual_time(async {
            let slots = ConnectionSlots::new();
            let mut all = Vec::new();
            for n in 0..MAX_AUTHENTICATED {
                all.push(if n % 2 == 0 {
                    slots.authenticated().await
                } else {
                    slots.unauthenticated()
                });
                assert!(all[n].authenticate());
            }
            let one_more = slots.unauthenticated();
            assert!(!one_more.authenticate());
            assert!(tokio::time::timeout(TIME, slots.authenticated()).await.is_err());
            assert!(tokio::time::timeout(TIME, slots.all_left()).await.is_err());
            all.pop();
            assert!(one_more.authenticate());
            drop((all, one_more));
            slots.all_left().await;
        });
    }
}
