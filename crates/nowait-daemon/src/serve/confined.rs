//! The fifth phase: the process has given up what it does not need.
//!
//! Invariant: nothing is opened any more but what the sandbox was told of.

use crate::confinement;
use crate::error::CliError;
use crate::serve::started::Started;

/// A server that is confined, unless it is not to be.
pub(super) struct Confined<'a> {
    pub(super) started: Started<'a>,
    /// Private: no other module makes one.
    _made_here: (),
}

impl<'a> Confined<'a> {
    /// Has the nodes of new block devices appear, and confines the server that is `started`, unless it is confined already.
    ///
    /// # Errors
    /// The driver's; there is no sandbox where it has to be one.
    pub(super) fn of(mut started: Started<'a>) -> Result<Self, CliError> {
        // Where this fails, the server is dropped first, then its nodes.
        if let Some(files) = started.files.take() {
            let devices = &started.places.devices;
            devices.start()?;
            confinement::enter(started.context.config, files, devices)?;
        }
        Ok(Self { started, _made_here: () })
    }
}
