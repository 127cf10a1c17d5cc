//! Commits an overlay's data to its backing file, and then empties the overlay.
//!
//! Invariant: the backing file has all data, durably, before any cluster of the overlay is freed.
//! Until then the overlay's disk reads the same at any moment, and an interrupted commit can be
//! repeated.

use std::io;

use crate::error::{ImageError, os_message};
use crate::formats::chain_reader::ChainReader;
use crate::formats::driver::{CommitTerms, Committed, Overlay};
use crate::formats::layer::Layer;
use crate::formats::qcow2::bitmap_slot::settle_bitmaps;
use crate::formats::qcow2::content::header_of;
use crate::formats::qcow2::editor::{Editor, check_editable};
use crate::formats::qcow2::entries::Cluster;
use crate::formats::qcow2::grow_shrink;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::Tables;
use crate::formats::qcow2::make_empty::make_empty;
use crate::formats::raw;
use crate::image_file::ImageFile;

/// Most bytes of one read and write.
const PIECE_BYTES: u64 = 1 << 20;

/// The mapping of a run of bytes in the overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    Zero,
}

/// Commits the first of `layers` to the second. Both were opened for writing, the first one only if it is
/// to be emptied.
///
/// # Errors
/// Like [`crate::commit::commit`].
pub(crate) fn commit(
    layers: &[Layer],
    terms: &mut CommitTerms<'_>,
) -> Result<Committed, ImageError> {
    let [top, below, ..] = layers else { return Ok(Committed::default()) };
    let header = header_of(top)?;
    refuse_bitmaps(below)?;
    if terms.overlay == Overlay::Emptied {
        refuse_bitmaps(top)?;
        check_editable(top)?;
    }
    let mut done =
        Committed { old_size: below.size, size: below.size.max(top.size), ..Committed::default() };
    let mut tables = Tables::read(&top.file, header)?;
    let mut pos = 0;
    while pos < top.size {
        let (kind, len) = lookup_overlay(&mut tables, pos, top.size - pos)?;
        match kind {
            Some(Kind::Data) => done.data_bytes += len,
            Some(Kind::Zero) => done.zero_bytes += len,
            None => {}
        }
        pos += len;
    }
    let total = done.data_bytes + done.zero_bytes;
    let reader = ChainReader::new(layers)?;
    (terms.before)(&reader)?;
    let mut source = Source { layers, tables, reader, done: 0 };
    let mut progress = |done| (terms.progress)(done, total);
    match below.header() {
        Some(_) => source.commit_to_qcow2(below, &mut progress)?,
        None if below.format().is_raw() => source.commit_to_raw(below, &mut progress)?,
        None => {
            let why = below.format().cannot_be("committed to");
            return Err(ImageError::refused(below.file.path(), why));
        }
    }
    drop(source);
    if terms.overlay == Overlay::Emptied {
        empty_overlay(&top.file, header)?;
    }
    Ok(done)
}

/// Refuses to change an image with bitmaps, which would not say so. That it has none any more is durable then.
fn refuse_bitmaps(layer: &Layer) -> Result<(), ImageError> {
    let Some(header) = layer.header() else { return Ok(()) };
    if header.bitmaps.is_some() {
        let why = "it has dirty bitmaps, which a commit does not keep up to date (remove them with qemu-img bitmap \
                   --remove)";
        return Err(ImageError::refused(layer.file.path(), why));
    }
    settle_bitmaps(&layer.file, header)
}

fn empty_overlay(file: &ImageFile, header: &Header) -> Result<(), ImageError> {
    make_empty(file, header).map_err(|error| ImageError::os(file.path(), "empty it", &error))
}

/// The mapping of the overlay at `pos`, and for how many bytes: at most `len`. `None` where its
/// backing file is visible.
fn lookup_overlay(
    tables: &mut Tables<'_>,
    pos: u64,
    len: u64,
) -> Result<(Option<Kind>, u64), ImageError> {
    let (cluster, len) = tables.lookup(pos, len)?;
    let kind = match cluster {
        Cluster::Unallocated | Cluster::Reserved { .. } | Cluster::Mixed { .. } => None,
        Cluster::Zero { .. } => Some(Kind::Zero),
        Cluster::Data { .. } | Cluster::Compressed { .. } => Some(Kind::Data),
    };
    Ok((kind, len))
}

/// One pass through the overlay.
struct Source<'a> {
    layers: &'a [Layer],
    tables: Tables<'a>,
    reader: ChainReader,
    /// Bytes that are already in the backing file.
    done: u64,
}

