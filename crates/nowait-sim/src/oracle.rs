//! The oracle of a run: which results a request may have, whether it came from an engine or a
//! server.
//!
//! Invariant: each request that has begun is closed here once: as done, failed, unanswered, or never
//! begun. Rules of docs/contract.md: C17 and C55 (short transfers), C25 (the end of a device), C51
//! (a flush after a failed one), C53 (a device that shrinks), and those of the model.

use std::sync::Arc;

use nowait::sim::{Fault, SUBMIT_ERRNO, SimDevice, SimOptions};
use nowait::{ByteRange, Error, ExtentStatus, Flags, Op};
use nowait_server::SimChange;

use crate::model::{Ending, Model, Time, Violation};
use crate::pattern::{Value, ZERO};
use crate::protection::Protection;
use crate::scenario::{RequestSpec, Scenario};

/// A request that has begun.
#[derive(Clone, Copy, Debug)]
pub struct InFlight {
    /// The request.
    pub spec: RequestSpec,
    /// The part of its range that is on the device.
    pub inside: ByteRange,
    /// When it began.
    pub began: Time,
}

/// The oracle of one device.
pub struct Oracle {
    device: Arc<SimDevice>,
    model_kind: SimOptions,
    strict: bool,
    /// Handing requests to the queue may fail.
    submits_fail: bool,
    /// The disk is a qcow2 image: a power cut leaks clusters, which are not freed again.
    leaks: bool,
    /// Storage may run out.
    runs_out: bool,
    /// The metadata of the image is damaged so that changes of the disk may fail.
    refuses_changes: bool,
    protection: Protection,
    /// Bytes of the device as its current user opened it.
    size: u64,
    /// Bytes of the device after it has shrunk.
    left: u64,
    model: Model,
    /// The time of the first failed flush since the device was opened.
    latched: Option<Time>,
    values: Value,
}

impl Oracle {
    /// The oracle of `device`, which holds `bytes`, followed by zeros.
    pub fn new(scenario: &Scenario, device: &Arc<SimDevice>, bytes: &[u8]) -> Self {
        let device_options = scenario.device;
        let block = u64::from(device_options.align.read_offset);
        let unit = u64::from(device_options.unit);
        let mut model = Model::new(device_options.bytes, scenario.grain, block, unit);
        model.hold(ByteRange::new(0, bytes.len() as u64), bytes);
        Self {
            device: device.clone(),
            model_kind: device_options,
            strict: scenario.config.strict,
            submits_fail: scenario.faults.submit_errors > 0
                || matches!(scenario.faults.once, Some((_, Fault::SubmitError))),
            leaks: scenario.qcow2.is_some(),
            runs_out: device_options.capacity < u64::MAX,
            refuses_changes: false,
            protection: Protection::default(),
            size: device_options.bytes,
            left: device_options.bytes,
            model,
            latched: None,
            values: ZERO,
        }
    }

    /// Bytes of the device as its current user opened it.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The value for a request to write: unique for a write, [`ZERO`] for others.
    pub fn value_for(&mut self, op: Op) -> Value {
        if op != Op::Write {
            return ZERO;
        }
        self.values += 1;
        self.values
    }

    /// Records the begin of a request that writes `value`. No request in flight began before
    /// `oldest`.
    pub fn begin(&mut self, spec: RequestSpec, value: Value, oldest: Time) -> InFlight {
        let ByteRange { pos, .. } = spec.range;
        let from = pos.min(self.size);
        let inside = ByteRange::new(from, spec.range.end().min(self.size) - from);
        let began = match spec.op.changes() {
            true => self.model.begin_write(inside, value, oldest),
            false => self.model.begin(),
        };
        InFlight { spec, inside, began }
    }

    fn end_change(&mut self, flight: &InFlight, ending: Ending) {
        if flight.spec.op.changes() {
            self.model.end_write(flight.inside, flight.began, ending);
        }
    }

    /// A request was refused and had no effect.
    pub fn never_began(&mut self, flight: &InFlight) {
        self.end_change(flight, Ending::Never);
    }

    /// A request has completed with an unknown result.
    pub fn unanswered(&mut self, flight: &InFlight) {
        self.end_change(flight, Ending::Maybe);
        self.doubt_flush(flight);
    }

