//! Blocks that lie side by side are one request.
//!
//! Invariant: the runs have all of the blocks, in their order, each once, and no others.

use std::ops::Range;

/// The runs of `blocks`, which ascend and are at most `longest` (at least 1) in a run.
pub fn block_runs(
    blocks: impl IntoIterator<Item = u64>,
    longest: u64,
) -> impl Iterator<Item = Range<u64>> {
    let mut blocks = blocks.into_iter().peekable();
    std::iter::from_fn(move || {
        let first = blocks.next()?;
        let mut run = first..first + 1;
        while run.end - run.start < longest && blocks.next_if_eq(&run.end).is_some() {
            run.end += 1;
        }
        Some(run)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run_up_to_the_longest() {
        let runs: Vec<_> = block_runs([1, 2, 3, 4, 5, 8, 10, 11], 3).collect();
        assert_eq!(runs, [1..4, 4..6, 8..9, 10..12]);
        assert_eq!(block_runs([], 3).count(), 0);
    }
}
