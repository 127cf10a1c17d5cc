//! The disk of a point as a storage, to be served: it is there immediately, and read where it is asked for.
//!
//! Invariant: a byte that is read has the checksum that was made when it was backed up; a read of a damaged block is an
//! error, which is logged once.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use nowait::{
    Alignment, AsyncTransfers, ByteRange, Error, ExtentStatus, Flags, Operation, PendingTransfer,
    Storage, StorageProperties,
};
use nowait_copy::SourceDisk;
use rustix::io::Errno;

use crate::point_disk::PointDisk;

/// Bytes of the blocks that are kept as they were read last, at least one block.
const KEPT_BYTES: u64 = 16 << 20;

/// Threads that read blocks for an engine.
const THREADS: usize = 4;

/// The disk of a point, which is only read.
pub struct PointStorage {
    blocks: Arc<Blocks>,
    /// Requests of engines; the threads exit when it is dropped.
    jobs: Sender<PendingTransfer>,
}

/// The blocks of the disk.
struct Blocks {
    disk: Arc<PointDisk>,
    /// Blocks by their numbers, the one that was read last at the end.
    kept: Mutex<VecDeque<(u64, Arc<Vec<u8>>)>>,
    has_told: AtomicBool,
}

impl PointStorage {
    /// The storage of `disk`, with threads that read it.
    ///
    /// # Errors
    /// `EAGAIN`: there are too many threads.
    pub fn new(disk: Arc<PointDisk>) -> Result<Self, Error> {
        let kept = Mutex::default();
        let blocks = Arc::new(Blocks { disk, kept, has_told: AtomicBool::new(false) });
        let (jobs, inbox) = channel();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..THREADS {
            let (blocks, inbox) = (blocks.clone(), inbox.clone());
            let thread = std::thread::Builder::new().name("nowait-point".into());
            let started = thread.spawn(move || blocks.serve(&inbox));
            started.map_err(|error| Error::from_io(&error, Operation::SetUp))?;
        }
        Ok(Self { blocks, jobs })
    }
}

/// Hands transfers to the threads.
struct Transfers(Sender<PendingTransfer>);

impl AsyncTransfers for Transfers {
    fn begin(&self, transfers: &mut Vec<PendingTransfer>) {
        for transfer in transfers.drain(..) {
            // A transfer that is not taken ends with EIO.
            let _ = self.0.send(transfer);
        }
    }
}

impl Blocks {
    /// Makes the transfers that come, until none can come any more.
    fn serve(&self, inbox: &Mutex<Receiver<PendingTransfer>>) {
        loop {
            let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(transfer) = next else { return };
            let range = transfer.range();
            if transfer.is_write() {
                transfer.fail(Errno::ROFS.raw_os_error());
                continue;
            }
            let mut bytes = vec![0; range.len as usize];
            match self.read(&mut [IoSliceMut::new(&mut bytes)], range.pos) {
                Ok(read) if read == bytes.len() => transfer.complete(&bytes),
                Ok(_) | Err(_) => transfer.fail(Errno::IO.raw_os_error()),
            }
        }
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let (bytes, mut done) = (self.disk.block_bytes(), 0);
        for buf in bufs {
            let mut rest = &mut buf[..];
            while !rest.is_empty() {
                let at = pos + done as u64;
                if at >= self.disk.size() {
                    return Ok(done);
                }
                let block = self.block(at / bytes)?;
                let part = block.get((at % bytes) as usize..).unwrap_or_default();
                let len = part.len().min(rest.len());
                let (now, later) = rest.split_at_mut(len);
                now.copy_from_slice(part.get(..len).unwrap_or_default());
                rest = later;
                done += len;
            }
        }
        Ok(done)
    }

    /// The bytes of block `number`, which begins on the disk.
    fn block(&self, number: u64) -> Result<Arc<Vec<u8>>, Error> {
        let kept = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found =
            kept().iter().find(|(other, _)| *other == number).map(|(_, block)| block.clone());
        if let Some(block) = found {
            return Ok(block);
        }
        let bytes = self.disk.block_bytes();
        let pos = number * bytes;
        let len = bytes.min(self.disk.size().saturating_sub(pos));
        let mut block = vec![0; len as usize];
        self.disk.read(pos, &mut block).map_err(|why| {
            if !self.has_told.swap(true, Ordering::Relaxed) {
                let name = self.disk.name();
                tracing::error!(
                    "{name}: {why} (later errors are not told; nowait backup verify tells all)"
                );
            }
            failed(Errno::IO, Operation::Read).at(ByteRange::new(pos, len))
        })?;
        let block = Arc::new(block);
        let mut kept = kept();
        while kept.len() as u64 >= (KEPT_BYTES / bytes).max(1) {
            kept.pop_front();
        }
        kept.push_back((number, block.clone()));
        Ok(block)
    }
}

