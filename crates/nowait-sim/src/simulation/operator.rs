//! Pauses and removals of the exports of a server, and other sizes of their disks.
//!
//! The steps are those of `nowait_daemon::disks::image_exchange`, and call the functions of `nowait_image` and the server
//! that it calls. Its own code needs what a simulation has not: images are opened by paths, and keep the locks of files
//! from one opening to the next; a pause waits on the thread of the request, while the server's threads run on others; and
//! an upgrade sends descriptors of sockets to another process.
//!
//! Invariant: the clients of an export that is paused find every byte and every answer after it.

use nowait::sim::{Faults, Random};
use nowait_server::SimChange;

use crate::image;
use crate::image::{Image, Opening};
use crate::model::Violation;
use crate::scenario::{Action, ExportsChange};
use crate::simulation::{MAX_ITERATIONS, Simulation, broken};
use crate::system_under_test::{Health, SystemUnderTest};

impl<S: SystemUnderTest> Simulation<S> {
    /// The disk of a qcow2 image has another size, of whole cells, after a pause.
    pub(super) fn resize(&mut self, random: &mut Random) -> Result<(), Violation> {
        let unit = whole_cells(self.scenario.grain);
        let most = self.scenario.device.bytes / unit;
        // A larger disk needs space for its tables.
        if most == 0 || self.scenario.device.capacity < u64::MAX {
            return Ok(());
        }
        let least = random.below(most);
        self.settle(random)?;
        self.pause(Some((1 + least + random.below(most - least)) * unit), random)
    }

    /// The export is removed by force, and added again: its clients are disconnected, and the image is
    /// closed.
    pub(super) fn remove(&mut self, random: &mut Random) -> Result<(), Violation> {
        if self.damaged.is_some() || self.oracle.has_shrunk() {
            return Ok(());
        }
        self.device.answer();
        let flights = self.system.forget();
        self.drain(random)?;
        flights.iter().for_each(|flight| self.oracle.unanswered(flight));
        self.device.set_faults(Faults::default());
        let began = self.oracle.now();
        let closed = match self.image.flush() {
            Ok(()) => self.image.close().unwrap_or(Ok(())),
            failed => failed,
        };
        match closed {
            Ok(()) => self.oracle.closed(began)?,
            Err(error) => {
                self.oracle.not_closed(&error)?;
                // The cached metadata of the image is lost.
                return self.cut(random);
            }
        }
        self.reopen_device(random)
    }

    /// The server leaves its clients, in whatever they are sending and receiving. The image is closed
    /// and reopened, with `size` bytes or sometimes below a new overlay; other threads go on with
    /// the clients.
    pub(super) fn pause(
        &mut self,
        size: Option<u64>,
        random: &mut Random,
    ) -> Result<(), Violation> {
        if self.damaged.is_some() || self.oracle.has_shrunk() || !self.system.begin_pause() {
            return Ok(());
        }
        self.device.answer();
        if !self.await_pause(random)? {
            return self.crash(random);
        }
        self.device.set_faults(Faults::default());
        let began = self.oracle.now();
        if let Err(error) = self.image.flush() {
            // It goes on as it is.
            self.oracle.not_closed(&error)?;
            return self.resume();
        }
        self.oracle.closed(began)?;
        if let Some(Err(error)) = self.image.close() {
            self.oracle.not_closed(&error)?;
            // The cached metadata of the image is lost.
            return self.cut(random);
        }
        if let Some(size) = size {
            image::resize(&self.device, size)?;
            self.oracle.resized(size);
            if random.below(4) == 0 {
                return self.cut(random);
            }
        } else if self.scenario.qcow2.is_some() && self.device.files() < 4 && random.below(2) == 0 {
            let size = self.oracle.size();
            image::stack(&self.scenario, &self.device, None, size, random)?;
            self.torn = false;
        }
        self.image.disk.give_back();
        let image = Image::open(&self.scenario, &self.device, Opening::Consistent)?;
        let closed = std::mem::replace(&mut self.image, image);
        let resumed = self.resume();
        drop(closed);
        resumed
    }

    /// One of several exports is changed, and the others go on.
    pub(super) fn change_exports(
        &mut self,
        change: ExportsChange,
        random: &mut Random,
    ) -> Result<(), Violation> {
        if !self.system.begin_change(change, random) {
            return Ok(());
        }
        self.device.answer();
        for _ in 0..MAX_ITERATIONS {
            if self.system.has_changed()? {
                return Ok(());
            }
            if self.system.settle_others(&mut self.oracle)? == Health::Down {
                return self.crash(random);
            }
            self.work(random)?;
        }
        Err(Violation::new(format!("never completes beside other exports: {change:?}")))
    }

    /// Runs until all clients were left. False if the system has failed meanwhile.
    fn await_pause(&mut self, random: &mut Random) -> Result<bool, Violation> {
        for _ in 0..MAX_ITERATIONS {
            if self.system.has_paused() && !self.is_writing_back.get() {
                return Ok(true);
            }
            for part in 0..self.scenario.parts as usize {
                let acted = self.system.act(Action::Wait, part, &mut self.oracle, random)?;
                if acted != Health::Well {
                    return Ok(false);
                }
            }
            self.work(random)?;
        }
        Err(Violation::new("a pause never begins".to_owned()))
    }

    /// Other parts of the system go on with the clients that were left.
    fn resume(&mut self) -> Result<(), Violation> {
        self.system.resume(&self.image, &self.scenario).map_err(broken)?;
        self.oracle.changed(SimChange::Unprotect);
        self.device.set_faults(self.scenario.faults);
        Ok(())
    }
}

/// The least common multiple of `grain` and a sector, in bytes: a size that a qcow2 disk can have, and
/// that cuts no cell.
fn whole_cells(grain: u64) -> u64 {
    let odd = grain >> grain.trailing_zeros();
    odd << grain.trailing_zeros().max(9)
}
