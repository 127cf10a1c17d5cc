//! The metadata of an image in use and its files: read when it is needed, written in an order
//! that a power cut cannot hurt.
//!
//! Invariant: metadata goes to the file stage by stage, each durable before the next begins
//! ([`Stage`]); the lock on it is never held during I/O. Once writing it has failed, nothing of it
//! is written any more, so that the image stays as it was.
//! Knows: breaks, wait, medium, meta, overlay. Known by: layers, image. Source: QEMU docs/interop/qcow2.txt.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nowait::{Buffer, Doing, Error};

use crate::breaks::{self, Flaw};

use super::counts::Clusters;
use super::medium::Medium;
use super::meta::Meta;
use super::overlay::{Outgoing, Stage, Stop};
use super::wait::{lock, lock_for_io, wait};

/// Changed metadata that may wait for a flush, in bytes.
const MAX_DIRTY_BYTES: u64 = 16 << 20;
/// How long it may wait.
const MAX_DIRTY_TIME: Duration = Duration::from_secs(5);
/// Bytes that are written at once, where blocks are neighbours.
const RUN_BYTES: usize = 1 << 20;
/// The file grows to multiples of so many bytes, because growing holds up what is written to it.
const GROW_BYTES: u64 = 16 << 20;

/// The writing of batches. Who needs one waits for the next to begin and end; all who come while
/// one is under way share the one after.
#[derive(Default)]
struct Batches {
    begun: u64,
    ended: u64,
    failed: bool,
    /// Whether something was changed since the last one begun.
    due: bool,
    /// Whether the thread that writes from time to time is to end.
    closing: bool,
}

/// How long a file is, and what it grows to multiples of, in bytes.
struct Length {
    bytes: u64,
    step: u64,
}

/// The metadata and the files of the image on top of a chain.
pub(crate) struct Store {
    meta: Mutex<Meta>,
    /// The file with the data.
    data: Medium,
    /// The file with the metadata, where that is another one.
    separate: Option<Medium>,
    /// Held while the file with the metadata is made longer: who needs that waits.
    len: Mutex<Length>,
    batches: Mutex<Batches>,
    changed: Condvar,
}