fn failed(errno: Errno, operation: Operation) -> Error {
    Error::new(errno.raw_os_error(), operation)
}

impl Storage for PointStorage {
    fn properties(&self) -> StorageProperties {
        StorageProperties {
            read_only: true,
            // Its bytes may be a guest's, and its size is not ours to change.
            device: true,
            shares_syncs: false,
            ..StorageProperties::new(Alignment::NONE)
        }
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(self.blocks.disk.size())
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        self.blocks.read(bufs, pos)
    }

    fn write(&self, _: &[IoSlice<'_>], _: u64, _: Flags) -> Result<usize, Error> {
        Err(failed(Errno::ROFS, Operation::Write))
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(())
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        Err(failed(Errno::ROFS, Operation::Discard).at(range))
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        Err(failed(Errno::ROFS, Operation::Zero).at(range))
    }

    fn set_len(&self, _: u64) -> Result<(), Error> {
        Err(failed(Errno::ROFS, Operation::Write))
    }

    fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        let mut at = range.pos;
        while at < range.end() && extents.len() < limit {
            let found = self.blocks.disk.extents(ByteRange::new(at, range.end() - at));
            let room = limit - extents.len();
            at += found.iter().map(|extent| extent.len).sum::<u64>().max(1);
            extents.extend(found.into_iter().take(room));
        }
        Ok(())
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn transfers(&self) -> Option<Arc<dyn AsyncTransfers>> {
        Some(Arc::new(Transfers(self.jobs.clone())))
    }
}

#[cfg(test)]
mod tests {
    use nowait_testkit::Random;

    use super::*;
    use crate::chain::Chain;
    use crate::place::Access;
    use crate::tests::{BLOCK, DISK, back_up, names};

    #[test]
    fn a_point_is_read_anywhere_as_a_storage_and_damage_is_an_error() {
        let mut random = Random::from_seed(13);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let mut disk = vec![0; DISK];
        // Holes, and a last block that is cut off.
        for block in [1, 2, 7, 20] {
            let end = ((block + 1) * BLOCK).min(DISK);
            disk[block * BLOCK..end].copy_from_slice(&random.bytes(end - block * BLOCK));
        }
        back_up(Chain::open(path, Access::Add, None).unwrap(), &disk, None).unwrap();
        let open = || {
            let chain = Chain::open(path, Access::Read, None).unwrap();
            PointStorage::new(PointDisk::open(chain, None).unwrap()).unwrap()
        };
        let storage = open();
        let read = |storage: &PointStorage, pos: u64, len: usize| {
            let (mut first, mut second) = (vec![0xee; len / 3], vec![0xee; len - len / 3]);
            let bufs = &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
            let read = storage.read(bufs, pos)?;
            Ok::<_, nowait::Error>([first, second].concat()[..read].to_vec())
        };
        for _ in 0..300 {
            let (pos, len) = (random.below(DISK as u64 + 10), random.below(5 * BLOCK as u64));
            let end = (pos + len).min(DISK as u64);
            let wanted = disk.get(pos as usize..end as usize).unwrap_or_default();
            assert!(read(&storage, pos, len as usize).unwrap() == wanted, "{len} bytes at {pos}");
        }
        let whole = ByteRange::new(0, storage.size().unwrap());
        let extents = |limit| {
            let mut extents = Vec::new();
            storage.extents(whole, limit, &mut extents).unwrap();
            extents
        };
        let (mut pos, all) = (0, extents(1000));
        for extent in &all {
            let part = &disk[pos..pos + extent.len as usize];
            assert_eq!(part.iter().all(|byte| *byte == 0), extent.hole);
            pos += extent.len as usize;
        }
        assert_eq!((pos, extents(2).len()), (DISK, 2));
        let refused = storage.write(&[], 0, nowait::Flags::NONE).unwrap_err();
        assert!(refused.to_string().contains("Read-only"), "{refused}");
        let data =
            names(path).into_iter().find(|it| it.to_string_lossy().contains("data-")).unwrap();
        let mut bytes = std::fs::read(&data).unwrap();
        bytes[10] ^= 1;
        std::fs::write(&data, bytes).unwrap();
        let storage = open();
        assert!(read(&storage, BLOCK as u64, 1).is_err() && read(&storage, 0, 2 * BLOCK).is_err());
        assert!(read(&storage, 2 * BLOCK as u64, BLOCK).unwrap() == disk[2 * BLOCK..3 * BLOCK]);
    }
}
