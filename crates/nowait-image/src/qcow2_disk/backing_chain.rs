//! The images of a served chain: the mapping of the disk's bytes, and reading them.
//!
//! Invariant: this module writes nothing. Images below the top one never change, so mappings in
//! them stay valid; a mapping in the top image was valid at the time of the lookup.

use std::sync::Arc;

use nowait::{ByteRange, Error, ReadCursor, Storage};

use crate::formats::decompress::Packing;
use crate::formats::decompressed_cache::DecompressedCache;
use crate::formats::mapped_disk::{Place, RunTable};
use crate::formats::qcow2::entries::Cluster;
use crate::formats::qcow2::header::Header;
use crate::injected_bug;
use crate::injected_bug::ImageBug;

use crate::formats::qcow2::backing_tables::{BackingTables, bytes_of, clusters_of};
use crate::qcow2_disk::writeback::MetadataWriteback;

/// Most bytes that are read with one lookup.
const FETCH_BYTES: u64 = 1 << 20;

/// The format of an image below the top one.
pub(crate) enum Kind {
    /// The disk's bytes, as they are.
    Raw,
    /// Clusters, whose positions are in tables.
    Qcow2(BackingTables),
    /// The table of another format.
    Mapped(Arc<dyn RunTable>),
}

/// An image below the top one.
pub(crate) struct BackingImage {
    pub(crate) kind: Kind,
    /// The files with the data.
    pub(crate) files: Vec<Arc<dyn Storage>>,
    /// The number of the first of them.
    pub(crate) first_file: u8,
    /// Bytes of the disk.
    pub(crate) size: u64,
}

/// The mapping of a run of bytes of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// Zeros, without a position in a file.
    Zeros,
    /// At `pos` in the file with this number. `writable` if the bytes may be written in place.
    Data { file: u8, pos: u64, writable: bool },
    /// `skip` bytes into the cluster that is compressed into at most `len` bytes at `pos`.
    Compressed { file: u8, pos: u64, len: u64, skip: u64, packing: Packing },
}

impl Mapping {
    /// The mapping of `place`, in an image whose first file has the number `first_file`.
    pub(crate) fn of(place: Place, first_file: u8) -> Self {
        let number = |file: u8| file.saturating_add(first_file);
        match place {
            Place::Zeros { .. } => Self::Zeros,
            Place::Data { file, pos } => Self::Data { file: number(file), pos, writable: false },
            Place::Packed { file, pos, len, skip, packing } => {
                Self::Compressed { file: number(file), pos, len, skip, packing }
            }
        }
    }
}

/// The mapping of a run of the disk in one image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resolved {
    /// `None` where the image has no mapping: the image below it has to be asked.
    pub(crate) found: Option<Mapping>,
    /// Bytes of the run.
    pub(crate) len: u64,
    /// Reads of the image's file that the lookup took.
    pub(crate) reads: usize,
}

/// The bytes that positions in all of `files` have to be multiples of for direct I/O; at least 1.
pub(crate) fn direct_alignment<'a>(files: impl Iterator<Item = &'a Arc<dyn Storage>>) -> u64 {
    files.map(|file| u64::from(file.properties().align.offset)).max().unwrap_or(1).max(1)
}

/// The images, from the top one down.
pub(crate) struct BackingChain {
    writeback: Arc<MetadataWriteback>,
    header: Header,
    below: Vec<BackingImage>,
    /// Like [`direct_alignment`].
    align: u64,
    decompressed: DecompressedCache,
}

impl BackingChain {
    pub(crate) fn new(
        writeback: Arc<MetadataWriteback>,
        header: Header,
        below: Vec<BackingImage>,
    ) -> Self {
        let files = below.iter().flat_map(|image| &image.files).chain([writeback.data()]);
        let align = direct_alignment(files);
        let decompressed = DecompressedCache::of(writeback.host().path());
        Self { writeback, header, below, align, decompressed }
    }

    /// Like [`direct_alignment`], of all files.
    pub(crate) fn align(&self) -> u64 {
        self.align
    }

    pub(crate) fn writeback(&self) -> &Arc<MetadataWriteback> {
        &self.writeback
    }

    /// Number of images.
    pub(crate) fn count(&self) -> usize {
        1 + self.below.len()
    }

    /// The header of the top image, as it was when the image was opened.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The file with this number.
    pub(crate) fn data_file(&self, file: u8) -> &Arc<dyn Storage> {
        let below = usize::from(file).checked_sub(1).and_then(|at| self.files_below().nth(at));
        below.unwrap_or(self.writeback.data())
    }

