//! The interface between the simulation and its engines or its server.
//!
//! Invariant: a system is opened on an image and is dropped before the image is closed.

use nowait::Error;
use nowait::sim::Random;
use nowait_server::{SimChange, SimThread};

use crate::image::Image;
use crate::model::{Time, Violation};
use crate::oracle::{InFlight, Oracle};
use crate::scenario::{Action, ExportsChange, Scenario};

/// The state of a system after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It continues.
    Well,
    /// It has failed as a whole, which the faults allow: it must be reopened.
    Down,
    /// It has died, and its clients go on when it is reopened.
    Dead,
}

impl Health {
    /// The state of a server after an iteration of a thread, which ends when its queue fails; the
    /// server ends with the thread.
    ///
    /// # Errors
    /// A violation of the contract: no fault allows the error.
    pub fn after_iteration(
        result: Result<(), Error>,
        oracle: &mut Oracle,
    ) -> Result<Self, Violation> {
        match result {
            Ok(()) => Ok(Self::Well),
            Err(error) if oracle.expects(&error) => Ok(Self::Down),
            Err(error) => Err(Violation::new(format!("a thread has failed: {error}"))),
        }
    }
}

/// Runs an iteration of thread number `part` of a server.
pub fn run_iteration(
    threads: &mut [impl SimThread],
    part: usize,
    waits: bool,
    oracle: &mut Oracle,
) -> Result<Health, Violation> {
    let Some(thread) = threads.get_mut(part) else { return Ok(Health::Well) };
    Health::after_iteration(thread.run_once(waits), oracle)
}

/// An operator changes the export of a server's threads.
pub fn change_all(threads: &mut [impl SimThread], change: SimChange) {
    threads.iter_mut().for_each(|thread| thread.change(change));
}

/// All threads of a server, which no limits hold up, make progress; answers are discarded.
pub fn drain_all(threads: &mut [impl SimThread]) -> Result<(), Error> {
    change_all(threads, SimChange::LiftLimits);
    threads.iter_mut().try_for_each(|thread| thread.run_once(true))
}

/// A system that serves requests on a device.
pub trait SystemUnderTest: Sized {
    /// Opens a system on `image`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be created.
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error>;

    /// Reopens the system, with no request in flight.
    ///
    /// # Errors
    /// As for [`SystemUnderTest::open`].
    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error>;

    /// Has all parts take no more requests and leave their clients, which go on after
    /// [`SystemUnderTest::resume`]. Returns whether the system can do that.
    fn begin_pause(&mut self) -> bool {
        false
    }

    /// Whether all parts have left their clients.
    fn has_paused(&mut self) -> bool {
        true
    }

    /// Other parts serve the clients that were left, on `image`.
    ///
    /// # Errors
    /// As for [`SystemUnderTest::open`].
    fn resume(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error> {
        self.reopen(image, scenario)
    }

    /// Begins to change one of several exports. Returns whether the system has several.
    fn begin_change(&mut self, _change: ExportsChange, _random: &mut Random) -> bool {
        false
    }

    /// Whether the change of an export has been made, and the requests of all others were answered.
    fn has_changed(&mut self) -> Result<bool, Violation> {
        Ok(true)
    }

    /// All parts and the clients of all exports that are not paused make progress.
    fn settle_others(&mut self, oracle: &mut Oracle) -> Result<Health, Violation> {
        self.settle(oracle)
    }

    /// The power of devices of its own fails, with that of the first one.
    fn cut_power(&mut self) {}

    /// It is on again, with no request in flight.
    ///
    /// # Errors
    /// A device has lost what was durable.
    fn power_on(&mut self) -> Result<(), Violation> {
        Ok(())
    }

    /// Checks all content of devices of its own.
    fn check(&mut self) -> Result<(), Violation> {
        Ok(())
    }

    /// Executes one action of part `part` of the system, or of a client.
    fn act(
        &mut self,
        action: Action,
        part: usize,
        oracle: &mut Oracle,
        random: &mut Random,
    ) -> Result<Health, Violation>;

    /// All parts and clients make progress, without new requests.
    fn settle(&mut self, oracle: &mut Oracle) -> Result<Health, Violation>;

    /// Whether no work is left.
    fn is_idle(&self) -> bool;

    /// Discards the answers to all requests in flight, and returns these requests.
    fn forget(&mut self) -> Vec<InFlight>;

    /// Like [`SystemUnderTest::settle`], but all answers are discarded.
    ///
    /// # Errors
    /// An error of the device.
    fn drain(&mut self) -> Result<(), Error>;

    /// The begin time of the oldest request in flight; `Time::MAX` if there is none.
    fn oldest(&self) -> Time;

    /// The number of requests so far.
    fn requests(&self) -> u64;
}
