//! The header of a qcow2 image, parsed and range-checked.
//!
//! Invariant: whatever the bytes are, every field of a parsed header is within the limits named
//! here, so that its users need no checks of their own; only the first cluster is read.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use crate::error::ImageError;
use crate::formats::decompress::{Compression, Form, Packing};
use crate::formats::layer::BackingName;
use crate::image_file::ImageFile;

/// The first bytes of every qcow2 image.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Most bytes of a header: the largest cluster that it must fit into, cut to a useful size. The
/// longest name has 1023 bytes and QEMU's own extensions take less than 1 KiB.
const HEADER_BYTES: usize = 64 << 10;

const V2_BYTES: usize = 72;
pub(crate) const V3_BYTES: usize = 104;
const MIN_CLUSTER_BITS: u32 = 9;
/// The cluster size of a qcow2 image, as a power of two: 2 MiB.
/// Beyond it: the image is refused as damaged.
const MAX_CLUSTER_BITS: u32 = 21;
/// A subcluster has at least a sector.
pub(crate) const MIN_EXTENDED_CLUSTER_BITS: u32 = 14;
/// The most bytes of an L1 table, as in QEMU (block/qcow2.h, `QCOW_MAX_L1_SIZE`).
/// Beyond it: the image is refused as damaged; a disk that needs more is not created, nor resized to.
pub(crate) const MAX_L1_BYTES: u64 = 32 << 20;
/// The most bytes of a refcount table (block/qcow2.h, `QCOW_MAX_REFTABLE_SIZE`); one cluster is always allowed.
/// Beyond it: the image is refused as damaged; an allocation that would need more fails with `EFBIG`.
pub(crate) const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// The position that all clusters of an image lie below: entries have 56 bits for it.
/// Beyond it: the image is refused as damaged, an entry is `EIO`, and an allocation fails with `EFBIG`.
pub(crate) const MAX_POS: u64 = 1 << 56;
/// The most bitmaps of an image, as in QEMU (block/qcow2.h, `QCOW2_MAX_BITMAPS`).
/// Beyond it: the image is refused as damaged.
const MAX_BITMAPS: u32 = 65535;
/// The most bytes of the list of bitmaps (block/qcow2.h, `QCOW2_MAX_BITMAP_DIRECTORY_SIZE`).
/// Beyond it: the image is refused as damaged.
const MAX_DIRECTORY_BYTES: u64 = 64 << 20;
/// The most snapshots of an image (block/qcow2.h, `QCOW_MAX_SNAPSHOTS`).
/// Beyond it: the image is refused as damaged.
const MAX_SNAPSHOTS: u32 = 65536;
/// The most bytes of the name of a backing file, also of a name in JSON.
/// Beyond it: the image is refused as damaged; one with a longer name is not created.
pub(crate) const MAX_NAME_BYTES: u32 = 1023;
/// The width of a refcount, as a power of two: 64 bits.
/// Beyond it: the image is refused as damaged.
const MAX_REFCOUNT_ORDER: u32 = 6;

/// Refcounts of 16 bits, as QEMU makes them and as version 2 always has them.
const DEFAULT_REFCOUNT_ORDER: u32 = 4;

const EXTENSION_END: u32 = 0;
pub(crate) const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
pub(crate) const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
pub(crate) const EXTENSION_BITMAPS: u32 = 0x2385_2875;

/// The state of the disk in an external raw data file; of this program.
pub(crate) const EXTENSION_DISK_STATE: u32 = 0x6e6f_7762;
/// The type of an extension that holds the place of a list of bitmaps that was removed: programs skip what they do not know.
pub(crate) const EXTENSION_SPARE: u32 = 0x6e6f_7761;

/// Bytes of the extension for bitmaps, and of that for the state of the disk.
pub(crate) const BITMAPS_BYTES: usize = 24;

