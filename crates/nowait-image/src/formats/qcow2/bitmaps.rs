//! The persistent dirty bitmaps of a qcow2 image, as its bitmap directory lists them.
//!
//! Invariant: only the header and the name of each entry of a directory are read, however long the
//! entries claim to be; a directory with one invalid entry is invalid as a whole, as in QEMU.
//! Source: QEMU docs/interop/qcow2.txt, "Bitmaps".

use std::io;

use crate::error::ImageError;
use crate::formats::qcow2::header::{BitmapDirectory, Header, MAX_POS, be32, be64};
use crate::image_file::ImageFile;

pub(crate) const ENTRY_BYTES: usize = 24;
pub(crate) const FLAG_IN_USE: u32 = 1 << 0;
pub(crate) const FLAG_AUTO: u32 = 1 << 1;
/// Tracks which parts of the disk were written to; the only known type.
pub(crate) const TYPE_DIRTY_TRACKING: u8 = 1;
/// Limits as in QEMU (block/qcow2-bitmap.c, `BME_MIN_GRANULARITY_BITS`, `BME_MAX_GRANULARITY_BITS`).
const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// The most bytes of the name of a bitmap in a qcow2 image, as in QEMU (`BME_MAX_NAME_SIZE`).
/// Beyond it: the bitmaps of the image count as damaged and are not used.
const MAX_NAME_BYTES: u16 = 1023;
/// The most bytes of the bits of a bitmap in a qcow2 image, as in QEMU (`BME_MAX_PHYS_SIZE`).
/// Beyond it: `nowait bitmap add` refuses a new one; the bitmaps of an image that has one count as damaged.
pub(crate) const MAX_BITMAP_BYTES: u64 = 0x2000_0000;

/// One bitmap of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// The name; bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Bytes of the disk that one bit stands for: a power of two, 512 to 2 GiB.
    pub granularity: u64,
    /// Whether the last program that wrote to the image did not save it, so that its bits are
    /// unusable.
    pub in_use: bool,
    /// Whether its bits are not too few although it is in use: this program keeps them on storage while it writes to the
    /// image, and no other program has written to it since.
    pub kept: bool,
    /// Whether it records writes as soon as the image is open.
    pub auto: bool,
}

impl Bitmap {
    /// Whether its bits say what was changed.
    #[must_use]
    pub const fn is_usable(&self) -> bool {
        !self.in_use || self.kept
    }

    /// The bitmaps of the image in `file`, in the order of its directory; none where the header has
    /// no directory that can be relied on.
    ///
    /// # Errors
    /// `EINVAL`: the directory is damaged. Those of pread(2) and lseek(2).
    pub fn all(file: &ImageFile, header: &Header) -> Result<Vec<Self>, ImageError> {
        let all = Self::with_entries(file, header)?;
        Ok(all.into_iter().map(|(_, bitmap)| bitmap).collect())
    }

    /// The bitmaps with their entries.
    ///
    /// # Errors
    /// Like [`Bitmap::all`].
    pub(crate) fn with_entries(
        file: &ImageFile,
        header: &Header,
    ) -> Result<Vec<(Entry, Self)>, ImageError> {
        let Some(directory) = header.bitmaps else { return Ok(Vec::new()) };
        let listed = list(file, header, directory);
        let listed = listed.map_err(|e| ImageError::os(file.path(), "read its bitmaps", &e))?;
        listed.ok_or_else(|| ImageError::refused(file.path(), "the list of its bitmaps is damaged"))
    }
}

/// The bitmaps in `directory`; `None` if it is damaged.
fn list(
    file: &ImageFile,
    header: &Header,
    directory: BitmapDirectory,
) -> io::Result<Option<Vec<(Entry, Bitmap)>>> {
    let end = directory.pos.saturating_add(directory.len);
    if end > file.size()? {
        return Ok(None);
    }
    let mut bitmaps = Vec::new();
    let mut at = directory.pos;
    for number in 0..directory.bitmaps {
        let entry = Entry::read(file, at)?;
        if at.saturating_add(entry.bytes()) > end || !entry.is_valid(header) {
            return Ok(None);
        }
        let kept = number < u32::BITS && header.kept_bitmaps() & 1 << number != 0;
        bitmaps.push((entry, entry.bitmap(file, kept)?));
        at = at.saturating_add(entry.bytes());
    }
    Ok((at == end).then_some(bitmaps))
}

