//! The thread of an object's storage: it takes reads, gets the blocks that they want from memory, the
//! cache or the store, and gives them to all reads that wait for them.
//!
//! Invariant: a block is fetched once at a time however many reads want it. What reads wait for comes
//! before what is read ahead, and that before what a record names. When the object has changed, every
//! read fails from then on, those of blocks that are at hand too.

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use slab::Slab;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::object::asking::Asking;
use crate::object::block_cache::{BlockCache, Cached};
use crate::object::block_memory::BlockMemory;
use crate::object::block_queue::BlockQueue;
use crate::object::boot_record::ObjectRecord;
use crate::object::fault::Fault;
use crate::object::read_job::ReadJob;
use crate::policy::{BLOCK_BYTES, PrefetchCursor, ReadAhead};

/// The most blocks of one request: 4 MiB.
const RUN_BLOCKS: u64 = 64;
/// The most requests to an object store simultaneously, for one object.
/// Beyond it: reads wait.
const MAX_REQUESTS: usize = 16;
/// The most of these for blocks that no read waits for.
/// Beyond it: reading ahead waits.
const MAX_AHEAD: usize = 4;
/// The most reads of an object's cache file simultaneously.
/// Beyond it: reads wait.
const MAX_LOOKS: usize = 4;
/// The most writes of an object's cache file simultaneously.
/// Beyond it: no further request is sent to the store.
const MAX_STORES: usize = 4;
/// The most blocks of one read of the cache.
const LOOK_BLOCKS: u64 = 16;
/// The most bytes of reads that have begun, unless it is one read.
/// Beyond it: reads wait.
const MAX_JOB_BYTES: u64 = 64 << 20;
/// The most blocks in memory: 32 MiB.
const MEMORY_BLOCKS: usize = 512;

/// Purposes that blocks are fetched for, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Read,
    Ahead,
    Record,
}

const PURPOSES: [Purpose; 3] = [Purpose::Read, Purpose::Ahead, Purpose::Record];

/// Where a block comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Cache,
    Store,
}

/// A step that has completed.
enum Done {
    Looked(Range<u64>, Purpose, Vec<Cached>),
    Fetched(Range<u64>, Purpose, Result<Vec<u8>, Fault>),
    /// So many blocks are in the cache now.
    Stored(u64),
}

type Step = Pin<Box<dyn Future<Output = Done>>>;

/// The helpers of a storage that it may have.
#[derive(Default)]
pub(super) struct Helpers {
    pub(super) cache: Option<Arc<BlockCache>>,
    pub(super) record: Option<ObjectRecord>,
    /// Blocks that are fetched into the cache without being asked for.
    pub(super) prefetch: Option<PrefetchCursor>,
}

/// The thread's data.
pub(super) struct BlockFetcher {
    inbox: UnboundedReceiver<ReadJob>,
    asking: Rc<Asking>,
    helpers: Helpers,
    waiting: VecDeque<ReadJob>,
    jobs: Slab<ReadJob>,
    job_bytes: u64,
    /// The blocks that are on their way, and the reads that wait for them.
    pending: HashMap<u64, Vec<usize>>,
    /// Blocks that are to be looked for in the cache, and those that are to be asked for, by purpose.
    look: [BlockQueue; 3],
    fetch: [BlockQueue; 3],
    steps: FuturesUnordered<Step>,
    looks: usize,
    requests: usize,
    /// Of the requests those for what no read waited for.
    ahead: usize,
    stores: usize,
    /// Blocks of the record that the cache has, or cannot get.
    known: HashSet<u64>,
    streams: ReadAhead,
    memory: BlockMemory,
    /// The object has changed; nothing is read any more.
    changed: bool,
    refused: Option<Instant>,
}

