//! The devices of one kind that exports of a server are, as the phases of a start ask them.
//!
//! Invariant: a device belongs to one export, by its index among those that the server starts with.

use nowait_server::AnyExport;
use serde_json::Value;

use crate::error::CliError;
use crate::sandbox::FileAccess;

/// The devices of a kind.
pub(crate) trait DeviceKind {
    /// Whether no export has one.
    fn is_empty(&self) -> bool;

    /// Whether they are devices of this host, which appear when the server serves.
    fn is_local(&self) -> bool {
        false
    }

    /// The export of index `at`, as its devices, too.
    ///
    /// # Errors
    /// One cannot be made.
    fn add_to(&mut self, at: usize, export: AnyExport) -> Result<AnyExport, CliError>;

    /// Where clients of the export of index `at` find it, for people.
    fn places(&self, at: usize) -> Vec<String>;

    /// Adds what programs are told to `export`, the object of the export of index `at`.
    fn describe(&self, at: usize, export: &mut Value);

    /// Adds the files that their server opens while it serves.
    fn add_files(&self, _files: &mut FileAccess) {}

    /// Has those appear that could not be named before, or go on.
    ///
    /// # Errors
    /// The driver's.
    fn start(&self) -> Result<(), CliError> {
        Ok(())
    }
}