    /// The server has died with this request in flight; the next server does it again.
    pub fn interrupted(&mut self, flight: &InFlight) {
        self.doubt_flush(flight);
    }

    /// Like `check`, for an answer of a server that has died since: a failed flush does not latch the
    /// device that was opened after it (C51).
    ///
    /// # Errors
    /// As `check`.
    pub fn of_dead_server(
        &mut self,
        check: impl FnOnce(&mut Self) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let latched = self.latched.take();
        let checked = check(self);
        self.latched = latched;
        checked
    }

    /// A flush that has failed, or may have, leaves what is durable in doubt.
    fn doubt_flush(&mut self, flight: &InFlight) {
        let flushes = flight.spec.op == Op::Flush || flight.spec.flags.contains(Flags::DSYNC);
        if flushes && self.device.has_failed() {
            self.model.doubt();
        }
    }

    /// The server may have flushed the device by itself.
    pub fn flushed_by_server(&mut self) {
        if self.device.has_failed() {
            self.model.doubt();
        }
    }

    /// Whether the request reaches into a part that the device has lost since it began.
    pub fn is_behind_the_end(&self, flight: &InFlight) -> bool {
        flight.inside.end() > self.left
    }

    /// Whether storage may run out under an image. After a failed write of its tables, the image
    /// accepts no more writes, even if no request caused the failed write.
    fn stops(&self) -> bool {
        self.leaks && self.model_kind.capacity < u64::MAX
    }

    /// Whether storage may have run out. An image treats `EINVAL` as the answer of a device that
    /// cannot grow.
    fn is_full(&self) -> bool {
        let injected = |errno| self.device.has_injected(errno);
        self.runs_out || injected(libc::ENOSPC) || self.model_kind.grows && injected(libc::EINVAL)
    }

    /// Whether a request may have been cut short, or executed more than once.
    pub fn is_disturbed(&self, flight: &InFlight) -> bool {
        self.device.has_failed() || self.is_behind_the_end(flight)
    }

    /// Checks the success of a request with `count` bytes. Its data is checked by [`Oracle::found`]
    /// and [`Oracle::status`].
    pub fn done(&mut self, flight: &InFlight, count: u64) -> Result<(), Violation> {
        let InFlight { spec, inside, began } = *flight;
        let fail = |what: &str| Err(Violation::new(format!("{spec:?}: {what}: {count}")));
        if spec.op.changes() && self.protection.refuses(began) {
            return fail("a change of a read-only export");
        }
        let expected = if spec.op == Op::Flush { 0 } else { inside.len };
        if count > expected {
            return fail("more was done than there is");
        }
        let full = spec.op == Op::Write && (self.runs_out || self.refuses_changes);
        if count < expected && !full && !self.is_disturbed(flight) {
            return fail("cut short for no reason");
        }
        let durable = spec.flags.contains(Flags::DSYNC);
        match spec.op {
            Op::Read | Op::Status => {}
            Op::Write | Op::Zero => {
                let part = ByteRange::new(inside.pos, count);
                let rest = ByteRange::new(inside.pos + count, inside.len - count);
                self.model.end_write(part, began, Ending::Done { durable });
                self.model.end_write(rest, began, Ending::Maybe);
            }
            Op::Discard => self.model.end_write(inside, began, Ending::Maybe),
            Op::Flush => {
                if self.latched.is_some_and(|when| began > when) {
                    return fail("C51: a flush after a failed one");
                }
                self.model.end_flush(began);
            }
        }
        Ok(())
    }

