//! An object of a store as a storage: what an engine asks of it.
//!
//! Invariant: a call waits for its own read only; size and version are those of the first answer.

use std::io::{IoSlice, IoSliceMut, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nowait::{
    Alignment, AsyncTransfers, ByteRange, Error, Flags, Operation, PendingTransfer, Storage,
    StorageProperties,
};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::object::asking::Asking;
use crate::object::block_cache::BlockCache;
use crate::object::block_fetcher::{BlockFetcher, Helpers};
use crate::object::boot_record::{self, BootRecord, ObjectRecord};
use crate::object::cache_directory::CacheOptions;
use crate::object::fault::Fault;
use crate::object::object_url::ObjectUrl;
use crate::object::read_job::{Origin, ReadJob};
use crate::object::store::{Object, Timeouts, Version};
use crate::policy::{BLOCK_BYTES, BackOff, PrefetchCursor};
use crate::store_counters::StoreCounters;

/// The longest read of one call in bytes.
const CALL_BYTES: u64 = 4 << 20;
/// The most threads that wait for what cannot be waited for otherwise: names of hosts, and files of
/// the cache.
const BLOCKING_THREADS: usize = 10;
/// How long the first answer is waited for, with all attempts, if `reconnect` is not less.
const OPEN_TIME: Duration = Duration::from_secs(10);

/// Bytes a second that have to come of an answer, unless another number is given.
pub(crate) const MINIMUM_RATE: u64 = 1 << 10;

/// How an object is read.
#[derive(Clone, Debug)]
pub struct ObjectOptions {
    /// How long a read waits for a store that does not answer, or answers that it cannot now: since
    /// the request, or since it was answered fast enough last; a second at least.
    pub reconnect: Duration,
    /// How long a server may send nothing in the middle of a request.
    pub silence: Duration,
    /// How long one request may take.
    pub request: Duration,
    /// Bytes a second that have to come of an answer, on average over `silence` or `reconnect`, which
    /// is less; 0: any number but none.
    pub minimum_rate: u64,
    /// Where what was read stays.
    pub cache: Option<CacheOptions>,
    /// Where the order of the blocks that are read is written.
    pub record: Option<BootRecord>,
    /// The record whose blocks are fetched into the cache.
    pub prefetch: Option<PathBuf>,
    /// The file with the headers that web servers want: tokens and passwords.
    pub http_auth: Option<PathBuf>,
}

impl Default for ObjectOptions {
    fn default() -> Self {
        Self {
            reconnect: Duration::from_secs(30),
            silence: Duration::from_secs(20),
            request: Duration::from_secs(120),
            minimum_rate: MINIMUM_RATE,
            cache: None,
            record: None,
            prefetch: None,
            http_auth: None,
        }
    }
}

/// An object of a store.
pub struct ObjectStorage {
    jobs: UnboundedSender<ReadJob>,
    version: Version,
    counters: Arc<StoreCounters>,
}

impl ObjectStorage {
    /// Asks for the object at `url`, and starts the thread that reads it. Credentials are those of
    /// the environment.
    ///
    /// # Errors
    /// A message of one line: the store cannot be reached, refuses, has no such object, or cannot be
    /// read from in parts.
    pub fn open(url: &ObjectUrl, options: &ObjectOptions) -> Result<Self, String> {
        let (jobs, inbox) = unbounded_channel();
        let (opened, version) = mpsc::channel();
        let counters = StoreCounters::listed(url.to_string());
        let (url, options, counted) = (url.clone(), options.clone(), counters.clone());
        let thread = std::thread::Builder::new().name("nowait-store".into());
        let serve = move || serve(&url, &options, inbox, counted, &opened);
        thread.spawn(serve).map_err(|error| format!("cannot start a thread: {error}"))?;
        let version = version.recv().map_err(|_| "its thread has exited")??;
        Ok(Self { jobs, version, counters })
    }

    /// Counters of what was asked of the store so far.
    #[must_use]
    pub const fn counters(&self) -> &Arc<StoreCounters> {
        &self.counters
    }

    /// The name of this version of the object: its size, and its ETag or date.
    #[must_use]
    pub fn identity(&self) -> String {
        self.version.identity()
    }
}

/// The thread of a storage: tells by `opened` what the object is, and reads it.
fn serve(
    url: &ObjectUrl,
    options: &ObjectOptions,
    inbox: UnboundedReceiver<ReadJob>,
    counters: Arc<StoreCounters>,
    opened: &mpsc::Sender<Result<Version, String>>,
) {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("nowait-resolve")
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return drop(opened.send(Err(error.to_string()))),
    };
    runtime.block_on(async {
        let object = open(url, options, &counters).await;
        let helped = object.and_then(|(object, version)| {
            let helpers = helpers(url, options, &version)?;
            Ok((object, version, helpers))
        });
        match helped {
            Err(why) => drop(opened.send(Err(why))),
            Ok((object, version, helpers)) => {
                let asking = Asking::new((object, version.clone()), options.reconnect, counters);
                let fetcher = BlockFetcher::new(inbox, asking, helpers);
                if opened.send(Ok(version)).is_ok() {
                    fetcher.run().await;
                }
            }
        }
    });
    // A thread that waits for a resolver is not waited for.
    runtime.shutdown_background();
}

