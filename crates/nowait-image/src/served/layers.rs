//! The images of a chain in use: where the bytes of the disk are, and what they are.
//!
//! Invariant: nothing is written. All images below the top one stay as they are, so what is found
//! in them stays true; what is found in the top one was true when it was asked.
//! Knows: breaks, medium, parts, store, entry, header, host, tables. Known by: image.

use std::sync::{Arc, Mutex, PoisonError};

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use nowait::{Buffer, Doing, Error, Range};

use crate::breaks::{self, Flaw};
use crate::entry::{Cluster, L1Entry};
use crate::header::{Header, be64};
use crate::host::HostFile;
use crate::tables::{continues, read_table};

use super::medium::Medium;
use super::parts::{Scatter, scatter};
use super::store::Store;

/// Entries of an L2 table that are read at once.
const ENTRIES_AT_ONCE: u64 = 512;
/// The most bytes that are filled with something found at once.
const FETCH_BYTES: u64 = 1 << 20;

/// What an image below the top one holds.
pub(crate) enum Kind {
    /// The disk's bytes.
    Raw,
    /// Clusters, whose places are in the tables of `host`.
    Qcow2 { header: Box<Header>, host: Arc<HostFile> },
}

/// An image below the top one.
pub(crate) struct Below {
    pub(crate) kind: Kind,
    /// The file with the data.
    pub(crate) medium: Medium,
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Bytes of the file with the data.
    pub(crate) file_bytes: u64,
}

/// What bytes of the disk are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Zeros, without being anywhere.
    Zeros,
    /// At `pos` in the file with this number. `writable` if they may be written there.
    Data { file: u8, pos: u64, writable: bool },
    /// `skip` bytes into the cluster that is packed into at most `len` bytes at `pos`.
    Packed { file: u8, pos: u64, len: u64, skip: u64 },
}

/// The images, from the top one down.
pub(crate) struct Layers {
    store: Arc<Store>,
    header: Header,
    below: Vec<Below>,
    /// The one that was unpacked last.
    unpacked: Mutex<Option<Unpacked>>,
}

/// A cluster that was packed at `pos` in the file with this number.
#[derive(Clone)]
struct Unpacked {
    file: u8,
    pos: u64,
    bytes: Arc<[u8]>,
}

impl Layers {
    pub(crate) fn new(store: Arc<Store>, header: Header, below: Vec<Below>) -> Self {
        Self { store, header, below, unpacked: Mutex::new(None) }
    }

    pub(crate) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The header of the top image, as it was when that was opened.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The file with this number.
    pub(crate) fn medium(&self, file: u8) -> &Medium {
        match file {
            0 => self.store.data(),
            below => {
                self.below.get(usize::from(below) - 1).map_or(self.store.data(), |b| &b.medium)
            }
        }
    }

    /// What the top image says of the disk from `pos` on, and for how many bytes: `len` at most.
    ///
    /// # Errors
    /// `EIO` where its tables are damaged; what reading them said.
    pub(crate) fn top(&self, pos: u64, len: u64) -> Result<(Cluster, u64), Error> {
        let bits = self.header.cluster_bits;
        let first = pos >> bits;
        let most = (((pos + len - 1) >> bits) - first + 1).min(ENTRIES_AT_ONCE);
        let clusters = self.store.with(|meta| meta.look(first, most))?;
        Ok(run_of(clusters.into_iter(), pos, len, bits))
    }

    /// What the disk is from `pos` on, and for how many bytes: `len` at most, which is not 0.
    ///
    /// # Errors
    /// As [`Layers::top`], of any image.
    pub(crate) fn find(&self, pos: u64, len: u64) -> Result<(Found, u64), Error> {
        self.find_with_depth(pos, len).map(|(found, _, len)| (found, len))
    }

    /// As [`Layers::find`]; in the middle which image says so ([`nowait::Span::depth`]).
    ///
    /// # Errors
    /// As [`Layers::find`].
    pub(crate) fn find_with_depth(&self, pos: u64, len: u64) -> Result<(Found, u8, u64), Error> {
        let len = len.min(self.header.size.saturating_sub(pos));
        if len == 0 {
            return Ok((Found::Zeros, 0, u64::MAX));
        }
        let (cluster, len) = self.top(pos, len)?;
        match meaning(0, cluster, pos, &self.header) {
            Some(found) => Ok((found, 1, len)),
            None => self.find_below(pos, len),
        }
    }

