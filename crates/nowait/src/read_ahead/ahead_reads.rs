//! The streams of one file, of all its handles in the process, and the threads that read ahead of them.
//!
//! Invariant: a thread reads a chunk once, and puts it back only if it is still wanted. A change that has
//! ended is forgotten in every stream before the request that made it is answered.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::read_ahead::access_pattern::AccessPattern;
use crate::read_ahead::ahead_chunk::{AheadChunk, ChunkState};
use crate::read_ahead::ahead_memory::AheadMemory;
use crate::read_ahead::ahead_stream::{AheadStream, Cover, Part};
use crate::threads::fork_mark;
use crate::threads::thread_pool::ThreadPool;
use crate::threads::work_item::WorkItem;
use crate::types::byte_range::ByteRange;
use crate::types::io_cursor::ReadCursor;

/// Streams of a file; the one that was used last of all makes room.
const STREAMS: usize = 8;
/// Bytes of the largest read that is served: a larger one keeps the device busy by itself.
const LARGEST_READ: u64 = 256 << 10;
/// Threads that read ahead.
const THREADS: u32 = 16;
/// How long a read waits for a chunk that no thread has begun to read.
const QUEUE_PATIENCE: Duration = Duration::from_millis(5);

/// The bytes of a file.
pub(crate) trait AheadSource: Send + Sync {
    /// Fills `memory` from byte `pos` on, up to the end. Returns the bytes read, `None` after an error.
    fn fill(&self, pos: u64, memory: &mut [u8]) -> Option<usize>;
}

/// How a read was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// All of its bytes are copied.
    All,
    /// A thread is reading them.
    Coming,
    /// The caller has to read them.
    Not,
}

/// The read-ahead of all files.
static ALL: Mutex<Vec<Weak<AheadReads>>> = Mutex::new(Vec::new());

fn all() -> MutexGuard<'static, Vec<Weak<AheadReads>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops what is too old to be served, of all files.
fn drop_old(now: Instant) {
    // Nothing is dropped while the list is locked.
    let open: Vec<_> = all().iter().filter_map(Weak::upgrade).collect();
    for reads in open {
        reads.lock().streams.iter_mut().for_each(|stream| stream.drop_old(now));
    }
}

struct Streams {
    pattern: AccessPattern,
    streams: Vec<AheadStream>,
    /// Reads so far.
    reads: u64,
    next_chunk: u64,
}

/// The read-ahead of one file.
pub(crate) struct AheadReads {
    streams: Mutex<Streams>,
    /// A chunk was read, or is no longer wanted.
    ended: Condvar,
    /// Bytes that were served from memory.
    served: AtomicU64,
}

/// A chunk to be read.
struct AheadJob {
    reads: Arc<AheadReads>,
    source: Arc<dyn AheadSource>,
    chunk: u64,
    range: ByteRange,
}

impl WorkItem for AheadJob {
    fn device(&self) -> u64 {
        Arc::as_ptr(&self.reads) as u64
    }

    fn client(&self) -> u64 {
        0
    }
}

fn start(jobs: impl IntoIterator<Item = AheadJob>) {
    static POOL: LazyLock<ThreadPool<AheadJob>> = LazyLock::new(|| {
        ThreadPool::of_devices(THREADS, |jobs: &mut Vec<AheadJob>| {
            jobs.drain(..).for_each(AheadJob::run);
        })
    });
    POOL.push(jobs);
}

impl AheadJob {
    /// Reads the chunk, unless it is no longer wanted.
    fn run(self) {
        let Self { reads, source, chunk, range } = self;
        let begun = reads.update(chunk, |found| found.state = ChunkState::Reading);
        if !begun {
            return;
        }
        let since = Instant::now();
        let memory = AheadMemory::new(range.len as usize).or_else(|| {
            drop_old(since);
            AheadMemory::new(range.len as usize)
        });
        let filled = memory.and_then(|mut memory| {
            let count = source.fill(range.pos, memory.bytes_mut())?;
            Some((Arc::new(memory), count as u64))
        });
        match filled {
            Some((memory, count)) => {
                reads.update(chunk, |found| {
                    found.cut(count);
                    found.state = ChunkState::Ready { memory, since };
                });
            }
            None => reads.lock().remove(chunk),
        }
        reads.ended.notify_all();
    }
}

impl Streams {
    fn remove(&mut self, chunk: u64) {
        self.streams.iter_mut().for_each(|stream| stream.remove(chunk));
    }

