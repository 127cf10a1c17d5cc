//! The table of the devices that exports of a server are, beside what NBD clients choose: a field for each kind, and
//! what the phases of a start ask of all.
//!
//! Invariant: a device belongs to one export, by its index among those that the server starts with.

pub(crate) mod ublk_nodes;
pub(crate) mod vhost_sockets;

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nowait_server::{AnyExport, UblkDevice};

use crate::config::ServeConfig;
use crate::devices::ublk_nodes::UblkNodes;
use crate::devices::vhost_sockets::VhostSockets;
use crate::disks::open_disk::OpenedDisk;
use crate::error::CliError;
use crate::sandbox::FileAccess;

/// The devices of a server.
pub(crate) struct Devices {
    nodes: UblkNodes,
    sockets: VhostSockets,
}

impl Devices {
    /// The devices of `config` for exports of `all`. `connections` are those that this process has inherited. If another
    /// program hands over, its local devices are taken over, and all others come later.
    ///
    /// # Errors
    /// Errors of [`UblkNodes::open`] and [`VhostSockets::of`].
    pub(crate) fn open(
        config: &ServeConfig,
        all: &[OpenedDisk],
        connections: HashMap<i32, UnixStream>,
        handed_over: Option<&[(usize, u32)]>,
    ) -> Result<Self, CliError> {
        let sockets = VhostSockets::of(config, all, connections, handed_over.is_some())?;
        Ok(Self { nodes: UblkNodes::open(config, all, handed_over)?, sockets })
    }

    /// Whether NBD is the only way to the exports.
    pub(crate) fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.sockets.is_empty()
    }

    /// Whether some are devices of this host, which appear when the server serves.
    pub(crate) fn has_local(&self) -> bool {
        !self.nodes.is_empty()
    }

    /// The export of index `at`, as its devices, too.
    ///
    /// # Errors
    /// A socket cannot be bound.
    pub(crate) fn add_to(&mut self, at: usize, export: AnyExport) -> Result<AnyExport, CliError> {
        self.sockets.add_to(at, self.nodes.add_to(at, export))
    }

    /// The local device of the export of index `at`, if it has one.
    pub(crate) fn local(&self, at: usize) -> Option<Arc<UblkDevice>> {
        self.nodes.device(at)
    }

    /// The paths of all local devices, in the order of their exports.
    pub(crate) fn local_paths(&self) -> impl Iterator<Item = String> {
        self.nodes.devices().map(|device| device.node())
    }

    /// The sockets of virtual machines of the export of index `at`, as given.
    pub(crate) fn sockets(&self, at: usize) -> Vec<String> {
        self.sockets.places(at)
    }

    /// The files that their server opens while it serves.
    pub(crate) fn add_files(&self, files: &mut FileAccess) {
        self.nodes.add_files(files);
    }

    /// Has the local devices appear, which cannot be named before, or go on.
    ///
    /// # Errors
    /// Errors of [`UblkNodes::start`].
    pub(crate) fn start(&self) -> Result<(), CliError> {
        self.nodes.start()
    }
}
