//! The ways to ask a device: what a world needs to know of its engines, or of its server.
//!
//! Invariant: a front is opened on an image and lives no longer than that is open.
//! Knows: model, scenario, judge, image. Known by: engines, server, world.

use nowait::Error;
use nowait::sim::Random;

use crate::image::Image;
use crate::judge::{Flight, Judge};
use crate::model::{Time, Wrong};
use crate::scenario::{Action, Scenario};

/// What became of a front by a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Health {
    /// It goes on.
    Well,
    /// It has failed as a whole, as it may: it can only be opened anew.
    Down,
}

/// A way to ask a device.
pub trait Front: Sized {
    /// A front on `image`.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: a descriptor could not be made.
    fn open(image: &Image, scenario: &Scenario) -> Result<Self, Error>;

    /// It is opened anew, with nothing in flight.
    ///
    /// # Errors
    /// As for [`Front::open`].
    fn reopen(&mut self, image: &Image, scenario: &Scenario) -> Result<(), Error>;

    /// Does one thing: part `part` of the front, or a client of it.
    ///
    /// # Errors
    /// What is not as it may be.
    fn act(
        &mut self,
        action: Action,
        part: usize,
        judge: &mut Judge,
        random: &mut Random,
    ) -> Result<Health, Wrong>;

    /// Everybody does what there is left to do, but asks nothing more.
    ///
    /// # Errors
    /// What is not as it may be.
    fn settle(&mut self, judge: &mut Judge) -> Result<Health, Wrong>;

    /// Whether nothing is left to do.
    fn is_idle(&self) -> bool;

    /// Nobody waits for an answer any more; returns what is in flight.
    fn forget(&mut self) -> Vec<Flight>;

    /// As [`Front::settle`], when there is nobody who could be answered.
    ///
    /// # Errors
    /// As the device said.
    fn drain(&mut self) -> Result<(), Error>;

    /// When the oldest request in flight began.
    fn oldest(&self) -> Time;

    /// Requests that were made so far.
    fn requests(&self) -> u64;
}
