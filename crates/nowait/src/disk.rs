//! An open image: what all engines of one device share.
//!
//! Invariant: after a failed flush every later flush fails until the device is opened anew (C51).
//! Knows: error, align, storage, map, ranges, flushes. Known by: blocking, engine, file.

use std::os::fd::BorrowedFd;
use std::path::Path;

use crate::align::Alignment;
use crate::breaks::{self, Break};
use crate::error::{Error, Range};
use crate::flushes::Flushes;
use crate::io::Span;
use crate::map::{Extent, Extents, Identity, Intent, Map, WouldBlock};
use crate::ranges::RangeLocks;
use crate::storage::{OpenOptions, Storage};

/// An open image.
pub struct Disk<M> {
    /// The file that is written to.
    top: Storage,
    /// The other files that extents may lie in, by [`crate::Extent::file`] from 1 on.
    below: Vec<Storage>,
    pub(crate) map: M,
    pub(crate) ranges: RangeLocks,
    align: Alignment,
    size: u64,
    read_only: bool,
    nowait: bool,
    flushes: Flushes,
}

impl Disk<Extents> {
    /// Opens the image at `path`, with a hint cache that knows nothing yet; see [`Disk::scan`].
    ///
    /// # Errors
    /// As [`Storage::open`].
    pub fn open(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        let storage = Storage::open(path, options)?;
        let map = Extents::new(storage.size(), !options.no_hint);
        Ok(Self::identical(storage, map))
    }

    /// Learns which ranges are holes. To be called when nobody else writes to the image any more:
    /// after it was locked, before it is used. What is learnt is kept right across everything that
    /// is done through this `Disk`, and only that.
    pub fn scan(&self) {
        self.map.scan(&self.top);
    }
}

impl Disk<Identity> {
    /// Opens the image at `path` and takes every byte for mapped.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open_mapped(path: &Path, options: OpenOptions) -> Result<Self, Error> {
        Ok(Self::identical(Storage::open(path, options)?, Identity))
    }
}

impl<M: Map> Disk<M> {
    fn identical(storage: Storage, map: M) -> Self {
        let (size, read_only) = (storage.size(), storage.is_read_only());
        Self::mapped(storage, Vec::new(), size, read_only, map)
    }

    /// A device of `size` bytes, which `map` finds in `top` and the files `below` it. What direct
    /// I/O asks of a transfer is the strictest that any of them asks; one of them that uses the
    /// page cache asks nothing.
    #[must_use]
    pub fn mapped(top: Storage, below: Vec<Storage>, size: u64, read_only: bool, map: M) -> Self {
        let mut align = top.alignment();
        let mut nowait = top.takes_nowait();
        for storage in &below {
            align = align.strictest(storage.alignment());
            nowait &= storage.takes_nowait();
        }
        let (ranges, flushes) = (RangeLocks::new(), Flushes::default());
        Self { top, below, map, ranges, align, size, read_only, nowait, flushes }
    }

    /// Bytes of the device, not rounded to any block.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What direct I/O asks of a transfer; [`Alignment::NONE`] when the page cache is used.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.align
    }

    /// Whether the page cache is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.align != Alignment::NONE
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether the files take `RWF_NOWAIT`; asked once at open.
    #[must_use]
    pub fn takes_nowait(&self) -> bool {
        self.nowait
    }

    /// Whether storage can be given back and zeros made without writing them; asked once at open.
    #[must_use]
    pub fn punches_holes(&self) -> bool {
        !self.read_only && self.top.punches_holes()
    }

    /// The span at the start of `range`, by what is known without waiting: a hole reads as zeros
    /// without I/O (C14), and what is not known counts as data. The next span may be of the same
    /// kind. Of depths nothing is known.
    #[inline]
    #[must_use]
    pub fn known_span(&self, range: Range) -> Span {
        match self.map.begin(range, Intent::Read) {
            Ok(Extent { len, hole, .. }) => Span::on_top(len, hole),
            Err(WouldBlock) => Span::on_top(range.len, false),
        }
    }

    /// Whether all of `range` is known to be a hole.
    #[inline]
    #[must_use]
    pub fn is_hole(&self, range: Range) -> bool {
        self.known_span(range) == Span::on_top(range.len, true)
    }

    /// Whether it is a chain of images, so that [`Span::depth`] tells something when it is asked for
    /// by [`crate::Op::Status`].
    #[must_use]
    pub fn has_depths(&self) -> bool {
        self.map.image().is_some()
    }

    /// The descriptors that transfers go through, by [`crate::Transfer::file`]: what a queue is
    /// made for.
    #[must_use]
    pub fn files(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(&self.top).chain(&self.below).map(Storage::fd).collect()
    }

    /// The descriptor that transfers to the file on top go through.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.top.fd()
    }

    /// The descriptor for locks: of an open file description that no ring holds, so that a lock
    /// ends with the process and not some time later.
    #[must_use]
    pub fn lock_fd(&self) -> BorrowedFd<'_> {
        self.top.lock_fd()
    }

    /// The file that extents with this number lie in; the one on top for a number that none has.
    #[inline]
    pub(crate) fn storage(&self, file: u16) -> &Storage {
        match file {
            0 => &self.top,
            below => self.below.get(usize::from(below) - 1).unwrap_or(&self.top),
        }
    }

    /// The file that is written to.
    pub(crate) fn top(&self) -> &Storage {
        &self.top
    }

    /// Whether requests may have to keep away from each other: blocks are read and written back
    /// (C13), holes remembered, or clusters given back.
    pub(crate) fn locks(&self) -> bool {
        self.align.offset > 1 || self.map.remembers_holes() || self.map.image().is_some()
    }

    /// Makes durable what was completed before, on any queue (C49). To be called where waiting is
    /// allowed: those who flush at the same time share a sync.
    pub(crate) fn flush(&self) -> Result<(), Error> {
        if breaks::is(Break::DropFlush) {
            return Ok(());
        }
        self.flushes
            .share(|| self.map.image().map_or_else(|| self.top.sync(), |image| image.flush()))
    }
}