const INCOMPATIBLE_DIRTY: u64 = 1 << 0;
const INCOMPATIBLE_CORRUPT: u64 = 1 << 1;
pub(crate) const INCOMPATIBLE_DATA_FILE: u64 = 1 << 2;
const INCOMPATIBLE_COMPRESSION: u64 = 1 << 3;
const INCOMPATIBLE_EXTENDED_L2: u64 = 1 << 4;
const COMPATIBLE_LAZY_REFCOUNTS: u64 = 1 << 0;
pub(crate) const AUTOCLEAR_BITMAPS: u64 = 1 << 0;
pub(crate) const AUTOCLEAR_DATA_FILE_RAW: u64 = 1 << 1;

/// The list of an image's dirty bitmaps (QEMU docs/interop/qcow2.txt, "Bitmaps extension").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapDirectory {
    /// Bitmaps in it, at most 65535.
    pub bitmaps: u32,
    /// Position in bytes; a multiple of the cluster size.
    pub pos: u64,
    /// Its length in bytes, at most 64 MiB.
    pub len: u64,
}

/// A parsed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Clusters have 1 << this bytes; 9 to 21.
    pub cluster_bits: u32,
    /// Size of the disk in bytes; all of it is reached by the L1 table.
    pub size: u64,
    /// Entries of the active L1 table.
    pub l1_entries: u32,
    /// Position of the active L1 table in bytes; a multiple of the cluster size.
    pub l1_pos: u64,
    /// Position of the refcount table in bytes; a multiple of the cluster size.
    pub refcount_table_pos: u64,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// Refcounts have 1 << this bits; 0 to 6.
    pub refcount_order: u32,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Position of the table of snapshots in bytes.
    pub snapshots_pos: u64,
    /// Incompatible feature bits: a reader must know each bit that is set.
    pub incompatible: u64,
    /// Autoclear feature bits: a writer must clear those whose promise it does not keep.
    pub autoclear: u64,
    pub(crate) compatible: u64,
    /// The backing image, if any.
    pub backing: Option<BackingName>,
    /// The name of the external data file, if it is recorded.
    pub data_file: Option<OsString>,
    /// The compression of clusters.
    pub compression: Compression,
    /// The directory of persistent dirty bitmaps, if there is one that can be relied on.
    pub bitmaps: Option<BitmapDirectory>,
    /// Whether there is such a directory that cannot be relied on: a program that does not know bitmaps has written to the
    /// image.
    pub has_stale_bitmaps: bool,
    /// Whether there is or was a directory: what the header says of it may be of a change that a kill has cut off.
    pub(crate) had_bitmaps: bool,
    /// The state of the disk in its data file, as this program has noted it.
    pub(crate) disk_state: Option<[u8; BITMAPS_BYTES]>,
    /// 0 none, 1 AES, 2 LUKS.
    pub encryption: u32,
    /// Whether the disk, its size and the L1 table are those of an internal snapshot.
    pub is_snapshot: bool,
}

/// A big-endian number of four bytes at `at`; 0 behind the end of `bytes`.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    let four = bytes.get(at..at.saturating_add(4)).and_then(|four| four.try_into().ok());
    four.map_or(0, u32::from_be_bytes)
}

/// A big-endian number of eight bytes at `at`; 0 behind the end of `bytes`.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    let eight = bytes.get(at..at.saturating_add(8)).and_then(|eight| eight.try_into().ok());
    eight.map_or(0, u64::from_be_bytes)
}

impl Header {
    /// The header of an empty image of version 3, for a disk of `size` bytes with refcounts of 16
    /// bits. Its tables have no positions yet. Clusters have `1 << cluster_bits` bytes.
    pub(crate) const fn empty(size: u64, cluster_bits: u32) -> Self {
        Self {
            version: 3,
            cluster_bits,
            size,
            l1_entries: 0,
            l1_pos: 0,
            refcount_table_pos: 0,
            refcount_table_clusters: 0,
            refcount_order: DEFAULT_REFCOUNT_ORDER,
            snapshots: 0,
            snapshots_pos: 0,
            incompatible: 0,
            autoclear: 0,
            compatible: 0,
            backing: None,
            data_file: None,
            compression: Compression::Deflate,
            bitmaps: None,
            has_stale_bitmaps: false,
            had_bitmaps: false,
            disk_state: None,
            encryption: 0,
            is_snapshot: false,
        }
    }

