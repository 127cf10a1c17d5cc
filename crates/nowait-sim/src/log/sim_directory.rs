//! A directory of simulated files, whose names and bytes a power cut may undo.
//!
//! Invariant: of the changes of names that no sync has made durable, a power cut leaves some first ones, as
//! a file system's journal does. A process that was killed or lost its power changes nothing any more.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nowait::sim::{Faults, Random, SimDevice, SimOptions, yield_now};
use nowait::{
    ByteRange, Error, ExtentStatus, Flags, LogDirectory, OpenOptions, Operation, SimStorage,
    Storage, StorageProperties,
};

use crate::log::log_scenario::LogScenario;

/// The errnos of changes of names.
const ERRNOS: [i32; 2] = [libc::EIO, libc::ENOSPC];

type Files = BTreeMap<String, Arc<SimDevice>>;

struct State {
    files: Files,
    /// The durable ones, and all of them after each later change.
    durable: Files,
    changes: Vec<Files>,
    /// Every file that was made, for their faults and power.
    devices: Vec<Arc<SimDevice>>,
    random: Random,
    device: SimOptions,
    faults: Faults,
    name_errors: u16,
    most_files: usize,
    is_off: bool,
}

/// The directory, for one process after the other.
pub(super) struct SimDirectory {
    state: Mutex<State>,
    /// The number of the process that lives.
    process: AtomicU64,
}

/// The directory as a process sees it.
pub(super) struct ProcessDirectory {
    directory: Arc<SimDirectory>,
    process: u64,
}

/// A file that a process has open.
struct ProcessFile {
    directory: Arc<SimDirectory>,
    process: u64,
    storage: SimStorage,
}

impl SimDirectory {
    /// An empty directory.
    pub(super) fn new(scenario: &LogScenario) -> Self {
        let state = State {
            files: Files::new(),
            durable: Files::new(),
            changes: Vec::new(),
            devices: Vec::new(),
            random: Random::part(scenario.seed, u64::MAX - 3),
            device: scenario.device,
            faults: scenario.faults,
            name_errors: scenario.name_errors,
            most_files: scenario.most_files,
            is_off: false,
        };
        Self { state: Mutex::new(state), process: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process starts; the one before it is gone.
    pub(super) fn start(self: &Arc<Self>) -> ProcessDirectory {
        let process = self.process.fetch_add(1, Ordering::Relaxed) + 1;
        ProcessDirectory { directory: self.clone(), process }
    }

    /// The process is killed.
    pub(super) fn kill(&self) {
        self.process.fetch_add(1, Ordering::Relaxed);
    }

    /// Cuts the power; the process is gone.
    pub(super) fn cut_power(&self) {
        self.kill();
        let state = &mut *self.lock();
        state.is_off = true;
        state.devices.iter().for_each(|device| drop(device.cut_power()));
        let count = state.random.below(state.changes.len() as u64 + 1) as usize;
        if let Some(last) = count.checked_sub(1).and_then(|last| state.changes.get(last)) {
            state.durable.clone_from(last);
        }
        state.files.clone_from(&state.durable);
        state.changes.clear();
    }

    /// Ends a power cut. Files without a name are gone.
    pub(super) fn power_on(&self) {
        let state = &mut *self.lock();
        state.is_off = false;
        state.devices = state.files.values().cloned().collect();
        state.devices.iter().for_each(|device| device.power_on());
    }

    /// Nothing fails from now on, and there is space for any number of files.
    pub(super) fn mend(&self) {
        let state = &mut *self.lock();
        state.faults = Faults { rot: state.faults.rot, ..Faults::default() };
        (state.name_errors, state.most_files) = (0, usize::MAX);
        state.devices.iter().for_each(|device| device.set_faults(state.faults));
    }

    /// Things fail as the scenario says.
    pub(super) fn spoil(&self, scenario: &LogScenario) {
        let state = &mut *self.lock();
        state.faults = scenario.faults;
        (state.name_errors, state.most_files) = (scenario.name_errors, scenario.most_files);
        state.devices.iter().for_each(|device| device.set_faults(state.faults));
    }

    /// The invalid requests so far, and the operations of all files.
    pub(super) fn violations(&self) -> Vec<String> {
        self.lock().devices.iter().flat_map(|device| device.take_violations()).collect()
    }

    /// `EIO` if the process is gone or the power is off, or by chance another error.
    fn check(&self, process: u64, changes: bool) -> Result<MutexGuard<'_, State>, Error> {
        let failed = |errno| Error::new(errno, Operation::Write);
        if self.lock().pauses() {
            yield_now();
        }
        let mut state = self.lock();
        if state.is_off || self.process.load(Ordering::Relaxed) != process {
            return Err(failed(libc::EIO));
        }
        let State { random, name_errors, .. } = &mut *state;
        if changes && random.chance(*name_errors) {
            return Err(failed(random.pick(&ERRNOS).unwrap_or(libc::EIO)));
        }
        Ok(state)
    }

    fn pause(&self) {
        if self.lock().pauses() {
            yield_now();
        }
    }
}

impl State {
    fn pauses(&mut self) -> bool {
        let pauses = self.device.pauses;
        self.random.chance(pauses)
    }

