//! The segments of a log as files: the next one is begun, the first ones are freed.
//!
//! Invariant: a file gets the name of a segment when its new header is durable, and holds groups when
//! that name is. Segments are freed from the first one on, each durably before the next one, so that
//! those that are there are always without a gap.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::log::log_directory::LogDirectory;
use crate::log::log_format::{BLOCK_BYTES, Layout, SegmentHeader};
use crate::log::segment_names::SegmentName;
use crate::log::whole_blocks;
use crate::memory::io_buffer::IoBuffer;
use crate::storage::Storage;
use crate::types::error::{Error, Operation};
use crate::types::request::Flags;

/// The bit in the number of a spare file that was never a segment; no segment has it.
const MADE_AHEAD: u64 = 1 << 63;

/// The reason why a group was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteFailure {
    /// None of it is in the log, which goes on.
    Refused(Error),
    /// The log takes nothing more: it is not known what is durable.
    Broken(Error),
}

impl WriteFailure {
    pub(crate) const fn error(self) -> Error {
        match self {
            Self::Refused(error) | Self::Broken(error) => error,
        }
    }
}

/// The segments of a log.
pub(crate) struct Segments {
    directory: Arc<dyn LogDirectory>,
    pub(crate) layout: Layout,
    most_spares: u32,
    /// The number of the first segment.
    first: AtomicU64,
    /// The numbers of the spare files. Never locked during I/O.
    spares: Mutex<Vec<u64>>,
    /// Locked by the one that frees segments.
    freed: Mutex<Freed>,
}

/// Segments that were freed last.
#[derive(Default)]
struct Freed {
    /// Their names are not known to be durable.
    is_in_doubt: bool,
    /// Numbers of those that are spare files then.
    spares: Vec<u64>,
}

impl Segments {
    pub(crate) fn new(
        directory: Arc<dyn LogDirectory>,
        layout: Layout,
        most_spares: u32,
        first: u64,
        spares: Vec<u64>,
    ) -> Self {
        let (first, spares) = (AtomicU64::new(first), Mutex::new(spares));
        Self { directory, layout, most_spares, first, spares, freed: Mutex::default() }
    }

    /// The number of the first segment.
    pub(crate) fn first(&self) -> u64 {
        self.first.load(Ordering::Acquire)
    }

    fn spares(&self) -> MutexGuard<'_, Vec<u64>> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a segment to read it.
    ///
    /// # Errors
    /// The errors of [`LogDirectory::open`].
    pub(crate) fn open(&self, number: u64) -> Result<Arc<dyn Storage>, Error> {
        self.directory.open(&SegmentName::Segment(number).text())
    }

    /// Begins segment `number`, the last one; the one before it ends at `previous_end`.
    ///
    /// # Errors
    /// Refused: there was no space, or no file could be made. Broken: its name is in doubt.
    pub(crate) fn begin(
        &self,
        number: u64,
        previous_end: u64,
    ) -> Result<Arc<dyn Storage>, WriteFailure> {
        if number >= self.layout.most_segments() {
            let error = Error::new(libc::EFBIG, Operation::Write);
            return Err(WriteFailure::Refused(error));
        }
        let spare = self.spares().pop();
        let name = spare.map_or(SegmentName::New(number), SegmentName::Spare).text();
        let header = SegmentHeader { layout: self.layout, number, previous_end };
        let prepared = self.prepare(&name, spare.is_some(), header);
        let storage = prepared.map_err(|error| {
            // The file is given up, whatever it holds. If it cannot be removed, it stays a spare one.
            let _ = self.directory.remove(&name);
            WriteFailure::Refused(error)
        })?;
        self.directory
            .rename(&name, &SegmentName::Segment(number).text())
            .and_then(|()| self.directory.sync())
            .map_err(WriteFailure::Broken)?;
        Ok(storage)
    }

    /// Whether a spare segment has to be made, because none is left and the last segment, whose groups end
    /// at `end`, is half full.
    pub(crate) fn needs_spare(&self, end: u64) -> bool {
        self.layout.place_of(end).1 > self.layout.segment_bytes / 2 && self.spares().is_empty()
    }

    /// Makes a spare file, while segment `last` is the last one.
    ///
    /// # Errors
    /// The errors of [`LogDirectory::create`]; the errno of a write, a sync or rename(2). There is no such file then.
    pub(crate) fn make_spare(&self, last: u64) -> Result<(), Error> {
        let number = MADE_AHEAD | last;
        let (new, spare) = (SegmentName::New(number).text(), SegmentName::Spare(number).text());
        let made = self.create(&new).and_then(|storage| storage.sync());
        match made.and_then(|()| self.directory.rename(&new, &spare)) {
            Ok(()) => self.spares().push(number),
            Err(error) => {
                let _ = self.directory.remove(&new);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Makes a file of zeros. A later write to it allocates nothing and changes no metadata.
    fn create(&self, name: &str) -> Result<Arc<dyn Storage>, Error> {
        let storage = self.directory.create(name, self.layout.segment_bytes)?;
        whole_blocks::fill_with_zeros(&*storage, self.layout.segment_bytes)?;
        Ok(storage)
    }

    /// Makes a file whose header is durable.
    fn prepare(
        &self,
        name: &str,
        is_spare: bool,
        header: SegmentHeader,
    ) -> Result<Arc<dyn Storage>, Error> {
        let storage = match is_spare {
            true => {
                let storage = self.directory.open(name)?;
                if storage.size()? != self.layout.segment_bytes {
                    return Err(Error::new(libc::EBADMSG, Operation::Open));
                }
                storage
            }
            false => self.create(name)?,
        };
        let mut block = IoBuffer::zeroed(BLOCK_BYTES as usize)?;
        header.write(&mut block);
        whole_blocks::write(&*storage, &block, 0, Flags::NONE)?;
        storage.sync()?;
        Ok(storage)
    }

    /// Frees all segments before `number`: they become spare files, or are removed.
    ///
    /// # Errors
    /// The errno of rename(2), unlink(2) or fsync(2). Some may be freed then.
    pub(crate) fn free_before(&self, number: u64) -> Result<(), Error> {
        let mut freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if freed.is_in_doubt {
                self.directory.sync()?;
                freed.is_in_doubt = false;
                self.spares().append(&mut freed.spares);
            }
            if self.first() >= number {
                return Ok(());
            }
            self.free_first(&mut freed)?;
        }
    }

    /// Frees the first segment, not durably.
    fn free_first(&self, freed: &mut Freed) -> Result<(), Error> {
        let first = self.first();
        let (from, to) = (SegmentName::Segment(first).text(), SegmentName::Spare(first).text());
        let keeps = self.spares().len() < self.most_spares as usize;
        // Readers look for it no more before it gets other bytes.
        self.first.store(first + 1, Ordering::Release);
        let done = match keeps {
            true => self.directory.rename(&from, &to),
            false => self.directory.remove(&from),
        };
        if done.is_err() {
            self.first.store(first, Ordering::Release);
            return done;
        }
        freed.is_in_doubt = true;
        freed.spares.extend(keeps.then_some(first));
        Ok(())
    }
}
