//! The fixtures of the async APIs, both run by the driver of one thread.

use std::sync::Arc;

use nowait::{
    Allocate, AllocationCache, AsyncFile, BlockDevice, ByteRange, Error, Flags, IoBuffer,
    LocalAsyncFile, LocalDriver, Op, WorkerPool,
};

use crate::files::FileApi;
use crate::rig::{Api, Case, Image, POISON};

/// A file of either API.
enum AnyFile {
    OneThread(LocalAsyncFile),
    SeveralThreads(AsyncFile),
}

/// Runs a request of a file of either API to its end.
macro_rules! run {
    ($self:ident, $($request:tt)*) => {
        match &$self.file {
            AnyFile::OneThread(file) => $self.driver.block_on(file.$($request)*),
            AnyFile::SeveralThreads(file) => $self.driver.block_on(file.$($request)*),
        }
    };
}

/// An async API on an image.
pub(crate) struct AsyncFiles {
    file: AnyFile,
    driver: LocalDriver,
    image: Image,
    direct: bool,
    label: String,
}

impl AsyncFiles {
    /// `None` where the system does not have the queue.
    pub(crate) fn new(case: &Case, image: Image, several_threads: bool) -> Option<Self> {
        let disk = Arc::new(image.open(case));
        disk.scan();
        Self::on(case, image, disk, several_threads)
    }

    /// Like `new`, on a device that is open already and is not scanned.
    pub(crate) fn on(
        case: &Case,
        image: Image,
        disk: Arc<BlockDevice<AllocationCache>>,
        several_threads: bool,
    ) -> Option<Self> {
        let (kind, config) = (case.kind, case.config);
        let direct = disk.is_direct();
        let workers = WorkerPool::new(case.workers);
        let queue = kind.queue(config.slots)?;
        let (file, api) = if several_threads {
            drop(queue);
            let make = move || kind.try_queue(config.slots);
            let file = AsyncFile::with_queue(disk, workers, config, make);
            (AnyFile::SeveralThreads(file.unwrap()), "AsyncFile")
        } else {
            let file = LocalAsyncFile::with_queue(disk, workers, queue, config);
            (AnyFile::OneThread(file.unwrap()), "LocalAsyncFile")
        };
        let (driver, label) = (LocalDriver::new().unwrap(), format!("{api}, {}", case.label));
        Some(Self { file, driver, image, direct, label })
    }
}

fn bytes((done, _): (Result<usize, Error>, IoBuffer)) -> Result<u64, i32> {
    done.map(|done| done as u64).map_err(|error| error.errno())
}

impl Api for AsyncFiles {
    fn label(&self) -> &str {
        &self.label
    }

    fn image(&self) -> &Image {
        &self.image
    }

    fn is_direct(&self) -> bool {
        self.direct
    }

    fn read(&mut self, pos: u64, len: u64) -> Result<Vec<u8>, i32> {
        let mut buffer = IoBuffer::zeroed(len as usize).unwrap();
        buffer.fill(POISON);
        let (done, buffer) = run!(self, read_at(buffer, pos));
        assert_eq!(buffer.len() as u64, len, "{}", self.label);
        let done = done.map_err(|error| error.errno())?;
        assert!(buffer[done..].iter().all(|&byte| byte == POISON), "{}", self.label);
        Ok(buffer[..done].to_vec())
    }

    fn write(&mut self, pos: u64, data: &[u8], flags: Flags) -> Result<u64, i32> {
        let mut buffer = IoBuffer::zeroed(data.len()).unwrap();
        buffer.copy_from_slice(data);
        bytes(run!(self, write_at(buffer, pos, flags)))
    }

    /// One read of all: these APIs take no lists.
    fn read_vectored(&mut self, pos: u64, bufs: &mut [&mut [u8]]) -> Result<u64, i32> {
        let len = bufs.iter().map(|buf| buf.len() as u64).sum();
        let read = self.read(pos, len)?;
        let places = bufs.iter_mut().flat_map(|buf| buf.iter_mut());
        places.zip(&read).for_each(|(place, byte)| *place = *byte);
        Ok(read.len() as u64)
    }

    fn write_vectored(&mut self, pos: u64, bufs: &[&[u8]]) -> Result<u64, i32> {
        self.write(pos, &bufs.concat(), Flags::NONE)
    }

    fn bare(&mut self, op: Op, flags: Flags, range: ByteRange) -> Result<(), i32> {
        let done = match op {
            Op::Flush => run!(self, flush()),
            Op::Discard => run!(self, discard(range)),
            Op::Zero => run!(self, zero(range, flags)),
            Op::Read | Op::Write | Op::Status => panic!("the async APIs have no such call"),
        };
        done.map_err(|error| error.errno())
    }
}

impl FileApi for AsyncFiles {
    fn append(&mut self, data: &[u8], flags: Flags) -> Result<u64, i32> {
        let mut buffer = IoBuffer::zeroed(data.len()).unwrap();
        buffer.copy_from_slice(data);
        run!(self, append(buffer, flags)).0.map_err(|error| error.errno())
    }

    fn set_len(&mut self, bytes: u64) -> Result<(), i32> {
        run!(self, set_len(bytes)).map_err(|error| error.errno())
    }

    fn allocate(&mut self, range: ByteRange, mode: Allocate) -> Result<(), i32> {
        run!(self, allocate(range, mode)).map_err(|error| error.errno())
    }

    fn sync_all(&mut self) -> Result<(), i32> {
        run!(self, sync_all()).map_err(|error| error.errno())
    }

    fn size(&mut self) -> u64 {
        let size = match &self.file {
            AnyFile::OneThread(file) => file.size(),
            AnyFile::SeveralThreads(file) => file.size(),
        };
        assert_eq!(run!(self, metadata()).unwrap().len(), size);
        size
    }
}
