//! A file or a block device as an endpoint of a copy: an engine on an open disk, raw or in a qcow2
//! image.
//!
//! Invariant: the memory of a request stays in its entry of `pending` until the engine has
//! completed every part of the request; it is leaked if the queue fails before that.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nowait::{
    BlockDevice, BlockMap, ByteRange, Completion, Config, DeviceHandle, Engine, ExtentStatus,
    Flags, IoBuffer, IoQueue, IoSegment, Op, QueueKind, Request, WorkerPool,
};
use nowait_image::{Image, ImageBuilder, ImageFile};
use rustix::event::PollFlags;
use rustix::io::Errno;
use slab::Slab;

use crate::endpoint::{Capabilities, Completed, CopyOperation, CopyRequest, Endpoint};
use crate::error::{Error, os_message, reason};
use crate::zero_detection::DataRun;

/// The longest read or write in bytes: the block layer splits it into few pieces, and the fixed
/// cost of a request is negligible.
const MAX_BYTES: u64 = 4 << 20;
/// The longest range that one request zeroes, in bytes: short enough that progress is visible.
const MAX_ZERO_BYTES: u64 = 1 << 30;
/// Most bytes that the file of a new image grows ahead of its data.
const MAX_AHEAD_BYTES: u64 = 1 << 30;
/// The block of most file systems.
const GRANULE_BYTES: u64 = 4096;

/// The content of a disk's files.
pub(crate) enum Content {
    /// A new file that holds the disk's bytes themselves, or a disk that the caller keeps open.
    Raw,
    /// An image; the handle holds its locks.
    Image(Image),
    /// A new qcow2 image, which is only written.
    New(NewImage),
}

/// A new qcow2 image whose file grows with the data, so that a limit on the size of files concerns
/// only what is written.
pub(crate) struct NewImage {
    image: Box<dyn ImageBuilder>,
    /// The file behind the disk.
    file: ImageFile,
    /// Length of the file in bytes.
    len: u64,
}

impl NewImage {
    /// `image` in the empty `file`.
    pub(crate) fn new(image: Box<dyn ImageBuilder>, file: ImageFile) -> Self {
        Self { image, file, len: 0 }
    }

    /// Makes the file long enough for all allocated clusters, in whole blocks of `block` bytes. It
    /// grows ahead where it may, because on some file systems ftruncate(2) waits for all writes.
    ///
    /// # Errors
    /// The errno of ftruncate(2), such as `EFBIG`.
    fn make_room(&mut self, block: u64) -> io::Result<()> {
        let (end, most) = (self.image.data_end(), self.image.max_data_end());
        if end <= self.len {
            return Ok(());
        }
        let lens = [end + (end / 4).min(MAX_AHEAD_BYTES), end];
        let [ahead, least] = lens.map(|len| len.next_multiple_of(block).min(most));
        self.len = match self.file.set_len(ahead) {
            Ok(()) => ahead,
            Err(_) => self.file.set_len(least).map(|()| least)?,
        };
        Ok(())
    }
}

/// An open image as an endpoint.
///
/// # Errors
/// Like [`open`].
pub(crate) fn of_image(name: String, image: Image) -> Result<Box<dyn Endpoint>, Error> {
    open(name, image.device(), Content::Image(image))
}

/// An open disk as an endpoint. The queue is io_uring where the system allows it.
///
/// # Errors
/// Neither queue, or no thread, could be created.
pub(crate) fn open(
    name: String,
    disk: Arc<BlockDevice<dyn BlockMap>>,
    content: Content,
) -> Result<Box<dyn Endpoint>, Error> {
    let config = Config::default();
    let queue = QueueKind::Auto.open(config.slots).map_err(|error| Error::at(&name, error))?;
    Ok(Box::new(FileEndpoint::new(name, disk, content, queue, config)?))
}

struct FileEndpoint<Q: IoQueue> {
    engine: Engine<Q, dyn BlockMap>,
    disk: DeviceHandle<dyn BlockMap>,
    /// Indexed by the engine's tags.
    pending: Slab<Pending>,
    /// Parts for which the engine had no free slot yet.
    queue: VecDeque<EnginePart>,
    done: VecDeque<Completed>,
    name: String,
    content: Content,
    /// Unreadable ranges are reported instead of failing the copy.
    reports_unreadable: bool,
}