    /// This header, of an image whose clusters are compressed by `compression`.
    pub(crate) fn with_compression(self, compression: Compression) -> Self {
        let incompatible = match compression {
            Compression::Deflate => self.incompatible & !INCOMPATIBLE_COMPRESSION,
            _ => self.incompatible | INCOMPATIBLE_COMPRESSION,
        };
        Self { compression, incompatible, ..self }
    }

    /// This header, of an image whose disk is the file `name` as it is.
    pub(crate) fn with_raw_data_file(self, name: OsString) -> Self {
        Self {
            incompatible: self.incompatible | INCOMPATIBLE_DATA_FILE,
            autoclear: self.autoclear | AUTOCLEAR_DATA_FILE_RAW,
            data_file: Some(name),
            ..self
        }
    }

    /// This header, of an image with extended L2 entries.
    pub(crate) fn with_extended_l2(self) -> Self {
        Self { incompatible: self.incompatible | INCOMPATIBLE_EXTENDED_L2, ..self }
    }

    /// Reads the header of the image in `file`.
    ///
    /// # Errors
    /// The errnos of pread(2); the reason why the header is invalid.
    pub fn read(file: &ImageFile) -> Result<Self, ImageError> {
        let mut first = vec![0; HEADER_BYTES];
        file.read_at(0, &mut first).map_err(|e| ImageError::os(file.path(), "read", &e))?;
        Self::parse(&first).map_err(|why| ImageError::refused(file.path(), why))
    }

