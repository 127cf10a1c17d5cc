//! The exports of a server beside its first one, each with a device, an oracle and clients of its own.
//!
//! Invariant: the device of a neighbour never fails, so each of its requests has one right answer, whatever
//! happens to the others.

use std::sync::Arc;

use nowait::sim::{Random, SimDevice};
use nowait::{ByteRange, Error, Operation};
use nowait_server::{ExportError, Simulated};

use crate::clients::Clients;
use crate::image::{self, Image, Opening};
use crate::model::Violation;
use crate::oracle::Oracle;
use crate::scenario::Scenario;

/// An export beside the first one.
pub struct Neighbour {
    /// The name by which clients choose it.
    pub name: String,
    /// Its disk, and the requests of its clients.
    pub scenario: Scenario,
    /// The judge of its answers.
    pub oracle: Oracle,
    /// Its clients.
    pub clients: Clients,
    device: Arc<SimDevice>,
    image: Image,
    /// Threads that are gone, or were paused, may have left writes that are not durable.
    pub keeps_writes: bool,
    /// Garbage that the last power cut has left.
    rotten: Vec<ByteRange>,
}

fn failed(_: Violation) -> Error {
    Error::new(libc::EINVAL, Operation::SetUp)
}

impl Neighbour {
    /// Neighbour number `n` of the export of `scenario`.
    ///
    /// # Errors
    /// `EINVAL`: its disk could not be opened.
    pub fn open(scenario: &Scenario, n: u64) -> Result<Self, Error> {
        let (scenario, name) = (scenario.neighbour(n), format!("neighbour-{n}"));
        let (device, bytes) = image::device(&scenario).map_err(failed)?;
        let image = Image::open(&scenario, &device, Opening::Consistent).map_err(failed)?;
        device.set_faults(scenario.faults);
        let oracle = Oracle::new(&scenario, &device, &bytes);
        let (clients, rotten) = (Clients::new(&name), Vec::new());
        Ok(Self { name, scenario, oracle, clients, device, image, keeps_writes: false, rotten })
    }

    /// Opens its disk again, with no request in flight.
    ///
    /// # Errors
    /// Like [`Neighbour::open`].
    pub fn reopen(&mut self) -> Result<(), Error> {
        self.image =
            Image::open(&self.scenario, &self.device, Opening::Consistent).map_err(failed)?;
        self.oracle.opened();
        Ok(())
    }

    /// Adds it to each of the threads.
    ///
    /// # Errors
    /// [`ExportError::NameTaken`]: a thread has it.
    pub fn add_to(&self, threads: &mut [Simulated]) -> Result<(), ExportError> {
        let disk = &self.image.disk;
        threads.iter_mut().try_for_each(|thread| thread.add_export(&self.name, disk.clone()))
    }

    /// Restarts the random numbers of its device.
    pub fn reseed(&self, random: &mut Random) {
        self.device.reseed(random.next());
    }

    /// The power of its device fails; no answer counts any more.
    pub fn cut_power(&mut self) {
        self.rotten = self.device.cut_power();
    }

    /// The power is on again.
    ///
    /// # Errors
    /// The device has lost what was durable.
    pub fn power_on(&mut self) -> Result<(), Violation> {
        self.device.power_on();
        let bytes = self.contents();
        let rotten = std::mem::take(&mut self.rotten);
        self.oracle.power_cut(&bytes, &rotten).map_err(|wrong| self.wrong(&wrong))
    }

    /// Checks all of its content, with no request in flight.
    ///
    /// # Errors
    /// The bytes are not those that its clients have written, or a request of its device was invalid.
    pub fn check(&mut self) -> Result<(), Violation> {
        let (bytes, began) = (self.contents(), self.oracle.now());
        self.oracle.found(0, &bytes, began).map_err(|wrong| self.wrong(&wrong))?;
        self.violations()
    }

    /// The export was removed: all that was answered is durable, without a flush by its owner if the threads
    /// have served it from its begin.
    ///
    /// # Errors
    /// A flush has failed.
    pub fn removed(&mut self) -> Result<(), Violation> {
        if std::mem::take(&mut self.keeps_writes) {
            self.image.flush().map_err(|error| self.wrong(&error))?;
        }
        let now = self.oracle.now();
        self.oracle.closed(now)
    }

    /// Invalid requests of its device.
    ///
    /// # Errors
    /// There is one.
    pub fn violations(&self) -> Result<(), Violation> {
        match self.device.take_violations().first() {
            Some(what) => Err(self.wrong(what)),
            None => Ok(()),
        }
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.device.bytes() as usize];
        self.device.peek(0, 0, &mut bytes);
        bytes
    }

    /// A violation of its contract, with its name.
    pub fn wrong(&self, what: &impl std::fmt::Display) -> Violation {
        Violation::new(format!("{}: {what}", self.name))
    }
}
