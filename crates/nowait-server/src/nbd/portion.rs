//! Fair between connections: how much one look at a connection moves, and who is looked at first.
//!
//! Invariant: a connection that moves little waits for one portion of those that move much, however
//! many there are of these; and each of these is looked at again after all others of its kind.
//! Knows: nothing. Known by: conn, turn, parse.

use std::collections::VecDeque;

/// What one look at a connection may send, and as much may be asked of the device, in bytes: what a
/// processor copies in some 50 µs. A request is not cut, so the last one may be longer.
const BESIDE_OTHERS_BYTES: u64 = 256 << 10;
/// The same for a connection that is alone: all that it may hold.
const ALONE_BYTES: u64 = 32 << 20;
/// A connection moves much if it moved so many bytes lately.
const MUCH_BYTES: u64 = 256 << 10;

/// What one look may move with so many connections.
pub(crate) fn portion_among(connections: usize) -> u64 {
    if connections > 1 { BESIDE_OTHERS_BYTES } else { ALONE_BYTES }
}

/// What a connection may still move in this look at it.
#[derive(Default)]
pub(crate) struct Portion {
    /// Bytes that may be sent.
    pub(crate) send: u64,
    /// Bytes that may be read for it.
    read: u64,
    /// What was received last is taken up to its half in this look.
    halved: bool,
    /// Bytes moved in this look.
    moved: u64,
    /// Bytes moved in earlier looks: half of the last one's, a quarter of that before, and so on.
    lately: u64,
}

impl Portion {
    /// A look begins, which may move `bytes` each way.
    #[inline]
    pub(crate) fn begin(&mut self, bytes: u64) {
        let lately = (self.lately + self.moved) / 2;
        *self = Self { send: bytes, read: bytes, halved: false, moved: 0, lately };
    }

    /// `bytes` have moved, in whichever way.
    #[inline]
    pub(crate) fn moved(&mut self, bytes: u64) {
        self.moved += bytes;
    }

    /// A read of `bytes` was asked of the device.
    #[inline]
    pub(crate) fn read(&mut self, bytes: u64) {
        self.read = self.read.saturating_sub(bytes);
        self.moved += bytes;
    }

    /// Whether no more is to be read in this look.
    #[inline]
    pub(crate) fn has_read_all(&self) -> bool {
        self.read == 0
    }

    /// The other half of what was received is for the next look.
    pub(crate) fn halve(&mut self) {
        self.halved = true;
    }

    /// Whether what has stalled goes on in the next look, without anything having to happen.
    #[inline]
    pub(crate) fn is_used_up(&self) -> bool {
        self.has_read_all() || self.halved
    }

    /// Bytes moved in this look, in whichever way.
    #[inline]
    pub(crate) fn in_this_look(&self) -> u64 {
        self.moved
    }

    #[inline]
    fn is_much(&self) -> bool {
        self.lately + self.moved >= MUCH_BYTES
    }
}

/// The connections that are to be looked at, by number.
#[derive(Default)]
pub(crate) struct Lines {
    /// Those that move little: all of them are looked at in each turn.
    pub(crate) little: Vec<usize>,
    /// Those that move much, the one that waits longest first.
    pub(crate) much: VecDeque<usize>,
}

impl Lines {
    #[inline]
    pub(crate) fn push(&mut self, index: usize, portion: &Portion) {
        match portion.is_much() {
            true => self.much.push_back(index),
            false => self.little.push(index),
        }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.little.is_empty() && self.much.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A portion of a connection that moves `bytes` in each of some looks.
    fn moving(bytes: u64) -> Portion {
        let mut portion = Portion::default();
        for _ in 0..10 {
            portion.begin(BESIDE_OTHERS_BYTES);
            portion.moved(bytes);
        }
        portion
    }

    #[test]
    fn who_moves_a_portion_in_each_look_is_in_another_line_than_who_moves_little() {
        let mut lines = Lines::default();
        lines.push(1, &moving(BESIDE_OTHERS_BYTES));
        lines.push(2, &moving(16 * 4096));
        lines.push(3, &moving(1 << 20));
        assert_eq!((lines.little, lines.much), (vec![2], VecDeque::from([1, 3])));
    }

    #[test]
    fn who_has_moved_much_is_forgiven_after_some_looks_that_move_nothing() {
        let mut portion = moving(1 << 20);
        let mut looks = 0;
        while portion.is_much() {
            portion.begin(BESIDE_OTHERS_BYTES);
            looks += 1;
        }
        assert!((1..10).contains(&looks), "{looks}");
    }

    #[test]
    fn a_look_reads_its_portion_and_a_last_request_of_any_length() {
        let mut portion = Portion::default();
        portion.begin(BESIDE_OTHERS_BYTES);
        portion.read(BESIDE_OTHERS_BYTES - 1);
        assert!(!portion.has_read_all());
        portion.read(32 << 20);
        assert!(portion.has_read_all());
    }
}