/// An accepted request.
struct Pending {
    tag: u64,
    range: ByteRange,
    memory: Option<IoBuffer>,
    /// Parts that have not completed.
    left: usize,
    unreadable: bool,
}

/// One request to the engine.
struct EnginePart {
    pending: usize,
    io: Request,
    /// Offset of its bytes in the memory of the request.
    start: usize,
}

impl<Q: IoQueue> FileEndpoint<Q> {
    fn new(
        name: String,
        disk: Arc<BlockDevice<dyn BlockMap>>,
        content: Content,
        queue: Q,
        config: Config,
    ) -> Result<Self, Error> {
        let engine = Engine::new(queue, WorkerPool::default(), config);
        let attached = engine.and_then(|mut engine| Ok((engine.attach(disk)?, engine)));
        let (disk, engine) = attached.map_err(|error| Error::at(&name, error))?;
        let (queue, done) = (VecDeque::new(), VecDeque::new());
        let (pending, reports_unreadable) = (Slab::new(), false);
        Ok(Self { engine, disk, pending, queue, done, name, content, reports_unreadable })
    }

    fn start(&mut self, part: &EnginePart) -> Result<(), Error> {
        let EnginePart { pending, io, start } = *part;
        let block = u64::from(self.disk.disk().alignment().offset);
        if let Content::New(new) = &mut self.content
            && let Err(error) = new.make_room(block)
        {
            return Err(self.failure(io, &os_message(&error)));
        }
        let tag = pending as u64;
        let submitted = if matches!(io.op, Op::Read | Op::Write) {
            let memory = self.pending.get_mut(pending).and_then(|pending| pending.memory.as_mut());
            let len = io.range.len as usize;
            let part = memory.and_then(|memory| memory.get_mut(start..)?.get_mut(..len));
            let Some(part) = part else {
                return Err(Error::at(&self.name, "a request without memory"));
            };
            let segment = IoSegment { base: part.as_mut_ptr(), len };
            // SAFETY: the buffer belongs to the pending request and is not accessed until all parts
            // of the request have completed; `drop` waits for them, or leaks the buffer.
            unsafe { self.engine.submit_user_memory(&self.disk, io, &[segment], tag) }
        } else {
            self.engine.submit_no_data(&self.disk, io, tag)
        };
        submitted.map_err(|rejected| self.failure(io, &reason(rejected.error.errno())))
    }

    fn take(&mut self, completion: &Completion) -> Result<(), Error> {
        let io = completion.io;
        let reads = self.reports_unreadable && matches!(io.op, Op::Read | Op::Status);
        let (moved, unreadable) = match completion.result() {
            // A short read: the file was truncated. A write or read that an error ends is never short
            // (`Flags::ALL_OR_ERROR`).
            Ok(moved) => (moved, reads && moved < io.range.len),
            Err(error) if reads && is_unreadable(error.errno()) => (0, true),
            Err(error) => return Err(self.failure(io, &reason(error.errno()))),
        };
        if moved < io.range.len && io.op != Op::Flush && !unreadable {
            let at = io.range.pos + moved;
            let what = format!("it became shorter while it was copied: it ends at byte {at}");
            return Err(Error::at(&self.name, what));
        }
        let index = completion.tag as usize;
        let Some(pending) = self.pending.get_mut(index) else { return Ok(()) };
        pending.left -= 1;
        pending.unreadable |= unreadable;
        if pending.left > 0 {
            return Ok(());
        }
        let Pending { tag, range, memory, unreadable, .. } = self.pending.remove(index);
        let extents = match io.op {
            Op::Status => self.engine.take_extents(completion.tag),
            _ => Vec::<ExtentStatus>::new(),
        };
        self.done.push_back(Completed { tag, range, memory, extents, unreadable });
        Ok(())
    }

    fn failure(&self, io: Request, why: &str) -> Error {
        let doing = match io.op {
            Op::Read => "read",
            Op::Write => "write",
            Op::Zero | Op::Discard => "make zero",
            Op::Status => "find the holes",
            Op::Flush => return Error::at(&self.name, format!("cannot flush: {why}")),
        };
        let at = io.range.pos;
        Error::at(&self.name, format!("cannot {doing} at byte {at}: {why}"))
    }
}

