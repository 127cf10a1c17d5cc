//! The judge of a run: what a request may come to, whoever asked for it.
//!
//! Invariant: a request that has begun is ended here once: as done, failed, unanswered, or never
//! begun after all.
//! Rules of docs/contract.md: C17 and C55 (what may end short), C25 (the end of a device), C51 (a
//! flush after a failed one), C53 (a device that shrinks), and those of the model.
//! Knows: pattern, model, scenario. Known by: front, engines, client, server, world.

use std::sync::Arc;

use nowait::sim::{Fault, KICK_ERRNO, SimDevice, SimOptions};
use nowait::{Error, Flags, Op, Range, Span};

use crate::model::{Ending, Model, Time, Wrong};
use crate::pattern::{Value, ZERO};
use crate::scenario::{Asked, Scenario};

/// A request that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Flight {
    /// What was asked.
    pub asked: Asked,
    /// The part of its range that is on the device.
    pub inside: Range,
    /// When it began.
    pub began: Time,
}

/// The judge of one device.
pub struct Judge {
    device: Arc<SimDevice>,
    like: SimOptions,
    strict: bool,
    /// A hand-over may fail.
    kicks_fail: bool,
    /// An image leaks clusters when the power fails, and nobody gives them back.
    leaks: bool,
    /// Storage may run out.
    runs_out: bool,
    /// Bytes of the device, as whoever has opened it knows it.
    size: u64,
    /// Bytes of the device that are left.
    left: u64,
    model: Model,
    /// A flush has failed since the device was opened; when that was told.
    latched: Option<Time>,
    values: Value,
}

impl Judge {
    /// The judge of `device`, which holds `bytes`, and zeros behind them.
    #[must_use]
    pub fn new(scenario: &Scenario, device: &Arc<SimDevice>, bytes: &[u8]) -> Self {
        let like = scenario.device;
        let block = u64::from(like.align.read_offset);
        let unit = u64::from(like.unit);
        let mut model = Model::new(like.bytes, scenario.grain, block, unit);
        model.hold(bytes);
        Self {
            device: device.clone(),
            like,
            strict: scenario.config.strict,
            kicks_fail: scenario.faults.kicks > 0
                || matches!(scenario.faults.once, Some((_, Fault::Kick))),
            leaks: scenario.qcow2.is_some(),
            runs_out: like.capacity < u64::MAX,
            size: like.bytes,
            left: like.bytes,
            model,
            latched: None,
            values: ZERO,
        }
    }

    /// Bytes of the device, as whoever has opened it knows it.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What a request writes, if it does: what no other one wrote.
    pub fn value_for(&mut self, op: Op) -> Value {
        if op != Op::Write {
            return ZERO;
        }
        self.values += 1;
        self.values
    }

    /// A request begins that writes `value`. Nothing that is in flight began before `oldest`.
    pub fn begin(&mut self, asked: Asked, value: Value, oldest: Time) -> Flight {
        let Range { pos, .. } = asked.range;
        let from = pos.min(self.size);
        let inside = Range::new(from, asked.range.end().min(self.size) - from);
        let began = match asked.op.changes() {
            true => self.model.begin_write(inside, value, oldest),
            false => self.model.begin(),
        };
        Flight { asked, inside, began }
    }

    fn end_change(&mut self, flight: &Flight, ending: Ending) {
        if flight.asked.op.changes() {
            self.model.end_write(flight.inside, flight.began, ending);
        }
    }

    /// A request was refused before anything was done.
    pub fn never_began(&mut self, flight: &Flight) {
        self.end_change(flight, Ending::Never);
    }

    /// A request has ended, and nobody will ever tell how.
    pub fn unanswered(&mut self, flight: &Flight) {
        self.end_change(flight, Ending::Maybe);
        let flushes = flight.asked.op == Op::Flush || flight.asked.flags.has(Flags::DSYNC);
        if flushes && self.device.has_failed() {
            self.model.doubt();
        }
    }

    /// Whether it touches what the device has lost while it was open.
    fn is_behind_the_end(&self, flight: &Flight) -> bool {
        flight.inside.end() > self.left
    }

