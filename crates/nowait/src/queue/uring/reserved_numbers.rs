//! Numbers of a ring's table of buffers that drivers register the memory of their requests under.
//!
//! Invariant: ranges that are in use do not overlap, and lie within the numbers that were set aside.

/// The numbers, in ranges.
pub(super) struct ReservedNumbers {
    first: u16,
    count: u16,
    /// Ranges in use: their first numbers and their lengths, in order.
    used: Vec<(u16, u16)>,
}

impl ReservedNumbers {
    /// Sets `count` numbers from `first` on aside.
    pub(super) const fn new(first: u16, count: u16) -> Self {
        Self { first, count, used: Vec::new() }
    }

    /// Whether none is in use.
    pub(super) fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    /// Reserves `count` successive numbers. Returns the first one, or `None` if there are not so many.
    pub(super) fn reserve(&mut self, count: u16) -> Option<u16> {
        let mut start = self.first;
        let mut at = 0;
        for (first, length) in &self.used {
            if first - start >= count {
                break;
            }
            start = first + length;
            at += 1;
        }
        let end = u32::from(self.first) + u32::from(self.count);
        if count == 0 || u32::from(start) + u32::from(count) > end {
            return None;
        }
        self.used.insert(at, (start, count));
        Some(start)
    }

    /// Gives the range back that begins at `first`.
    pub(super) fn release(&mut self, first: u16) {
        self.used.retain(|(used, _)| *used != first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_reserved_until_there_is_no_room_and_again_once_they_were_given_back() {
        let mut numbers = ReservedNumbers::new(100, 20);
        assert_eq!([8, 8, 5].map(|count| numbers.reserve(count)), [Some(100), Some(108), None]);
        assert_eq!(numbers.reserve(4), Some(116));
        numbers.release(108);
        assert_eq!(
            [9, 3, 5, 1].map(|count| numbers.reserve(count)),
            [None, Some(108), Some(111), None]
        );
        for first in [100, 108, 111, 116] {
            numbers.release(first);
        }
        assert!(numbers.is_empty());
        assert_eq!([0, 21, 20].map(|count| numbers.reserve(count)), [None, None, Some(100)]);
    }
}
