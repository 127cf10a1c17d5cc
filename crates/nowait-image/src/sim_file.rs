//! A file of a simulated device.
//!
//! Invariant: reading a file that is not served is no operation of the device; once it is served,
//! each call is one, and the simulation may make it fail.

use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use nowait::{Direct, OpenOptions, ReadCursor, SimStorage, Storage};

pub(crate) use nowait::sim::SimDevice;

/// An open simulated file.
pub(crate) struct SimFile {
    device: Arc<SimDevice>,
    number: u16,
    /// Opened through the page cache once the file is served.
    served: OnceLock<SimStorage>,
}

impl SimFile {
    pub(crate) fn new(device: &Arc<SimDevice>, number: u16) -> Self {
        Self { device: device.clone(), number, served: OnceLock::new() }
    }

    /// Opens the file a second time.
    pub(crate) fn open(&self, read_only: bool, direct: Direct) -> SimStorage {
        let options = OpenOptions { read_only, direct, ..OpenOptions::default() };
        SimStorage::open(&self.device, self.number, options)
    }

    /// Makes all further reads operations of the device.
    pub(crate) fn serve(&self) {
        self.served.get_or_init(|| self.open(true, Direct::Off));
    }

    pub(crate) fn size(&self) -> u64 {
        self.device.bytes_of(self.number)
    }

    pub(crate) fn read_at(&self, pos: u64, memory: &mut [u8]) -> io::Result<()> {
        let Some(storage) = self.served.get() else {
            self.device.peek(self.number, pos, memory);
            return Ok(());
        };
        let mut memory = ReadCursor::from(memory);
        (storage as &dyn Storage).read_at(pos, &mut memory)?;
        memory.fill(0);
        Ok(())
    }
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimFile")
    }
}