    /// Checks the failure of a request with `errno`; it may be done in part.
    pub fn failed(&mut self, flight: &InFlight, errno: i32) -> Result<(), Violation> {
        let InFlight { spec, .. } = *flight;
        let device_options = self.model_kind;
        let behind = self.is_behind_the_end(flight);
        let allowed = match errno {
            libc::EAGAIN => spec.flags.contains(Flags::NOWAIT),
            // A server reports a full queue that cannot be submitted as EIO.
            libc::EIO => {
                let damaged = self.refuses_changes && spec.op.changes();
                let stops = self.submits_fail || self.stops();
                behind || damaged || self.device.has_failed() || stops
            }
            libc::ENOSPC => behind || self.is_full(),
            libc::EOPNOTSUPP => {
                let unable = match spec.op {
                    Op::Discard => !device_options.punches,
                    Op::Zero => {
                        spec.flags.contains(Flags::FAST_ZERO)
                            && !(device_options.punches && device_options.zeroes)
                    }
                    _ => false,
                };
                unable || self.device.has_injected(errno)
            }
            libc::EINTR => false,
            _ => self.device.has_injected(errno),
        };
        self.unanswered(flight);
        if spec.op == Op::Flush && self.latched.is_none() {
            self.latched = Some(self.model.begin());
        }
        match allowed {
            true => Ok(()),
            false => Err(Violation::new(format!("{spec:?} failed with errno {errno}"))),
        }
    }

    /// Checks an answer that says only that the request has failed. `outside`: it reaches beyond the
    /// end of the device.
    pub fn io_error(&mut self, flight: &InFlight, outside: bool) -> Result<(), Violation> {
        let op = flight.spec.op;
        let data = matches!(op, Op::Read | Op::Write);
        match () {
            () if outside && matches!(op, Op::Write | Op::Zero) => {
                self.refused(flight, libc::ENOSPC, true)
            }
            () if outside => self.refused(flight, libc::EINVAL, true),
            () if self.strict && data => {
                // Refused, or begun and failed: the answer does not tell.
                self.unanswered(flight);
                Ok(())
            }
            () if op.changes() && self.protection.may_refuse(flight.began) => {
                // The same.
                self.unanswered(flight);
                Ok(())
            }
            () if self.is_full() => self.failed(flight, libc::ENOSPC),
            () => self.failed(flight, libc::EIO),
        }
    }

    /// Checks the answer `EINVAL` of a server: the protocol has no other value for an unsupported
    /// operation (NBD proto.md, "Error values").
    pub fn invalid(&mut self, flight: &InFlight) -> Result<(), Violation> {
        let unable = matches!(flight.spec.op, Op::Discard | Op::Zero);
        match () {
            () if self.device.has_injected(libc::EINVAL) => self.failed(flight, libc::EINVAL),
            () if unable || self.device.has_injected(libc::EOPNOTSUPP) => {
                self.failed(flight, libc::EOPNOTSUPP)
            }
            () => self.refused(flight, libc::EINVAL, true),
        }
    }

    /// Checks the answer `EPERM` of a server: the export is read-only. `again`: a server that has died
    /// since may have done the request before.
    pub fn not_permitted(&mut self, flight: &InFlight, again: bool) -> Result<(), Violation> {
        let may_refuse = flight.spec.op.changes() && self.protection.may_refuse(flight.began);
        match self.device.has_injected(libc::EPERM) {
            true => self.failed(flight, libc::EPERM),
            false if again && may_refuse => {
                self.unanswered(flight);
                Ok(())
            }
            false => self.refused(flight, libc::EPERM, true),
        }
    }

    /// The export is changed.
    pub fn changed(&mut self, change: SimChange) {
        let now = self.model.begin();
        self.protection.change(change, now);
    }

    /// Checks the refusal of a request with `errno`; it had no effect. `whole`: the refusal is a
    /// server's, which executes no part of a request that reaches beyond the end (C25).
    pub fn refused(&mut self, flight: &InFlight, errno: i32, whole: bool) -> Result<(), Violation> {
        let InFlight { spec, inside, .. } = *flight;
        self.never_began(flight);
        let data = matches!(spec.op, Op::Read | Op::Write);
        let outside = match whole {
            true => inside.len < spec.range.len,
            false => inside.len == 0 && !matches!(spec.op, Op::Read | Op::Flush),
        };
        let allowed = match errno {
            libc::EINVAL if self.strict && data => true,
            libc::EINVAL => whole && outside && !matches!(spec.op, Op::Write | Op::Zero),
            libc::ENOSPC => outside && (!whole || matches!(spec.op, Op::Write | Op::Zero)),
            libc::EPERM => spec.op.changes() && self.protection.may_refuse(flight.began),
            _ => false,
        };
        match allowed {
            true => Ok(()),
            false => Err(Violation::new(format!("{spec:?} was refused with errno {errno}"))),
        }
    }