impl Source<'_> {
    fn commit_to_raw(
        &mut self,
        below: &Layer,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ImageError> {
        let end = self.reader.size();
        if end > below.size {
            raw::resize(below, end)?;
        }
        let mut pos = 0;
        while pos < end {
            let (kind, len) = lookup_overlay(&mut self.tables, pos, (end - pos).min(PIECE_BYTES))?;
            if let Some(kind) = kind {
                self.write_all(kind, pos, len, &below.file, pos)?;
                progress(self.done);
            }
            pos += len;
        }
        below.file.sync().map_err(|error| failed(below, &error))
    }

    fn commit_to_qcow2(
        &mut self,
        below: &Layer,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ImageError> {
        let failed = |error: io::Error| failed(below, &error);
        let below_top = self.layers.get(1..).unwrap_or_default();
        let mut editor = Editor::open(below)?;
        let end = self.reader.size();
        if end > editor.size() {
            grow_shrink::grow(&mut editor, below_top, end)?;
        }
        // A reader of the unchanged backing image, for the bytes that the overlay does not have.
        let old = ChainReader::new(below_top)?;
        let mut pos = 0;
        while pos < end {
            let (kind, len) = lookup_overlay(&mut self.tables, pos, end - pos)?;
            let Some(kind) = kind else {
                pos += len;
                continue;
            };
            let cluster = editor.cluster_bytes();
            let (index, inside) = (pos / cluster, pos % cluster);
            let first = pos - inside;
            let stop = (first + cluster).min(end);
            let whole = inside == 0 && pos + len >= (first + cluster).min(editor.size());
            if kind == Kind::Zero && whole {
                let lower = self.layers.get(2).is_some_and(|lower| lower.size > first);
                editor.zero_cluster(index, lower).map_err(failed)?;
                self.done += stop - pos;
            } else if let Some(host) = editor.in_place(index).map_err(failed)? {
                self.write_data(pos, stop, &below.file, host + inside)?;
            } else {
                let bytes = self.whole_cluster(&old, first, stop, cluster)?;
                editor.write_cluster(index, &bytes).map_err(failed)?;
                self.count_bytes(pos, stop)?;
            }
            progress(self.done);
            pos = stop;
        }
        editor.finish(false).map_err(failed)
    }

    /// The contents of the cluster that begins at `first`, with the overlay's bytes up to `stop`.
    fn whole_cluster(
        &self,
        old: &ChainReader,
        first: u64,
        stop: u64,
        cluster: u64,
    ) -> Result<Vec<u8>, ImageError> {
        let mut bytes = vec![0; cluster as usize];
        let (inside, rest) = bytes.split_at_mut((stop - first) as usize);
        self.reader.read_at(first, inside)?;
        let rest_bytes = old.size().saturating_sub(stop).min(rest.len() as u64);
        if rest_bytes > 0 {
            old.read_at(stop, rest.get_mut(..rest_bytes as usize).unwrap_or_default())?;
        }
        Ok(bytes)
    }

    /// Writes the overlay's bytes from `pos` to `stop` into `file` at `at`, and leaves the others.
    fn write_data(
        &mut self,
        mut pos: u64,
        stop: u64,
        file: &ImageFile,
        mut at: u64,
    ) -> Result<(), ImageError> {
        while pos < stop {
            let (kind, len) = lookup_overlay(&mut self.tables, pos, stop - pos)?;
            if let Some(kind) = kind {
                self.write_all(kind, pos, len, file, at)?;
            }
            (pos, at) = (pos + len, at + len);
        }
        Ok(())
    }

    fn count_bytes(&mut self, mut pos: u64, stop: u64) -> Result<(), ImageError> {
        while pos < stop {
            let (kind, len) = lookup_overlay(&mut self.tables, pos, stop - pos)?;
            self.done += if kind.is_some() { len } else { 0 };
            pos += len;
        }
        Ok(())
    }

    fn write_all(
        &mut self,
        kind: Kind,
        pos: u64,
        len: u64,
        file: &ImageFile,
        at: u64,
    ) -> Result<(), ImageError> {
        let written = match kind {
            Kind::Zero => file.zero(at, len),
            Kind::Data => {
                let mut bytes = vec![0; len as usize];
                self.reader.read_at(pos, &mut bytes)?;
                file.write_at(at, &bytes)
            }
        };
        self.done += len;
        written.map_err(|error| no_room(file, &error))
    }
}

fn failed(below: &Layer, error: &io::Error) -> ImageError {
    no_room(&below.file, error)
}

fn no_room(file: &ImageFile, error: &io::Error) -> ImageError {
    let lacks_room = [libc::ENOSPC, libc::EDQUOT, libc::EFBIG].map(Some);
    if !lacks_room.contains(&error.raw_os_error()) {
        return ImageError::os(file.path(), "write", error);
    }
    let hint = "nothing is lost: make room, and commit again";
    let why = format!("cannot write: {} ({hint})", os_message(error));
    ImageError::refused(file.path(), why)
}
