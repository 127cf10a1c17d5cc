//! An append log: records that are durable when their appends return, in preallocated segments.
//!
//! Invariant: records are written in groups, one after the other, and each group begins in a block that
//! holds no durable record.

pub(crate) mod log_options;
pub(crate) mod log_position;
mod log_format;
pub(crate) mod log_directory;
mod segment_names;
mod whole_blocks;
mod segment_reader;
mod group_buffer;
mod segments;
mod recovery;
mod log_writer;
mod group_end;
mod append_queue;
pub(crate) mod log_records;

use std::future::poll_fn;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::api::file_call;
use crate::sim_hooks::yield_point;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};
use append_queue::{AppendQueue, Spawn};
use log_directory::{DirectoryLock, FileDirectory, LogDirectory};
use log_format::check_of;
use log_options::LogOptions;
use log_position::LogPosition;
use log_records::{LogRecords, read_one};
use log_writer::LogWriter;
use recovery::{Recovered, recover};
use segment_reader::SegmentReader;

/// The most readers of single records that are kept for later ones.
const KEPT_READERS: usize = 8;

/// A log of records in a directory of its own, for a database's write-ahead log and the like. A handle is
/// `Clone + Send + Sync`; any number of threads and tasks append simultaneously.
///
/// Records that are appended while others are written form a group, which is written by one aligned direct
/// write and made durable by one sync, whatever the number of its records. A group takes whole blocks of
/// 4 KiB. It is never written over before [`Log::truncate_before`] has freed its segment, so that no loss of
/// power harms a record that was durable; a log of single small records takes a block for each.
///
/// The files of the directory are `segment-*`, of one size, `spare-*`, which are reused, and `lock`. The rules
/// are in docs/contract.md, I.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("log");
/// use nowait::{Log, LogOptions};
/// let log = Log::open(&path, LogOptions::new().segment_bytes(1 << 20))?;
/// let first = log.append(b"set a = 1")?; // durable when it returns
/// let second = log.append(b"set a = 2")?;
/// assert_eq!(log.read(first)?, b"set a = 1");
/// let all: Result<Vec<_>, _> = log.records().collect();
/// assert_eq!(all?[1].position, second);
/// log.truncate_before(second)?; // frees whole segments only
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Log(Arc<Handles>);

/// The state that all handles of a log share; it is dropped with the last one, and unlocks the directory then.
struct Handles {
    queue: Arc<AppendQueue>,
    readers: Mutex<Vec<SegmentReader>>,
    _lock: Option<DirectoryLock>,
}

impl Log {
    /// Opens the log in the directory at `path`, or makes both. It blocks, for as long as it takes to read one
    /// segment, and a new one is filled with zeros.
    ///
    /// A log that was open when its process was killed or the power failed ends with its last acknowledged
    /// record, or with records after it whose appends had not returned; what the open finds is durable.
    /// Records of a group that is not whole are not found.
    ///
    /// # Errors
    /// `EBUSY` if another handle or process has the log open. `EINVAL` for options outside their bounds.
    /// `ENOENT` if there is none and `options` do not make one, or with a range if a segment is missing.
    /// `EBADMSG` for a damaged log, at the position where its first damaged group begins: one that is not
    /// whole, although another follows it, or a segment without its header. The errno of mkdir(2), open(2),
    /// fallocate(2), such as `ENOSPC`, and those of reads and syncs.
    pub fn open(path: &Path, options: LogOptions) -> Result<Self, Error> {
        options.check()?;
        let (directory, lock) = FileDirectory::open(path, options.direct, options.create)?;
        // The state of a new hasher is random.
        let id = std::hash::RandomState::new().build_hasher().finish();
        let spawn: Spawn = Arc::new(move |job| file_call::start(id, job));
        Self::of(Arc::new(directory), Some(lock), options, id, spawn)
    }

    /// Opens the log in a simulated directory; a new one gets the number `id`. `spawn` runs the jobs of tasks.
    ///
    /// # Errors
    /// The errors of [`Log::open`].
    #[cfg(feature = "sim")]
    pub fn simulated(
        directory: Arc<dyn LogDirectory>,
        options: LogOptions,
        id: u64,
        spawn: impl Fn(Box<dyn FnOnce() + Send>) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        options.check()?;
        Self::of(directory, None, options, id, Arc::new(spawn))
    }

    fn of(
        directory: Arc<dyn LogDirectory>,
        lock: Option<DirectoryLock>,
        options: LogOptions,
        id: u64,
        spawn: Spawn,
    ) -> Result<Self, Error> {
        let Recovered { segments, last, end } = recover(directory, options, id)?;
        let writer = LogWriter::new(last, end);
        let queue = Arc::new(AppendQueue::new(writer, segments, spawn, options.prepare_ahead));
        Ok(Self(Arc::new(Handles { queue, readers: Mutex::default(), _lock: lock })))
    }

