//! A qcow2 image in use, as the engine asks it: extents without waiting, requests that may wait.
//!
//! Invariant: an extent that may be written to stays where it is for as long as the image is in
//! use, and what it holds is never another range's (C56). What is known is told only when the data
//! is in place.
//! Knows: known, layers, parts, busy, write. Known by: the engine, by its traits.

use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use nowait::{Error, Extent, Flags, Image, Intent, Map, Range, Span, WouldBlock};

use super::busy::Busy;
use super::known::{Known, Place};
use super::layers::{Found, Layers};
use super::parts::{Gather, Scatter};

/// A qcow2 image and all that it stands on.
pub(crate) struct Live {
    pub(super) layers: Layers,
    pub(super) known: Known,
    pub(super) busy: Busy,
}

/// The map of a disk that is in a qcow2 image.
pub struct Qcow2(Arc<Live>);

impl Qcow2 {
    pub(crate) fn new(layers: Layers, known: Known) -> Self {
        Self(Arc::new(Live { layers, known, busy: Busy::default() }))
    }
}

impl Map for Qcow2 {
    #[inline]
    fn begin(&self, range: Range, intent: Intent) -> Result<Extent, WouldBlock> {
        self.0.known.extent(range, intent).ok_or(WouldBlock)
    }

    fn is_mapped(&self, range: Range) -> bool {
        let mut pos = range.pos;
        while pos < range.end() {
            let rest = Range::new(pos, range.end() - pos);
            match self.0.known.extent(rest, Intent::Write) {
                Some(extent) => pos += extent.len,
                None => return false,
            }
        }
        true
    }

    #[inline]
    fn image(&self) -> Option<&dyn Image> {
        Some(&*self.0)
    }
}

impl Image for Live {
    fn read(&self, pos: u64, bufs: &mut [IoSliceMut<'_>]) -> Result<(), Error> {
        let mut left: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        let mut rest = Scatter::new(bufs);
        let mut pos = pos;
        while left > 0 {
            self.learn_about(pos);
            let len = self.layers.fetch_some(pos, left, &mut rest)?;
            pos += len;
            left -= len;
        }
        Ok(())
    }

    fn write(&self, pos: u64, bufs: &[IoSlice<'_>]) -> Result<(), Error> {
        self.write_all(pos, Gather::new(bufs))
    }

    fn discard(&self, range: Range) -> Result<(), Error> {
        self.discard_all(range)
    }

    fn zero(&self, range: Range, flags: Flags) -> Result<(), Error> {
        self.zero_all(range, flags)
    }

    fn flush(&self) -> Result<(), Error> {
        self.layers.store().flush()
    }

    fn status(&self, range: Range, limit: usize, spans: &mut Vec<Span>) -> Result<(), Error> {
        let mut pos = range.pos;
        while pos < range.end() && spans.len() < limit {
            let (found, depth, len) = self.layers.find_with_depth(pos, range.end() - pos)?;
            let len = len.min(range.end() - pos);
            match found {
                Found::Zeros => push(spans, Span { len, hole: true, depth }),
                Found::Packed { .. } => push(spans, Span { len, hole: false, depth }),
                Found::Data { file, pos, .. } => {
                    self.status_in_file(file, pos, Span { len, hole: false, depth }, spans);
                }
            }
            pos += len;
        }
        // Neighbours were made one, so there may be room for more than were asked for.
        spans.truncate(limit);
        Ok(())
    }
}

/// Appends a span, or makes the last one longer.
fn push(spans: &mut Vec<Span>, span: Span) {
    match spans.last_mut() {
        Some(last) if (last.hole, last.depth) == (span.hole, span.depth) => last.len += span.len,
        _ => spans.push(span),
    }
}

impl Live {
    /// Appends what the file says of `data`, which is at `pos` in it: a cluster that was given back
    /// is a hole of the file.
    fn status_in_file(&self, file: u8, pos: u64, data: Span, spans: &mut Vec<Span>) {
        /// More than that are told as data.
        const MAX_HOLES: usize = 512;
        let mut inside = Vec::new();
        let asked = self.layers.medium(file).storage().spans(
            Range::new(pos, data.len),
            MAX_HOLES,
            &mut inside,
        );
        let mut told = 0;
        if asked.is_ok() {
            for span in inside {
                push(spans, Span { depth: data.depth, ..span });
                told += span.len;
            }
        }
        if told < data.len {
            push(spans, Span { len: data.len - told, ..data });
        }
    }

    /// Makes known where the bytes around `pos` are, unless it is. That it fails is told to whoever
    /// needs these bytes.
    pub(super) fn learn_about(&self, pos: u64) {
        let Some(claim) = self.known.claim(pos) else { return };
        let granule = self.known.granule();
        let start = pos / self.known.window() * self.known.window();
        let size = self.layers.header().size;
        let end = start.saturating_add(self.known.window()).min(size);
        let mut places = Vec::new();
        let mut pos = start;
        while pos < end {
            let Ok((found, len)) = self.layers.find(pos, end - pos) else { break };
            let len = len.min(end - pos);
            let run = Range::new(pos, len);
            // Of a granule that is cut, only its last byte's run may be told, and is not.
            let first = pos.div_ceil(granule);
            let last = if run.end() == size { size.div_ceil(granule) } else { run.end() / granule };
            for at in first..last.max(first) {
                places.resize((at - start / granule) as usize, None);
                places.push(place(found, at * granule - pos));
            }
            pos += len;
        }
        self.known.learn(claim, &places);
    }
}

/// What backs a granule that begins `offset` bytes into what was found.
fn place(found: Found, offset: u64) -> Option<Place> {
    match found {
        Found::Zeros => Some(Place::Hole),
        Found::Data { pos, writable: true, .. } => Some(Place::Writable { pos: pos + offset }),
        Found::Data { file, pos, .. } => Some(Place::Data { file, pos: pos + offset }),
        Found::Packed { .. } => None,
    }
}
