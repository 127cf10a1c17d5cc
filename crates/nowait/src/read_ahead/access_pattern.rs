//! Where a read would be if it continued an earlier one: the reads of a file are compared with what the
//! last ones let expect.
//!
//! Invariant: a read costs the same whatever was read before: one look-up, and at most
//! [`RECENT`] + 1 entries.

/// Entries of the table, a power of two.
const ENTRIES: usize = 256;
/// Reads whose distance to the next read is expected again.
const RECENT: usize = 4;
/// Reads in a row, at the same distance, that make a stream: of one that goes on where the last one has
/// ended, and of one that leaves gaps or goes backwards.
const SEQUENTIAL_READS: u8 = 3;
const STRIDED_READS: u8 = 4;
/// Reads after which a read of a stream is not expected any more: in a small file some random read would be
/// there by chance.
const PATIENCE: u64 = 64;

/// How the reads of a stream follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Each begins where the last one has ended.
    Sequential,
    /// Each has `len` bytes, and begins `stride` bytes after the last one, or before it if that is
    /// negative.
    Strided { stride: i64, len: u64 },
}

/// A read that is expected at a position.
#[derive(Clone, Copy)]
struct Expected {
    pos: u64,
    step: Step,
    /// Reads in a row so far.
    reads: u8,
    /// The number of the last of these among the reads of the file.
    since: u64,
}

/// The reads that are expected next.
pub(crate) struct AccessPattern {
    table: Box<[Option<Expected>]>,
    /// Position and length of the last reads.
    recent: [(u64, u64); RECENT],
    /// Reads so far.
    reads: u64,
}

impl AccessPattern {
    pub(crate) fn new() -> Self {
        let table = vec![None; ENTRIES].into_boxed_slice();
        Self { table, recent: [(0, 0); RECENT], reads: 0 }
    }

    /// Takes note of a read. Returns its step if it belongs to a stream, which begins with it.
    pub(crate) fn note(&mut self, pos: u64, len: u64) -> Option<Step> {
        let found = self.table[place(pos)]
            .filter(|expected| expected.pos == pos && self.reads - expected.since <= PATIENCE);
        let found = found.filter(|expected| match expected.step {
            Step::Sequential => true,
            Step::Strided { len: earlier, .. } => earlier == len,
        });
        let reads = found.map_or(1, |expected| expected.reads + 1);
        match found.map(|expected| expected.step) {
            Some(step @ Step::Sequential) if reads >= SEQUENTIAL_READS => {
                return self.leave(pos, step);
            }
            Some(step @ Step::Strided { .. }) if reads >= STRIDED_READS => {
                return self.leave(pos, step);
            }
            Some(step @ Step::Strided { stride, .. }) => {
                self.predict(pos.checked_add_signed(stride), step, reads);
                self.predict(pos.checked_add(len), Step::Sequential, 1);
            }
            Some(Step::Sequential) => {
                self.predict(pos.checked_add(len), Step::Sequential, reads);
            }
            None => {
                for (earlier, _) in self.recent.into_iter().filter(|read| read.1 == len) {
                    let stride = pos.wrapping_sub(earlier).cast_signed();
                    // A read that overlaps the earlier one is none of a stream with gaps.
                    if stride.unsigned_abs() >= len && stride.cast_unsigned() != len {
                        let step = Step::Strided { stride, len };
                        self.predict(pos.checked_add_signed(stride), step, 2);
                    }
                }
                self.predict(pos.checked_add(len), Step::Sequential, 1);
            }
        }
        self.recent[self.reads as usize % RECENT] = (pos, len);
        self.reads += 1;
        None
    }

    /// Removes the entry of a read that has become a stream's.
    fn leave(&mut self, pos: u64, step: Step) -> Option<Step> {
        self.table[place(pos)] = None;
        Some(step)
    }

    fn predict(&mut self, pos: Option<u64>, step: Step, reads: u8) {
        if let Some(pos) = pos {
            self.table[place(pos)] = Some(Expected { pos, step, reads, since: self.reads });
        }
    }
}

/// The place of a position in the table.
fn place(pos: u64) -> usize {
    // The upper bits of the product depend on all bits of the position (Fibonacci hashing).
    (pos.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize % ENTRIES
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of the first read, from 1 on, that makes a stream, and its step.
    fn found(reads: impl IntoIterator<Item = (u64, u64)>) -> Option<(usize, Step)> {
        let mut pattern = AccessPattern::new();
        let mut all = reads.into_iter().enumerate();
        all.find_map(|(n, (pos, len))| pattern.note(pos, len).map(|step| (n + 1, step)))
    }

    #[test]
    fn the_third_read_in_a_row_makes_a_sequential_stream_of_any_lengths() {
        let reads = [(7, 100), (107, 3), (110, 4096), (4206, 1)];
        assert_eq!(found(reads), Some((3, Step::Sequential)));
        assert_eq!(found([(7, 100), (107, 3), (111, 4096)]), None);
    }

    #[test]
    fn the_fourth_read_at_the_same_distance_makes_a_strided_stream_in_either_direction() {
        for stride in [-8192, -4096, 12_288, 1 << 20] {
            let at = |n: i64| ((1 << 30) + n * stride).cast_unsigned();
            let step = Step::Strided { stride, len: 4096 };
            assert_eq!(found((0..9).map(|n| (at(n), 4096))), Some((4, step)), "{stride}");
            let other_len = (0..9).map(|n| (at(n), 4096 + n.cast_unsigned() * 512));
            assert_eq!(found(other_len), None, "{stride}");
        }
    }

    #[test]
    fn streams_that_take_turns_are_each_found() {
        let sequential = (0..40u64).map(|n| ((n % 4 + 1).pow(2) * (1 << 30) + n / 4 * 8192, 8192));
        assert_eq!(found(sequential), Some((9, Step::Sequential)));
        let strided = (0..40u64).map(|n| ((n % 3 + 1).pow(2) * (1 << 30) + n / 3 * 65_536, 8192));
        let step = Step::Strided { stride: 65_536, len: 8192 };
        assert_eq!(found(strided), Some((10, step)));
    }

    #[test]
    fn random_reads_and_reads_at_the_ends_of_the_numbers_make_no_stream() {
        let mut random = nowait_testkit::Random::from_seed(81);
        assert_eq!(found((0..100_000).map(|_| (random.below(1 << 24) * 4096, 4096))), None);
        assert_eq!(found([(u64::MAX, 9), (0, 9), (u64::MAX - 1, 9), (5, u64::MAX)]), None);
        assert_eq!(found((0..50).map(|_| (4096, 4096))), None, "the same block");
    }
}