    /// Parses the header in the first bytes of an image (zeros where the file is shorter).
    ///
    /// # Errors
    /// The reason why it is invalid, in words to follow the image's name.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if !bytes.starts_with(&MAGIC) {
            return Err("it is not a qcow2 image (its first bytes are others)".into());
        }
        let version = be32(bytes, 4);
        if version == 1 {
            return Err(
                "it is an image of qcow2's predecessor, which is not supported (make one that \
                        is, with qemu-img convert -f qcow -O qcow2)"
                    .into(),
            );
        }
        if !(2..=3).contains(&version) {
            return Err(format!("qcow2 version {version} is not known here (2 and 3 are)"));
        }
        let three = version == 3;
        let if_three = |value: u64| if three { value } else { 0 };
        let incompatible = if_three(be64(bytes, 72));
        let mut header = Self {
            version,
            cluster_bits: be32(bytes, 20),
            size: be64(bytes, 24),
            l1_entries: be32(bytes, 36),
            l1_pos: be64(bytes, 40),
            refcount_table_pos: be64(bytes, 48),
            refcount_table_clusters: be32(bytes, 56),
            refcount_order: if three { be32(bytes, 96) } else { DEFAULT_REFCOUNT_ORDER },
            snapshots: be32(bytes, 60),
            snapshots_pos: be64(bytes, 64),
            incompatible,
            compatible: if_three(be64(bytes, 80)),
            autoclear: if_three(be64(bytes, 88)),
            backing: None,
            data_file: None,
            compression: Compression::Deflate,
            bitmaps: None,
            has_stale_bitmaps: false,
            had_bitmaps: false,
            disk_state: None,
            encryption: be32(bytes, 32),
            is_snapshot: false,
        };
        header.check_numbers()?;
        let len = if three { be32(bytes, 100) as usize } else { V2_BYTES };
        let cluster = header.cluster_bytes() as usize;
        if three && !(V3_BYTES..=cluster.min(HEADER_BYTES)).contains(&len) {
            return Err(format!("its header is damaged: a header of {len} bytes"));
        }
        let compression = if three && len > V3_BYTES { bytes.get(V3_BYTES) } else { None };
        header.compression = match compression.copied().unwrap_or_default() {
            0 => Compression::Deflate,
            1 => Compression::Zstd,
            other => Compression::Unknown(other),
        };
        // The bit must be set exactly if the field is not 0: only the bit stops a reader that does
        // not know the field.
        let marked = incompatible & INCOMPATIBLE_COMPRESSION != 0;
        if marked != (header.compression != Compression::Deflate) {
            return Err(
                "its header is damaged: its compression type and feature bits do not agree".into(),
            );
        }
        let format = header.read_extensions(bytes, len)?;
        header.backing = header.read_backing(bytes, format)?;
        Ok(header)
    }

    /// Checks that the numbers are within the limits.
    pub(crate) fn check_numbers(&self) -> Result<(), String> {
        let damaged = |what: String| Err(format!("its header is damaged: {what}"));
        if !(MIN_CLUSTER_BITS..=MAX_CLUSTER_BITS).contains(&self.cluster_bits) {
            return damaged(format!("clusters of 2^{} bytes", self.cluster_bits));
        }
        if self.refcount_order > MAX_REFCOUNT_ORDER {
            return damaged(format!("refcounts of 2^{} bits", self.refcount_order));
        }
        let l1_bytes = u64::from(self.l1_entries) * 8;
        if l1_bytes > MAX_L1_BYTES {
            return damaged(format!("an L1 table of {} entries", self.l1_entries));
        }
        let table_bytes = u64::from(self.refcount_table_clusters) << self.cluster_bits;
        if table_bytes == 0 || table_bytes > MAX_REFCOUNT_TABLE_BYTES.max(self.cluster_bytes()) {
            let clusters = self.refcount_table_clusters;
            return damaged(format!("a refcount table of {clusters} clusters"));
        }
        for (what, pos) in
            [("the L1 table", self.l1_pos), ("the refcount table", self.refcount_table_pos)]
        {
            let no_table = what == "the L1 table" && l1_bytes == 0;
            let unaligned = pos & (self.cluster_bytes() - 1) != 0;
            if !no_table && (pos == 0 || pos >= MAX_POS || unaligned) {
                return damaged(format!("{what} at byte {pos}"));
            }
        }
        let tables = [
            (0, self.cluster_bytes()),
            (self.refcount_table_pos, table_bytes),
            (self.l1_pos, l1_bytes.next_multiple_of(self.cluster_bytes())),
        ];
        for (n, &(pos, len)) in tables.iter().enumerate() {
            let meets = |&(other, bytes): &(u64, u64)| pos < other + bytes && other < pos + len;
            if tables.iter().skip(n + 1).any(meets) {
                return damaged(format!("two tables at byte {pos}"));
            }
        }
        if self.has_extended_l2() && self.cluster_bits < MIN_EXTENDED_CLUSTER_BITS {
            return damaged(format!("subclusters in clusters of 2^{} bytes", self.cluster_bits));
        }
        if self.size > u64::from(self.l1_entries).saturating_mul(self.l2_reach()) {
            return damaged(format!(
                "a disk of {} bytes, more than its L1 table of {} entries reaches",
                self.size, self.l1_entries
            ));
        }
        let unaligned = self.snapshots_pos & (self.cluster_bytes() - 1) != 0;
        if self.snapshots > MAX_SNAPSHOTS
            || self.snapshots > 0 && (unaligned || self.snapshots_pos >= MAX_POS)
        {
            return damaged(format!("{} snapshots", self.snapshots));
        }
        if self.size > i64::MAX as u64 - self.cluster_bytes() {
            return damaged(format!("a disk of {} bytes", self.size));
        }
        Ok(())
    }

    /// Parses the extensions that begin at `at`. Returns the format of the backing file.
    fn read_extensions(&mut self, bytes: &[u8], mut at: usize) -> Result<Option<String>, String> {
        let first_name = be64(bytes, 8);
        let end = match first_name {
            0 => self.cluster_bytes(),
            name => name.min(self.cluster_bytes()),
        };
        let end = (end as usize).min(bytes.len());
        let mut format = None;
        while at + 8 <= end {
            let (kind, len) = (be32(bytes, at), be32(bytes, at + 4) as usize);
            at += 8;
            if kind == EXTENSION_END {
                break;
            }
            let Some(data) = bytes.get(at..at.saturating_add(len)).filter(|_| at + len <= end)
            else {
                return Err("its header is damaged: an extension that does not fit".into());
            };
            self.had_bitmaps |= matches!(kind, EXTENSION_BITMAPS | EXTENSION_SPARE);
            match kind {
                EXTENSION_BACKING_FORMAT => {
                    format = Some(String::from_utf8_lossy(data).into_owned());
                }
                EXTENSION_DATA_FILE => {
                    self.data_file = Some(OsString::from_vec(data.to_owned()));
                }
                // Without the bit, a program that does not know bitmaps has written to the image.
                EXTENSION_BITMAPS if self.autoclear & AUTOCLEAR_BITMAPS != 0 => {
                    self.bitmaps = Some(self.read_bitmaps(data)?);
                }
                EXTENSION_BITMAPS => self.has_stale_bitmaps = true,
                EXTENSION_DISK_STATE => self.disk_state = data.try_into().ok(),
                _ => {}
            }
            at += len.next_multiple_of(8);
        }
        Ok(format)
    }

    fn read_bitmaps(&self, data: &[u8]) -> Result<BitmapDirectory, String> {
        let found =
            BitmapDirectory { bitmaps: be32(data, 0), len: be64(data, 8), pos: be64(data, 16) };
        let unaligned = found.pos & (self.cluster_bytes() - 1) != 0 || found.pos >= MAX_POS;
        let unaligned = unaligned || data.len() != BITMAPS_BYTES;
        if found.bitmaps > MAX_BITMAPS || found.len > MAX_DIRECTORY_BYTES || unaligned {
            return Err("its header is damaged: the list of its bitmaps".into());
        }
        Ok(found)
    }

    fn read_backing(
        &self,
        bytes: &[u8],
        format: Option<String>,
    ) -> Result<Option<BackingName>, String> {
        let (pos, len) = (be64(bytes, 8), be32(bytes, 16));
        if pos == 0 || len == 0 {
            return Ok(None);
        }
        let damaged = || "its header is damaged: the name of its backing file".to_owned();
        let end = pos.checked_add(u64::from(len)).ok_or_else(damaged)?;
        if len > MAX_NAME_BYTES || end > self.cluster_bytes() {
            return Err(damaged());
        }
        let name = bytes.get(pos as usize..end as usize).ok_or_else(damaged)?;
        if name.contains(&0) {
            return Err(damaged());
        }
        Ok(Some(BackingName { name: OsString::from_vec(name.to_owned()), format }))
    }

    /// Checks that the L1 table and the refcount table of an image with this header are inside a
    /// file of `bytes` bytes.
    ///
    /// # Errors
    /// The reason, in words to follow the image's name.
    pub fn fits(&self, bytes: u64) -> Result<(), String> {
        let end = bytes.next_multiple_of(self.cluster_bytes());
        let table = self.refcount_table_pos + self.refcount_table_entries() * 8;
        let l1 = self.l1_pos + u64::from(self.l1_entries) * 8;
        let cut = |what: &str, needed: u64| {
            Err(format!(
                "it was cut off: it has {bytes} bytes, and {what} ends at byte {needed} (nowait \
                 check counts what is missing)"
            ))
        };
        match self.l1_entries > 0 && l1 > bytes {
            true => cut("its L1 table", l1),
            false if table > end => cut("its refcount table", table),
            false => Ok(()),
        }
    }

    /// Bytes of a cluster: a power of two, 512 to 2 MiB.
    #[must_use]
    pub const fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table, which fills one cluster.
    #[must_use]
    pub const fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / self.entry_bytes()
    }

    /// Refcounts in one refcount block, which fills one cluster.
    #[must_use]
    pub const fn block_entries(&self) -> u64 {
        1 << (self.cluster_bits + 3 - self.refcount_order)
    }

    /// Entries of the refcount table.
    #[must_use]
    pub const fn refcount_table_entries(&self) -> u64 {
        ((self.refcount_table_clusters as u64) << self.cluster_bits) / 8
    }

    /// Bytes of the disk that one L1 entry covers.
    #[must_use]
    pub const fn l2_reach(&self) -> u64 {
        self.l2_entries() << self.cluster_bits
    }

    /// Whether the data is in an external data file.
    #[must_use]
    pub const fn has_data_file(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DATA_FILE != 0
    }

    /// Whether the data file, read raw, is the disk.
    #[must_use]
    pub const fn is_data_file_raw(&self) -> bool {
        self.autoclear & AUTOCLEAR_DATA_FILE_RAW != 0
    }

    /// Position in the file, in bytes, of the refcount table's own position, which its number of
    /// clusters follows.
    pub(crate) const REFCOUNT_TABLE_AT: usize = 48;

    /// Position of the incompatible bits in the file, in bytes.
    pub(crate) const INCOMPATIBLE_AT: usize = 72;

    /// The incompatible bit of an image whose refcounts may be wrong.
    pub(crate) const DIRTY: u64 = INCOMPATIBLE_DIRTY;

    /// The incompatible bit of an image whose metadata was found to be corrupt.
    pub(crate) const CORRUPT: u64 = INCOMPATIBLE_CORRUPT;

    /// Position of the autoclear bits in the file, in bytes.
    pub(crate) const AUTOCLEAR_AT: u64 = 88;

    /// Whether a writer may write refcounts late (and then sets the dirty bit).
    #[must_use]
    pub const fn has_lazy_refcounts(&self) -> bool {
        self.compatible & COMPATIBLE_LAZY_REFCOUNTS != 0
    }

    /// Whether the refcounts may be wrong: a writer was interrupted.
    #[must_use]
    pub const fn is_dirty(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DIRTY != 0
    }

    /// Whether the image is marked as corrupt.
    #[must_use]
    pub const fn is_corrupt(&self) -> bool {
        self.incompatible & INCOMPATIBLE_CORRUPT != 0
    }

    /// How a compressed cluster is compressed.
    pub(crate) const fn packing(&self) -> Packing {
        let form = match self.compression {
            Compression::Zstd => Form::Zstd,
            Compression::Deflate | Compression::Unknown(_) => Form::Deflate,
        };
        Packing { bytes: self.cluster_bytes(), least: self.cluster_bytes(), form }
    }

    /// Whether L2 entries have 16 bytes.
    #[must_use]
    pub const fn has_extended_l2(&self) -> bool {
        self.incompatible & INCOMPATIBLE_EXTENDED_L2 != 0
    }

    /// Checks that the use of every cluster of an image with this header is known: otherwise the
    /// image must not even be repaired. Each reason is one line with a remedy.
    ///
    /// # Errors
    /// The reason, in words to follow the image's name.
    pub fn understood(&self) -> Result<(), String> {
        let known_bits = INCOMPATIBLE_DIRTY
            | INCOMPATIBLE_CORRUPT
            | INCOMPATIBLE_DATA_FILE
            | INCOMPATIBLE_COMPRESSION
            | INCOMPATIBLE_EXTENDED_L2;
        let refused = if self.encryption != 0 {
            "it is encrypted, which is not supported (decrypt it with qemu-img convert)"
        } else if self.incompatible & !known_bits != 0 {
            return Err(format!(
                "it needs features that are not known here (incompatible bits {:#x})",
                self.incompatible & !known_bits
            ));
        } else {
            return Ok(());
        };
        Err(refused.into())
    }

    /// Checks that an image with this header can be read, or written if `writable`. Each reason is
    /// one line with a remedy.
    ///
    /// # Errors
    /// The reason, in words to follow the image's name.
    pub fn supported(&self, writable: bool) -> Result<(), String> {
        self.understood()?;
        let refused = if self.is_corrupt() && writable {
            "it is marked corrupt (read it with --read-only, repair it with nowait check --repair)"
        } else if self.is_dirty() && writable {
            "its writer was interrupted and left it marked dirty (read it with --read-only, put it \
             right with nowait check --repair)"
        } else if let Compression::Unknown(number) = self.compression {
            return Err(format!(
                "its compression type {number} is not known here (qemu-img convert -o \
                 compression_type=zlib makes one that is)"
            ));
        } else if writable && self.snapshots > 0 {
            "it has internal snapshots and is only read here (open it read-only, or remove them \
             with qemu-img snapshot -d)"
        } else {
            return Ok(());
        };
        Err(refused.into())
    }
}

#[cfg(test)]
mod tests;
