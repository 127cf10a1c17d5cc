//! Storages that end their transfers themselves, beside files of the kernel in one device.
//!
//! Invariant: such a storage ends its transfers on a thread of its own, in another order than they came
//! in.

use std::io::{IoSlice, IoSliceMut};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use nowait::{
    Alignment, AsyncTransfers, BlockDevice, BlockMap, ByteRange, Config, Direct, Error, Extent,
    FileStorage, Flags, Intent, IoQueue, Op, OpenOptions, PendingTransfer, QueueKind, Request,
    SingleDisk, Storage, StorageProperties, WorkerPool, WouldBlock,
};
use nowait_testkit::{BOUND, Random, seed};

/// Bytes of the stripes that lie in the two storages by turns.
const STRIPE: u64 = 4096;
const SIZE: u64 = 64 * STRIPE;

struct Shared {
    bytes: Mutex<Vec<u8>>,
    sender: Mutex<Sender<PendingTransfer>>,
}

impl AsyncTransfers for Shared {
    fn begin(&self, transfers: &mut Vec<PendingTransfer>) {
        let sender = self.sender.lock().unwrap();
        transfers.drain(..).for_each(|transfer| sender.send(transfer).unwrap());
    }
}

/// Bytes in memory, moved by a thread.
struct ThreadStorage(Arc<Shared>);

impl ThreadStorage {
    /// `drops` has it end no transfer in the right way.
    fn start(drops: bool) -> Self {
        let (sender, receiver) = channel::<PendingTransfer>();
        let bytes = Mutex::new(vec![0; SIZE as usize]);
        let shared = Arc::new(Shared { bytes, sender: Mutex::new(sender) });
        let of_thread = Arc::downgrade(&shared);
        std::thread::spawn(move || {
            while let Ok(first) = receiver.recv() {
                let mut all: Vec<_> = std::iter::once(first).chain(receiver.try_iter()).collect();
                let Some(shared) = of_thread.upgrade() else { return };
                while let Some(transfer) = all.pop().filter(|_| !drops) {
                    shared.end(transfer);
                }
            }
        });
        Self(shared)
    }
}

impl Shared {
    fn end(&self, transfer: PendingTransfer) {
        let range = transfer.range();
        let range = range.pos as usize..range.end() as usize;
        let mut bytes = self.bytes.lock().unwrap();
        if transfer.is_write() {
            let mut data = Vec::new();
            transfer.copy_data(&mut data);
            bytes[range].copy_from_slice(&data);
            transfer.complete_write();
        } else {
            transfer.complete(&bytes[range]);
        }
    }
}

impl Storage for ThreadStorage {
    fn properties(&self) -> StorageProperties {
        StorageProperties { device: true, ..StorageProperties::new(Alignment::NONE) }
    }

    fn size(&self) -> Result<u64, Error> {
        Ok(SIZE)
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        let bytes = self.0.bytes.lock().unwrap();
        let Some(buf) = bufs.first_mut() else { return Ok(0) };
        let len = buf.len();
        buf.copy_from_slice(&bytes[pos as usize..][..len]);
        Ok(len)
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, _: Flags) -> Result<usize, Error> {
        let mut bytes = self.0.bytes.lock().unwrap();
        let Some(buf) = bufs.first() else { return Ok(0) };
        bytes[pos as usize..][..buf.len()].copy_from_slice(buf);
        Ok(buf.len())
    }

    fn sync(&self) -> Result<(), Error> {
        Ok(())
    }

    fn transfers(&self) -> Option<Arc<dyn AsyncTransfers>> {
        Some(self.0.clone())
    }
}

/// Even stripes lie in file 0, odd ones in file 1.
struct Stripes;

impl BlockMap for Stripes {
    fn map_extent(&self, range: ByteRange, _: Intent) -> Result<Extent, WouldBlock> {
        let file = (range.pos / STRIPE % 2) as u16;
        let len = range.len.min(STRIPE - range.pos % STRIPE);
        Ok(Extent { file, pos: range.pos, len, hole: false })
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        true
    }
}