    /// Appends `record`, and returns its position when it is durable. It blocks.
    ///
    /// # Errors
    /// `EINVAL` for an empty record, `EMSGSIZE` for one of more than [`Log::max_record`] bytes. `ENOSPC` or
    /// `EDQUOT`, and the errno of open(2) where a new segment could not be made: the record is not in the log,
    /// which goes on. After any other error of a write, and after each failed sync, what is durable is not
    /// known: this and every later append fails with that errno, until the log is opened again. Then it may
    /// have the record.
    pub fn append(&self, record: &[u8]) -> Result<LogPosition, Error> {
        self.check(record)?;
        self.0.queue.append(record, check_of(record))
    }

    /// Appends `record` for a task of any executor, as [`Log::append`]: a thread of the library writes. A
    /// future that is dropped may have appended the record, unless it was never polled.
    ///
    /// # Errors
    /// The errors of [`Log::append`].
    pub async fn append_async(&self, record: &[u8]) -> Result<LogPosition, Error> {
        self.check(record)?;
        let (mut added, check) = (None, check_of(record));
        let queue = &self.0.queue;
        poll_fn(|context| queue.poll_append(&mut added, (record, check), context)).await
    }

    fn queue(&self) -> &AppendQueue {
        &self.0.queue
    }

    fn check(&self, record: &[u8]) -> Result<(), Error> {
        let errno = match record.len() {
            0 => libc::EINVAL,
            len if len > self.max_record() => libc::EMSGSIZE,
            _ => return Ok(()),
        };
        Err(Error::new(errno, Operation::Validate))
    }

    /// The most bytes of a record: 16 MiB, or what fits into a segment.
    #[must_use]
    pub fn max_record(&self) -> usize {
        self.0.queue.segments.layout.most_data() as usize
    }

    /// The data of the record at `position`, which an append or an iterator has returned. It blocks.
    ///
    /// # Errors
    /// `ENODATA` if it was truncated, or is behind the last durable record; `EINVAL` for a position where no
    /// record can begin; `EBADMSG` if it is damaged, or none begins there; the errno of a read.
    pub fn read(&self, position: LogPosition) -> Result<Vec<u8>, Error> {
        let readers = || self.0.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.0.queue.segments.layout.place_of(position.get()).0;
        let mut kept = readers();
        let at = kept.iter().position(|reader| reader.number() == number);
        let mut reader = at.map(|at| kept.swap_remove(at));
        drop(kept);
        let read = read_one(&self.0.queue, position.get(), &mut reader);
        let mut kept = readers();
        if let Some(reader) = reader.filter(|_| read.is_ok()) {
            if kept.len() == KEPT_READERS {
                kept.remove(0);
            }
            kept.push(reader);
        }
        read
    }

    /// All records, from the first one that is kept on. The iterator keeps the log open.
    #[must_use]
    pub fn records(&self) -> LogRecords {
        LogRecords::new(self.clone(), self.start().get())
    }

    /// The records from `position` on: that of a record, [`Log::start`] or [`Log::end`]. With another one
    /// the first item is an error: `ENODATA` before the start, else `EBADMSG`; behind the end there is no item.
    #[must_use]
    pub fn records_from(&self, position: LogPosition) -> LogRecords {
        LogRecords::new(self.clone(), position.get())
    }

    /// The start of the first segment that is kept: no record is before it.
    #[must_use]
    pub fn start(&self) -> LogPosition {
        let segments = &self.0.queue.segments;
        LogPosition::new(segments.layout.first_group(segments.first()))
    }

    /// The end of the durable records: all later ones are at this position or behind it.
    #[must_use]
    pub fn end(&self) -> LogPosition {
        LogPosition::new(self.0.queue.durable())
    }

    /// Frees the segments whose records are all before `position`, the first one first; their files are
    /// reused, so that later appends allocate nothing. Records before `position` in its own segment stay. It
    /// blocks.
    ///
    /// # Errors
    /// `EINVAL` for a position behind [`Log::end`]. The errno of rename(2), unlink(2) and fsync(2): some
    /// segments may be freed then, and the log goes on.
    pub fn truncate_before(&self, position: LogPosition) -> Result<(), Error> {
        let (queue, end) = (&self.0.queue, self.end());
        if position > end {
            let range = ByteRange::new(position.get(), 1);
            return Err(Error::new(libc::EINVAL, Operation::Validate).at(range));
        }
        let done = queue.segments.free_before(queue.segments.layout.place_of(position.get()).0);
        let first = queue.segments.first();
        let mut readers = self.0.readers.lock().unwrap_or_else(PoisonError::into_inner);
        readers.retain(|reader| reader.number() >= first);
        done
    }
}

impl Drop for Handles {
    /// Waits until the records of dropped futures are written, before the directory is unlocked.
    fn drop(&mut self) {
        if !yield_point::is_simulated() {
            self.queue.wait_until_idle();
        }
    }
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("start", &self.start()).field("end", &self.end()).finish()
    }
}

/// A log may be shared with other threads, and its futures sent to them.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Log>();
};
