//! The order in which blocks are fetched ahead: that of the first reads of an earlier boot.
//!
//! Invariant: every block of the record is proposed until the cache has it, each once, together with
//! the neighbours that the record has too.

use std::ops::Range;
use std::sync::Arc;

/// The blocks of a record.
#[derive(Debug)]
pub struct PrefetchOrder {
    /// In the order of their first reads.
    order: Vec<u64>,
    ascending: Vec<u64>,
}

impl PrefetchOrder {
    /// The order of `record`, in which a block may be there more than once.
    #[must_use]
    pub fn new(record: impl IntoIterator<Item = u64>) -> Self {
        let mut known = std::collections::HashSet::new();
        let order: Vec<_> = record.into_iter().filter(|&block| known.insert(block)).collect();
        let mut ascending = order.clone();
        ascending.sort_unstable();
        Self { order, ascending }
    }

    /// The blocks in the order of their first reads.
    #[must_use]
    pub fn blocks(&self) -> &[u64] {
        &self.order
    }

    fn has(&self, block: u64) -> bool {
        self.ascending.binary_search(&block).is_ok()
    }
}

/// How far an order has been followed.
#[derive(Clone, Debug)]
pub struct PrefetchCursor {
    order: Arc<PrefetchOrder>,
    next: usize,
}

impl PrefetchCursor {
    /// The beginning of `order`.
    #[must_use]
    pub fn new(order: Arc<PrefetchOrder>) -> Self {
        Self { order, next: 0 }
    }

    /// The next blocks to be fetched: the first one of the order for which `wanted` is true, with its
    /// neighbours on both sides that are in the record and wanted, at most `longest` (at least 1)
    /// together. `None`: all of the record has been proposed.
    pub fn next_run(&mut self, wanted: impl Fn(u64) -> bool, longest: u64) -> Option<Range<u64>> {
        let rest = self.order.order.get(self.next..)?;
        let at = rest.iter().position(|&block| wanted(block)).unwrap_or(rest.len());
        self.next += at;
        let first = *rest.get(at)?;
        self.next += 1;
        let may_join = |block: u64| self.order.has(block) && wanted(block);
        let mut run = first..first + 1;
        while run.end - run.start < longest && may_join(run.end) {
            run.end += 1;
        }
        while run.end - run.start < longest && run.start > 0 && may_join(run.start - 1) {
            run.start -= 1;
        }
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(record: &[u64], longest: u64, cached: &[u64]) -> Vec<Range<u64>> {
        let mut cursor = PrefetchCursor::new(Arc::new(PrefetchOrder::new(record.iter().copied())));
        let mut have = cached.to_vec();
        let mut runs = Vec::new();
        while let Some(run) = cursor.next_run(|block| !have.contains(&block), longest) {
            have.extend(run.clone());
            runs.push(run);
        }
        runs
    }

    #[test]
    fn blocks_come_in_the_order_of_the_record_with_their_neighbours() {
        assert_eq!(runs(&[5, 20, 6, 5, 19, 0], 64, &[]), [5..7, 19..21, 0..1]);
    }

    #[test]
    fn what_the_cache_has_is_not_proposed() {
        assert_eq!(runs(&[5, 6, 7, 30], 64, &[6, 30]), [5..6, 7..8]);
    }

    #[test]
    fn a_run_is_not_longer_than_allowed_and_nothing_is_left_out() {
        assert_eq!(runs(&[1, 2, 3, 4, 5], 2, &[]), [1..3, 3..5, 5..6]);
    }
}
