//! The options of one kind of devices, as all the rest of the program asks them.
//!
//! Invariant: a kind answers for itself; none is named where all are meant.

use std::path::Path;

use crate::config::export_spec::NamedExport;

/// The options of a kind of devices: one value for each device that was given.
pub(crate) trait DeviceOptions {
    /// Checks them against each other and against `exports`, of which there is at least one.
    ///
    /// # Errors
    /// A message for the user that names the option.
    fn check(&self, exports: &[NamedExport]) -> Result<(), String>;

    /// Their option, if devices are given that need io_uring.
    fn needs_ring(&self) -> Option<&'static str> {
        None
    }

    /// Their option, if devices are given that this host itself uses.
    fn used_by_host(&self) -> Option<&'static str> {
        None
    }

    /// Their option, if devices are given that need a process which does nothing but serve.
    fn needs_process(&self) -> Option<&'static str>;

    /// Paths of the sockets that are made for them.
    fn sockets(&self) -> Vec<&Path> {
        Vec::new()
    }

    /// Paths of the sockets of their clients, which the server connects to.
    fn sockets_of_clients(&self) -> Vec<&Path> {
        Vec::new()
    }

    /// Descriptors of their clients, which the process has inherited, above 2.
    fn descriptors(&self) -> Vec<i32> {
        Vec::new()
    }
}
