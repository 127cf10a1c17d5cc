//! The thread of an object's storage: it takes reads, fetches the blocks that they want, and gives
//! them to all reads that wait for them.
//!
//! Invariant: a block is fetched once at a time however many reads want it. What reads wait for comes
//! before what is read ahead. When the object has changed, every read fails from then on, those of
//! blocks that are at hand too.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use slab::Slab;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::object::block_memory::{BLOCK_BYTES, BlockMemory};
use crate::object::fault::Fault;
use crate::object::read_ahead::ReadAhead;
use crate::object::read_job::ReadJob;
use crate::object::store::{Object, Version};
use crate::object::store_counters::{StoreCounters, add};
use crate::policy::{BackOff, block_runs};

/// The most blocks of one request: 4 MiB.
const RUN_BLOCKS: u64 = 64;
/// The most requests with the store at once, and of these for what no read waits for.
const MAX_REQUESTS: usize = 16;
const MAX_AHEAD: usize = 4;
/// The most bytes of reads that have begun, unless it is one read.
const MAX_JOB_BYTES: u64 = 64 << 20;
/// The blocks in memory: 32 MiB.
const MEMORY_BLOCKS: usize = 512;

/// Since when the store has not answered.
#[derive(Default)]
struct Outage {
    since: Option<Instant>,
    /// Its end was told of: requests fail until the store answers again.
    gave_up: bool,
}

/// What a request needs to be made again.
struct Asking {
    object: Object,
    version: Version,
    place: String,
    reconnect: Duration,
    outage: RefCell<Outage>,
    counters: Arc<StoreCounters>,
}

impl Asking {
    /// Reads the blocks of `run`, again and again until `reconnect` is over.
    async fn fetch(&self, run: Range<u64>) -> (Range<u64>, Result<Vec<u8>, Fault>) {
        let pos = run.start * BLOCK_BYTES;
        let len = (run.end * BLOCK_BYTES).min(self.version.size()) - pos;
        let mut first_failure = None;
        for failed in 1.. {
            let begun = Instant::now();
            let result = self.object.read(&self.version, pos, len).await;
            let bytes = result.as_ref().map_or(0, |data| data.len() as u64);
            self.counters.request(begun.elapsed(), bytes);
            match result {
                Err(Fault::Transient(why)) => {
                    let since = *first_failure.get_or_insert_with(Instant::now);
                    if !self.tries_again(&why, since) {
                        return (run, Err(Fault::Transient(why)));
                    }
                    tokio::time::sleep(BackOff::STORE.pause(failed, fastrand::u64(..))).await;
                    add(&self.counters.retries, 1);
                }
                Ok(data) => {
                    self.answered();
                    return (run, Ok(data));
                }
                Err(fault) => return (run, Err(fault)),
            }
        }
        (run, Err(Fault::Transient("too many attempts".into())))
    }

    /// Whether a request that has failed since `since` is made again.
    fn tries_again(&self, why: &str, since: Instant) -> bool {
        let mut outage = self.outage.borrow_mut();
        let begun = *outage.since.get_or_insert_with(|| {
            tracing::warn!("{}: {why}; asking again", self.place);
            Instant::now()
        });
        if begun.min(since).elapsed() < self.reconnect {
            return true;
        }
        if !std::mem::replace(&mut outage.gave_up, true) {
            tracing::error!("{}: {why}; reads fail until it answers again", self.place);
        }
        false
    }

    fn answered(&self) {
        let outage = std::mem::take(&mut *self.outage.borrow_mut());
        if let Some(since) = outage.since {
            let lost = since.elapsed().as_millis();
            tracing::warn!("{}: it answers again, after {lost} ms", self.place);
        }
    }
}

/// A block that is not at hand.
#[derive(Default)]
struct Pending {
    /// The reads that wait for it.
    waiters: Vec<usize>,
    asked: bool,
}

/// The thread's data.
pub(super) struct BlockFetcher {
    inbox: UnboundedReceiver<ReadJob>,
    asking: Rc<Asking>,
    waiting: VecDeque<ReadJob>,
    jobs: Slab<ReadJob>,
    job_bytes: u64,
    pending: HashMap<u64, Pending>,
    /// Blocks that reads wait for and that are not asked yet, and the order in which they came.
    wanted: BTreeSet<u64>,
    order: VecDeque<u64>,
    /// Blocks that are to be read ahead.
    ahead: BTreeSet<u64>,
    /// Requests for what no read waited for when they were made.
    asked_ahead: BTreeSet<u64>,
    streams: ReadAhead,
    memory: BlockMemory,
    /// The object has changed; nothing is read any more.
    changed: bool,
    refused: Option<Instant>,
}

impl BlockFetcher {
    pub(super) fn new(
        inbox: UnboundedReceiver<ReadJob>,
        (object, version): (Object, Version),
        reconnect: Duration,
        counters: Arc<StoreCounters>,
    ) -> Self {
        let place = object.url().to_string();
        let outage = RefCell::default();
        let asking = Asking { object, version, place, reconnect, outage, counters };
        Self {
            inbox,
            asking: Rc::new(asking),
            waiting: VecDeque::new(),
            jobs: Slab::new(),
            job_bytes: 0,
            pending: HashMap::new(),
            wanted: BTreeSet::new(),
            order: VecDeque::new(),
            ahead: BTreeSet::new(),
            asked_ahead: BTreeSet::new(),
            streams: ReadAhead::default(),
            memory: BlockMemory::new(MEMORY_BLOCKS),
            changed: false,
            refused: None,
        }
    }

