//! The manifest of a point: which disk, which parent, and where each block is stored.
//!
//! Invariant: a manifest that is decoded has its own checksum, and its numbers are in range: blocks ascend and are on
//! the disk, stored bytes are in a file of the list, a parent has a lower number. All of it is a stranger's bytes.

use serde::{Deserialize, Serialize};

use crate::block::{MAX_BLOCK_BYTES, MAX_BLOCKS, MIN_BLOCK_BYTES, Sum, sum_of};

/// The message about a manifest that is encrypted.
pub(crate) const ENCRYPTED: &str = "it is encrypted (give the --identity of a recipient)";
const MAGIC: &[u8; 8] = b"nwbackup";
/// The version of the format.
const VERSION: u32 = 1;
/// Magic, version, and length of the header.
const PREFIX_BYTES: usize = 16;
const SUM_BYTES: usize = 32;
/// Block, file, stored length, position, checksum.
const ENTRY_BYTES: usize = 4 + 4 + 4 + 8 + SUM_BYTES;

/// The most bytes of the header, JSON.
/// Beyond it: the point is damaged.
const MAX_HEADER_BYTES: usize = 1 << 20;
/// The most data files that have the blocks of a point and of all that it stands on, and the most points of a chain.
/// Beyond it: a backup is refused, until `prune` has made the chain shorter; a manifest with more is damaged.
pub(crate) const MAX_FILES: usize = 10_000;
/// The most bytes of a manifest.
/// Beyond it: the point is damaged, and its manifest is not read.
pub(crate) const MAX_MANIFEST_BYTES: u64 =
    (PREFIX_BYTES + MAX_HEADER_BYTES + SUM_BYTES) as u64 + MAX_BLOCKS * ENTRY_BYTES as u64;

/// A data file of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DataFile {
    /// Its name is made of this number.
    pub(crate) id: u64,
    /// Its length in bytes.
    pub(crate) bytes: u64,
}

/// The stored place of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The SHA-256 of the content; zeros for a block of zeros.
    pub(crate) sum: Sum,
    /// The position in its file in bytes.
    pub(crate) position: u64,
    /// The number of the block on the disk.
    pub(crate) block: u32,
    /// The index of its file in the list.
    pub(crate) file: u32,
    /// Stored bytes: fewer than a block where it is compressed; 0 for a block that has become zero.
    pub(crate) len: u32,
}

impl Entry {
    /// A block that has become zero.
    pub(crate) const fn zero(block: u32) -> Self {
        Self { sum: [0; 32], position: 0, block, file: 0, len: 0 }
    }

    pub(crate) const fn is_zero(&self) -> bool {
        self.len == 0
    }
}

/// The facts of a manifest apart from its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    /// A random number that all points of a chain have.
    pub(crate) chain: u64,
    /// The number of the point.
    pub(crate) number: u32,
    /// The point that has all other blocks; without one these are zero.
    pub(crate) parent: Option<u32>,
    /// Bytes of the disk.
    pub(crate) size: u64,
    /// Bytes of a block.
    pub(crate) block_bytes: u64,
    /// The begin of the backup, in seconds since 1970.
    pub(crate) seconds: u64,
    /// The dirty bitmap that told what had changed.
    pub(crate) bitmap: Option<String>,
    /// The recipients of the chain, if it is encrypted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) recipients: Vec<String>,
    pub(crate) files: Vec<DataFile>,
}

/// A manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) header: Header,
    /// In the order of blocks, each at most once.
    pub(crate) entries: Vec<Entry>,
}

impl Header {
    /// Blocks of the disk.
    pub(crate) const fn blocks(&self) -> u64 {
        self.size.div_ceil(self.block_bytes)
    }

    /// Whether the point `below` can be its parent: of the same number and of the same disk.
    pub(crate) fn stands_on(&self, below: Option<&Self>) -> bool {
        let disk = |header: &Self| (Some(header.number), header.size, header.block_bytes);
        below.map(disk) == Some((self.parent, self.size, self.block_bytes))
    }

    fn check(&self) -> Result<(), &'static str> {
        let is_size = self.block_bytes.is_power_of_two()
            && (MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&self.block_bytes);
        if !is_size {
            return Err("its blocks have a size that is not possible");
        }
        if self.blocks() > MAX_BLOCKS {
            return Err("its disk is too large");
        }
        if self.parent.is_some_and(|parent| parent >= self.number) {
            return Err("its parent is younger than the point");
        }
        if self.files.len() > MAX_FILES {
            return Err("it has too many files");
        }
        Ok(())
    }

    fn check_entry(&self, entry: &Entry) -> Result<(), &'static str> {
        if u64::from(entry.block) >= self.blocks() {
            return Err("a block is behind the end of the disk");
        }
        if entry.is_zero() {
            let is_plain = *entry == Entry::zero(entry.block) && self.parent.is_some();
            return is_plain.then_some(()).ok_or("a block has a place that is not possible");
        }
        let file =
            self.files.get(entry.file as usize).ok_or("a block has a file that is missing")?;
        let end = entry.position.checked_add(entry.len.into());
        if u64::from(entry.len) > self.block_bytes || end.is_none_or(|end| end > file.bytes) {
            return Err("a block has a place that is not possible");
        }
        Ok(())
    }
}