impl BlockFetcher {
    pub(super) fn new(inbox: UnboundedReceiver<ReadJob>, asking: Asking, helpers: Helpers) -> Self {
        Self {
            inbox,
            asking: Rc::new(asking),
            helpers,
            waiting: VecDeque::new(),
            jobs: Slab::new(),
            job_bytes: 0,
            pending: HashMap::new(),
            look: <[BlockQueue; 3]>::default(),
            fetch: <[BlockQueue; 3]>::default(),
            steps: FuturesUnordered::new(),
            looks: 0,
            requests: 0,
            ahead: 0,
            stores: 0,
            known: HashSet::new(),
            streams: ReadAhead::default(),
            memory: BlockMemory::new(MEMORY_BLOCKS),
            changed: false,
            refused: None,
        }
    }

    /// Serves until the storage is closed and its last read has completed.
    pub(super) async fn run(mut self) {
        let mut open = true;
        loop {
            self.begin_waiting();
            if let Some(record) = &mut self.helpers.record {
                record.write();
            }
            self.begin_looks();
            self.begin_requests();
            let idle = self.jobs.is_empty() && self.waiting.is_empty() && self.stores == 0;
            if !open && idle {
                return;
            }
            tokio::select! {
                job = self.inbox.recv(), if open => {
                    open = job.is_some();
                    self.waiting.extend(job);
                    // Jobs that came together are asked for together.
                    while let Ok(job) = self.inbox.try_recv() {
                        self.waiting.push_back(job);
                    }
                }
                Some(done) = self.steps.next() => self.finish(done),
            }
        }
    }

    /// Begins the reads that wait, as far as there is memory for them.
    fn begin_waiting(&mut self) {
        while let Some(mut job) = self.waiting.pop_front() {
            let size = self.asking.version.size();
            // A device answers a read behind its end like this.
            job.range.len = job.range.len.min(size.saturating_sub(job.range.pos));
            if job.is_write() {
                job.fail(libc::EROFS);
            } else if self.changed {
                job.fail(libc::EIO);
            } else if job.range.len == 0 {
                job.end();
            } else if self.jobs.is_empty() || self.job_bytes + job.range.len <= MAX_JOB_BYTES {
                self.begin(job);
            } else {
                return self.waiting.push_front(job);
            }
        }
    }

    fn begin(&mut self, mut job: ReadJob) {
        let range = job.range;
        let blocks = range.pos / BLOCK_BYTES..range.end().div_ceil(BLOCK_BYTES);
        job.begin((blocks.end - blocks.start) as usize);
        self.job_bytes += range.len;
        let index = self.jobs.insert(job);
        let counters = self.asking.counters.clone();
        let mut ended = false;
        let mut asked_end = None;
        for block in blocks {
            if let Some(record) = &mut self.helpers.record {
                record.note(block);
            }
            if let Some(data) = self.memory.get(block) {
                counters.count(|counts| counts.hits += 1);
                let job = self.jobs.get_mut(index);
                ended = job.is_some_and(|job| job.give(block * BLOCK_BYTES, Some(&data)));
                continue;
            }
            asked_end = self.want(block, Purpose::Read).then_some(block + 1);
            self.pending.entry(block).or_default().push(index);
        }
        if ended {
            self.end(index);
        }
        // A record knows better where a sequence ends.
        if self.helpers.prefetch.is_some() {
            return;
        }
        let end = self.asking.version.size().div_ceil(BLOCK_BYTES);
        let proposed = self.streams.after(range, end);
        let joins = ReadAhead::joins(asked_end, &proposed);
        let purpose = if joins { Purpose::Read } else { Purpose::Ahead };
        for block in proposed {
            if !self.memory.has(block) {
                self.want(block, purpose);
            }
        }
    }

    /// Begins to get a block, or gets it sooner. Returns whether it begins.
    fn want(&mut self, block: u64, purpose: Purpose) -> bool {
        let is_new = !self.pending.contains_key(&block);
        self.pending.entry(block).or_default();
        if is_new {
            let has_cache = self.helpers.cache.is_some();
            let queues = if has_cache { &mut self.look } else { &mut self.fetch };
            queues[purpose as usize].push(block);
        } else if purpose == Purpose::Read {
            sooner(&mut self.look, block);
            sooner(&mut self.fetch, block);
        }
        is_new
    }

