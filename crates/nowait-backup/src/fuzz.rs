//! Doors for fuzz targets: a chain of two points in memory, whose files are a stranger's.
//!
//! Invariant: a point that `verify` calls sound is read, also after the other one was removed.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait_copy::SourceDisk;

use crate::block::{MIN_BLOCK_BYTES, compressor, sum_of};
use crate::chain::Chain;
use crate::manifest::{DataFile, Entry, Header, Manifest};
use crate::place::{FileName, NewFile, Place, Put, StoredFile};
use crate::point_disk::PointDisk;
use crate::prune::{Keep, prune};
use crate::verify::{PointHealth, verify};

/// The data file that there is.
const DATA: u64 = 5;

type Files = Arc<Mutex<BTreeMap<FileName, Vec<u8>>>>;

#[derive(Debug)]
struct Memory(Files);

fn lock(files: &Files) -> MutexGuard<'_, BTreeMap<FileName, Vec<u8>>> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Place for Memory {
    fn list(&self) -> Result<Vec<(FileName, u64)>, String> {
        Ok(lock(&self.0).iter().map(|(name, bytes)| (*name, bytes.len() as u64)).collect())
    }

    fn open(&self, name: FileName) -> Result<Box<dyn StoredFile>, String> {
        let bytes = lock(&self.0).get(&name).cloned().ok_or("it is missing")?;
        Ok(Box::new(Bytes(bytes)))
    }

    fn create(&self, name: FileName, _: u64) -> Result<Box<dyn NewFile>, String> {
        Ok(Box::new(Appended { files: self.0.clone(), name, bytes: Vec::new() }))
    }

    fn put(&self, name: FileName, bytes: &[u8], _: Put) -> Result<(), String> {
        lock(&self.0).insert(name, bytes.to_vec());
        Ok(())
    }

    fn remove(&self, name: FileName) -> Result<(), String> {
        lock(&self.0).remove(&name).map(drop).ok_or_else(|| "it is missing".into())
    }
}

struct Bytes(Vec<u8>);

impl StoredFile for Bytes {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, pos: u64, bytes: &mut [u8]) -> Result<(), String> {
        let from = usize::try_from(pos).ok().and_then(|pos| self.0.get(pos..)?.get(..bytes.len()));
        bytes.copy_from_slice(from.ok_or("it is too short")?);
        Ok(())
    }
}

#[derive(Debug)]
struct Appended {
    files: Files,
    name: FileName,
    bytes: Vec<u8>,
}

impl NewFile for Appended {
    fn append(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn complete(&mut self) -> Result<(), String> {
        lock(&self.files).insert(self.name, self.bytes.clone());
        Ok(())
    }

    fn keep(self: Box<Self>) {}
}

/// Takes `input` apart: a length of two bytes and a manifest without its checksum, the same again, and stored blocks.
/// Lists, verifies, reads and prunes the chain of that.
///
/// # Errors
/// A sound point that cannot be read.
pub fn check(input: &[u8]) -> Result<(), String> {
    let mut files = BTreeMap::new();
    let mut rest = input;
    for number in [1, 2] {
        let Some((len, after)) = rest.split_first_chunk() else { return Ok(()) };
        let len = usize::from(u16::from_le_bytes(*len)).min(after.len());
        let (body, after) = after.split_at(len);
        rest = after;
        files.insert(FileName::Point(number), [body, &sum_of(body)].concat());
    }
    files.insert(FileName::Data(DATA), rest.to_vec());
    let files = Arc::new(Mutex::new(files));
    let chain = || Chain::in_place(Arc::new(Memory(files.clone())), "chain".into());
    let open = || chain().map_err(|error| error.to_string());
    check_points(open()?, &open)?;
    let keep = Keep { last: 1, ..Keep::default() };
    let sound = is_last_sound(&open()?)?;
    if prune(open()?, keep, &AtomicBool::new(false)).is_ok() && is_last_sound(&open()?)? != sound {
        return Err(format!("a point that was sound ({sound}) is otherwise after a prune"));
    }
    check_points(open()?, &open)
}

fn health(chain: &Chain) -> Result<Vec<PointHealth>, String> {
    let health = verify(chain, None, &AtomicBool::new(false), &mut |_, _| {});
    health.map_err(|error| error.to_string())
}

fn is_last_sound(chain: &Chain) -> Result<bool, String> {
    Ok(health(chain)?.last().is_some_and(PointHealth::is_sound))
}

/// Reads all blocks of sound points.
fn check_points(chain: Chain, open: &dyn Fn() -> Result<Chain, String>) -> Result<(), String> {
    for point in health(&chain)?.iter().filter(|point| point.is_sound()) {
        // Its files may be shorter than a manifest says where no block is.
        let Ok(disk) = PointDisk::open(open()?, Some(point.number)) else { continue };
        let table = chain.table(point.number)?;
        for entry in &table.entries {
            let pos = u64::from(entry.block) * disk.block_bytes();
            let mut bytes = vec![0; disk.block_bytes().min(disk.size() - pos) as usize];
            disk.read(pos, &mut bytes)?;
        }
        let range = nowait::ByteRange::new(0, disk.size());
        let answered: u64 = disk.extents(range).iter().map(|extent| extent.len).sum();
        if answered != disk.size() {
            return Err(format!("{answered} of {} bytes have extents", disk.size()));
        }
    }
    Ok(())
}

/// A chain with a whole point and one of changes.
#[must_use]
pub fn seed() -> Vec<u8> {
    let block = vec![7; MIN_BLOCK_BYTES as usize];
    let stored =
        compressor(MIN_BLOCK_BYTES).and_then(|mut it| it.compress(&block).map(<[u8]>::to_vec));
    let stored = stored.unwrap_or_default();
    let len = stored.len() as u32;
    let mut input = Vec::new();
    for number in [1, 2] {
        let header = Header {
            chain: 7,
            number,
            parent: (number == 2).then_some(1),
            size: 4 * MIN_BLOCK_BYTES + 512,
            block_bytes: MIN_BLOCK_BYTES,
            seconds: 0,
            bitmap: None,
            recipients: Vec::new(),
            files: vec![DataFile { id: DATA, bytes: stored.len() as u64 }],
        };
        let entry = |block| Entry {
            sum: sum_of(&vec![7; MIN_BLOCK_BYTES as usize]),
            position: 0,
            block,
            file: 0,
            len,
        };
        let entries = match number {
            1 => vec![entry(0), entry(4)],
            _ => vec![Entry::zero(0), entry(2)],
        };
        let manifest = Manifest { header, entries }.encode().unwrap_or_default();
        let body = manifest.get(..manifest.len().saturating_sub(32)).unwrap_or_default();
        input.extend_from_slice(&(body.len() as u16).to_le_bytes());
        input.extend_from_slice(body);
    }
    input.extend_from_slice(&stored);
    input
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_is_a_sound_chain() {
        let input = seed();
        assert_eq!(check(&input), Ok(()));
        assert!(input.len() < 2048, "{}", input.len());
    }
}
