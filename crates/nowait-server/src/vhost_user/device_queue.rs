//! A queue of a device: its requests are taken, given to the engine, and answered.
//!
//! Invariant: a request is answered once, by its status and its entry in the used ring. A queue that
//! breaks down takes no more requests, and nothing more of its memory is read or written.
#![allow(unsafe_code)]

use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;

use nowait::{ByteRange, Flags, IoQueue, Op, Rejected, Request};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};
use vm_memory::GuestAddress;

use crate::export::SECTOR_BYTES;
use crate::frontend_kind::FrontendKind;
use crate::injected_bug::{ServerBug, injected};
use crate::loop_context::LoopContext;
use crate::member::Member;
use crate::vhost_user::block_request::{
    BlockRequest, Kind, Malformed, RequestReader, SectorRange, status_of,
};
use crate::vhost_user::device_config::MAX_REQUEST_BYTES;
use crate::vhost_user::queue_channel::{QueueStart, signal};

/// A write that begins before this byte is copied before it is checked: the first bytes of an image
/// decide what later programs take it for, so the guest must not change them after the check.
const COPIED_BEFORE: u64 = 4096;
/// The flag of a write of zeroes that lets storage be deallocated.
const UNMAP: u32 = 1;

/// A request in the engine.
struct InFlight {
    status: GuestAddress,
    /// Bytes written to the guest's memory beside the status, if it succeeds.
    written: u32,
    /// The parts of the memory that it writes to, while the VMM keeps a log.
    logged: Vec<(u64, u64)>,
    /// The request that comes after it.
    rest: Option<Box<Rest>>,
}

impl InFlight {
    /// `request`, whose transfer is `io` in all; what is read behind the end of the image counts, too.
    fn of(request: &BlockRequest, io: Request, rest: Option<Box<Rest>>) -> Self {
        let written = if io.op == Op::Read { request.len as u32 } else { 0 };
        Self { status: request.status, written, logged: Vec::new(), rest }
    }
}

/// The rest of a long request, which the engine gets piece by piece.
struct Rest {
    request: BlockRequest,
    io: Request,
    /// Bytes of the pieces so far.
    done: u64,
}

/// Whether a queue takes requests.
pub(super) enum Phase {
    Running,
    /// It takes no more requests. The answer is awaited, except at the end of the thread.
    Stopping(Option<SyncSender<u16>>),
}

/// A queue of a device.
pub(super) struct DeviceQueue {
    pub(super) start: QueueStart,
    pub(super) member: Member,
    pub(super) phase: Phase,
    /// The requests in the engine, by the index of their first descriptor.
    requests: Vec<Option<InFlight>>,
    pub(super) in_flight: u32,
    /// It is in the list of queues that have something to do at the end of the iteration.
    pub(super) is_touched: bool,
    /// It is in the list of queues without a next request, whose drivers were not asked for a kick.
    pub(super) is_idle: bool,
}

/// The next step of a service.
pub(super) enum Step {
    Next,
    /// Nothing more can be done now.
    Pause,
    /// There is no next request.
    Idle,
}

/// The outcome of a request that is decided without the engine: success with bytes that were
/// written, or a status.
type Outcome = Result<u32, u32>;

impl DeviceQueue {
    /// A queue that takes requests.
    pub(super) fn new(start: QueueStart) -> Self {
        let (_, size) = start.virtqueue.table();
        Self {
            requests: (0..size).map(|_| None).collect(),
            member: Member::of(start.device.client.clone()),
            phase: Phase::Running,
            in_flight: 0,
            is_touched: false,
            is_idle: false,
            start,
        }
    }

    /// Takes the next request and begins it.
    pub(super) fn step<Q: IoQueue>(
        &mut self,
        number: usize,
        reader: &mut RequestReader,
        context: &mut LoopContext<Q>,
    ) -> Result<Step, Malformed> {
        if self.member.quantum.reads_exhausted() || self.member.quantum.is_spent() {
            context.schedule(number, &mut self.member);
            return Ok(Step::Pause);
        }
        if !context.has_free_slot(self.member.served()) {
            return Ok(self.wait(number, context));
        }
        let taken = match self.phase {
            Phase::Running => self.start.virtqueue.take()?,
            Phase::Stopping(_) => self.start.virtqueue.take_again(),
        };
        let Some(head) = taken else {
            self.check_memory()?;
            return Ok(Step::Idle);
        };
        if self.requests.get(usize::from(head)).is_none_or(Option::is_some) {
            return Err(Malformed("a request was made available again before its end"));
        }
        let virtqueue = &self.start.virtqueue;
        let request = reader.read(virtqueue.memory(), virtqueue.table(), head)?;
        self.check_memory()?;
        match self.begin(number, head, &request, reader, context)? {
            Begun::Ended(outcome) => {
                self.end(head, request.status, outcome)?;
                Ok(Step::Next)
            }
            Begun::InFlight => {
                if injected(ServerBug::TellBeforeData) && request.kind == Kind::Read {
                    self.finish(head, Ok(0))?;
                }
                Ok(Step::Next)
            }
            Begun::NoMemory => {
                self.start.virtqueue.put_back(head);
                Ok(self.wait(number, context))
            }
        }
    }