    fn end(&mut self, index: usize) {
        let job = self.jobs.remove(index);
        self.job_bytes -= job.range.len;
        job.end();
    }

    fn begin_looks(&mut self) {
        let Some(cache) = self.helpers.cache.clone() else { return };
        while self.looks < MAX_LOOKS {
            let next = PURPOSES.into_iter().find_map(|purpose| {
                let run = self.look[purpose as usize].next_run(LOOK_BLOCKS);
                run.map(|run| (purpose, run))
            });
            let Some((purpose, run)) = next else { return };
            self.looks += 1;
            let (cache, blocks) = (cache.clone(), run.clone());
            let look = move || blocks.map(|block| cache.read(block)).collect::<Vec<_>>();
            let look = tokio::task::spawn_blocking(look);
            self.steps.push(Box::pin(async move {
                Done::Looked(run, purpose, look.await.unwrap_or_default())
            }));
        }
    }

    fn begin_requests(&mut self) {
        while self.requests < MAX_REQUESTS && self.stores < MAX_STORES {
            let Some((purpose, run)) = self.next_run() else { break };
            self.requests += 1;
            self.ahead += usize::from(purpose != Purpose::Read);
            let asking = self.asking.clone();
            self.steps.push(Box::pin(async move {
                let result = asking.fetch(&run).await;
                Done::Fetched(run, purpose, result)
            }));
        }
        self.follow_record();
    }

    fn next_run(&mut self) -> Option<(Purpose, Range<u64>)> {
        PURPOSES.into_iter().find_map(|purpose| {
            if purpose != Purpose::Read && self.ahead >= MAX_AHEAD {
                return None;
            }
            let run = self.fetch[purpose as usize].next_run(RUN_BLOCKS);
            run.map(|run| (purpose, run))
        })
    }

    /// Wants the next blocks of the record, while little else is under way.
    fn follow_record(&mut self) {
        while !self.changed && self.looks == 0 && self.ahead < MAX_AHEAD && self.stores == 0 {
            let Self { helpers, pending, known, .. } = self;
            let Some(cursor) = &mut helpers.prefetch else { return };
            let wanted = |block| !pending.contains_key(&block) && !known.contains(&block);
            let Some(run) = cursor.next_run(wanted, RUN_BLOCKS) else {
                helpers.prefetch = None;
                tracing::info!("{}: all of the record is in the cache", self.asking.place);
                return;
            };
            for block in run {
                self.known.insert(block);
                self.want(block, Purpose::Record);
            }
            self.begin_looks();
        }
    }

    fn finish(&mut self, done: Done) {
        match done {
            Done::Stored(blocks) => {
                self.stores -= 1;
                self.asking.counters.count(|counts| counts.stored += blocks);
            }
            Done::Looked(run, purpose, found) => {
                self.looks -= 1;
                self.looked(run, purpose, found);
            }
            Done::Fetched(run, purpose, result) => {
                self.requests -= 1;
                self.ahead -= usize::from(purpose != Purpose::Read);
                self.fetched(run, purpose, result);
            }
        }
    }

    /// Gives what the cache has to the reads that wait for it, and asks the store for the rest.
    fn looked(&mut self, run: Range<u64>, purpose: Purpose, found: Vec<Cached>) {
        let counters = self.asking.counters.clone();
        let mut found = found.into_iter();
        let before = run.start.wrapping_sub(1);
        let mut at_hand = !self.pending.contains_key(&before) && !self.memory.has_fetched(before);
        for block in run {
            let waiters = self.waiters(block);
            let cached = found.next().unwrap_or(Cached::Absent);
            if cached == Cached::Corrupt {
                counters.count(|counts| counts.corrupt += 1);
            }
            if let Cached::Block(data) = cached {
                counters.count(|counts| counts.hits += waiters);
                at_hand = true;
                let keeps = waiters > 0 || purpose != Purpose::Record;
                let data = Some(data.as_slice()).filter(|_| !self.changed);
                self.deliver(block, data, keeps.then_some(Origin::Cache));
            } else if self.changed
                || at_hand
                    && waiters == 0
                    && purpose != Purpose::Record
                    && self.streams.leaves_out(block)
            {
                self.deliver(block, None, None);
            } else {
                at_hand = false;
                // A read may wait by now for what was looked for ahead.
                let purpose = if waiters > 0 { Purpose::Read } else { purpose };
                self.fetch[purpose as usize].push(block);
            }
        }
    }

