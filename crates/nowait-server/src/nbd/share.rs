//! How much of a thread's memory for payload each of its connections may hold.
//!
//! Invariant: a connection may always hold its equal part of a quarter of the memory, and at least
//! `SURE_BYTES`; with more it leaves several times as much to the others. So those that never give
//! anything back (their clients do not read what they asked for) get less and less each, and who
//! comes later still finds something.
//! Knows: nothing. Known by: conn, turn, parse.

/// What every connection may hold at least, in bytes, however many there are.
const SURE_BYTES: u64 = 64 << 10;
/// This part of the memory is for what every connection may hold, however much the others do.
const SURE_PART: u64 = 4;
/// What one connection may hold at most, in bytes, unless it is a single request.
const MOST_BYTES: u64 = 32 << 20;
/// The same beside other connections, whose requests wait for it at the device: enough to keep a
/// fast one busy.
const MOST_BESIDE_OTHERS_BYTES: u64 = 8 << 20;
/// A connection may hold this part of what nobody holds.
const PART: u64 = 8;
/// A single request may be longer: this part of what nobody holds.
const SINGLE_PART: u64 = 2;

/// The memory of a thread, in bytes.
pub(crate) struct Store {
    all: u64,
    held: u64,
    /// What each connection may hold, however much the others do.
    sure: u64,
    /// What each connection may hold at most, unless it is a single request.
    most: u64,
}

impl Store {
    pub(crate) fn new(all: u64) -> Self {
        Self { all, held: 0, sure: SURE_BYTES, most: MOST_BYTES }
    }

    /// So many connections share the memory from now on.
    pub(crate) fn share_among(&mut self, connections: usize) {
        let equal = self.all / SURE_PART / (connections as u64).max(1);
        self.most = if connections > 1 { MOST_BESIDE_OTHERS_BYTES } else { MOST_BYTES };
        self.sure = equal.clamp(SURE_BYTES, self.most);
    }

    /// Whether a connection that holds `held` may hold `more`.
    #[inline]
    pub(crate) fn admits(&self, held: u64, more: u64) -> bool {
        let then = held + more;
        let free = self.all.saturating_sub(self.held);
        more == 0
            || then <= self.sure
            || then <= self.most.min(free / PART)
            || held == 0 && more <= free / SINGLE_PART
    }

    /// `share`, which is what a connection holds, grows by `bytes`.
    #[inline]
    pub(crate) fn take(&mut self, share: &mut u64, bytes: u64) {
        *share += bytes;
        self.held += bytes;
    }

    /// `share` shrinks by `bytes`, or to nothing.
    #[inline]
    pub(crate) fn give_back(&mut self, share: &mut u64, bytes: u64) {
        let bytes = bytes.min(*share);
        *share -= bytes;
        self.held -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL_BYTES: u64 = 256 << 20;

    /// Takes requests of `bytes` until no more is admitted; how much that was.
    fn greedy(store: &mut Store, bytes: u64) -> u64 {
        let mut share = 0;
        while store.admits(share, bytes) {
            store.take(&mut share, bytes);
        }
        share
    }

    #[test]
    fn a_single_connection_gets_close_to_the_most_and_gives_all_of_it_back() {
        let mut store = Store::new(ALL_BYTES);
        let mut share = greedy(&mut store, 1 << 20);
        assert!((MOST_BYTES * 3 / 4..=MOST_BYTES).contains(&share), "{share}");
        store.give_back(&mut share, u64::MAX);
        assert_eq!((share, store.held), (0, 0));
    }

    #[test]
    fn the_longest_request_is_admitted_beside_a_connection_that_holds_the_most() {
        let mut store = Store::new(ALL_BYTES);
        greedy(&mut store, 1 << 20);
        assert!(store.admits(0, MOST_BYTES));
    }

    #[test]
    fn a_connection_with_others_beside_it_gets_a_quarter_of_what_it_gets_alone() {
        let mut store = Store::new(ALL_BYTES);
        for (connections, most) in [(1, MOST_BYTES), (2, MOST_BYTES / 4), (1, MOST_BYTES)] {
            store.share_among(connections);
            let mut share = greedy(&mut store, 1 << 20);
            assert!((most * 3 / 4..=most).contains(&share), "{connections}: {share}");
            store.give_back(&mut share, u64::MAX);
        }
    }

    #[test]
    fn however_many_give_nothing_back_the_next_one_finds_something_and_there_is_an_end() {
        for bytes in [4 << 10, 64 << 10, 1 << 20, 32 << 20] {
            let mut store = Store::new(ALL_BYTES);
            for n in 1..=1024 {
                store.share_among(n);
                assert!(store.admits(0, SURE_BYTES), "before {n} with {bytes}");
                greedy(&mut store, bytes);
            }
            assert!(store.held <= 2 * ALL_BYTES, "{} with {bytes}", store.held);
        }
    }

    #[test]
    fn sixty_that_give_nothing_back_leave_room_for_a_request_of_a_mebibyte() {
        let mut store = Store::new(ALL_BYTES);
        for n in 1..=60 {
            store.share_among(n);
            greedy(&mut store, 1 << 20);
        }
        store.share_among(61);
        assert!(store.admits(0, 1 << 20), "{} are held", store.held);
    }
}