    /// The number of entries of the virtqueue, 1 to [`MAX_QUEUE_SIZE`](super::virtqueue::MAX_QUEUE_SIZE).
    pub(super) fn size(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn takes_requests(&self) -> bool {
        matches!(self.phase, Phase::Running) && !self.start.device.is_broken()
    }

    /// Whether there is a next request.
    #[inline]
    pub(super) fn has_next(&self) -> bool {
        self.takes_requests() && self.start.virtqueue.has_next()
    }

    /// Checks that all memory that was accessed was there.
    fn check_memory(&self) -> Result<(), Malformed> {
        match self.start.virtqueue.has_faulted() {
            true => Err(Malformed("memory that the VMM shares is missing")),
            false => Ok(()),
        }
    }

    /// Goes on when something was released: one of the queue's own requests, or another's.
    fn wait<Q: IoQueue>(&mut self, number: usize, context: &mut LoopContext<Q>) -> Step {
        if self.in_flight == 0 {
            context.block(number, &mut self.member);
        }
        Step::Pause
    }

    /// Begins a request, or answers it.
    fn begin<Q: IoQueue>(
        &mut self,
        number: usize,
        head: u16,
        request: &BlockRequest,
        reader: &mut RequestReader,
        context: &mut LoopContext<Q>,
    ) -> Result<Begun, Malformed> {
        let ended = |status| Ok(Begun::Ended(Err(status)));
        if request.kind == Kind::Unknown {
            return ended(VIRTIO_BLK_S_UNSUPP);
        }
        let has_data = matches!(request.kind, Kind::Read | Kind::Write);
        if request.has_stray || has_data && request.len > self.start.features.max_request_bytes() {
            return ended(VIRTIO_BLK_S_IOERR);
        }
        let memory = self.start.virtqueue.memory();
        let through = || {
            let wce = self.start.device.wce.load(Ordering::Relaxed);
            if self.start.features.writes_through(wce) { Flags::DSYNC } else { Flags::NONE }
        };
        let (op, flags, sector, len) = match request.kind {
            Kind::Read => (Op::Read, Flags::ALL_OR_ERROR, request.sector, request.len),
            Kind::Write => {
                (Op::Write, Flags::ALL_OR_ERROR | through(), request.sector, request.len)
            }
            Kind::Flush => (Op::Flush, Flags::NONE, 0, 0),
            Kind::GetId => {
                let id = self.start.device.id;
                reader.fill_data(memory, &id)?;
                self.log(reader);
                return Ok(Begun::Ended(Ok(request.len.min(id.len() as u64) as u32)));
            }
            Kind::Discard | Kind::WriteZeroes => {
                let Some(SectorRange { sector, sectors, flags }) = reader.range(memory, request)?
                else {
                    return ended(VIRTIO_BLK_S_IOERR);
                };
                let len = u64::from(sectors) * SECTOR_BYTES;
                match (request.kind, flags) {
                    (Kind::Discard, 0) => (Op::Discard, through(), sector, len),
                    (Kind::WriteZeroes, 0) => (Op::Zero, through() | Flags::NO_UNMAP, sector, len),
                    (Kind::WriteZeroes, UNMAP) => (Op::Zero, through(), sector, len),
                    _ => return ended(VIRTIO_BLK_S_UNSUPP),
                }
            }
            Kind::Unknown => return ended(VIRTIO_BLK_S_UNSUPP),
        };
        let Some(range) = self.range(op, sector, len) else {
            return ended(VIRTIO_BLK_S_IOERR);
        };
        if has_data && range.len < request.len {
            self.pad(request, range.len, reader)?;
        }
        self.begin_io(number, head, request, Request { op, flags, range }, reader, context)
    }

    /// The range of a request, if it is valid. One that the export refuses is counted.
    #[inline]
    fn range(&self, op: Op, sector: u64, len: u64) -> Option<ByteRange> {
        if op == Op::Flush {
            return Some(ByteRange::new(0, 0));
        }
        let pos = sector.checked_mul(SECTOR_BYTES).filter(|_| len.is_multiple_of(SECTOR_BYTES))?;
        let served = self.member.served.as_ref()?;
        let is_whole = served.export.is_whole_blocks(ByteRange::new(pos, len));
        let range = served.export.range_of_sectors(op, pos, len);
        let range = if is_whole { range } else { range.and(Err(libc::EINVAL)) };
        let count = |errno: &i32| {
            served.statistics.count_error(FrontendKind::VhostUser, op, *errno);
        };
        range.inspect_err(count).ok()
    }

    /// Leaves of the data of `request` the first `len` bytes, before the end of the image; those that are read behind it
    /// are zeros.
    #[cold]
    fn pad(
        &self,
        request: &BlockRequest,
        len: u64,
        reader: &mut RequestReader,
    ) -> Result<(), Malformed> {
        let padding = reader.split_off(len);
        if request.kind == Kind::Read {
            padding.fill_data(self.start.virtqueue.memory(), &[0; SECTOR_BYTES as usize])?;
            self.log(&padding);
        }
        Ok(())
    }

    /// Marks the memory for the data of `reader` as changed, while the VMM keeps a log.
    fn log(&self, reader: &RequestReader) {
        if let Some(log) = self.start.virtqueue.log() {
            reader.data().iter().for_each(|part| log.log.mark(part.address.0, part.len.into()));
        }
    }

    /// Begins a checked request; of a long one its first piece.
    fn begin_io<Q: IoQueue>(
        &mut self,
        number: usize,
        head: u16,
        request: &BlockRequest,
        io: Request,
        reader: &mut RequestReader,
        context: &mut LoopContext<Q>,
    ) -> Result<Begun, Malformed> {
        let is_long = matches!(io.op, Op::Read | Op::Write) && io.range.len > MAX_REQUEST_BYTES;
        if is_long {
            let rest = Box::new(Rest { request: *request, io, done: 0 });
            return self.begin_piece(number, head, rest, reader, context);
        }
        self.submit(number, head, io, InFlight::of(request, io, None), reader, context)
    }

    /// Gives the next piece of a long request, which `reader` has, to the engine.
    #[cold]
    fn begin_piece<Q: IoQueue>(
        &mut self,
        number: usize,
        head: u16,
        mut rest: Box<Rest>,
        reader: &mut RequestReader,
        context: &mut LoopContext<Q>,
    ) -> Result<Begun, Malformed> {
        let Rest { request, io: whole, done } = *rest;
        let len = MAX_REQUEST_BYTES.min(whole.range.len - done);
        reader.keep(done, len);
        rest.done += len;
        let io = Request { range: ByteRange::new(whole.range.pos + done, len), ..whole };
        let rest = (rest.done < whole.range.len).then_some(rest);
        self.submit(number, head, io, InFlight::of(&request, whole, rest), reader, context)
    }

    /// Goes on with a long request. Its descriptors are read again: the guest must not have changed
    /// them.
    #[cold]
    fn go_on<Q: IoQueue>(
        &mut self,
        number: usize,
        head: u16,
        rest: Box<Rest>,
        reader: &mut RequestReader,
        context: &mut LoopContext<Q>,
    ) -> Result<(), Malformed> {
        let virtqueue = &self.start.virtqueue;
        let request = reader.read(virtqueue.memory(), virtqueue.table(), head)?;
        if request != rest.request {
            return Err(Malformed("a request was changed before its end"));
        }
        match self.begin_piece(number, head, rest, reader, context)? {
            Begun::InFlight => Ok(()),
            Begun::Ended(outcome) => self.end(head, request.status, outcome),
            Begun::NoMemory => self.end(head, request.status, Err(VIRTIO_BLK_S_IOERR)),
        }
    }

    /// Gives a checked request to the engine, of which there may be a rest.
    fn submit<Q: IoQueue>(
        &mut self,
        number: usize,
        head: u16,
        io: Request,
        mut answer: InFlight,
        reader: &mut RequestReader,
        context: &mut LoopContext<Q>,
    ) -> Result<Begun, Malformed> {
        let memory = self.start.virtqueue.memory();
        let (key, is_read) = (u32::from(head), io.op == Op::Read);
        let submitted: Result<(), Rejected> = match io.op {
            Op::Write if io.range.pos < COPIED_BEFORE => {
                let Some(mut buf) = context.buffer(&self.member, io.range) else {
                    return Ok(Begun::NoMemory);
                };
                reader.copy_data(memory, &mut buf)?;
                context.submit_buffer(self.member.served(), number, key, (io, buf))
            }
            Op::Read | Op::Write => {
                let segments = reader.segments(memory)?;
                context.submit(self.member.served(), number, key, |engine, device, tag| {
                    // SAFETY: the segments are in regions that stay mapped while this queue has
                    // requests in flight; if the queue goes before them, its memory is leaked. The
                    // guest may access them meanwhile. The engine only moves their bytes, and decides
                    // nothing by them: the writes that it looks at are copied above.
                    unsafe { engine.submit_user_memory(device, io, segments, tag) }
                })
            }
            _ => context.submit(self.member.served(), number, key, |engine, device, tag| {
                engine.submit_no_data(device, io, tag)
            }),
        };
        if let Err(rejected) = submitted {
            // The slot was checked before: EAGAIN means that the engine's queue is stuck.
            return Ok(Begun::Ended(Err(status_of(rejected.error.errno()))));
        }
        self.member.quantum.read(io.range.len);
        self.member.quantum.count(io);
        if is_read && self.start.virtqueue.log().is_some() {
            let parts = reader.data().iter();
            answer.logged = parts.map(|part| (part.address.0, part.len.into())).collect();
        }
        if let Some(entry) = self.requests.get_mut(usize::from(head)) {
            *entry = Some(answer);
        }
        self.in_flight += 1;
        Ok(Begun::InFlight)
    }

    /// Tells the driver of the end of a request.
    fn end(&mut self, head: u16, status: GuestAddress, outcome: Outcome) -> Result<(), Malformed> {
        let (code, written) = match outcome {
            Ok(written) => (VIRTIO_BLK_S_OK, written),
            Err(code) => (code, 0),
        };
        let virtqueue = &mut self.start.virtqueue;
        if !virtqueue.memory().write(code as u8, status) {
            return Err(Malformed("a status is outside of the memory"));
        }
        if let Some(log) = virtqueue.log() {
            log.log.mark(status.0, 1);
        }
        virtqueue.finish(head, written.saturating_add(1))
    }

    /// A request, or a piece of one, has left the engine.
    #[inline]
    pub(super) fn complete<Q: IoQueue>(
        &mut self,
        number: usize,
        head: u16,
        outcome: Outcome,
        reader: &mut RequestReader,
        context: &mut LoopContext<Q>,
    ) -> Result<(), Malformed> {
        match self.finish(head, outcome)? {
            Some(rest) => self.go_on(number, head, rest, reader, context),
            None => Ok(()),
        }
    }

    /// Ends a request, unless there is a rest of it and all has gone well so far.
    fn finish(&mut self, head: u16, outcome: Outcome) -> Result<Option<Box<Rest>>, Malformed> {
        let entry = self.requests.get_mut(usize::from(head)).and_then(Option::take);
        let Some(InFlight { status, written, logged, rest }) = entry else { return Ok(None) };
        self.in_flight -= 1;
        if self.start.device.is_broken() {
            return Ok(None);
        }
        self.check_memory()?;
        if let Some(log) = self.start.virtqueue.log() {
            logged.iter().for_each(|(address, len)| log.log.mark(*address, *len));
        }
        if rest.is_some() && outcome.is_ok() {
            return Ok(rest);
        }
        self.end(head, status, outcome.map(|_| written))?;
        Ok(None)
    }

    /// Stops the device of the queue.
    #[cold]
    pub(super) fn break_down(&mut self, reason: Malformed) {
        self.start.device.break_down(reason.0);
        self.start.err.iter().for_each(signal);
    }

    /// Calls the driver, if it wants to be called. Returns whether the queue has stopped.
    pub(super) fn end_iteration(&mut self) -> bool {
        self.is_touched = false;
        let is_broken = self.start.device.is_broken();
        if !is_broken {
            match self.start.virtqueue.wants_call() {
                Ok(true) => self.start.call.iter().for_each(signal),
                Ok(false) => {}
                Err(reason) => self.break_down(reason),
            }
        }
        let is_done = is_broken || !self.start.virtqueue.has_again();
        matches!(self.phase, Phase::Stopping(_)) && self.in_flight == 0 && is_done
    }
}

/// The result of beginning a request.
enum Begun {
    /// It is answered with this.
    Ended(Outcome),
    InFlight,
    /// It has to be begun again when memory is free.
    NoMemory,
}