async fn open(
    url: &ObjectUrl,
    options: &ObjectOptions,
    counters: &StoreCounters,
) -> Result<(Object, Version), String> {
    let ObjectOptions { silence, request, minimum_rate, .. } = *options;
    let timeouts = Timeouts { silence, all: request, minimum_rate };
    let http_auth = options.http_auth.as_deref();
    let hinted = |why: &str| match http_auth {
        None if url.is_web() && why.contains("(401") => {
            format!("{why}; --http-auth names a file with a token or a password")
        }
        _ => format!("{why}{}", url.hint()),
    };
    let object = Object::new(url, timeouts, http_auth).map_err(|why| hinted(&why))?;
    let time = options.reconnect.min(OPEN_TIME);
    let begun = Instant::now();
    for failed in 1.. {
        let asked = Instant::now();
        let answer = object.probe(OPEN_TIME.saturating_sub(begun.elapsed())).await;
        counters.request(asked.elapsed(), 0);
        match answer {
            Ok(version) => return Ok((object, version)),
            Err(Fault::Transient(_) | Fault::Busy(_)) if begun.elapsed() < time => {
                tokio::time::sleep(BackOff::STORE.pause(failed, fastrand::u64(..))).await;
                counters.count(|counts| counts.retries += 1);
            }
            Err(fault) => return Err(hinted(fault.text())),
        }
    }
    Err("too many attempts".into())
}

/// The cache and the records of the object at `url`.
fn helpers(url: &ObjectUrl, options: &ObjectOptions, version: &Version) -> Result<Helpers, String> {
    let (place, size) = (url.to_string(), version.size());
    let open = |cache| BlockCache::open(cache, &place, &version.identity(), size);
    let cache = options.cache.as_ref().map(open).transpose()?;
    let record = options.record.clone().map(|record| ObjectRecord::new(record, &place));
    let order = |path: &PathBuf| boot_record::order_of(path, &place, size.div_ceil(BLOCK_BYTES));
    // Without a cache there is no place for what is fetched.
    let prefetch = options.prefetch.as_ref().filter(|_| cache.is_some()).map(order).transpose()?;
    let prefetch = prefetch.map(|order| PrefetchCursor::new(Arc::new(order)));
    Ok(Helpers { cache: cache.map(Arc::new), record, prefetch })
}

fn read_only(operation: Operation) -> Error {
    Error::new(libc::EROFS, operation)
}

impl Storage for ObjectStorage {
    fn version(&self) -> Option<String> {
        Some(self.version.identity())
    }

    fn properties(&self) -> StorageProperties {
        StorageProperties {
            read_only: true,
            // Its bytes may be a guest's, and its size is not ours to change.
            device: true,
            shares_syncs: false,
            ..StorageProperties::new(Alignment::NONE)
        }
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(self.version.size())
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let len: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        let len = len.min(CALL_BYTES).min(self.version.size().saturating_sub(pos));
        if len == 0 {
            return Ok(0);
        }
        let range = ByteRange::new(pos, len);
        let (sender, answer) = mpsc::channel();
        // A thread that has exited drops it: then there is no answer.
        let _ = self.jobs.send(ReadJob::new(range, Origin::Call(sender)));
        let data = answer.recv().unwrap_or(Err(libc::EIO));
        let data = data.map_err(|errno| Error::new(errno, Operation::Read).at(range))?;
        let copied = data.as_slice().read_vectored(bufs);
        copied.map_err(|error| Error::from_io(&error, Operation::Read))
    }

    fn write(&self, _: &[IoSlice<'_>], _: u64, _: Flags) -> Result<usize, Error> {
        Err(read_only(Operation::Write))
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(())
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        Err(read_only(Operation::Discard).at(range))
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        Err(read_only(Operation::Zero).at(range))
    }

    fn set_len(&self, _: u64) -> Result<(), Error> {
        Err(read_only(Operation::Write))
    }

    fn transfers(&self) -> Option<Arc<dyn AsyncTransfers>> {
        Some(Arc::new(Transfers(self.jobs.clone())))
    }
}

/// Hands transfers to the thread.
struct Transfers(UnboundedSender<ReadJob>);

impl AsyncTransfers for Transfers {
    fn begin(&self, transfers: &mut Vec<PendingTransfer>) {
        for transfer in transfers.drain(..) {
            // A transfer that is not taken ends with EIO.
            let _ = self.0.send(ReadJob::of_transfer(transfer));
        }
    }
}