    fn changed(&mut self) {
        self.changes.push(self.files.clone());
    }

    fn device(&self, name: &str) -> Result<Arc<SimDevice>, Error> {
        self.files.get(name).cloned().ok_or(Error::new(libc::ENOENT, Operation::Open))
    }
}

impl ProcessDirectory {
    fn storage(&self, device: &Arc<SimDevice>) -> Arc<dyn Storage> {
        let storage = SimStorage::open(device, 0, OpenOptions::new());
        let (directory, process) = (self.directory.clone(), self.process);
        Arc::new(ProcessFile { directory, process, storage })
    }
}

impl LogDirectory for ProcessDirectory {
    fn names(&self) -> Result<Vec<String>, Error> {
        Ok(self.directory.check(self.process, false)?.files.keys().cloned().collect())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Storage>, Error> {
        let device = self.directory.check(self.process, false)?.device(name)?;
        Ok(self.storage(&device))
    }

    fn open_settled(&self, name: &str) -> Result<Arc<dyn Storage>, Error> {
        let device = self.directory.check(self.process, false)?.device(name)?;
        let storage = self.storage(&device);
        storage.sync()?;
        device.drop_cache();
        Ok(storage)
    }

    fn create(&self, name: &str, bytes: u64) -> Result<Arc<dyn Storage>, Error> {
        let mut state = self.directory.check(self.process, true)?;
        if state.files.len() >= state.most_files {
            return Err(Error::new(libc::ENOSPC, Operation::Write));
        }
        let seed = state.random.next();
        let device = Arc::new(SimDevice::new(SimOptions { seed, bytes, ..state.device }));
        device.set_faults(state.faults);
        state.devices.push(device.clone());
        state.files.insert(name.to_owned(), device.clone());
        state.changed();
        drop(state);
        self.directory.pause();
        Ok(self.storage(&device))
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Error> {
        let mut state = self.directory.check(self.process, true)?;
        let file = state.device(from)?;
        state.files.remove(from);
        state.files.insert(to.to_owned(), file);
        state.changed();
        drop(state);
        self.directory.pause();
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<(), Error> {
        let mut state = self.directory.check(self.process, true)?;
        state.files.remove(name);
        state.changed();
        Ok(())
    }

    fn sync(&self) -> Result<(), Error> {
        let mut state = self.directory.check(self.process, true)?;
        state.durable = state.files.clone();
        state.changes.clear();
        drop(state);
        self.directory.pause();
        Ok(())
    }
}

impl ProcessFile {
    /// `EIO` if the process is gone.
    fn alive(&self) -> Result<&SimStorage, Error> {
        match self.directory.process.load(Ordering::Relaxed) == self.process {
            true => Ok(&self.storage),
            false => Err(Error::new(libc::EIO, Operation::Wait)),
        }
    }
}

impl Storage for ProcessFile {
    fn properties(&self) -> StorageProperties {
        self.storage.properties()
    }

    fn size(&self) -> Result<u64, Error> {
        self.storage.size()
    }

    fn read(&self, bufs: &mut [IoSliceMut<'_>], pos: u64) -> Result<usize, Error> {
        self.alive()?.read(bufs, pos)
    }

    fn write(&self, bufs: &[IoSlice<'_>], pos: u64, flags: Flags) -> Result<usize, Error> {
        self.alive()?.write(bufs, pos, flags)
    }

    fn sync(&self) -> Result<(), Error> {
        self.alive()?.sync()
    }

    fn punch(&self, range: ByteRange) -> Result<(), Error> {
        self.alive()?.punch(range)
    }

    fn zero(&self, range: ByteRange) -> Result<(), Error> {
        self.alive()?.zero(range)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.alive()?.set_len(bytes)
    }

    fn extents(
        &self,
        range: ByteRange,
        limit: usize,
        extents: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        self.alive()?.extents(range, limit, extents)
    }
}