    /// Gives what the store has sent to the reads that wait for it, and to the cache.
    fn fetched(&mut self, run: Range<u64>, purpose: Purpose, result: Result<Vec<u8>, Fault>) {
        let has_failed = result.is_err();
        let data = match result {
            Ok(data) if !self.changed => Some(data),
            Ok(_) => None,
            Err(fault) => {
                self.note(fault);
                None
            }
        };
        for block in run.clone() {
            let from = ((block - run.start) * BLOCK_BYTES) as usize;
            let data = data.as_ref().and_then(|data| data.get(from..));
            let data = data.map(|rest| rest.get(..BLOCK_BYTES as usize).unwrap_or(rest));
            let waiters = self.waiters(block);
            self.asking.counters.count(|counts| counts.misses += waiters);
            let keeps = waiters > 0 || purpose != Purpose::Record;
            self.deliver(block, data, keeps.then_some(Origin::Store));
        }
        if let (Some(data), Some(cache)) = (data, self.helpers.cache.clone()) {
            self.stores += 1;
            let store = tokio::task::spawn_blocking(move || cache.write(run.start, &data));
            self.steps.push(Box::pin(async move {
                // Blocks that could not be written are fetched another time.
                Done::Stored(store.await.unwrap_or(0))
            }));
        }
        if self.changed {
            let looks = self.look.iter_mut().flat_map(BlockQueue::drain).collect();
            self.fail(looks);
        }
        // Those that wait for their turn have waited as long.
        if self.changed || has_failed && self.asking.gave_up() {
            let blocks = self.fetch.iter_mut().flat_map(BlockQueue::drain).collect();
            self.fail(blocks);
        }
    }

    /// Reads that wait for `block`.
    fn waiters(&self, block: u64) -> u64 {
        self.pending.get(&block).map_or(0, |jobs| jobs.len() as u64)
    }

    /// Gives `data`, or that there are none, to the reads that wait for `block`, and to memory if it is
    /// to be kept there.
    fn deliver(&mut self, block: u64, data: Option<&[u8]>, keeps: Option<Origin>) {
        for index in self.pending.remove(&block).unwrap_or_default() {
            let job = self.jobs.get_mut(index);
            if job.is_some_and(|job| job.give(block * BLOCK_BYTES, data)) {
                self.end(index);
            }
        }
        if let (Some(data), Some(origin)) = (data, keeps) {
            let data = self.memory.copied(data);
            self.memory.put(block, data, origin == Origin::Store);
        }
    }

    /// Logs why a request has failed; one that was tried again for long has been told of.
    fn note(&mut self, fault: Fault) {
        const PAUSE: Duration = Duration::from_secs(10);
        let place = &self.asking.place;
        match fault {
            Fault::Transient(_) | Fault::Busy(_) => {}
            Fault::Changed(why) => {
                if !std::mem::replace(&mut self.changed, true) {
                    tracing::error!("{place}: {why}; every read fails from now on");
                }
            }
            Fault::Refused(why) => {
                if self.refused.is_none_or(|told| told.elapsed() > PAUSE) {
                    self.refused = Some(Instant::now());
                    tracing::error!("{place}: {why}");
                }
            }
        }
    }

    /// Fails the reads that wait for `blocks`, which are not under way.
    fn fail(&mut self, blocks: Vec<u64>) {
        blocks.into_iter().for_each(|block| self.deliver(block, None, None));
    }
}

/// Moves `block` to the most urgent of `queues`, if it is in another one.
fn sooner(queues: &mut [BlockQueue; 3], block: u64) {
    let [first, rest @ ..] = queues;
    if rest.iter_mut().any(|queue| queue.remove(block)) {
        first.push(block);
    }
}
