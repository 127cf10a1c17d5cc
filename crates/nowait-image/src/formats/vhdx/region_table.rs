//! The headers of a VHDX image, and its table of regions.
//!
//! Invariant: each part that is used has the right checksum, and each region is inside the file and behind the
//! headers.

use crate::image_file::ImageFile;

use crc_fast::{CrcAlgorithm, checksum};

/// The first bytes of an image.
pub(super) const MAGIC: &[u8] = b"vhdxfile";
pub(super) const MIB: u64 = 1 << 20;
/// Positions of the two headers, and of the two region tables, and their bytes.
const HEADERS_AT: [u64; 2] = [64 << 10, 128 << 10];
const HEADER_BYTES: usize = 4096;
const TABLES_AT: [u64; 2] = [192 << 10, 256 << 10];
const TABLE_BYTES: usize = 64 << 10;
const CHECKSUM_AT: usize = 4;
const VERSION: u16 = 1;
const ENTRY_BYTES: usize = 32;
const ENTRIES_AT: usize = 16;
/// The most regions of a VHDX image.
/// Beyond it: the image is refused.
const MAX_ENTRIES: u32 = 2047;
/// The largest VHDX file in bytes: positions are counted in MiB with 44 bits, and files are signed.
/// Beyond it: the image is refused.
const MAX_BYTES: u64 = i64::MAX as u64;

const BLOCK_TABLE: Guid = Guid::new(0x2dc2_7766, 0xf623, 0x4200, 0x9d64_115e_9bfd_4a08);
const METADATA: Guid = Guid::new(0x8b7c_a206, 0x4790, 0x4b9a, 0xb8fe_575f_050f_886e);

/// A GUID, in the order of its bytes in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Guid([u8; 16]);

impl Guid {
    pub(super) const fn new(a: u32, b: u16, c: u16, d: u64) -> Self {
        let ([a0, a1, a2, a3], [b0, b1], [c0, c1]) =
            (a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes());
        let [d0, d1, d2, d3, d4, d5, d6, d7] = d.to_be_bytes();
        Self([a0, a1, a2, a3, b0, b1, c0, c1, d0, d1, d2, d3, d4, d5, d6, d7])
    }

    pub(super) fn at(bytes: &[u8], at: usize) -> Self {
        Self(le(bytes, at))
    }
}

pub(super) fn le<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|it| it.try_into().ok()).unwrap_or([0; N])
}

/// A region of the file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    pub(super) pos: u64,
    pub(super) len: u64,
}

/// Where the parts of an image are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Regions {
    pub(super) block_table: Region,
    pub(super) metadata: Region,
}

/// Whether `bytes` begins with `signature` and has the checksum that it says.
fn is_valid(bytes: &[u8], signature: &[u8; 4]) -> bool {
    let mut plain = bytes.to_vec();
    if let Some(own) = plain.get_mut(CHECKSUM_AT..CHECKSUM_AT + 4) {
        own.fill(0);
    }
    let expected = u32::from_le_bytes(le(bytes, CHECKSUM_AT));
    bytes.starts_with(signature)
        && checksum(CrcAlgorithm::Crc32Iscsi, &plain) == u64::from(expected)
}

impl Regions {
    /// Reads and checks the headers and the table of `file`.
    ///
    /// # Errors
    /// The reason, in words to follow the image's name; or what a system call says.
    pub(super) fn read(file: &ImageFile) -> std::io::Result<Result<Self, String>> {
        let end = file.size()?;
        let mut newest: Option<Vec<u8>> = None;
        for at in HEADERS_AT {
            let mut header = vec![0; HEADER_BYTES];
            file.read_at(at, &mut header)?;
            let sequence = |header: &[u8]| u64::from_le_bytes(le(header, 8));
            let is_newer = newest.as_ref().is_none_or(|other| sequence(&header) > sequence(other));
            if is_valid(&header, b"head") && is_newer {
                newest = Some(header);
            }
        }
        let Some(header) = newest else {
            return Ok(Err("its headers are damaged: neither has the right checksum".into()));
        };
        if let Err(why) = check_header(&header) {
            return Ok(Err(why));
        }
        for at in TABLES_AT {
            let mut table = vec![0; TABLE_BYTES];
            file.read_at(at, &mut table)?;
            if is_valid(&table, b"regi") {
                return Ok(Self::parse(&table, end));
            }
        }
        Ok(Err("its region tables are damaged: neither has the right checksum".into()))
    }

    fn parse(table: &[u8], end: u64) -> Result<Self, String> {
        let count = u32::from_le_bytes(le(table, 8));
        if count > MAX_ENTRIES {
            return Err("its region table is damaged: too many regions".into());
        }
        let (mut block_table, mut metadata) = (None, None);
        for index in 0..count as usize {
            let at = ENTRIES_AT + index * ENTRY_BYTES;
            let pos = u64::from_le_bytes(le(table, at + 16));
            let len = u64::from(u32::from_le_bytes(le(table, at + 24)));
            let is_required = u32::from_le_bytes(le(table, at + 28)) & 1 != 0;
            let slot = match Guid::at(table, at) {
                BLOCK_TABLE => &mut block_table,
                METADATA => &mut metadata,
                _ if is_required => return Err("it has a region that is not known".into()),
                _ => continue,
            };
            let is_in_place = pos >= MIB && pos.is_multiple_of(MIB) && len > 0 && pos < MAX_BYTES;
            if !is_in_place || slot.is_some() {
                return Err("its region table is damaged: the place of a region".into());
            }
            if pos + len > end {
                let needed = pos + len;
                return Err(format!(
                    "it was cut off: it has {end} bytes, and a region ends at byte {needed}"
                ));
            }
            *slot = Some(Region { pos, len });
        }
        match (block_table, metadata) {
            (Some(block_table), Some(metadata)) => Ok(Self { block_table, metadata }),
            _ => Err("its region table is damaged: a region is missing".into()),
        }
    }
}

fn check_header(header: &[u8]) -> Result<(), String> {
    let version = u16::from_le_bytes(le(header, 66));
    if version != VERSION {
        return Err(format!("vhdx version {version} is not known"));
    }
    match Guid::at(header, 48) == Guid([0; 16]) {
        true => Ok(()),
        false => {
            Err("its log has changes that are not in its tables yet, as after a crash (have them \
                      played back: qemu-img check -r all, or attach it in Windows once)"
                .into())
        }
    }
}