    /// Serves until the storage is closed and its last read has ended.
    pub(super) async fn run(mut self) {
        let mut requests = FuturesUnordered::new();
        let mut open = true;
        loop {
            self.begin_waiting();
            while let Some(run) = self.next_run(requests.len()) {
                let asking = self.asking.clone();
                requests.push(async move { asking.fetch(run).await });
            }
            if !open && self.jobs.is_empty() && self.waiting.is_empty() {
                return;
            }
            tokio::select! {
                job = self.inbox.recv(), if open => {
                    open = job.is_some();
                    self.waiting.extend(job);
                    // What came together is asked for together.
                    while let Ok(job) = self.inbox.try_recv() {
                        self.waiting.push_back(job);
                    }
                }
                Some((run, result)) = requests.next() => self.finish(&run, result),
            }
        }
    }

    /// Begins the reads that wait, as far as there is memory for them.
    fn begin_waiting(&mut self) {
        while let Some(mut job) = self.waiting.pop_front() {
            let size = self.asking.version.size();
            // As a device answers a read behind its end.
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
        let blocks = job.range.pos / BLOCK_BYTES..job.range.end().div_ceil(BLOCK_BYTES);
        let end = self.asking.version.size().div_ceil(BLOCK_BYTES);
        let counters = self.asking.counters.clone();
        job.begin((blocks.end - blocks.start) as usize);
        self.job_bytes += job.range.len;
        let range = job.range;
        let entry = self.jobs.vacant_entry();
        let index = entry.key();
        let job = entry.insert(job);
        let mut ended = false;
        for block in blocks {
            if let Some(data) = self.memory.get(block) {
                add(&counters.hits, 1);
                ended = job.give(block * BLOCK_BYTES, Some(&data));
                continue;
            }
            add(&counters.misses, 1);
            let pending = self.pending.entry(block).or_default();
            pending.waiters.push(index);
            if !pending.asked && self.wanted.insert(block) {
                self.order.push_back(block);
            }
            self.ahead.remove(&block);
        }
        if ended {
            self.end(index);
        }
        for block in self.streams.after(range, end) {
            if !self.memory.has(block) && !self.pending.contains_key(&block) {
                self.ahead.insert(block);
            }
        }
    }

    fn end(&mut self, index: usize) {
        let job = self.jobs.remove(index);
        self.job_bytes -= job.range.len;
        job.end();
    }

    /// The blocks of the next request, while `requests` are with the store.
    fn next_run(&mut self, requests: usize) -> Option<Range<u64>> {
        if requests >= MAX_REQUESTS {
            return None;
        }
        while let Some(first) = self.order.pop_front() {
            let run = block_runs(self.wanted.range(first..).copied(), RUN_BLOCKS).next();
            // It was in the request for another one.
            let Some(run) = run.filter(|run| run.start == first) else { continue };
            self.ask(&run);
            return Some(run);
        }
        if self.asked_ahead.len() >= MAX_AHEAD {
            return None;
        }
        let run = block_runs(self.ahead.iter().copied(), RUN_BLOCKS).next()?;
        self.asked_ahead.insert(run.start);
        self.ask(&run);
        Some(run)
    }

    fn ask(&mut self, run: &Range<u64>) {
        for block in run.clone() {
            self.wanted.remove(&block);
            self.ahead.remove(&block);
            self.pending.entry(block).or_default().asked = true;
        }
    }

    /// Gives what has come to the reads that wait for it.
    fn finish(&mut self, run: &Range<u64>, result: Result<Vec<u8>, Fault>) {
        self.asked_ahead.remove(&run.start);
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
            let data = data
                .as_ref()
                .and_then(|data| data.get(from..))
                .map(|rest| Rc::from(rest.get(..BLOCK_BYTES as usize).unwrap_or(rest)));
            self.deliver(block, data);
        }
        if self.changed {
            self.fail_all();
        }
    }

    fn deliver(&mut self, block: u64, data: Option<Rc<[u8]>>) {
        let pending = self.pending.remove(&block).unwrap_or_default();
        for index in pending.waiters {
            let job = self.jobs.get_mut(index);
            if job.is_some_and(|job| job.give(block * BLOCK_BYTES, data.as_deref())) {
                self.end(index);
            }
        }
        if let Some(data) = data {
            self.memory.put(block, data);
        }
    }

    /// Logs why a request has failed; one that was tried again for long has been told of.
    fn note(&mut self, fault: Fault) {
        const PAUSE: Duration = Duration::from_secs(10);
        let place = &self.asking.place;
        match fault {
            Fault::Transient(_) => {}
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

    /// Fails the reads that wait for what is not asked yet. Those with a request end with it.
    fn fail_all(&mut self) {
        self.order.clear();
        self.ahead.clear();
        for block in std::mem::take(&mut self.wanted) {
            self.deliver(block, None);
        }
    }
}