    /// The files of the images below the top one, in the order of their numbers.
    pub(crate) fn files_below(&self) -> impl Iterator<Item = &Arc<dyn Storage>> {
        self.below.iter().flat_map(|image| &image.files)
    }

    /// Looks up `pos` of the disk in the top image: the mapping, and for how many bytes, at most
    /// `len`.
    ///
    /// # Errors
    /// `EIO` where its tables are damaged; the errno of a failed read.
    pub(crate) fn lookup_top(&self, pos: u64, len: u64) -> Result<(Cluster, u64), Error> {
        let bits = self.header.unit_bits();
        let (first, max_clusters) = clusters_of(pos, len, bits);
        let (cluster, count) =
            self.writeback.with(|metadata| metadata.lookup(first, max_clusters))?;
        Ok((cluster, bytes_of(count, pos, len, bits)))
    }

    /// Like [`BackingChain::lookup_top`], for a run that is then changed.
    ///
    /// # Errors
    /// Like [`MetadataWriteback::update`].
    pub(crate) fn lookup_top_for_write(&self, pos: u64, len: u64) -> Result<(Cluster, u64), Error> {
        let bits = self.header.unit_bits();
        let (first, max_clusters) = clusters_of(pos, len, bits);
        let (cluster, count) =
            self.writeback.update(|metadata| metadata.lookup(first, max_clusters))?;
        Ok((cluster, bytes_of(count, pos, len, bits)))
    }

    /// The mapping of the disk from `pos` on, and for how many bytes: at most `len`, which is not
    /// 0.
    ///
    /// # Errors
    /// Like [`BackingChain::lookup_top`], of any image.
    pub(crate) fn resolve(&self, pos: u64, len: u64) -> Result<(Mapping, u64), Error> {
        let len = len.min(self.header.size.saturating_sub(pos));
        if len == 0 {
            return Ok((Mapping::Zeros, u64::MAX));
        }
        let (cluster, len) = self.lookup_top(pos, len)?;
        match mapping_of_entry(0, cluster, pos, &self.header) {
            Some(found) => Ok((found, len)),
            None => self.resolve_in_backing(pos, len),
        }
    }

    /// The mapping of the disk from `pos` on in one image: at most `len` bytes, which are inside
    /// the disk. Image 0 is the top one. Tables are read ahead; the result must not be used for
    /// writes.
    ///
    /// # Errors
    /// `EIO` where its tables are damaged; the errno of a failed read.
    pub(crate) fn scan_image(&self, image: u8, pos: u64, len: u64) -> Result<Resolved, Error> {
        let all = |found| Resolved { found: Some(found), len, reads: 0 };
        let below = match usize::from(image).checked_sub(1).map(|at| self.below.get(at)) {
            Some(Some(below)) => below,
            Some(None) => return Ok(Resolved { found: None, len, reads: 0 }),
            None => {
                let bits = self.header.unit_bits();
                let (first, max_clusters) = clusters_of(pos, len, bits);
                let ((cluster, count), reads) = self.writeback.scan(first, max_clusters)?;
                let found = mapping_of_entry(0, cluster, pos, &self.header);
                return Ok(Resolved { found, len: bytes_of(count, pos, len, bits), reads });
            }
        };
        if pos >= below.size {
            // Behind its end an image has zeros, whatever the images below it have.
            return Ok(all(Mapping::Zeros));
        }
        let len = len.min(below.size - pos);
        let file = below.first_file;
        let tables = match &below.kind {
            Kind::Qcow2(tables) => tables,
            Kind::Raw => {
                let found = Some(Mapping::Data { file, pos, writable: false });
                return Ok(Resolved { found, len, reads: 0 });
            }
            Kind::Mapped(table) => {
                let mut reads = 0;
                let (place, len) = table.lookup(pos, len, &mut reads)?;
                return Ok(Resolved { found: Some(Mapping::of(place, file)), len, reads });
            }
        };
        let (cluster, len, reads) = tables.scan(pos, len)?;
        Ok(Resolved { found: mapping_of_entry(file, cluster, pos, tables.header()), len, reads })
    }

