//! How much of the server's payload memory each connection may hold.
//!
//! With `n` connections on the server and `free` bytes that none of them holds: a connection has
//! `guaranteed = total/4/n`, at least 64 KiB and at most `max` (32 MiB alone on its thread, else 8
//! MiB). Beyond it, it may hold at most `free/8`, up to `max`. A connection that holds nothing may
//! use `free/2` for a single request.
//!
//! Invariant: a connection may always hold `guaranteed`. Beyond it, it leaves several times as much
//! to the others, so clients that never read their replies get less and less each, and a later
//! connection still gets memory. What is beyond the guarantees leaves them their quarter, also what several threads admit at
//! the same moment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crate::locking::lock;

/// The smallest guarantee of a connection, in bytes, however many connections there are.
/// Beyond it: as much as is free.
const GUARANTEED_BYTES: u64 = 64 << 10;
/// This fraction of the memory is divided into the guarantees.
const GUARANTEED_SHARE: u64 = 4;
/// The most bytes that a connection alone on its thread may hold, unless it is a single request.
/// Beyond it: its socket is not read.
const MAX_BYTES: u64 = 32 << 20;
/// The most bytes of a connection among others of the thread, whose requests wait for it at the device:
/// enough to keep a fast device busy.
/// Beyond it: its socket is not read.
const MAX_BYTES_SHARED: u64 = 8 << 20;
/// A connection may hold this fraction of the free memory.
const FREE_SHARE: u64 = 8;
/// A single request may use this fraction of the free memory.
const SINGLE_REQUEST_SHARE: u64 = 2;

/// A thread declares its use in steps of this many bytes.
const STEP_BYTES: u64 = 256 << 10;
/// A thread keeps this many declared bytes for its next requests.
const RETAINED_BYTES: u64 = 1 << 20;

/// The memory that the connections of all threads hold, as declared by the threads.
#[derive(Clone, Default)]
pub(crate) struct DeclaredUse(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// In bytes.
    declared: AtomicU64,
    /// When a connection that holds nothing was refused a request last.
    refused: Mutex<Option<Instant>>,
}

/// The memory of the server, as seen by one of its threads, in bytes.
pub(crate) struct BufferBudget {
    all: u64,
    /// Bytes that the connections of this thread hold.
    used: u64,
    /// Bytes that this thread has declared: `used` or a little more.
    declared: u64,
    all_declared: DeclaredUse,
    /// Connections that share the memory: on the server, and on this thread.
    connections: (u32, usize),
    /// Bytes that each connection may hold, however much the others do.
    guaranteed: u64,
    /// The most bytes that each connection may hold, unless it is a single request.
    max: u64,
}

impl BufferBudget {
    pub(crate) fn new(all: u64, all_declared: DeclaredUse) -> Self {
        let (connections, guaranteed, max) = ((0, 0), GUARANTEED_BYTES, MAX_BYTES);
        Self { all, used: 0, declared: 0, all_declared, connections, guaranteed, max }
    }

    /// Sets the number of connections on the server, and on this thread (`here`).
    #[inline]
    pub(crate) fn set_connection_count(&mut self, connections: u32, here: usize) {
        if self.connections == (connections, here) {
            return;
        }
        self.connections = (connections, here);
        let equal = self.all / GUARANTEED_SHARE / u64::from(connections).max(here as u64).max(1);
        self.max = if here > 1 { MAX_BYTES_SHARED } else { MAX_BYTES };
        self.guaranteed = equal.clamp(GUARANTEED_BYTES, self.max);
    }

    /// Bytes that no connection holds.
    #[inline]
    fn free(&self) -> u64 {
        let others =
            self.all_declared.0.declared.load(Ordering::Relaxed).saturating_sub(self.declared);
        self.all.saturating_sub(self.used).saturating_sub(others)
    }

    /// Declares the use if it exceeds the declared bytes, or is much less.
    #[inline]
    fn declare(&mut self) {
        if self.used > self.declared || self.declared - self.used > RETAINED_BYTES {
            let now = self.used.next_multiple_of(STEP_BYTES);
            match now.checked_sub(self.declared) {
                Some(more) => self.all_declared.0.declared.fetch_add(more, Ordering::Relaxed),
                None => {
                    self.all_declared.0.declared.fetch_sub(self.declared - now, Ordering::Relaxed)
                }
            };
            self.declared = now;
        }
    }

