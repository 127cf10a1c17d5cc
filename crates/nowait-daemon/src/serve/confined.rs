//! The fifth phase: the process has given up what it does not need.
//!
//! Invariant: nothing is opened any more but what the sandbox was told of.

use nowait_server::{Listener, QueueKind, Server};

use crate::confinement;
use crate::control::control_interface::BoundControl;
use crate::endpoints::signals::Ending;
use crate::error::CliError;
use crate::process::background::Detached;
use crate::serve::Context;
use crate::serve::bound::Places;
use crate::serve::opened::Images;
use crate::serve::started::Started;
use crate::upgrade::sender::Upgrades;

/// A server that is confined, unless it is not to be.
pub(super) struct Confined<'a> {
    pub(super) context: Context<'a>,
    pub(super) server: Server,
    pub(super) images: Images,
    pub(super) later: Vec<Listener>,
    pub(super) places: Places,
    pub(super) control: BoundControl,
    pub(super) upgrades: Upgrades,
    pub(super) kind: QueueKind,
    pub(super) detached: Detached,
    pub(super) ending: Ending,
    /// Private: no other module makes one.
    _made_here: (),
}

impl<'a> Confined<'a> {
    /// Has the nodes of new block devices appear, and confines the server that is `started`, unless it is confined already.
    ///
    /// # Errors
    /// The driver's; there is no sandbox where it has to be one.
    pub(super) fn of(started: Started<'a>) -> Result<Self, CliError> {
        // Where this fails, the server is dropped first, then its nodes.
        let Started { context, images, later, places, control, upgrades, server, .. } = started;
        if let Some(files) = started.files {
            places.devices.start()?;
            confinement::enter(context.config, files, &places.devices)?;
        }
        let (kind, detached, ending) = (started.kind, started.detached, started.ending);
        Ok(Self {
            context,
            server,
            images,
            later,
            places,
            control,
            upgrades,
            kind,
            detached,
            ending,
            _made_here: (),
        })
    }
}