impl<Q: IoQueue> Drop for FileEndpoint<Q> {
    /// Waits for the requests in flight; if the queue has failed, leaks the memory that the kernel
    /// may still use.
    fn drop(&mut self) {
        if self.engine.settle().is_err() {
            for (_, pending) in &mut self.pending {
                std::mem::forget(pending.memory.take());
            }
        }
    }
}

/// Whether `errno` says that the storage is unreadable: the block layer's errors of a medium, of
/// the path to it and of checksums, and a file system's errors of corruption. Other errors concern
/// the machine and are fatal.
fn is_unreadable(errno: i32) -> bool {
    matches!(
        Errno::from_raw_os_error(errno),
        Errno::IO
            | Errno::NODATA
            | Errno::REMOTEIO
            | Errno::ILSEQ
            | Errno::BADMSG
            | Errno::UCLEAN
            | Errno::TIMEDOUT
    )
}

impl Content {
    /// The ranges of the file, or of the image, that hold the bytes of `range`.
    fn map(&mut self, op: Op, range: ByteRange) -> Vec<ByteRange> {
        match self {
            Self::New(new) if op == Op::Write => new.image.allocate(range),
            _ => vec![range],
        }
    }
}

/// The parts of a request: an operation and its run, relative to the start of the range.
fn split(operation: CopyOperation, range: ByteRange) -> Vec<(Op, DataRun)> {
    let whole = DataRun { start: 0, len: range.len as usize, zero: false };
    match operation {
        CopyOperation::Read => vec![(Op::Read, whole)],
        CopyOperation::Write(runs) => {
            runs.into_iter().map(|run| (if run.zero { Op::Zero } else { Op::Write }, run)).collect()
        }
        CopyOperation::Zero => vec![(Op::Zero, whole)],
        CopyOperation::Status => vec![(Op::Status, whole)],
        CopyOperation::Flush => vec![(Op::Flush, whole)],
    }
}