fn ended<Q: IoQueue, M: BlockMap>(engine: &mut SingleDisk<Q, M>) -> Result<u64, Error> {
    loop {
        if let Some(done) = engine.next() {
            return done.result();
        }
        engine.wait(Some(BOUND), &mut |_, _| {}).unwrap();
    }
}

/// Reads in flight simultaneously, each checked, on a device whose even stripes are in `remote` and whose odd
/// ones are in a file.
fn read_both(kind: QueueKind) {
    let mut random = Random::from_seed(seed());
    let model = random.bytes(SIZE as usize);
    let remote = ThreadStorage::start(false);
    remote.0.bytes.lock().unwrap().copy_from_slice(&model);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("odd");
    std::fs::write(&path, &model).unwrap();
    let options = OpenOptions::new().direct(Direct::Off);
    let local = Arc::new(FileStorage::open(&path, options).unwrap());
    let disk = BlockDevice::mapped(Arc::new(remote), vec![local], SIZE, true, Stripes);
    assert!(disk.is_remote());
    let disk = Arc::new(disk);
    let config = Config::default();
    let Ok(queue) = kind.open(config.slots) else {
        nowait_testkit::skip("no io_uring");
        return;
    };
    let workers = WorkerPool::new(1);
    let mut engine = SingleDisk::new(disk, workers, queue, config).unwrap();
    for _ in 0..50 {
        for tag in 0..16 {
            let pos = random.below(SIZE);
            let range = ByteRange::new(pos, 1 + random.below(SIZE - pos));
            let buffer = engine.buffer(range).unwrap();
            let io = Request { op: Op::Read, flags: Flags::ALL_OR_ERROR, range };
            engine.submit(io, buffer, tag).map_err(|rejected| rejected.error).unwrap();
        }
        while engine.in_flight() > 0 {
            engine.wait(Some(BOUND), &mut |_, _| {}).unwrap();
            while let Some(done) = engine.next() {
                let range = done.io.range;
                assert_eq!(done.result().unwrap(), range.len);
                let buffer = done.buf.expect("its buffer");
                assert!(buffer[..] == model[range.pos as usize..range.end() as usize], "{range:?}");
            }
        }
    }
}

#[test]
fn reads_of_files_and_of_asynchronous_storages_end_with_their_bytes_on_a_ring() {
    read_both(QueueKind::Uring);
}

#[test]
fn reads_of_files_and_of_asynchronous_storages_end_with_their_bytes_on_threads() {
    read_both(QueueKind::Threads);
}

#[test]
fn a_durable_write_needs_no_sync_of_its_own_and_a_transfer_that_is_dropped_is_an_error() {
    for drops in [false, true] {
        let storage = Arc::new(ThreadStorage::start(drops));
        let disk = BlockDevice::raw(storage.clone(), OpenOptions::default());
        let disk = Arc::new(disk.unwrap());
        let config = Config::default();
        let queue = QueueKind::Auto.open(config.slots).unwrap();
        let workers = WorkerPool::new(1);
        let mut engine = SingleDisk::new(disk, workers, queue, config).unwrap();
        let range = ByteRange::new(5, 7000);
        let mut buffer = engine.buffer(range).unwrap();
        buffer.fill(9);
        let io = Request { op: Op::Write, flags: Flags::DSYNC, range };
        engine.submit(io, buffer, 1).map_err(|rejected| rejected.error).unwrap();
        match drops {
            true => assert_eq!(ended(&mut engine).unwrap_err().errno(), libc::EIO),
            false => assert_eq!(ended(&mut engine).unwrap(), 7000),
        }
        assert_eq!(engine.stats().worker, 0, "a worker was asked for a sync");
        let bytes = storage.0.bytes.lock().unwrap();
        assert_eq!(
            (bytes[4], bytes[5], bytes[7004], bytes[7005]),
            if drops { (0, 0, 0, 0) } else { (0, 9, 9, 0) }
        );
    }
}