impl Store {
    /// `len` are the bytes of the file with the metadata.
    pub(crate) fn new(meta: Meta, data: Medium, separate: Option<Medium>, len: u64) -> Self {
        Self {
            meta: Mutex::new(meta),
            data,
            separate,
            len: Mutex::new(Length { bytes: len, step: GROW_BYTES }),
            batches: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// The file with the data.
    pub(crate) fn data(&self) -> &Medium {
        &self.data
    }

    fn file(&self) -> &Medium {
        self.separate.as_ref().unwrap_or(&self.data)
    }

    /// Does `act` on the metadata, as often as it takes to have at hand what it needs.
    ///
    /// # Errors
    /// `EIO` for metadata that contradicts itself, `ENOSPC` where there is no room, what reading
    /// it said.
    pub(crate) fn with<T>(
        &self,
        mut act: impl FnMut(&mut Meta) -> Result<T, Stop>,
    ) -> Result<T, Error> {
        loop {
            let mut meta = lock(&self.meta);
            let (pos, len) = match act(&mut meta) {
                Ok(done) => return Ok(done),
                Err(Stop::Missing { pos, len }) => (pos, len),
                Err(Stop::Damaged) => return Err(Error::new(libc::EIO, Doing::Read)),
                Err(Stop::Full) => return Err(Error::new(libc::ENOSPC, Doing::Write)),
            };
            let ticket = meta.overlay.ticket();
            drop(meta);
            let mut bytes = Buffer::zeroed(len as usize)?;
            self.file().read(pos, vec![&mut bytes])?;
            lock(&self.meta).overlay.supply(pos, &bytes, ticket);
        }
    }

    /// Nothing points to these clusters, and nothing ever did.
    pub(crate) fn give_up(&self, clusters: Clusters) {
        lock(&self.meta).give_up(clusters);
    }

    /// Makes the file with the metadata at least `bytes` long. To be called before anything is
    /// written behind its end: only so is it known where that is.
    ///
    /// # Errors
    /// `ENOSPC` where it cannot grow, what else ftruncate(2) said.
    pub(crate) fn cover(&self, bytes: u64) -> Result<(), Error> {
        let mut len = lock_for_io(&self.len);
        if bytes > len.bytes && !breaks::has(Flaw::ForgetToGrow) {
            let new = bytes.next_multiple_of(len.step);
            self.file().set_len(new).map_err(|error| match error.errno() {
                // A block device has the size that it has.
                libc::EINVAL => Error::new(libc::ENOSPC, Doing::Write),
                _ => error,
            })?;
            len.bytes = new;
        }
        Ok(())
    }

    /// The file grows to multiples of `bytes` from now on.
    #[cfg(feature = "sim")]
    pub(crate) fn grow_by(&self, bytes: u64) {
        lock(&self.len).step = bytes;
    }

    /// Makes durable all that was done before, data and metadata.
    ///
    /// # Errors
    /// What the first call said that failed, and from then on always `EIO`.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        let mut batches = lock(&self.batches);
        let mine = batches.begun + 1;
        loop {
            if batches.failed {
                return Err(Error::new(libc::EIO, Doing::Flush));
            }
            if batches.ended >= mine {
                return Ok(());
            }
            if batches.begun > batches.ended {
                if breaks::has(Flaw::FlushBesideAnother) {
                    return Ok(());
                }
                batches = wait(&self.batches, &self.changed, batches);
                continue;
            }
            batches.begun += 1;
            batches.due = false;
            drop(batches);
            let written = self.write_out();
            batches = lock(&self.batches);
            batches.ended = batches.begun;
            batches.failed |= written.is_err();
            self.changed.notify_all();
            written?;
        }
    }

    /// To be called before metadata is changed: waits where more of it was changed than may be.
    ///
    /// # Errors
    /// As [`Store::flush`].
    pub(crate) fn before_change(&self) -> Result<(), Error> {
        let full = lock(&self.meta).overlay.dirty_bytes() >= MAX_DIRTY_BYTES;
        if full || lock(&self.batches).failed { self.flush() } else { Ok(()) }
    }

    /// To be called when metadata was changed: it will be written even if nobody asks for it.
    pub(crate) fn after_change(&self) {
        if !std::mem::replace(&mut lock(&self.batches).due, true) {
            self.changed.notify_all();
        }
    }

    fn write_out(&self) -> Result<(), Error> {
        let batch = lock(&self.meta).overlay.take_batch();
        if batch.is_empty() {
            return self.data.sync();
        }
        for stage in Stage::ALL {
            let blocks: Vec<_> = batch.iter().filter(|block| block.stage == stage).collect();
            self.write_blocks(&blocks)?;
            if breaks::has(Flaw::ForgetOrder) && stage != Stage::Pointers {
                continue;
            }
            if stage == Stage::Ahead {
                self.data.sync()?;
            }
            if !blocks.is_empty() && (stage != Stage::Ahead || self.separate.is_some()) {
                self.file().sync()?;
            }
        }
        lock(&self.meta).overlay.settle();
        Ok(())
    }

    /// Writes blocks, which are in order; neighbours in one transfer.
    fn write_blocks(&self, blocks: &[&Outgoing]) -> Result<(), Error> {
        let follows = |a: &&Outgoing, b: &&Outgoing| a.pos + a.bytes.len() as u64 == b.pos;
        let all: usize = blocks.iter().map(|block| block.bytes.len()).sum();
        if all == 0 {
            return Ok(());
        }
        let mut run = Buffer::zeroed(RUN_BYTES.min(all))?;
        for neighbours in blocks.chunk_by(follows) {
            let size = neighbours.first().map_or(1, |block| block.bytes.len());
            for some in neighbours.chunks((RUN_BYTES / size).max(1)) {
                let Some(first) = some.first() else { continue };
                let places = run.chunks_exact_mut(size);
                places.zip(some).for_each(|(place, block)| place.copy_from_slice(&block.bytes));
                self.cover(first.pos + (some.len() * size) as u64)?;
                self.file().write(first.pos, &[&run[..some.len() * size]])?;
            }
        }
        Ok(())
    }

    /// Gives back the clusters that were given up, and what the file has grown by and does not
    /// need. To be called when everything is flushed and nothing is asked of the image any more.
    ///
    /// # Errors
    /// As [`Store::flush`].
    pub(crate) fn tidy(&self, cluster_bytes: u64) -> Result<(), Error> {
        let given_up = lock(&self.meta).take_given_up();
        for &cluster in &given_up {
            // A count that is wrong is left as it is: at worst a leak.
            let _ = self.with(|meta| meta.give_back(cluster));
            self.before_change()?;
        }
        if !given_up.is_empty() && !breaks::has(Flaw::ForgetGivenBack) {
            self.flush()?;
        }
        let forgotten = u64::from(breaks::has(Flaw::CutTooShort));
        let end = (lock(&self.meta).end() - forgotten) * cluster_bytes;
        let mut len = lock_for_io(&self.len);
        if end < len.bytes {
            self.file().set_len(end)?;
            len.bytes = end;
        }
        Ok(())
    }

    /// Whether something was changed that is not on its way yet, and may be written.
    #[cfg(feature = "sim")]
    pub(crate) fn is_due(&self) -> bool {
        let batches = lock(&self.batches);
        batches.due && !batches.failed
    }

    /// As [`Store::flush`]. Who asks for one next hears of a failure.
    pub(crate) fn flush_for_nobody(&self) {
        let flushed = self.flush();
        if flushed.is_err() && breaks::has(Flaw::ForgetFailure) {
            lock(&self.batches).failed = false;
        }
    }

    /// A thread that flushes from time to time what nobody else does.
    pub(crate) fn keep(self: &Arc<Self>) -> std::io::Result<JoinHandle<()>> {
        let store = self.clone();
        let thread = std::thread::Builder::new().name("nowait-image".into());
        thread.spawn(move || {
            let wait_for = |batches, time, done: fn(&mut Batches) -> bool| {
                let waited = store.changed.wait_timeout_while(batches, time, |now| !done(now));
                waited.unwrap_or_else(PoisonError::into_inner).0
            };
            let mut batches = lock(&store.batches);
            while !batches.closing {
                batches =
                    wait_for(batches, Duration::MAX, |now| now.closing || now.due && !now.failed);
                batches = wait_for(batches, MAX_DIRTY_TIME, |now| now.closing || !now.due);
                if batches.due && !batches.closing {
                    drop(batches);
                    store.flush_for_nobody();
                    batches = lock(&store.batches);
                }
            }
        })
    }

    /// Ends the thread of [`Store::keep`].
    pub(crate) fn let_go(&self) {
        lock(&self.batches).closing = true;
        self.changed.notify_all();
    }
}