/// Where an entry has its flags.
pub(crate) const FLAGS_AT: u64 = 12;

/// The header of an entry of a directory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// Where it is in the file.
    pub(crate) at: u64,
    /// Position of the bitmap's table in bytes.
    pub(crate) table_pos: u64,
    /// Entries of that table, of 8 bytes each.
    pub(crate) table_entries: u32,
    flags: u32,
    kind: u8,
    pub(crate) granularity_bits: u8,
    name_len: u16,
    pub(crate) extra_len: u32,
}

impl Entry {
    /// The header of the entry at `at`.
    pub(crate) fn read(file: &ImageFile, at: u64) -> io::Result<Self> {
        let mut head = [0; ENTRY_BYTES];
        file.read_at(at, &mut head)?;
        Ok(Self::parse(&head, at))
    }

    /// The entry that begins with `head` and is at `at`.
    pub(crate) fn parse(head: &[u8; ENTRY_BYTES], at: u64) -> Self {
        let [kind, granularity_bits, name @ ..] = be32(head, 16).to_be_bytes();
        Self {
            at,
            table_pos: be64(head, 0),
            table_entries: be32(head, 8),
            flags: be32(head, 12),
            kind,
            granularity_bits,
            name_len: u16::from_be_bytes(name),
            extra_len: be32(head, 20),
        }
    }

    /// Bytes of the whole entry, a multiple of 8.
    pub(crate) fn bytes(&self) -> u64 {
        let len = ENTRY_BYTES as u64 + u64::from(self.extra_len) + u64::from(self.name_len);
        len.next_multiple_of(8)
    }

    const fn is_in_use(&self) -> bool {
        self.flags & FLAG_IN_USE != 0
    }

    /// Whether QEMU would accept the entry.
    fn is_valid(&self, header: &Header) -> bool {
        let cluster = header.cluster_bytes();
        let bytes = u64::from(self.table_entries).saturating_mul(cluster);
        // A bitmap that is in use may be too short after a resize.
        let covers = || {
            let reach = u128::from(bytes * 8) << self.granularity_bits;
            self.is_in_use() || u128::from(header.size) <= reach
        };
        self.table_pos != 0
            && self.table_pos < MAX_POS
            && self.table_pos.is_multiple_of(cluster)
            && (1..=MAX_BITMAP_BYTES).contains(&bytes)
            && GRANULARITY_BITS.contains(&self.granularity_bits)
            && self.flags & !(FLAG_IN_USE | FLAG_AUTO) == 0
            && self.name_len <= MAX_NAME_BYTES
            && self.kind == TYPE_DIRTY_TRACKING
            && covers()
    }

    /// Clusters of bits that a disk of `size` bytes needs.
    pub(crate) fn clusters_for(&self, size: u64, cluster_bytes: u64) -> u64 {
        size.div_ceil(1 << self.granularity_bits).div_ceil(8).div_ceil(cluster_bytes).max(1)
    }