    /// The stream of a read, which may begin with it.
    fn stream_of(&mut self, range: ByteRange) -> Option<&mut AheadStream> {
        self.reads += 1;
        let found = self.streams.iter().position(|stream| stream.continues(range));
        let at = match found {
            Some(at) => at,
            None => {
                let step = self.pattern.note(range.pos, range.len)?;
                if self.streams.len() == STREAMS {
                    let oldest = (0..STREAMS).min_by_key(|&at| self.streams[at].used)?;
                    self.streams.swap_remove(oldest);
                }
                self.streams.push(AheadStream::new(step, range));
                self.streams.len() - 1
            }
        };
        let stream = &mut self.streams[at];
        stream.used = self.reads;
        stream.follow(range);
        Some(stream)
    }

    fn cover(&self, range: ByteRange) -> Cover {
        // Most reads are of no stream: the clock is read for the others.
        match self.streams.iter().find(|stream| stream.continues(range)) {
            Some(stream) => stream.cover(range, Instant::now()),
            None => Cover::Missing,
        }
    }
}

impl AheadReads {
    pub(crate) fn new() -> Arc<Self> {
        fork_mark::set();
        let pattern = AccessPattern::new();
        let streams = Streams { pattern, streams: Vec::new(), reads: 0, next_chunk: 0 };
        let (streams, ended) = (Mutex::new(streams), Condvar::new());
        let reads = Arc::new(Self { streams, ended, served: AtomicU64::new(0) });
        let mut all = all();
        all.retain(|reads| reads.strong_count() > 0);
        all.push(Arc::downgrade(&reads));
        reads
    }

    /// Bytes that were served from memory so far.
    pub(crate) fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a chunk. False if it is no longer wanted.
    fn update(&self, chunk: u64, change: impl FnOnce(&mut AheadChunk)) -> bool {
        let mut streams = self.lock();
        let found = streams.streams.iter_mut().find_map(|stream| stream.chunk(chunk));
        found.map(change).is_some()
    }

    /// Takes note of a read of `range` in a file of `end` bytes, and begins to read ahead of it. To be
    /// called once for each read.
    pub(crate) fn note(
        self: &Arc<Self>,
        source: &Arc<dyn AheadSource>,
        range: ByteRange,
        end: u64,
    ) {
        if range.len == 0 || range.len > LARGEST_READ || fork_mark::is_child() {
            return;
        }
        let mut streams = self.lock();
        let mut next_chunk = streams.next_chunk;
        let Some(stream) = streams.stream_of(range) else { return };
        let planned = stream.plan(end, &mut next_chunk);
        streams.next_chunk = next_chunk;
        drop(streams);
        if !planned.is_empty() {
            start(planned.into_iter().map(|(chunk, range)| {
                let (reads, source) = (self.clone(), source.clone());
                AheadJob { reads, source, chunk, range }
            }));
        }
    }

    /// Copies the bytes of `range` to `memory`, which is as long, if all of them were read ahead. If they
    /// are being read it waits for that, unless the caller `must_not_wait`.
    pub(crate) fn serve(
        &self,
        range: ByteRange,
        memory: &mut ReadCursor<'_>,
        must_not_wait: bool,
    ) -> Served {
        if range.len == 0 || range.len > LARGEST_READ || fork_mark::is_child() {
            return Served::Not;
        }
        let mut streams = self.lock();
        loop {
            match streams.cover(range) {
                Cover::Ready(parts) => {
                    drop(streams);
                    copy(&parts, memory);
                    self.served.fetch_add(range.len, Ordering::Relaxed);
                    return Served::All;
                }
                Cover::Missing => return Served::Not,
                Cover::Coming { .. } if must_not_wait => return Served::Coming,
                Cover::Coming { queued: false, .. } => {
                    streams = self.ended.wait(streams).unwrap_or_else(PoisonError::into_inner);
                }
                Cover::Coming { chunk, queued: true } => {
                    let waited = self.ended.wait_timeout(streams, QUEUE_PATIENCE);
                    let timeout;
                    (streams, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                    if timeout.timed_out()
                        && matches!(streams.cover(range), Cover::Coming { queued: true, .. })
                    {
                        // All threads are busy: the caller reads by itself.
                        streams.remove(chunk);
                        self.ended.notify_all();
                        return Served::Not;
                    }
                }
            }
        }
    }

    /// Forgets what was read of `changed`. To be called when the change has ended, before its request is
    /// answered.
    pub(crate) fn forget(&self, changed: ByteRange) {
        if fork_mark::is_child() {
            return;
        }
        let mut streams = self.lock();
        streams.streams.iter_mut().for_each(|stream| stream.forget(changed));
        drop(streams);
        self.ended.notify_all();
    }
}

fn copy(parts: &[Part], memory: &mut ReadCursor<'_>) {
    for (chunk, part) in parts {
        memory.copy_from(&chunk.bytes()[part.clone()]);
    }
}
