//! A file or a block device as one side of a copy: an engine on an open disk, raw or in a qcow2 image.
//!
//! Invariant: the memory of a request stays in its place in `pending` until the engine has given
//! back every part of the request; the engine is dropped before that memory.
//! Knows: error, port, zeros. Known by: ends.
#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nowait::{
    Buffer, Completion, Config, Disk, Engine, Flags, Io, Map, Op, Queue, Range, Segment, Span,
    Threads, Uring, Workers,
};
use nowait_image::served::Keeper;
use nowait_image::{HostFile, NewImage};
use rustix::event::PollFlags;
use slab::Slab;

use crate::error::{Error, reason, words};
use crate::port::{Done, Facts, Port, Request, What};
use crate::zeros::Run;

/// The longest read or write in bytes: what the block layer takes in few pieces, and long enough
/// that what a request costs does not count.
const MAX_BYTES: u64 = 4 << 20;
/// The longest range that is made zero at once, in bytes: short enough for progress to be seen.
const MAX_ZERO_BYTES: u64 = 1 << 30;
/// The block of most file systems.
const GRANULE_BYTES: u64 = 4096;

/// What is in the files of a disk.
pub(crate) enum Content {
    /// The bytes of the disk.
    Raw,
    /// A qcow2 image, which is only read and stays locked by this.
    Image { _keeper: Keeper },
    /// A qcow2 image that is being made in this file, to which the disk leads. It is only written to.
    New { image: NewImage, file: HostFile },
}

/// An open disk as a side. The queue is io_uring where the system allows it.
///
/// # Errors
/// No queue, or no thread, could be made.
pub(crate) fn open<M: Map>(
    name: String,
    disk: Arc<Disk<M>>,
    content: Content,
) -> Result<Box<dyn Port>, Error> {
    let config = Config::default();
    let files = disk.files();
    let fail = |error: nowait::Error| Error::at(&name, error);
    match Uring::for_files(&files) {
        Ok(queue) => {
            drop(files);
            Ok(Box::new(FilePort::new(name, disk, content, queue, config)?))
        }
        Err(_) => {
            let queue = Threads::for_files(&files, config.slots, !disk.is_direct());
            drop(files);
            let queue = queue.map_err(fail)?;
            Ok(Box::new(FilePort::new(name, disk, content, queue, config)?))
        }
    }
}

struct FilePort<Q: Queue, M: Map> {
    engine: Engine<Q, M>,
    /// By the engine's tags.
    pending: Slab<Pending>,
    /// What the engine had no room for yet.
    waiting: VecDeque<Part>,
    done: VecDeque<Done>,
    name: String,
    content: Content,
}

/// A request that was accepted.
struct Pending {
    tag: u64,
    range: Range,
    memory: Option<Buffer>,
    /// Parts that have not ended.
    left: usize,
}

/// One request to the engine.
struct Part {
    pending: usize,
    io: Io,
    /// Where its bytes begin in the memory of the request.
    start: usize,
}

impl<Q: Queue, M: Map> FilePort<Q, M> {
    fn new(
        name: String,
        disk: Arc<Disk<M>>,
        content: Content,
        queue: Q,
        config: Config,
    ) -> Result<Self, Error> {
        let workers = Workers::new(&disk, config.workers);
        let engine =
            Engine::new(disk, workers, queue, config).map_err(|error| Error::at(&name, error))?;
        let (waiting, done) = (VecDeque::new(), VecDeque::new());
        Ok(Self { engine, pending: Slab::new(), waiting, done, name, content })
    }

    fn start(&mut self, part: &Part) -> Result<(), Error> {
        let Part { pending, io, start } = *part;
        let tag = pending as u64;
        let submitted = if matches!(io.op, Op::Read | Op::Write) {
            let memory = self.pending.get_mut(pending).and_then(|pending| pending.memory.as_mut());
            let len = io.range.len as usize;
            let part = memory.and_then(|memory| memory.get_mut(start..)?.get_mut(..len));
            let Some(part) = part else {
                return Err(Error::at(&self.name, "a request without memory"));
            };
            let segment = Segment { base: part.as_mut_ptr(), len };
            // SAFETY: the buffer belongs to the pending request, which nobody touches until all
            // its parts were given back; `engine` is dropped before `pending`.
            unsafe { self.engine.submit_segments(io, &[segment], tag) }
        } else {
            self.engine.submit_bare(io, tag)
        };
        submitted.map_err(|rejected| self.failure(io, rejected.error.errno()))
    }