    /// The bitmap of this valid entry.
    fn bitmap(&self, file: &ImageFile, kept: bool) -> io::Result<Bitmap> {
        let mut name = vec![0; usize::from(self.name_len)];
        file.read_at(self.at + ENTRY_BYTES as u64 + u64::from(self.extra_len), &mut name)?;
        Ok(Bitmap {
            name: String::from_utf8_lossy(&name).into_owned(),
            granularity: 1 << self.granularity_bits,
            in_use: self.is_in_use(),
            kept,
            auto: self.flags & FLAG_AUTO != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const DIRECTORY: u64 = 65536;

    /// An entry for a disk of 1 MiB, with `changes` written over it.
    fn entry(name: &[u8], extra: usize, changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = [(1u64 << 20).to_be_bytes().to_vec(), 1u32.to_be_bytes().to_vec()].concat();
        bytes.extend(FLAG_AUTO.to_be_bytes());
        bytes.extend([TYPE_DIRTY_TRACKING, 16]);
        bytes.extend((name.len() as u16).to_be_bytes());
        bytes.extend((extra as u32).to_be_bytes());
        bytes.extend(vec![b'x'; extra]);
        bytes.extend(name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        for (at, change) in changes {
            bytes[*at..at + change.len()].copy_from_slice(change);
        }
        bytes
    }

    fn listed(entries: &[Vec<u8>], bitmaps: u32, len: u64) -> Result<Vec<Bitmap>, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let file = File::create_new(&path).unwrap();
        let bytes = entries.concat();
        file.set_len(DIRECTORY + bytes.len() as u64).unwrap();
        file.write_all_at(&bytes, DIRECTORY).unwrap();
        let file = ImageFile::open(&path, false).unwrap();
        let found = BitmapDirectory { bitmaps, pos: DIRECTORY, len };
        let header = Header { bitmaps: Some(found), ..Header::empty(1 << 20, 16) };
        Bitmap::all(&file, &header).map_err(|error| error.to_string())
    }

    #[test]
    fn each_entry_is_listed_with_its_name_behind_its_extra_data() {
        let entries = [
            entry(b"one", 0, &[]),
            entry(b"two", 5, &[(12, &[0, 0, 0, 1]), (17, &[9])]),
            entry(b"\xff", 0, &[(12, &[0; 4]), (17, &[31])]),
        ];
        let bitmap = |name: &str, bits: u32, in_use, auto| {
            let name = name.to_owned();
            Bitmap { name, granularity: 1 << bits, in_use, kept: false, auto }
        };
        let expected = [
            bitmap("one", 16, false, true),
            bitmap("two", 9, true, false),
            bitmap("\u{fffd}", 31, false, false),
        ];
        let len = entries.concat().len() as u64;
        assert_eq!(listed(&entries, 3, len).unwrap(), expected);
    }

    #[test]
    fn an_image_without_a_directory_has_no_bitmaps() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let file = ImageFile::open(file.path(), false).unwrap();
        assert_eq!(Bitmap::all(&file, &Header::empty(1 << 20, 16)).unwrap(), []);
    }

    #[test]
    fn a_directory_with_anything_wrong_is_damaged_as_a_whole() {
        let good = entry(b"good", 0, &[]);
        let len = good.len() as u64;
        assert!(listed(std::slice::from_ref(&good), 1, len).is_ok());
        let changes: [(&str, (usize, &[u8])); 12] = [
            ("no table", (0, &[0; 8])),
            ("a table inside a cluster", (6, &[2])),
            ("a table that no file reaches", (0, &[1])),
            ("a table without entries", (8, &[0; 4])),
            ("a table without end", (8, &[0xff; 4])),
            ("a flag that is not known", (15, &[4])),
            ("a type that is not known", (16, &[2])),
            ("bits for too little", (17, &[8])),
            ("bits for too much", (17, &[255])),
            ("a name without end", (18, &[0xff; 2])),
            ("a name that is too long", (18, &[4, 0])),
            ("extra data without end", (20, &[0xff; 4])),
        ];
        for (what, change) in changes {
            let entries = [good.clone(), entry(b"bad!", 0, &[change])];
            let error = listed(&entries, 2, 2 * len).unwrap_err();
            assert!(error.ends_with("the list of its bitmaps is damaged"), "{what}: {error}");
        }
        for (what, bitmaps, len) in [
            ("more bytes than entries", 1, len + 8),
            ("more entries than bytes", 2, len),
            ("a directory behind the end of the file", 1, 64 << 20),
            ("no bytes", 1, 0),
        ] {
            assert!(listed(std::slice::from_ref(&good), bitmaps, len).is_err(), "{what}");
        }
    }

    #[test]
    fn a_bitmap_that_does_not_cover_the_disk_is_accepted_only_if_it_is_in_use() {
        // One cluster of 64 KiB has 2^19 bits of 512 bytes: 256 MiB.
        let header = |size| Header::empty(size, 16);
        let valid = |flags, size| {
            let (table_pos, kind, granularity_bits) = (65536, TYPE_DIRTY_TRACKING, 9);
            let (name_len, extra_len) = (1, 0);
            let table_entries = 1;
            let entry = Entry {
                at: 0,
                table_pos,
                table_entries,
                flags,
                kind,
                granularity_bits,
                name_len,
                extra_len,
            };
            entry.is_valid(&header(size))
        };
        assert!(valid(0, 256 << 20));
        assert!(!valid(FLAG_AUTO, (256 << 20) + 512));
        assert!(valid(FLAG_IN_USE, (256 << 20) + 512));
    }
}