impl<Q: IoQueue> Endpoint for FileEndpoint<Q> {
    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities {
            size: self.disk.disk().size(),
            block: 1,
            alignment: u64::from(self.disk.disk().alignment().offset).max(GRANULE_BYTES),
            max_bytes: MAX_BYTES,
            max_zero_bytes: MAX_ZERO_BYTES,
            has_status: true,
            has_flush: true,
        };
        match &self.content {
            Content::Raw | Content::Image(_) => capabilities,
            Content::New(new) => Capabilities {
                size: new.image.size(),
                max_zero_bytes: 0,
                has_status: false,
                ..capabilities
            },
        }
    }

    fn submit(&mut self, request: CopyRequest) {
        let CopyRequest { operation, range, tag, memory } = request;
        let mut parts = Vec::new();
        for (op, run) in split(operation, range) {
            let range = ByteRange::new(range.pos + run.start as u64, run.len as u64);
            let mut start = run.start;
            for range in self.content.map(op, range) {
                parts.push((start, Request { op, flags: Flags::ALL_OR_ERROR, range }));
                start += range.len as usize;
            }
        }
        if parts.is_empty() {
            let (extents, unreadable) = (Vec::new(), false);
            self.done.push_back(Completed { tag, range, memory, extents, unreadable });
            return;
        }
        let left = parts.len();
        let pending = self.pending.insert(Pending { tag, range, memory, left, unreadable: false });
        self.queue.extend(parts.into_iter().map(|(start, io)| EnginePart { pending, io, start }));
    }

    fn advance(&mut self) -> Result<(), Error> {
        loop {
            while self.engine.has_free_slot()
                && let Some(part) = self.queue.pop_front()
            {
                self.start(&part)?;
            }
            self.engine.poll().map_err(|error| Error::at(&self.name, error))?;
            let mut progressed = false;
            while let Some(completion) = self.engine.next() {
                progressed = true;
                self.take(&completion)?;
            }
            if !progressed || self.queue.is_empty() {
                return Ok(());
            }
        }
    }

    fn next(&mut self) -> Option<Completed> {
        self.done.pop_front()
    }

    fn report_unreadable(&mut self) {
        self.reports_unreadable = true;
    }

    fn finish(&mut self) -> Result<(), Error> {
        let failed =
            |why: String| Error::at(&self.name, format!("cannot write the image's tables: {why}"));
        match &mut self.content {
            Content::Raw => Ok(()),
            Content::Image(image) => image.settle().map_err(|error| failed(reason(error.errno()))),
            Content::New(new) => {
                new.image.finish(&new.file).map_err(|error| failed(os_message(&error)))
            }
        }
    }

    fn poll_fds<'a>(&'a self, poll_fds: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        poll_fds.push((self.engine.fd(), PollFlags::IN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;
    use std::time::Duration;

    use nowait::{
        EventSource, LinearMap, Null, OpenOptions, Operation, Outcome, QueueFile, QueueFull, Token,
        Transfer,
    };

    /// A queue that accepts one transfer and then always fails, as if the kernel still used its
    /// memory.
    struct Lost {
        watched: Null,
        taken: Rc<Cell<usize>>,
    }

    const FAILURE: nowait::Error =
        nowait::Error::new(rustix::io::Errno::NXIO.raw_os_error(), Operation::Wait);

    // SAFETY: no transfer is ever completed; `Null` reports the watched descriptors.
    unsafe impl IoQueue for Lost {
        fn attach(&mut self, files: &[QueueFile<'_>]) -> Result<u32, nowait::Error> {
            self.watched.attach(files)
        }

        fn detach(&mut self, first: u32, count: u32) {
            self.watched.detach(first, count);
        }

        // SAFETY: the memory is never accessed.
        unsafe fn push(&mut self, transfer: &Transfer, _: Token) -> Result<(), QueueFull> {
            self.taken.set(transfer.base as usize);
            Ok(())
        }

        fn submit(&mut self) -> Result<(), nowait::Error> {
            if self.taken.get() == 0 { Ok(()) } else { Err(FAILURE) }
        }

        fn drain_completions(&mut self, sink: impl FnMut(Token, Outcome)) -> usize {
            self.watched.drain_completions(sink)
        }

        fn wait(&mut self, _: Option<Duration>) -> Result<(), nowait::Error> {
            Err(FAILURE)
        }

        fn has_completions(&mut self) -> bool {
            false
        }

        fn events(&self) -> &dyn EventSource {
            self.watched.events()
        }

        fn events_mut(&mut self) -> &mut dyn EventSource {
            self.watched.events_mut()
        }
    }

    /// Whether `address` is mapped in this process.
    fn is_mapped(address: usize) -> bool {
        let number = |hex| usize::from_str_radix(hex, 16).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (from, rest) = line.split_once('-').unwrap();
            let (to, _) = rest.split_once(' ').unwrap();
            (number(from)..number(to)).contains(&address)
        })
    }

    #[test]
    fn c45_memory_that_a_failed_queue_still_uses_is_not_freed() {
        // Large enough that the allocator returns it to the system immediately.
        const BYTES: usize = 4 << 20;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; BYTES]).unwrap();
        let disk =
            BlockDevice::<LinearMap>::open_mapped(file.path(), OpenOptions::default()).unwrap();
        let taken = Rc::new(Cell::new(0));
        let queue = Lost { watched: Null::new().unwrap(), taken: taken.clone() };
        let (name, config) = ("disk".to_owned(), Config::default());
        let mut endpoint =
            FileEndpoint::new(name, Arc::new(disk), Content::Raw, queue, config).unwrap();
        let memory = Some(IoBuffer::zeroed(BYTES).unwrap());
        let range = ByteRange::new(0, BYTES as u64);
        endpoint.submit(CopyRequest { operation: CopyOperation::Read, range, tag: 0, memory });
        assert!(endpoint.advance().is_err());
        drop(endpoint);
        let lost = taken.get();
        assert!(lost > 0 && is_mapped(lost), "the kernel's memory was freed");
        let again: Vec<_> = (0..8).map(|_| IoBuffer::zeroed(BYTES).unwrap()).collect();
        let overlaps = |buffer: &IoBuffer| (buffer.as_ptr() as usize).abs_diff(lost) < BYTES;
        assert!(!again.iter().any(overlaps), "the kernel's memory was given to another");
    }
}
