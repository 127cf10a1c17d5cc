//! What an overlay has, put into its backing file; the overlay emptied then.
//!
//! Invariant: the backing file has everything, on storage, before anything of the overlay is given
//! up. Until then the overlay's disk reads the same at any moment, and a commit that was cut short
//! is simply done again.
//! Knows: chain, editor, empty, entry, error, host, reader, resize, tables. Known by: the command.

use std::io::{self, ErrorKind};

use crate::chain::{Chain, Content, Format, Layer};
use crate::editor::{Editor, admit};
use crate::empty::empty;
use crate::entry::Cluster;
use crate::error::ImageError;
use crate::header::Header;
use crate::host::HostFile;
use crate::reader::Reader;
use crate::resize;
use crate::tables::Tables;

/// What is read and written at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What becomes of the overlay when its data is in the backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlay {
    /// It has nothing any more, and takes next to no space.
    Emptied,
    /// It stays as it was.
    Kept,
}

/// What a commit did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Bytes of data that the overlay had.
    pub data_bytes: u64,
    /// Bytes that it said are zeros.
    pub zero_bytes: u64,
    /// The size of the backing file's disk before.
    pub old_size: u64,
    /// The size that it has now: at least that of the overlay.
    pub size: u64,
}

/// What an overlay has in some place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    Zero,
}

/// Commits the top image of `chain` into the one below. Both were opened for writing, the top one
/// only if it is to be emptied. `progress` is told how many bytes of how many are done.
///
/// Whatever else stands on the backing file has other data than before.
///
/// # Errors
/// One line: that there is no backing file, or that one of the two has what is not kept right here;
/// or what the system said. The overlay is as it was, unless it was being emptied: then it lacks
/// nothing that the backing file does not have.
pub fn commit(
    chain: &Chain,
    overlay: Overlay,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Committed, ImageError> {
    let top = chain.top();
    let refused = |why: &str| ImageError::refused(top.file.path(), why);
    let (Content::Qcow2 { header, .. }, Some(below)) = (&top.content, chain.layers().get(1)) else {
        return Err(refused("it has no backing file that it could be committed to"));
    };
    if overlay == Overlay::Emptied {
        admit(top)?;
    }
    let mut done =
        Committed { old_size: below.size, size: below.size.max(top.size), ..Committed::default() };
    let mut tables = Tables::read(&top.file, header)?;
    let mut pos = 0;
    while pos < top.size {
        let (kind, len) = look(&mut tables, pos, top.size - pos)?;
        match kind {
            Some(Kind::Data) => done.data_bytes += len,
            Some(Kind::Zero) => done.zero_bytes += len,
            None => {}
        }
        pos += len;
    }
    let total = done.data_bytes + done.zero_bytes;
    let reader = Reader::new(chain)?;
    let mut source = Source { chain, tables: Tables::read(&top.file, header)?, reader, done: 0 };
    let mut progress = |done| progress(done, total);
    match below.format() {
        Format::Raw => source.commit_to_raw(below, &mut progress)?,
        Format::Qcow2 => source.commit_to_qcow2(below, &mut progress)?,
    }
    drop(source);
    if overlay == Overlay::Emptied {
        give_up(&top.file, header)?;
    }
    Ok(done)
}

fn give_up(file: &HostFile, header: &Header) -> Result<(), ImageError> {
    empty(file, header).map_err(|error| ImageError::os(file.path(), "empty it", &error))
}

/// What the overlay has at `pos`, and for how many bytes that is known: at most `len`. `None` where
/// its backing file is seen.
fn look(tables: &mut Tables<'_>, pos: u64, len: u64) -> Result<(Option<Kind>, u64), ImageError> {
    let (cluster, len) = tables.lookup(pos, len)?;
    let kind = match cluster {
        Cluster::Unallocated => None,
        Cluster::Zero { .. } => Some(Kind::Zero),
        Cluster::Data { .. } | Cluster::Compressed { .. } => Some(Kind::Data),
    };
    Ok((kind, len))
}

/// The overlay, walked through once.
struct Source<'a> {
    chain: &'a Chain,
    tables: Tables<'a>,
    reader: Reader,
    /// Bytes that are in the backing file.
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
            let (kind, len) = look(&mut self.tables, pos, (end - pos).min(PIECE_BYTES))?;
            if let Some(kind) = kind {
                self.put(kind, pos, len, &below.file, pos)?;
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
        // As it was: what the overlay does not have is as it was too.
        let old = Reader::below(self.chain, 1)?;
        let mut pos = 0;
        while pos < end {
            let (kind, len) = look(&mut self.tables, pos, end - pos)?;
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
                self.put_pieces(pos, stop, &below.file, host + inside)?;
            } else {
                let bytes = self.whole_cluster(&old, first, stop, cluster)?;
                editor.write_cluster(index, &bytes).map_err(failed)?;
                self.count_pieces(pos, stop)?;
            }
            progress(self.done);
            pos = stop;
        }
        editor.finish(false).map_err(failed)
    }

    /// The cluster that begins at `first`, with the overlay's bytes up to `stop`.
    fn whole_cluster(
        &self,
        old: &Reader,
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

    /// Puts what the overlay has from `pos` to `stop` into `file` at `at`, and leaves the rest.
    fn put_pieces(
        &mut self,
        mut pos: u64,
        stop: u64,
        file: &HostFile,
        mut at: u64,
    ) -> Result<(), ImageError> {
        while pos < stop {
            let (kind, len) = look(&mut self.tables, pos, stop - pos)?;
            if let Some(kind) = kind {
                self.put(kind, pos, len, file, at)?;
            }
            (pos, at) = (pos + len, at + len);
        }
        Ok(())
    }

    fn count_pieces(&mut self, mut pos: u64, stop: u64) -> Result<(), ImageError> {
        while pos < stop {
            let (kind, len) = look(&mut self.tables, pos, stop - pos)?;
            self.done += if kind.is_some() { len } else { 0 };
            pos += len;
        }
        Ok(())
    }

    fn put(
        &mut self,
        kind: Kind,
        pos: u64,
        len: u64,
        file: &HostFile,
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

fn no_room(file: &HostFile, error: &io::Error) -> ImageError {
    let what = match error.kind() {
        ErrorKind::StorageFull => "no space left on the file system",
        ErrorKind::QuotaExceeded => "your quota on the file system is used up",
        ErrorKind::FileTooLarge => "it would become larger than a file may be here (see ulimit -f)",
        _ => return ImageError::os(file.path(), "write", error),
    };
    let hint = "nothing is lost: make room, and commit again";
    ImageError::refused(file.path(), format!("{what} ({hint})"))
}
