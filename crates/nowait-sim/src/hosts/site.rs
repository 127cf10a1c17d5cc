//! A host or a rack's server: its cache, its requests in flight, its network.
//!
//! Invariant: a block is in the cache, in one request in flight, or in neither, and never asked for
//! twice at the same time.

use std::collections::{BTreeSet, HashMap, VecDeque};

use nowait::ByteRange;
use nowait_remote::{BLOCK_BYTES, Pace, PrefetchCursor, ReadAhead, block_runs};

use super::block_set::BlockSet;
use super::boot_trace::blocks_of;
use super::origin::nanoseconds_a_byte;
use super::parameters::{DOWNLOAD_REQUESTS, MEMORY_BLOCKS, PREFETCH_REQUESTS, RUN_BLOCKS};
use super::request::Purpose;
use super::timeline::Time;

/// Steps of a site so that a range can be read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Missing {
    /// Requests in flight that bring a part of it.
    pub(super) in_flight: Vec<u32>,
    /// Ranges to be asked for: position and length in bytes.
    pub(super) ranges: Vec<(u64, u64)>,
}

/// Parts of the image that a site has.
#[derive(Clone, Debug)]
pub(super) enum Contents {
    /// Nothing is kept: what reads a rack's server has it there.
    Nothing,
    /// The blocks of the set, which came last, in the order in which they came.
    Recent(BlockSet, VecDeque<u64>),
    /// The blocks of the set.
    Blocks(BlockSet),
    /// All of it.
    Everything,
}

/// A host or a rack's server.
#[derive(Debug)]
pub(super) struct Site {
    /// The origin that it sends its requests to.
    pub(super) origin: u32,
    contents: Contents,
    in_flight: HashMap<u64, u32>,
    /// Blocks of the image; if it reads ahead, sequences of reads, and the blocks that are read ahead because of them.
    blocks: u64,
    pub(super) streams: Option<ReadAhead>,
    behind_reads: BTreeSet<u64>,
    /// Blocks that were fetched because a record has them.
    from_record: BlockSet,
    /// Blocks that it fetches ahead, and whether that is all that it does until it has it.
    cursor: Option<PrefetchCursor>,
    downloads: bool,
    /// Requests ahead that are in flight.
    ahead: u32,
    /// Since when no request was answered, if one has failed since.
    outage: Option<Time>,
    /// How often it asks the store; `None`: as often as it likes.
    pub(super) pace: Option<Pace>,
    /// The time that its network takes for a byte, in nanoseconds, and when it has taken all that
    /// was sent to it.
    nanoseconds_a_byte: f64,
    network_free: Time,
}

impl Site {
    /// A site with `contents` of an image of `blocks` blocks, whose requests go to `origin` over a
    /// network of `bandwidth` bits a second.
    pub(super) fn new(origin: u32, contents: Contents, blocks: u64, bandwidth: f64) -> Self {
        Self {
            blocks,
            streams: None,
            behind_reads: BTreeSet::new(),
            from_record: BlockSet::new(blocks),
            origin,
            contents,
            in_flight: HashMap::new(),
            cursor: None,
            downloads: false,
            ahead: 0,
            outage: None,
            pace: None,
            nanoseconds_a_byte: nanoseconds_a_byte(bandwidth),
            network_free: 0,
        }
    }

    /// Fetches what `cursor` names, ahead of the guests or, for a download, before they start.
    pub(super) fn fetch_ahead(&mut self, cursor: PrefetchCursor, downloads: bool) {
        (self.cursor, self.downloads) = (Some(cursor), downloads);
    }

    /// Whether the machines start only when the whole image is here.
    pub(super) fn downloads(&self) -> bool {
        self.downloads
    }

    /// Whether a download has completed.
    pub(super) fn is_downloaded(&self) -> bool {
        self.downloads && self.cursor.is_none() && self.ahead == 0
    }

    fn has(&self, block: u64) -> bool {
        match &self.contents {
            Contents::Nothing => false,
            Contents::Recent(set, _) | Contents::Blocks(set) => set.has(block),
            Contents::Everything => true,
        }
    }

    /// Ranges that are missing of `len` bytes at `pos`.
    pub(super) fn missing(&self, pos: u64, len: u64) -> Missing {
        if matches!(self.contents, Contents::Nothing) {
            return Missing { in_flight: Vec::new(), ranges: vec![(pos, len)] };
        }
        let absent = || blocks_of(pos, len).filter(|&block| !self.has(block));
        let mut in_flight: Vec<_> =
            absent().filter_map(|block| self.in_flight.get(&block).copied()).collect();
        in_flight.dedup();
        let unknown = absent().filter(|block| !self.in_flight.contains_key(block));
        let ranges = block_runs(unknown, RUN_BLOCKS)
            .map(|run| (run.start * BLOCK_BYTES, (run.end - run.start) * BLOCK_BYTES));
        Missing { in_flight, ranges: ranges.collect() }
    }