    /// Whether a connection that holds `held` bytes may hold `more` in addition. To be followed by
    /// [`BufferBudget::charge`], by another question, or by the end of the connection.
    #[inline]
    pub(crate) fn admits(&mut self, held: u64, more: u64) -> bool {
        let then = held + more;
        more == 0 || then <= self.guaranteed || {
            let free = self.free();
            let fits = then <= self.max.min(free / FREE_SHARE)
                || held == 0 && more <= free / SINGLE_REQUEST_SHARE;
            let admitted = fits && self.reserve(more);
            if !admitted && held == 0 {
                self.note_refused(Instant::now());
            }
            admitted
        }
    }

    /// A connection that holds nothing waits for memory.
    #[cold]
    pub(crate) fn note_refused(&self, now: Instant) {
        *lock(&self.all_declared.0.refused) = Some(now);
    }

    /// Whether a connection of any thread that holds nothing has waited for memory since `time`.
    pub(crate) fn was_refused_since(&self, time: Instant) -> bool {
        lock(&self.all_declared.0.refused).is_some_and(|refused| refused >= time)
    }

    /// Whether a connection that holds `held` bytes has more than it is guaranteed.
    pub(crate) fn exceeds_guarantee(&self, held: u64) -> bool {
        held > self.guaranteed
    }

    /// Whether that may be so of a connection of this thread.
    #[inline]
    pub(crate) fn may_exceed_guarantee(&self) -> bool {
        self.exceeds_guarantee(self.used)
    }

    /// Declares `more` bytes, unless that would leave less than the guarantees.
    #[inline]
    fn reserve(&mut self, more: u64) -> bool {
        // Also if they were declared for the same request before, and not charged.
        self.used + more <= self.declared || self.declare_more(more)
    }

    #[cold]
    fn declare_more(&mut self, more: u64) -> bool {
        let missing = (self.used + more).next_multiple_of(STEP_BYTES) - self.declared;
        let then = self.all_declared.0.declared.fetch_add(missing, Ordering::Relaxed) + missing;
        let fits = then <= self.all - self.all / GUARANTEED_SHARE;
        match fits {
            true => self.declared += missing,
            false => drop(self.all_declared.0.declared.fetch_sub(missing, Ordering::Relaxed)),
        }
        fits
    }

    /// Adds `bytes` to `share`, the bytes that a connection holds.
    #[inline]
    pub(crate) fn charge(&mut self, share: &mut u64, bytes: u64) {
        *share += bytes;
        self.used += bytes;
        self.declare();
    }

    /// Takes `bytes` from `share`, or all of it if it is less.
    #[inline]
    pub(crate) fn release(&mut self, share: &mut u64, bytes: u64) {
        let bytes = bytes.min(*share);
        *share -= bytes;
        self.used -= bytes;
        self.declare();
    }
}

