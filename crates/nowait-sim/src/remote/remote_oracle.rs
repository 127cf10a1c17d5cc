//! The oracle of a storage behind a network: which ends its requests may have.
//!
//! Invariant: each request that has begun is closed here once. Rules of docs/contract.md: C17, C18, C41,
//! C49, C51 and C52, as those of the model; and those of docs/remote.md: an error has a reason, and a
//! storage that has given up a change lets no flush succeed.

use nowait::Op;
use nowait_nbd as nbd;
use nowait_remote::SimNbdEnd;

use crate::model::{Ending, Model, Time, Violation};
use crate::pattern;
use crate::pattern::{Value, ZERO};
use crate::remote::remote_scenario::{RemoteRequest, RemoteScenario};
use crate::remote::volatile_disk::UNIT;

/// A request that has begun.
struct Flight {
    tag: u64,
    request: RemoteRequest,
    began: Time,
}

/// Why a storage may fail requests as it is now.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outlook {
    /// The export is another one, or requests have waited long enough.
    pub(super) is_gone: bool,
    /// It has given up a change that had completed.
    pub(super) has_lost: bool,
}

/// The oracle.
pub(super) struct RemoteOracle {
    model: Model,
    flights: Vec<Flight>,
    /// When the server told which errno last.
    errors: Vec<(i32, Time)>,
    /// The storage had given up a change before.
    has_lost: bool,
    values: Value,
    tags: u64,
}

impl RemoteOracle {
    /// The oracle of a disk of zeros.
    pub(super) fn new(scenario: &RemoteScenario) -> Self {
        let (size, grain) = (scenario.export.size, scenario.grain);
        Self {
            model: Model::new(size, grain, UNIT, UNIT),
            flights: Vec::new(),
            errors: Vec::new(),
            has_lost: false,
            values: ZERO,
            tags: 0,
        }
    }

    /// The requests in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// One of the requests in flight.
    pub(super) fn first(&self) -> Option<RemoteRequest> {
        self.flights.first().map(|flight| flight.request)
    }

    /// Requests so far.
    pub(super) fn requests(&self) -> u64 {
        self.tags
    }

    /// A request begins. Returns its tag, and the data of a write.
    pub(super) fn begin(&mut self, request: RemoteRequest) -> (u64, Vec<u8>) {
        let RemoteRequest { op, range, .. } = request;
        let oldest = self.flights.iter().map(|flight| flight.began).min().unwrap_or(Time::MAX);
        let mut data = Vec::new();
        let began = match op {
            Op::Write => {
                self.values += 1;
                data.resize(range.len as usize, 0);
                pattern::fill(&mut data, range.pos, self.values);
                self.model.begin_write(range, self.values, oldest)
            }
            Op::Zero | Op::Discard => self.model.begin_write(range, ZERO, oldest),
            Op::Read | Op::Flush | Op::Status => self.model.begin(),
        };
        self.tags += 1;
        self.flights.push(Flight { tag: self.tags, request, began });
        (self.tags, data)
    }

    /// The server tells an NBD error.
    pub(super) fn told(&mut self, error: u32) {
        let errno = match error {
            nbd::ENOSPC => libc::ENOSPC,
            nbd::ESHUTDOWN => libc::ESHUTDOWN,
            _ => libc::EIO,
        };
        let now = self.model.begin();
        self.errors.retain(|(other, _)| *other != errno);
        self.errors.push((errno, now));
    }

    /// The server has lost what was not durable, and does not know it any more. A storage that has been
    /// told makes its changes again; those that have failed are in doubt.
    pub(super) fn doubt(&mut self) {
        self.model.doubt();
    }

    /// Whether the server has told `errno` since `began`.
    pub(super) fn was_told(&self, errno: i32, began: Time) -> bool {
        self.errors.iter().any(|&(other, when)| other == errno && when > began)
    }

