//! Finds the zeros in a piece of data, and what differs from an earlier copy of it.
//!
//! Invariant: the runs of a piece, or of what differs in it, cover it exactly, in order and without overlap; adjacent runs
//! differ in kind.

/// A part of a piece of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataRun {
    /// Its first byte, from the start of the piece.
    pub(crate) start: usize,
    /// Bytes, at least 1.
    pub(crate) len: usize,
    /// Whether the run is written as zeros. A run of data may contain zeros.
    pub(crate) zero: bool,
}

impl DataRun {
    /// Its bytes in the memory of the piece, if that has all of them.
    pub(crate) fn of(self, piece: &[u8]) -> Option<&[u8]> {
        piece.get(self.start..)?.get(..self.len)
    }
}

/// Bytes at the start of a block; checking them distinguishes most blocks of data from zeros.
const PROBE_BYTES: usize = 16;

/// Whether all of `bytes` are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let Some((probe, rest)) = bytes.split_at_checked(PROBE_BYTES) else {
        return bytes.iter().all(|&byte| byte == 0);
    };
    // If the first `PROBE_BYTES` are zero and each byte equals the one `PROBE_BYTES` before it, all
    // are zero; that comparison is the C library's memcmp, which is vectorised.
    probe == [0; PROBE_BYTES] && bytes.get(..rest.len()) == Some(rest)
}

/// The runs of `bytes`, in blocks of `block` bytes (at least 1) from their start on.
pub(crate) fn data_runs(bytes: &[u8], block: usize) -> Vec<DataRun> {
    let mut runs: Vec<DataRun> = Vec::new();
    for (index, part) in bytes.chunks(block.max(1)).enumerate() {
        let zero = is_zero(part);
        match runs.last_mut() {
            Some(last) if last.zero == zero => last.len += part.len(),
            _ => runs.push(DataRun { start: index * block.max(1), len: part.len(), zero }),
        }
    }
    runs
}

/// The runs of `new` that differ from `old`, which is as long, in blocks of `block` bytes (at least 1). Of these runs zeros are
/// found in blocks of `zero_block` bytes; 0: they are data.
pub(crate) fn changed_runs(
    new: &[u8],
    old: &[u8],
    block: usize,
    zero_block: usize,
) -> Vec<DataRun> {
    let block = block.max(1);
    let mut runs: Vec<DataRun> = Vec::new();
    for (index, (part, before)) in new.chunks(block).zip(old.chunks(block)).enumerate() {
        let start = index * block;
        match runs.last_mut() {
            _ if part == before => {}
            Some(last) if last.start + last.len == start => last.len += part.len(),
            _ => runs.push(DataRun { start, len: part.len(), zero: false }),
        }
    }
    if zero_block == 0 {
        return runs;
    }
    let split = |run: DataRun| {
        let parts = data_runs(run.of(new).unwrap_or_default(), zero_block);
        parts.into_iter().map(move |part| DataRun { start: run.start + part.start, ..part })
    };
    runs.into_iter().flat_map(split).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_anywhere_makes_it_data() {
        for len in [1, 15, 16, 17, 31, 32, 33, 512, 4096] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes), "{len}");
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "byte {at} of {len}");
                bytes[at] = 0;
            }
        }
        assert!(is_zero(&[]));
    }

    #[test]
    fn blocks_that_differ_are_found_and_zeros_in_them() {
        let run = |start, len, zero| DataRun { start, len, zero };
        let old = vec![1; 10_000];
        let mut new = old.clone();
        assert!(changed_runs(&new, &old, 4096, 0).is_empty());
        new[4095] = 2;
        new[9_999] = 2;
        let both = [run(0, 4096, false), run(8192, 1808, false)];
        assert_eq!(changed_runs(&new, &old, 4096, 0), both);
        new[..8192].fill(0);
        assert_eq!(changed_runs(&new, &old, 4096, 0), [run(0, 10_000, false)]);
        let with_zeros = [run(0, 8192, true), run(8192, 1808, false)];
        assert_eq!(changed_runs(&new, &old, 4096, 4096), with_zeros);
    }

    #[test]
    fn runs_cover_the_piece_and_alternate() {
        let mut bytes = vec![0; 10_000];
        bytes[4095] = 1;
        bytes[9_999] = 1;
        let wanted = [(0, 4096, false), (4096, 4096, true), (8192, 1808, false)];
        let wanted = wanted.map(|(start, len, zero)| DataRun { start, len, zero });
        assert_eq!(data_runs(&bytes, 4096), wanted);
        assert_eq!(data_runs(&[0; 9000], 4096), [DataRun { start: 0, len: 9000, zero: true }]);
        assert_eq!(data_runs(&[1; 9000], 4096), [DataRun { start: 0, len: 9000, zero: false }]);
        assert!(data_runs(&[], 4096).is_empty());
    }
}
