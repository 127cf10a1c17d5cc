//! Commits an overlay's data to its backing file, and then empties the overlay.
//!
//! Invariant: the backing file has all data, durably, before any cluster of the overlay is freed.
//! Until then the overlay's disk reads the same at any moment, and an interrupted commit can be
//! repeated.

use std::io;

use crate::chain::{Chain, Layer, LayerFormat};
use crate::chain_reader::ChainReader;
use crate::error::{ImageError, os_message};
use crate::formats::format::Format;
use crate::formats::qcow2::entries::Cluster;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::Tables;
use crate::formats::signature::{PROBE_BYTES, settle_raw};
use crate::image_file::ImageFile;
use crate::offline::editor::{Editor, check_editable};
use crate::offline::make_empty::make_empty;
use crate::offline::resize;

/// Most bytes that are read and written at once.
const PIECE_BYTES: u64 = 1 << 20;

/// The state of the overlay after its data is in the backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlay {
    /// It is empty, and takes next to no space.
    Emptied,
    /// It is unchanged.
    Kept,
}

/// The result of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Bytes of data that the overlay had.
    pub data_bytes: u64,
    /// Bytes that the overlay had as zeros.
    pub zero_bytes: u64,
    /// The size of the backing file's disk before.
    pub old_size: u64,
    /// The size of that disk now: at least that of the overlay.
    pub size: u64,
}

/// The mapping of a run of bytes in the overlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    Zero,
}

/// Commits the top image of `chain` to the one below it. Both were opened for writing, the top one
/// only if it is to be emptied. `progress` gets the bytes done and the total.
///
/// Any other overlay of the backing file has other data than before. A raw backing file that would
/// begin like another format is refused, unless the user declared it raw (`raw_named`): then it is
/// marked as raw.
///
/// # Errors
/// One line: there is no backing file, one of the two has features that cannot be maintained here,
/// or a system call failed. The overlay is as it was, unless it was being emptied: then it lacks
/// only data that the backing file has.
pub fn commit(
    chain: &Chain,
    overlay: Overlay,
    raw_named: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Committed, ImageError> {
    let top = chain.top();
    let refused = |why: &str| ImageError::refused(top.file.path(), why);
    let (LayerFormat::Qcow2 { header, .. }, Some(below)) = (&top.content, chain.layers().get(1))
    else {
        return Err(refused("it has no backing file that it could be committed to"));
    };
    if overlay == Overlay::Emptied {
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
    let reader = ChainReader::new(chain)?;
    if below.format() == Format::Raw && !below.file.is_block_device() {
        let mut first = vec![0; reader.size().min(PROBE_BYTES as u64) as usize];
        reader.read_at(0, &mut first)?;
        let fd = below.file.fd().map_err(|e| ImageError::os(below.file.path(), "mark it", &e))?;
        settle_raw(fd, &first, raw_named, "--backing-format raw")
            .map_err(|why| ImageError::refused(below.file.path(), why))?;
    }
    let mut source = Source { chain, tables, reader, done: 0 };
    let mut progress = |done| progress(done, total);
    match below.format() {
        Format::Raw => source.commit_to_raw(below, &mut progress)?,
        Format::Qcow2 => source.commit_to_qcow2(below, &mut progress)?,
    }
    drop(source);
    if overlay == Overlay::Emptied {
        empty_overlay(&top.file, header)?;
    }
    Ok(done)
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
        Cluster::Unallocated => None,
        Cluster::Zero { .. } => Some(Kind::Zero),
        Cluster::Data { .. } | Cluster::Compressed { .. } => Some(Kind::Data),
    };
    Ok((kind, len))
}

/// One pass through the overlay.
struct Source<'a> {
    chain: &'a Chain,
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
            resize::resize_raw(below, end)?;
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
        let mut editor = Editor::open(below)?;
        let end = self.reader.size();
        if end > editor.size() {
            resize::grow(&mut editor, self.chain, 1, end)?;
        }
        // A reader of the unchanged backing image, for the bytes that the overlay does not have.
        let old = ChainReader::below(self.chain, 1)?;
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
                let lower = self.chain.layers().get(2).is_some_and(|lower| lower.size > first);
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