impl Drop for BufferBudget {
    fn drop(&mut self) {
        self.all_declared.0.declared.fetch_sub(self.declared, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL_BYTES: u64 = 256 << 20;

    /// Charges requests of `bytes` until one is refused. Returns the total.
    fn greedy(budget: &mut BufferBudget, bytes: u64) -> u64 {
        let mut share = 0;
        while budget.admits(share, bytes) {
            budget.charge(&mut share, bytes);
        }
        share
    }

    #[test]
    fn a_single_connection_gets_close_to_the_maximum_and_releases_all_of_it() {
        let mut budget = BufferBudget::new(ALL_BYTES, DeclaredUse::default());
        let mut share = greedy(&mut budget, 1 << 20);
        assert!((MAX_BYTES * 3 / 4..=MAX_BYTES).contains(&share), "{share}");
        budget.release(&mut share, u64::MAX);
        assert_eq!((share, budget.used), (0, 0));
    }

    #[test]
    fn the_longest_request_is_admitted_beside_a_connection_that_holds_the_maximum() {
        let mut budget = BufferBudget::new(ALL_BYTES, DeclaredUse::default());
        greedy(&mut budget, 1 << 20);
        assert!(budget.admits(0, MAX_BYTES));
    }

    #[test]
    fn a_connection_with_others_beside_it_gets_a_quarter_of_what_it_gets_alone() {
        let mut budget = BufferBudget::new(ALL_BYTES, DeclaredUse::default());
        for (connections, max) in [(1, MAX_BYTES), (2, MAX_BYTES / 4), (1, MAX_BYTES)] {
            budget.set_connection_count(connections as u32, connections as usize);
            let mut share = greedy(&mut budget, 1 << 20);
            assert!((max * 3 / 4..=max).contains(&share), "{connections}: {share}");
            budget.release(&mut share, u64::MAX);
        }
    }

    #[test]
    fn however_many_connections_release_nothing_the_next_gets_memory_and_the_total_is_bounded() {
        for bytes in [4 << 10, 64 << 10, 1 << 20, 32 << 20] {
            let mut budget = BufferBudget::new(ALL_BYTES, DeclaredUse::default());
            for n in 1..=1024 {
                budget.set_connection_count(n as u32, n as usize);
                assert!(budget.admits(0, GUARANTEED_BYTES), "before {n} with {bytes}");
                greedy(&mut budget, bytes);
            }
            assert!(budget.used <= 2 * ALL_BYTES, "{} with {bytes}", budget.used);
        }
    }

    #[test]
    fn sixty_connections_that_release_nothing_leave_room_for_a_request_of_a_mebibyte() {
        let mut budget = BufferBudget::new(ALL_BYTES, DeclaredUse::default());
        for n in 1..=60 {
            budget.set_connection_count(n as u32, n as usize);
            greedy(&mut budget, 1 << 20);
        }
        budget.set_connection_count(61, 61);
        assert!(budget.admits(0, 1 << 20), "{} are held", budget.used);
    }

    #[test]
    fn memory_held_on_one_thread_is_not_available_on_another() {
        let declared = DeclaredUse::default();
        let mut budgets: Vec<_> =
            (0..40).map(|_| BufferBudget::new(ALL_BYTES, declared.clone())).collect();
        let mut all = 0;
        for (n, budget) in budgets.iter_mut().enumerate() {
            budget.set_connection_count(n as u32 + 1, 1);
            assert!(budget.admits(0, 1 << 20), "thread {n}");
            all += greedy(budget, 1 << 20);
        }
        assert!(all <= 2 * ALL_BYTES, "{all}");
        let total = declared.0.declared.load(Ordering::Relaxed);
        assert!((all..all + 40 * STEP_BYTES).contains(&total), "{total}");
        drop(budgets);
        assert_eq!(declared.0.declared.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_quarter_is_left_to_the_guarantees_also_by_threads_that_admit_at_the_same_moment() {
        for here in [1, 4] {
            let declared = DeclaredUse::default();
            let barrier = std::sync::Barrier::new(16);
            let thread = || {
                let mut budget = BufferBudget::new(ALL_BYTES, declared.clone());
                budget.set_connection_count(16 * here as u32, here);
                barrier.wait();
                let mut shares = vec![0; here];
                for share in &mut shares {
                    // Asked twice it is one request.
                    if budget.admits(0, MAX_BYTES) && budget.admits(0, MAX_BYTES) {
                        budget.charge(share, MAX_BYTES);
                    }
                }
                barrier.wait();
                assert!(!budget.admits(0, MAX_BYTES) && budget.admits(0, 1 << 20));
                barrier.wait();
                let all = shares.iter().sum::<u64>();
                shares.iter_mut().for_each(|share| budget.release(share, u64::MAX));
                all
            };
            let admitted: u64 = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..16).map(|_| scope.spawn(thread)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert!(admitted <= ALL_BYTES - ALL_BYTES / GUARANTEED_SHARE, "{admitted}");
            assert!(admitted >= 4 * MAX_BYTES, "{admitted}");
            assert_eq!(declared.0.declared.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn a_thread_that_charges_and_releases_a_little_declares_it_once() {
        let (declared, mut share) = (DeclaredUse::default(), 0);
        let mut budget = BufferBudget::new(ALL_BYTES, declared.clone());
        for _ in 0..10 {
            budget.charge(&mut share, 4096);
            assert_eq!(declared.0.declared.load(Ordering::Relaxed), STEP_BYTES);
            budget.release(&mut share, 4096);
        }
        budget.charge(&mut share, 32 << 20);
        budget.release(&mut share, 32 << 20);
        assert_eq!(declared.0.declared.load(Ordering::Relaxed), 0);
    }
}