    /// Whether storage may run out under an image, which is not written to any more when its tables
    /// could not be: whether somebody has asked for that or not.
    fn stops(&self) -> bool {
        self.leaks && self.like.capacity < u64::MAX
    }

    /// Whether storage may have run out. An image takes `EINVAL` for the word of a device that cannot
    /// grow.
    fn is_full(&self) -> bool {
        let injected = |errno| self.device.has_injected(errno);
        self.runs_out || injected(libc::ENOSPC) || self.like.grows && injected(libc::EINVAL)
    }

    /// Whether a request may have ended short, or have been done more than once.
    #[must_use]
    pub fn is_disturbed(&self, flight: &Flight) -> bool {
        self.device.has_failed() || self.is_behind_the_end(flight)
    }

    /// A request has succeeded with `count` bytes. What it has found is for [`Judge::found`] and
    /// [`Judge::status`].
    ///
    /// # Errors
    /// It may not.
    pub fn done(&mut self, flight: &Flight, count: u64) -> Result<(), Wrong> {
        let Flight { asked, inside, began } = *flight;
        let fail = |what: &str| Err(Wrong::new(format!("{asked:?}: {what}: {count}")));
        let expected = if asked.op == Op::Flush { 0 } else { inside.len };
        if count > expected {
            return fail("more was done than there is");
        }
        let full = asked.op == Op::Write && self.runs_out;
        if count < expected && !full && !self.is_disturbed(flight) {
            return fail("cut short for no reason");
        }
        let durable = asked.flags.has(Flags::DSYNC);
        match asked.op {
            Op::Read | Op::Status => {}
            Op::Write | Op::Zero => {
                let part = Range::new(inside.pos, count);
                let rest = Range::new(inside.pos + count, inside.len - count);
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

    /// A request has failed with `errno`, and something of it may be done.
    ///
    /// # Errors
    /// It may not.
    pub fn failed(&mut self, flight: &Flight, errno: i32) -> Result<(), Wrong> {
        let Flight { asked, .. } = *flight;
        let like = self.like;
        let behind = self.is_behind_the_end(flight);
        let allowed = match errno {
            libc::EAGAIN => asked.flags.has(Flags::NOWAIT),
            // A server has no other word for a queue that is full and cannot be handed over.
            libc::EIO => behind || self.device.has_failed() || self.kicks_fail || self.stops(),
            libc::ENOSPC => behind || self.is_full(),
            libc::EOPNOTSUPP => {
                let unable = match asked.op {
                    Op::Discard => !like.punches,
                    Op::Zero => asked.flags.has(Flags::FAST_ZERO) && !(like.punches && like.zeroes),
                    _ => false,
                };
                unable || self.device.has_injected(errno)
            }
            libc::EINTR => false,
            _ => self.device.has_injected(errno),
        };
        self.unanswered(flight);
        if asked.op == Op::Flush && self.latched.is_none() {
            self.latched = Some(self.model.begin());
        }
        match allowed {
            true => Ok(()),
            false => Err(Wrong::new(format!("{asked:?} failed with errno {errno}"))),
        }
    }

    /// A server has answered `EINVAL`: the protocol has no other word for what it cannot do (NBD
    /// proto.md, "Error values").
    ///
    /// # Errors
    /// It may not.
    pub fn invalid(&mut self, flight: &Flight) -> Result<(), Wrong> {
        let unable = matches!(flight.asked.op, Op::Discard | Op::Zero);
        match () {
            () if self.device.has_injected(libc::EINVAL) => self.failed(flight, libc::EINVAL),
            () if unable || self.device.has_injected(libc::EOPNOTSUPP) => {
                self.failed(flight, libc::EOPNOTSUPP)
            }
            () => self.refused(flight, libc::EINVAL, true),
        }
    }

    /// A request was refused with `errno` before anything was done; by a server, if `whole`, which
    /// does no part of what reaches behind the end (C25).
    ///
    /// # Errors
    /// It may not.
    pub fn refused(&mut self, flight: &Flight, errno: i32, whole: bool) -> Result<(), Wrong> {
        let Flight { asked, inside, .. } = *flight;
        self.never_began(flight);
        let data = matches!(asked.op, Op::Read | Op::Write);
        let outside = match whole {
            true => inside.len < asked.range.len,
            false => inside.len == 0 && !matches!(asked.op, Op::Read | Op::Flush),
        };
        let allowed = match errno {
            libc::EINVAL if self.strict && data => true,
            libc::EINVAL => whole && outside && !matches!(asked.op, Op::Write | Op::Zero),
            libc::ENOSPC => outside && (!whole || matches!(asked.op, Op::Write | Op::Zero)),
            _ => false,
        };
        match allowed {
            true => Ok(()),
            false => Err(Wrong::new(format!("{asked:?} was refused with errno {errno}"))),
        }
    }

    /// Somebody who asked at `began` has found `bytes` at `pos`.
    ///
    /// # Errors
    /// Bytes that could not be there.
    pub fn found(&mut self, pos: u64, bytes: &[u8], began: Time) -> Result<(), Wrong> {
        self.model.check(pos, bytes, began)
    }

    /// A status request was answered with `spans`, from its start on.
    ///
    /// # Errors
    /// A hole where there is none, or spans that cannot be those of its range.
    pub fn status(
        &mut self,
        flight: &Flight,
        spans: impl IntoIterator<Item = Span>,
    ) -> Result<(), Wrong> {
        let Flight { inside, began, .. } = *flight;
        let mut pos = inside.pos;
        for span in spans {
            if span.hole {
                self.model.check_zeros(Range::new(pos, span.len), began)?;
            }
            pos += span.len;
        }
        if pos > inside.end() || pos == inside.pos && inside.len > 0 {
            return Err(Wrong::new(format!("the status of {inside:?} ends at byte {pos}")));
        }
        Ok(())
    }

    /// Whether a queue may have failed with `error` as a whole.
    #[must_use]
    pub fn expects(&self, error: &Error) -> bool {
        self.kicks_fail && error.errno() == KICK_ERRNO
    }

    /// Whether the device has lost a part since it was opened.
    #[must_use]
    pub fn has_shrunk(&self) -> bool {
        self.left < self.size
    }

    /// A moment from which on somebody looks at what is there.
    pub fn now(&mut self) -> Time {
        self.model.begin()
    }

    /// The device has lost all but its first `bytes`. Nothing in flight began before `oldest`.
    pub fn shrunk(&mut self, bytes: u64, oldest: Time) {
        self.left = bytes;
        let lost = Range::new(bytes, self.size.saturating_sub(bytes));
        // Who remembers a hole there goes on finding one; who has read before is told later.
        let began = self.model.begin_write(lost, ZERO, oldest);
        self.model.end_write(lost, began, Ending::Maybe);
    }

    /// The device was opened anew, with nothing in flight.
    pub fn opened(&mut self) {
        self.latched = None;
        self.size = self.left;
        self.model.shrink(self.size);
    }

    /// An image was closed: what was done before `began` stays (C49).
    ///
    /// # Errors
    /// A flush had failed.
    pub fn closed(&mut self, began: Time) -> Result<(), Wrong> {
        if self.latched.is_some() {
            return Err(Wrong::new("C51: an image is closed after a failed flush".to_owned()));
        }
        self.model.end_flush(began);
        Ok(())
    }

    /// An image could not be closed.
    ///
    /// # Errors
    /// It could.
    pub fn not_closed(&self, error: &Error) -> Result<(), Wrong> {
        let errno = error.errno();
        let allowed = match errno {
            libc::EIO => self.device.has_failed() || self.stops(),
            libc::ENOSPC => self.is_full(),
            _ => self.device.has_injected(errno),
        };
        match allowed {
            true => Ok(()),
            false => Err(Wrong::new(format!("closing failed: {error}"))),
        }
    }

    /// The power has failed, and everything in flight has ended.
    ///
    /// # Errors
    /// Bytes that a power cut could not leave.
    pub fn power_cut(&mut self, bytes: &[u8], rotten: &[Range]) -> Result<(), Wrong> {
        self.runs_out |= self.leaks;
        self.model.power_cut(bytes, rotten)
    }
}
