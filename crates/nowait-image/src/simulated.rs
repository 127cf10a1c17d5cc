//! A file of a simulated device.
//!
//! Invariant: looking at a file that is not served is no operation of the device; when it is served,
//! each call is one, with which anything may go wrong.
//! Knows: nothing here. Known by: host, served.

use std::fmt;
use std::io;
use std::io::IoSliceMut;
use std::sync::{Arc, OnceLock};

use nowait::{Direct, Error, OpenOptions, Storage};

pub(crate) use nowait::sim::SimDevice;

/// A simulated file that is open.
pub(crate) struct SimFile {
    device: Arc<SimDevice>,
    number: u16,
    /// Through the page cache, when it is served.
    served: OnceLock<Storage>,
}

impl SimFile {
    pub(crate) fn new(device: &Arc<SimDevice>, number: u16) -> Self {
        Self { device: device.clone(), number, served: OnceLock::new() }
    }

    /// Opens it once more.
    ///
    /// # Errors
    /// As [`Storage::simulated`].
    pub(crate) fn open(&self, read_only: bool, direct: Direct) -> Result<Storage, Error> {
        let options = OpenOptions { read_only, direct, no_hint: false };
        Storage::simulated_file(&self.device, self.number, options)
    }

    /// From now on it is used.
    ///
    /// # Errors
    /// As [`SimFile::open`].
    pub(crate) fn serve(&self) -> Result<(), Error> {
        let storage = self.open(true, Direct::Off)?;
        self.served.get_or_init(|| storage);
        Ok(())
    }

    pub(crate) fn size(&self) -> u64 {
        self.device.bytes_of(self.number)
    }

    pub(crate) fn read_at(&self, pos: u64, memory: &mut [u8]) -> io::Result<()> {
        let Some(storage) = self.served.get() else {
            self.device.peek(self.number, pos, memory);
            return Ok(());
        };
        let found = storage.read_at(&mut [IoSliceMut::new(memory)], pos)?;
        memory.get_mut(found..).unwrap_or_default().fill(0);
        Ok(())
    }
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimFile")
    }
}