impl Manifest {
    /// The bytes of the file.
    ///
    /// # Errors
    /// The header is too large.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, String> {
        let header = serde_json::to_vec(&self.header).map_err(|error| error.to_string())?;
        if header.len() > MAX_HEADER_BYTES {
            return Err("the chain has too many files (prune it)".into());
        }
        let rest = header.len() + self.entries.len() * ENTRY_BYTES + SUM_BYTES;
        let mut bytes = Vec::with_capacity(PREFIX_BYTES + rest);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&header);
        for Entry { sum, position, block, file, len } in &self.entries {
            for number in [block, file, len] {
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            bytes.extend_from_slice(&position.to_le_bytes());
            bytes.extend_from_slice(sum);
        }
        bytes.extend_from_slice(&sum_of(&bytes));
        Ok(bytes)
    }

    /// The manifest that is in the file `bytes`.
    ///
    /// # Errors
    /// Its first fault.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let (body, sum) = bytes.split_last_chunk::<SUM_BYTES>().ok_or("it is too short")?;
        let (prefix, rest) = body.split_first_chunk::<PREFIX_BYTES>().ok_or("it is too short")?;
        if bytes.starts_with(b"age-encryption.org/") {
            return Err(ENCRYPTED.into());
        }
        if !prefix.starts_with(MAGIC) {
            return Err("it does not begin as a manifest does".into());
        }
        let [version, header_len] = [8, 12].map(|at| number(prefix, at));
        if version != VERSION {
            return Err(format!("it has version {version}, this program knows {VERSION}"));
        }
        if sum_of(body) != *sum {
            return Err("its checksum is wrong".into());
        }
        let header_len = header_len as usize;
        let parts = rest.split_at_checked(header_len).filter(|_| header_len <= MAX_HEADER_BYTES);
        let (header, table) = parts.ok_or("its header is too long")?;
        let header: Header =
            serde_json::from_slice(header).map_err(|error| format!("its header: {error}"))?;
        header.check()?;
        let (table, cut) = table.as_chunks::<ENTRY_BYTES>();
        if !cut.is_empty() {
            return Err("its table is cut off".into());
        }
        let mut entries = Vec::with_capacity(table.len());
        for bytes in table {
            let entry = decode_entry(bytes);
            header.check_entry(&entry)?;
            if entries.last().is_some_and(|last: &Entry| last.block >= entry.block) {
                return Err("its blocks are not in order".into());
            }
            entries.push(entry);
        }
        Ok(Self { header, entries })
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let number = bytes.get(at..).and_then(|rest| rest.first_chunk()).copied();
    u32::from_le_bytes(number.unwrap_or_default())
}

fn decode_entry(bytes: &[u8; ENTRY_BYTES]) -> Entry {
    let [block, file, len, low, high] = [0, 4, 8, 12, 16].map(|at| number(bytes, at));
    let sum = bytes.last_chunk().copied().unwrap_or_default();
    let position = u64::from(high) << 32 | u64::from(low);
    Entry { sum, position, block, file, len }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A manifest with a block in a file, and one that has become zero.
    pub(crate) fn example() -> Manifest {
        let header = Header {
            chain: 7,
            number: 2,
            parent: Some(1),
            size: 3 * MIN_BLOCK_BYTES - 1,
            block_bytes: MIN_BLOCK_BYTES,
            seconds: 1_000_000_000,
            bitmap: Some("monday".into()),
            recipients: Vec::new(),
            files: vec![DataFile { id: 5, bytes: 1000 }],
        };
        let data = Entry { sum: [3; 32], position: 900, block: 2, file: 0, len: 100 };
        Manifest { header, entries: vec![Entry::zero(0), data] }
    }

    fn refusal(change: impl FnOnce(&mut Manifest)) -> String {
        let mut manifest = example();
        change(&mut manifest);
        Manifest::decode(&manifest.encode().unwrap()).unwrap_err()
    }

    #[test]
    fn what_is_encoded_is_decoded_again() {
        let manifest = example();
        let bytes = manifest.encode().unwrap();
        assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
        for len in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x10;
            assert!(Manifest::decode(&wrong).is_err(), "byte {at}");
        }
    }

    #[test]
    fn numbers_are_taken_up_to_their_bounds_and_no_further() {
        assert!(refusal(|it| it.entries[1].block = 3).contains("behind the end"));
        assert!(refusal(|it| it.entries[1].block = 0).contains("order"));
        assert!(refusal(|it| it.entries[1].file = 1).contains("missing"));
        for change in [
            |it: &mut Manifest| it.entries[1].position = 901,
            |it: &mut Manifest| it.entries[1].position = u64::MAX,
            |it: &mut Manifest| it.header.files[0].bytes = 999,
            |it: &mut Manifest| it.entries[0].position = 1,
            |it: &mut Manifest| it.header.parent = None,
        ] {
            assert!(refusal(change).contains("not possible"));
        }
        let longer = |it: &mut Manifest| {
            it.header.files[0].bytes = u64::MAX;
            it.entries[1].len = MIN_BLOCK_BYTES as u32 + 1;
        };
        assert!(refusal(longer).contains("not possible"));
        for bytes in [0, 512, MIN_BLOCK_BYTES / 2, MIN_BLOCK_BYTES + 1, MAX_BLOCK_BYTES * 2] {
            assert!(refusal(|it| it.header.block_bytes = bytes).contains("size"), "{bytes}");
        }
        let size = MAX_BLOCKS * MIN_BLOCK_BYTES;
        assert!(refusal(|it| it.header.size = size + 1).contains("too large"));
        assert!(refusal(|it| it.header.size = u64::MAX).contains("too large"));
        for parent in [2, 3, u32::MAX] {
            assert!(refusal(|it| it.header.parent = Some(parent)).contains("younger"));
        }
        let files = |count| vec![DataFile { id: 0, bytes: 1000 }; count];
        assert!(refusal(|it| it.header.files = files(MAX_FILES + 1)).contains("too many"));
        let mut largest = example();
        largest.header.files = files(MAX_FILES);
        largest.header.size = size;
        largest.header.parent = Some(1);
        assert_eq!(Manifest::decode(&largest.encode().unwrap()), Ok(largest));
    }
}