    /// A read of `len` bytes at `pos` begins, for which `missing` is asked: what follows it may be read
    /// ahead, with it or behind it, unless a record is followed.
    pub(super) fn begin_read(&mut self, pos: u64, len: u64, missing: &mut Missing) {
        if self.cursor.is_some() {
            return;
        }
        let Some(mut streams) = self.streams.take() else { return };
        let proposed = streams.after(ByteRange::new(pos, len), self.blocks);
        let last = missing.ranges.last_mut();
        let last = last.map(|(start, bytes)| ((*start + *bytes) / BLOCK_BYTES, bytes));
        let mut joined = last.filter(|(end, _)| ReadAhead::joins(Some(*end), &proposed));
        // Behind what a record has brought nothing is read ahead before a read needs it.
        let mut at_hand = proposed.start > 0 && self.from_record.has(proposed.start - 1);
        for block in proposed {
            if self.has(block) || self.in_flight.contains_key(&block) {
                at_hand = self.from_record.has(block);
            } else if at_hand && streams.leaves_out(block) {
                // Asked for when a read needs it.
            } else if let Some((end, bytes)) = &mut joined
                && *end == block
            {
                *end += 1;
                **bytes += BLOCK_BYTES;
            } else {
                self.behind_reads.insert(block);
            }
        }
        self.streams = Some(streams);
    }

    /// The next range to fetch ahead and why, if there is one and not enough are in flight.
    pub(super) fn next_ahead(&mut self) -> Option<(Purpose, u64, u64)> {
        let limit = if self.downloads { DOWNLOAD_REQUESTS } else { PREFETCH_REQUESTS };
        if self.ahead >= limit {
            return None;
        }
        if let Some(run) = block_runs(self.behind_reads.iter().copied(), RUN_BLOCKS).next() {
            let len = (run.end - run.start) * BLOCK_BYTES;
            return Some((Purpose::Prefetch, run.start * BLOCK_BYTES, len));
        }
        let mut cursor = self.cursor.take()?;
        let wanted = |block| !self.has(block) && !self.in_flight.contains_key(&block);
        let run = cursor.next_run(wanted, RUN_BLOCKS)?;
        self.cursor = Some(cursor);
        let purpose = if self.downloads { Purpose::Download } else { Purpose::Prefetch };
        Some((purpose, run.start * BLOCK_BYTES, (run.end - run.start) * BLOCK_BYTES))
    }

    /// Request `number` for `len` bytes at `pos` begins.
    pub(super) fn begin(&mut self, number: u32, purpose: Purpose, pos: u64, len: u64) {
        self.ahead += u32::from(purpose.is_ahead());
        if !matches!(self.contents, Contents::Nothing) && len > 0 {
            for block in blocks_of(pos, len) {
                self.in_flight.insert(block, number);
                self.behind_reads.remove(&block);
                if purpose.is_ahead() && self.cursor.is_some() {
                    self.from_record.add(block);
                }
            }
        }
    }

    /// A request completes; its bytes are here if it was `answered`.
    pub(super) fn end(&mut self, purpose: Purpose, pos: u64, len: u64, answered: bool) {
        self.ahead -= u32::from(purpose.is_ahead());
        if answered {
            self.outage = None;
        }
        if len == 0 || matches!(self.contents, Contents::Nothing) {
            return;
        }
        for block in blocks_of(pos, len) {
            self.in_flight.remove(&block);
            if answered {
                self.keep(block);
            }
        }
    }

    fn keep(&mut self, block: u64) {
        match &mut self.contents {
            Contents::Nothing | Contents::Everything => {}
            Contents::Blocks(set) => set.add(block),
            Contents::Recent(set, order) => {
                set.add(block);
                order.push_back(block);
                if order.len() > MEMORY_BLOCKS
                    && let Some(oldest) = order.pop_front()
                {
                    set.remove(oldest);
                }
            }
        }
    }

    /// A request of this site has failed at `now`. Returns since when none was answered.
    pub(super) fn outage(&mut self, now: Time) -> Time {
        *self.outage.get_or_insert(now)
    }

    /// Its network takes `bytes` that were sent now. Returns when it has them.
    pub(super) fn receive(&mut self, now: Time, bytes: u64) -> Time {
        let time = (bytes as f64 * self.nanoseconds_a_byte) as Time;
        self.network_free = self.network_free.max(now) + time;
        self.network_free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_in_flight_or_in_the_cache_is_not_asked_for_again() {
        let mut site = Site::new(0, Contents::Blocks(BlockSet::new(100)), 100, 1e9);
        let block = |n| n * BLOCK_BYTES;
        site.begin(7, Purpose::Guest, block(3), 2 * BLOCK_BYTES);
        let missing = site.missing(block(1) + 5, 5 * BLOCK_BYTES);
        let ranges = vec![(block(1), 2 * BLOCK_BYTES), (block(5), 2 * BLOCK_BYTES)];
        assert_eq!(missing, Missing { in_flight: vec![7], ranges });
        site.end(Purpose::Guest, block(3), 2 * BLOCK_BYTES, true);
        assert_eq!(site.missing(block(3), 2 * BLOCK_BYTES), Missing::default());
    }

    #[test]
    fn a_client_of_a_racks_server_asks_for_exactly_the_bytes_read() {
        let site = Site::new(0, Contents::Nothing, 100, 1e9);
        assert_eq!(site.missing(4096, 512).ranges, [(4096, 512)]);
    }

    #[test]
    fn memory_has_the_blocks_that_came_last() {
        let blocks = BlockSet::new(2 * MEMORY_BLOCKS as u64);
        let mut site = Site::new(0, Contents::Recent(blocks, VecDeque::new()), 2000, 1e9);
        (0..=MEMORY_BLOCKS as u64).for_each(|block| site.keep(block));
        assert!(!site.has(0) && site.has(1) && site.has(MEMORY_BLOCKS as u64));
    }
}