    /// As [`Layers::find_with_depth`], of the images below the top one.
    fn find_below(&self, pos: u64, len: u64) -> Result<(Found, u8, u64), Error> {
        let mut len = len;
        for (below, file) in self.below.iter().zip(1..) {
            let depth = file + 1;
            if pos >= below.size {
                // Behind its end an image has zeros, whatever is below it.
                return Ok((Found::Zeros, depth, len));
            }
            len = len.min(below.size - pos);
            let Kind::Qcow2 { header, host } = &below.kind else {
                let pos = if breaks::has(Flaw::ReadBelowElsewhere) { pos ^ 512 } else { pos };
                return Ok((Found::Data { file, pos, writable: false }, depth, len));
            };
            let (cluster, run) = look(host, header, pos, len)?;
            len = run;
            match meaning(file, cluster, pos, header) {
                None => {}
                Some(Found::Data { pos, .. })
                    if pos >= below.file_bytes.next_multiple_of(header.cluster_bytes()) =>
                {
                    return Err(damaged());
                }
                Some(found) => return Ok((found, depth, len)),
            }
        }
        Ok((Found::Zeros, 0, len))
    }

    /// Whether all of `range` is known to read as zeros.
    ///
    /// # Errors
    /// As [`Layers::find`].
    pub(crate) fn is_zeros(&self, range: Range) -> Result<bool, Error> {
        let mut pos = range.pos;
        while pos < range.end() {
            match self.find(pos, range.end() - pos)? {
                (Found::Zeros, len) => pos = pos.saturating_add(len),
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Fills `parts` with `len` bytes of what was found, from its beginning on.
    ///
    /// # Errors
    /// What reading said; `EIO` for packed data that cannot be unpacked.
    pub(crate) fn fetch(&self, found: Found, mut parts: Vec<&mut [u8]>) -> Result<(), Error> {
        match found {
            Found::Zeros => parts.iter_mut().for_each(|part| part.fill(0)),
            Found::Data { file, pos, .. } => self.medium(file).read(pos, parts)?,
            Found::Packed { file, pos, len, skip } => {
                let cluster = self.unpack(file, pos, len)?;
                scatter(cluster.get(skip as usize..).unwrap_or_default(), &mut parts);
            }
        }
        Ok(())
    }

    /// Fills the next memory of `rest` with some of `len` bytes of the disk from `pos` on, which are
    /// all inside it, and returns how many. Of these the top image is asked once: whoever writes
    /// there meanwhile is read whole or not at all, also where images below end inside a block.
    ///
    /// # Errors
    /// As [`Layers::find`] and [`Layers::fetch`].
    pub(crate) fn fetch_some(
        &self,
        pos: u64,
        len: u64,
        rest: &mut Scatter<'_>,
    ) -> Result<u64, Error> {
        let (cluster, run) = self.top(pos, len)?;
        if let Some(found) = meaning(0, cluster, pos, &self.header) {
            self.fetch(found, rest.take(run))?;
            return Ok(run);
        }
        let mut done = 0;
        while done < run {
            let (found, _, len) = self.find_below(pos + done, run - done)?;
            self.fetch(found, rest.take(len))?;
            done += len;
        }
        Ok(run)
    }

    /// Fills `memory` with the disk's bytes from `pos` on; with zeros behind its end.
    ///
    /// # Errors
    /// As [`Layers::find`] and [`Layers::fetch`].
    pub(crate) fn read(&self, pos: u64, memory: &mut [u8]) -> Result<(), Error> {
        let mut rest = memory;
        let mut pos = pos;
        while !rest.is_empty() {
            let (found, len) = self.find(pos, (rest.len() as u64).min(FETCH_BYTES))?;
            let len = len.min(rest.len() as u64);
            let (now, later) = rest.split_at_mut(len as usize);
            self.fetch(found, vec![now])?;
            pos += len;
            rest = later;
        }
        Ok(())
    }

    /// The cluster that is packed into at most `len` bytes at `pos`.
    fn unpack(&self, file: u8, pos: u64, len: u64) -> Result<Arc<[u8]>, Error> {
        let last = || self.unpacked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last().clone()
            && (last.file, last.pos) == (file, pos)
        {
            return Ok(last.bytes);
        }
        let bytes = match file {
            0 => self.header.cluster_bytes(),
            _ => match self.below.get(usize::from(file) - 1).map(|below| &below.kind) {
                Some(Kind::Qcow2 { header, .. }) => header.cluster_bytes(),
                _ => return Err(damaged()),
            },
        };
        let mut packed = Buffer::zeroed(len as usize)?;
        self.medium(file).read(pos, vec![&mut packed])?;
        let mut cluster = vec![0; bytes as usize];
        // There may be more bytes than the cluster was packed into.
        let (status, _, got) =
            decompress(&mut DecompressorOxide::new(), &packed, &mut cluster, 0, 0);
        let whole = matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput);
        if !whole || got < cluster.len() {
            return Err(damaged());
        }
        let cluster: Arc<[u8]> = cluster.into();
        *last() = Some(Unpacked { file, pos, bytes: cluster.clone() });
        Ok(cluster)
    }
}

fn damaged() -> Error {
    Error::new(libc::EIO, Doing::Read)
}

fn failed(error: &std::io::Error) -> Error {
    Error::new(error.raw_os_error().unwrap_or(libc::EIO), Doing::Read)
}

/// What a cluster says of the byte at `pos` of the disk; `None` if the image below has it.
fn meaning(file: u8, cluster: Cluster, pos: u64, header: &Header) -> Option<Found> {
    let inside = pos & (header.cluster_bytes() - 1);
    match cluster {
        Cluster::Unallocated => None,
        Cluster::Zero { .. } => Some(Found::Zeros),
        Cluster::Data { host, copied } => {
            Some(Found::Data { file, pos: host + inside, writable: file == 0 && copied })
        }
        Cluster::Compressed { pos, len } => Some(Found::Packed { file, pos, len, skip: inside }),
    }
}

/// The first of `clusters`, which is at `pos` of the disk, and for how many bytes, `len` at most,
/// those behind it continue it.
fn run_of(
    mut clusters: impl Iterator<Item = Cluster>,
    pos: u64,
    len: u64,
    bits: u32,
) -> (Cluster, u64) {
    let bytes = 1 << bits;
    let first = clusters.next().unwrap_or(Cluster::Unallocated);
    let (mut last, mut run) = (first, bytes - (pos & (bytes - 1)));
    // Packed clusters are unpacked one by one.
    if !matches!(first, Cluster::Compressed { .. }) {
        for next in clusters {
            let goes_on = continues(last, next, bytes) && is_copied(last) == is_copied(next);
            if run >= len || !goes_on {
                break;
            }
            (last, run) = (next, run + bytes);
        }
    }
    (first, run.min(len))
}

fn is_copied(cluster: Cluster) -> bool {
    matches!(cluster, Cluster::Data { copied: true, .. } | Cluster::Zero { copied: true, .. })
}

/// As [`Layers::top`], of an image that nobody writes to.
fn look(host: &HostFile, header: &Header, pos: u64, len: u64) -> Result<(Cluster, u64), Error> {
    let bits = header.cluster_bits;
    let first = pos >> bits;
    let (index, inside) = (first / header.l2_entries(), first % header.l2_entries());
    let to_table_end =
        ((header.l2_entries() - inside) << bits) - (pos & (header.cluster_bytes() - 1));
    let len = len.min(to_table_end);
    let mut entry = [0; 8];
    host.read_at(header.l1_pos + index * 8, &mut entry).map_err(|e| failed(&e))?;
    let table = match L1Entry::parse(be64(&entry, 0), header) {
        Ok(L1Entry::Empty) => return Ok((Cluster::Unallocated, len)),
        Ok(L1Entry::Table { pos, .. }) => pos,
        Err(_) => return Err(damaged()),
    };
    let count = (((pos + len - 1) >> bits) - first + 1).min(ENTRIES_AT_ONCE);
    let mut clusters = Vec::with_capacity(count as usize);
    for entry in read_table(host, table + inside * 8, count).map_err(|e| failed(&e))? {
        match Cluster::parse(entry, header) {
            Ok(cluster) => clusters.push(cluster),
            Err(_) if !clusters.is_empty() => break,
            Err(_) => return Err(damaged()),
        }
    }
    Ok(run_of(clusters.into_iter(), pos, len, bits))
}