    /// Checks the end of a request. Returns whether it says that the server has answered.
    pub(super) fn end(&mut self, end: SimNbdEnd, outlook: Outlook) -> Result<bool, Violation> {
        let Some(at) = self.flights.iter().position(|flight| flight.tag == end.tag) else {
            return Err(Violation::new(format!("C41: request {} ends again", end.tag)));
        };
        let flight = self.flights.swap_remove(at);
        match end.result {
            Ok(()) => self.done(&flight, &end, outlook),
            Err(errno) => self.failed(&flight, errno, outlook).map(|()| false),
        }
    }

    fn done(
        &mut self,
        flight: &Flight,
        end: &SimNbdEnd,
        outlook: Outlook,
    ) -> Result<bool, Violation> {
        let Flight { request: RemoteRequest { op, range, durable }, began, .. } = *flight;
        match op {
            Op::Read if end.data.len() as u64 != range.len => {
                let len = end.data.len();
                Err(Violation::new(format!("C17: {range:?} is cut short at {len}")))
            }
            Op::Read if outlook.has_lost => Ok(true),
            Op::Read => self.model.check(range.pos, &end.data, began).map(|()| true),
            Op::Status => self.status(flight, end, outlook).map(|()| false),
            Op::Write | Op::Zero | Op::Discard => {
                self.model.end_write(range, began, Ending::Done { durable });
                Ok(true)
            }
            Op::Flush if self.has_lost => {
                Err(Violation::new("C51: a flush after a change was given up".to_owned()))
            }
            Op::Flush => {
                self.model.end_flush(began);
                Ok(false)
            }
        }
    }

    fn status(&self, flight: &Flight, end: &SimNbdEnd, outlook: Outlook) -> Result<(), Violation> {
        let range = flight.request.range;
        let mut pos = range.pos;
        for extent in &end.extents {
            if extent.hole && !outlook.has_lost {
                let part = nowait::ByteRange::new(pos, extent.len);
                self.model.check_zeros(part, flight.began)?;
            }
            pos += extent.len;
        }
        match pos > range.pos && pos <= range.end() {
            true => Ok(()),
            false => Err(Violation::new(format!("the status of {range:?} ends at {pos}"))),
        }
    }

    fn failed(&mut self, flight: &Flight, errno: i32, outlook: Outlook) -> Result<(), Violation> {
        let Flight { request, began, .. } = *flight;
        let told = self.was_told(errno, began);
        let flushes = request.op == Op::Flush || request.durable;
        if request.op.changes() {
            self.model.end_write(request.range, began, Ending::Wavers);
        }
        if flushes && told {
            // The engine above lets no later flush succeed (C51).
            self.model.doubt();
        }
        let waited = errno == libc::EIO && outlook.is_gone;
        let latched = errno == libc::EIO && outlook.has_lost && flushes;
        match told || waited || latched {
            true => Ok(()),
            false => Err(Violation::new(format!("{request:?} failed with errno {errno}"))),
        }
    }

    /// The storage was polled, and its ends were checked.
    ///
    /// # Errors
    /// It has given up a change for no reason, or takes it back.
    pub(super) fn polled(&mut self, outlook: Outlook) -> Result<(), Violation> {
        if self.has_lost && !outlook.has_lost {
            return Err(Violation::new("C51: a change was given up, and is not".to_owned()));
        }
        if outlook.has_lost && !self.has_lost && self.errors.is_empty() {
            return Err(Violation::new("a change was given up without an error".to_owned()));
        }
        self.has_lost = outlook.has_lost;
        Ok(())
    }

    /// The storage and the server have died; `bytes` are on the disk.
    ///
    /// # Errors
    /// What was durable is not there.
    pub(super) fn cut(&mut self, bytes: &[u8]) -> Result<(), Violation> {
        for flight in std::mem::take(&mut self.flights) {
            if flight.request.op.changes() {
                self.model.end_write(flight.request.range, flight.began, Ending::Maybe);
            }
        }
        self.errors.clear();
        self.has_lost = false;
        self.model.power_cut(bytes, &[])
    }
}