    /// Checks the `bytes` that a request begun at `began` read at `pos`.
    ///
    /// # Errors
    /// The bytes are not a possible content.
    pub fn found(&mut self, pos: u64, bytes: &[u8], began: Time) -> Result<(), Violation> {
        self.model.check(pos, bytes, began)
    }

    /// Checks the `extents` that answer a status request, from its start on.
    ///
    /// # Errors
    /// A hole where data is, or extents that do not fit the range.
    pub fn status(
        &mut self,
        flight: &InFlight,
        extents: impl IntoIterator<Item = ExtentStatus>,
    ) -> Result<(), Violation> {
        let InFlight { inside, began, .. } = *flight;
        let mut pos = inside.pos;
        for extent in extents {
            if extent.hole {
                self.model.check_zeros(ByteRange::new(pos, extent.len), began)?;
            }
            pos += extent.len;
        }
        if pos > inside.end() || pos == inside.pos && inside.len > 0 {
            return Err(Violation::new(format!("the status of {inside:?} ends at byte {pos}")));
        }
        Ok(())
    }

    /// Whether a queue may have failed with `error` as a whole.
    pub fn expects(&self, error: &Error) -> bool {
        self.submits_fail && error.errno() == SUBMIT_ERRNO
    }

    /// Whether the device has lost a part since it was opened.
    pub fn has_shrunk(&self) -> bool {
        self.left < self.size
    }

    /// The begin time of a read of the content.
    pub fn now(&mut self) -> Time {
        self.model.begin()
    }

    /// The device has lost all but its first `bytes`. No request in flight began before `oldest`.
    pub fn shrunk(&mut self, bytes: u64, oldest: Time) {
        self.left = bytes;
        let lost = ByteRange::new(bytes, self.size.saturating_sub(bytes));
        // A cached hole there still reads as zeros, and a read that was executed before may
        // complete later.
        let began = self.model.begin_write(lost, ZERO, oldest);
        self.model.end_write(lost, began, Ending::Maybe);
    }

    /// The disk has `size` bytes, whole cells. No request is in flight, and all content is durable.
    pub fn resized(&mut self, size: u64) {
        (self.size, self.left) = (size, size);
        self.model.shrink(size);
        self.model.grow(size);
    }

    /// The device was reopened, with no request in flight.
    pub fn opened(&mut self) {
        let now = self.model.begin();
        self.protection.lift(now);
        self.latched = None;
        self.size = self.left;
        self.model.shrink(self.size);
    }

    /// Sets whether the metadata of the image is damaged so that changes of the disk may fail.
    pub fn set_refuses_changes(&mut self, refuses_changes: bool) {
        self.refuses_changes = refuses_changes;
    }

    /// The damage of an image has changed `range` of the disk, whose bytes are `disk` now. No
    /// request is in flight, and all content is durable.
    pub fn replaced(&mut self, range: ByteRange, disk: &[u8]) {
        self.model.hold(range, disk);
    }

    /// Checks the close of an image: writes that completed before `began` are durable (C49).
    ///
    /// # Errors
    /// A flush had failed before.
    pub fn closed(&mut self, began: Time) -> Result<(), Violation> {
        if self.latched.is_some() {
            return Err(Violation::new("C51: an image is closed after a failed flush".to_owned()));
        }
        self.model.end_flush(began);
        Ok(())
    }

    /// Checks the failure to close an image.
    ///
    /// # Errors
    /// The failure has no reason.
    pub fn not_closed(&self, error: &Error) -> Result<(), Violation> {
        let errno = error.errno();
        let allowed = match errno {
            libc::EIO => self.device.has_failed() || self.stops(),
            libc::ENOSPC => self.is_full(),
            _ => self.device.has_injected(errno),
        };
        match allowed {
            true => Ok(()),
            false => Err(Violation::new(format!("closing failed: {error}"))),
        }
    }

    /// Checks the content after a power cut; no request is in flight.
    ///
    /// # Errors
    /// A power cut cannot leave these bytes.
    pub fn power_cut(&mut self, bytes: &[u8], rotten: &[ByteRange]) -> Result<(), Violation> {
        self.runs_out |= self.leaks;
        self.model.power_cut(bytes, rotten)
    }
}