    fn take(&mut self, completion: &Completion) -> Result<(), Error> {
        let io = completion.io;
        let moved = completion.result().map_err(|error| self.failure(io, error.errno()))?;
        if moved < io.range.len && io.op != Op::Flush {
            let at = io.range.pos + moved;
            let what = format!("it became shorter while it was copied: it ends at byte {at}");
            return Err(Error::at(&self.name, what));
        }
        let index = completion.tag as usize;
        let Some(pending) = self.pending.get_mut(index) else { return Ok(()) };
        pending.left -= 1;
        if pending.left > 0 {
            return Ok(());
        }
        let Pending { tag, range, memory, .. } = self.pending.remove(index);
        let spans = match io.op {
            Op::Status => self.engine.take_spans(completion.tag),
            _ => Vec::<Span>::new(),
        };
        self.done.push_back(Done { tag, range, memory, spans });
        Ok(())
    }

    fn failure(&self, io: Io, errno: i32) -> Error {
        let doing = match io.op {
            Op::Read => "read",
            Op::Write => "write",
            Op::Zero | Op::Discard => "make zero",
            Op::Status => "find the holes",
            Op::Flush => return Error::at(&self.name, format!("cannot flush: {}", reason(errno))),
        };
        let at = io.range.pos;
        Error::at(&self.name, format!("cannot {doing} at byte {at}: {}", reason(errno)))
    }
}

impl Content {
    /// Where in the file, or the image, the bytes of `range` are.
    fn place(&mut self, op: Op, range: Range) -> Vec<Range> {
        match self {
            Self::New { image, .. } if op == Op::Write => image.place(range),
            _ => vec![range],
        }
    }
}

/// The parts of a request: an operation and its bytes from the start of the range.
fn parts(what: What, range: Range) -> Vec<(Op, Run)> {
    let whole = Run { start: 0, len: range.len as usize, zero: false };
    match what {
        What::Read => vec![(Op::Read, whole)],
        What::Write(runs) => {
            runs.into_iter().map(|run| (if run.zero { Op::Zero } else { Op::Write }, run)).collect()
        }
        What::Zero => vec![(Op::Zero, whole)],
        What::Status => vec![(Op::Status, whole)],
        What::Flush => vec![(Op::Flush, whole)],
    }
}

impl<Q: Queue, M: Map> Port for FilePort<Q, M> {
    fn facts(&self) -> Facts {
        let facts = Facts {
            size: self.engine.disk().size(),
            block: 1,
            granule: u64::from(self.engine.disk().alignment().offset).max(GRANULE_BYTES),
            max_bytes: MAX_BYTES,
            max_zero_bytes: MAX_ZERO_BYTES,
            tells_status: true,
            flushes: true,
        };
        match &self.content {
            Content::Raw | Content::Image { .. } => facts,
            Content::New { image, .. } => {
                Facts { size: image.size(), max_zero_bytes: 0, tells_status: false, ..facts }
            }
        }
    }

    fn submit(&mut self, request: Request) {
        let Request { what, range, tag, memory } = request;
        let mut placed = Vec::new();
        for (op, run) in parts(what, range) {
            let range = Range::new(range.pos + run.start as u64, run.len as u64);
            let mut start = run.start;
            for range in self.content.place(op, range) {
                placed.push((start, Io { op, flags: Flags::NONE, range }));
                start += range.len as usize;
            }
        }
        if placed.is_empty() {
            self.done.push_back(Done { tag, range, memory, spans: Vec::new() });
            return;
        }
        let left = placed.len();
        let pending = self.pending.insert(Pending { tag, range, memory, left });
        self.waiting.extend(placed.into_iter().map(|(start, io)| Part { pending, io, start }));
    }

    fn advance(&mut self) -> Result<(), Error> {
        loop {
            while self.engine.has_room()
                && let Some(part) = self.waiting.pop_front()
            {
                self.start(&part)?;
            }
            self.engine.poll().map_err(|error| Error::at(&self.name, error))?;
            let mut took = false;
            while let Some(completion) = self.engine.next() {
                took = true;
                self.take(&completion)?;
            }
            if !took || self.waiting.is_empty() {
                return Ok(());
            }
        }
    }

    fn next(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    fn finish(&mut self) -> Result<(), Error> {
        let Content::New { image, file } = &mut self.content else { return Ok(()) };
        let written = image.finish(file);
        let what = |error| format!("cannot write the image's tables: {}", words(&error));
        written.map_err(|error| Error::at(&self.name, what(error)))
    }

    fn watched<'a>(&'a self, watched: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        watched.push((self.engine.fd(), PollFlags::IN));
    }
}