    /// Like [`BackingChain::resolve`], of the images below the top one.
    fn resolve_in_backing(&self, pos: u64, len: u64) -> Result<(Mapping, u64), Error> {
        let mut len = len;
        for below in &self.below {
            let file = below.first_file;
            if pos >= below.size {
                // Behind its end an image has zeros, whatever the images below it have.
                return Ok((Mapping::Zeros, len));
            }
            len = len.min(below.size - pos);
            let tables = match &below.kind {
                Kind::Qcow2(tables) => tables,
                Kind::Raw => {
                    let elsewhere = injected_bug::injected(ImageBug::ReadBelowElsewhere);
                    let pos = if elsewhere { pos ^ 512 } else { pos };
                    return Ok((Mapping::Data { file, pos, writable: false }, len));
                }
                Kind::Mapped(table) => {
                    let (place, len) = table.lookup(pos, len, &mut 0)?;
                    return Ok((Mapping::of(place, file), len));
                }
            };
            let (cluster, run) = tables.lookup(pos, len)?;
            len = run;
            if let Some(found) = mapping_of_entry(file, cluster, pos, tables.header()) {
                return Ok((found, len));
            }
        }
        Ok((Mapping::Zeros, len))
    }

    /// Whether all of `range` is known to read as zeros.
    ///
    /// # Errors
    /// Like [`BackingChain::resolve`].
    pub(crate) fn is_zeros(&self, range: ByteRange) -> Result<bool, Error> {
        let mut pos = range.pos;
        while pos < range.end() {
            match self.resolve(pos, range.end() - pos)? {
                (Mapping::Zeros, len) => pos = pos.saturating_add(len),
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Fills `memory` with the bytes of the mapping, from its beginning on.
    ///
    /// # Errors
    /// The errno of a failed read; `EIO` for compressed data that cannot be decompressed.
    pub(crate) fn read_mapping(
        &self,
        found: Mapping,
        mut memory: ReadCursor<'_>,
    ) -> Result<(), Error> {
        match found {
            Mapping::Zeros => {}
            Mapping::Data { file, pos, .. } => self.data_file(file).read_at(pos, &mut memory)?,
            Mapping::Compressed { file, pos, len, skip, packing } => {
                let storage = &**self.data_file(file);
                let cluster = self.decompressed.read((file, pos), storage, len, packing)?;
                memory.copy_from(cluster.get(skip as usize..).unwrap_or_default());
            }
        }
        // Behind the end of a file there are zeros.
        memory.fill(0);
        Ok(())
    }

    /// Fills some of `memory` with the bytes of the disk from `pos` on, all inside the disk, and
    /// returns how many. The top image is looked up once for them: a
    /// concurrent write is read whole or not at all, also where images below end inside a block.
    ///
    /// # Errors
    /// Like [`BackingChain::resolve`] and [`BackingChain::read_mapping`].
    pub(crate) fn read_some(&self, pos: u64, memory: &mut ReadCursor<'_>) -> Result<u64, Error> {
        let (cluster, run) = self.lookup_top(pos, memory.len())?;
        if let Some(found) = mapping_of_entry(0, cluster, pos, &self.header) {
            self.read_mapping(found, memory.take(run))?;
            return Ok(run);
        }
        let mut done = 0;
        while done < run {
            let (found, len) = self.resolve_in_backing(pos + done, run - done)?;
            self.read_mapping(found, memory.take(len))?;
            done += len;
        }
        Ok(run)
    }

    /// Fills `memory` with the disk's bytes from `pos` on; with zeros behind its end.
    ///
    /// # Errors
    /// Like [`BackingChain::resolve`] and [`BackingChain::read_mapping`].
    pub(crate) fn read(&self, pos: u64, memory: &mut [u8]) -> Result<(), Error> {
        let mut rest = memory;
        let mut pos = pos;
        while !rest.is_empty() {
            let (found, len) = self.resolve(pos, (rest.len() as u64).min(FETCH_BYTES))?;
            let len = len.min(rest.len() as u64);
            let (now, later) = rest.split_at_mut(len as usize);
            self.read_mapping(found, ReadCursor::from(now))?;
            pos += len;
            rest = later;
        }
        Ok(())
    }
}

/// The mapping of the byte at `pos` of the disk in an image's cluster; `None` if the image below
/// has it.
fn mapping_of_entry(file: u8, cluster: Cluster, pos: u64, header: &Header) -> Option<Mapping> {
    let inside = pos & (header.unit_bytes() - 1);
    match cluster {
        Cluster::Unallocated | Cluster::Reserved { .. } | Cluster::Mixed { .. } => None,
        Cluster::Zero { .. } => Some(Mapping::Zeros),
        Cluster::Data { host, copied } => {
            Some(Mapping::Data { file, pos: host + inside, writable: file == 0 && copied })
        }
        Cluster::Compressed { pos: host, len } => {
            let (pos, inside) = (host, pos & (header.cluster_bytes() - 1));
            Some(Mapping::Compressed { file, pos, len, skip: inside, packing: header.packing() })
        }
    }
}
