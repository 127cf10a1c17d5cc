//! The table of the devices that exports of a server are, beside what NBD clients choose: a field for each kind, and
//! what the phases of a start ask of all.
//!
//! Invariant: a kind is named here and in its own file only, except that of local block devices in an upgrade.

pub(crate) mod device_kind;
pub(crate) mod ublk_nodes;
pub(crate) mod vhost_sockets;

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nowait_control::{AddFrontend, ControlError};
use nowait_server::{AnyExport, NewDevice, UblkDevice};
use serde_json::Value;

use crate::config::ServeConfig;
use crate::devices::device_kind::DeviceKind;
use crate::devices::ublk_nodes::UblkNodes;
use crate::devices::vhost_sockets::VhostSockets;
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::open_disk::OpenedDisk;
use crate::error::CliError;
use crate::process::systemd;
use crate::sandbox::FileAccess;

pub(crate) use crate::devices::vhost_sockets::place_of;

/// The connections of clients that were handed over, by their descriptors; none if this program takes over those of
/// another one. To be called before this process opens any descriptor.
///
/// # Errors
/// A descriptor is not a connection.
pub(crate) fn connections(
    config: &ServeConfig,
    takes_over: bool,
) -> Result<HashMap<i32, UnixStream>, CliError> {
    if takes_over {
        return Ok(HashMap::new());
    }
    let numbers = config.devices().into_iter().flat_map(|devices| devices.descriptors());
    numbers.map(|number| Ok((number, systemd::connection(number)?))).collect()
}

/// Makes a device for an export that is added, at a place of `allowed`. Returns also where it is.
///
/// # Errors
/// It is not allowed, or cannot be made.
pub(crate) fn added(
    frontend: AddFrontend,
    allowed: &AllowedPlaces,
) -> Result<(NewDevice, String), ControlError> {
    match frontend {
        AddFrontend::VhostUser(path) => vhost_sockets::added(&path, allowed),
    }
}

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

    /// All kinds.
    fn kinds(&self) -> [&dyn DeviceKind; 2] {
        [&self.nodes, &self.sockets]
    }

    /// Whether NBD is the only way to the exports.
    pub(crate) fn is_empty(&self) -> bool {
        self.kinds().into_iter().all(DeviceKind::is_empty)
    }

    /// Whether some are devices of this host, which appear when the server serves.
    pub(crate) fn has_local(&self) -> bool {
        self.kinds().into_iter().any(|kind| kind.is_local() && !kind.is_empty())
    }

    /// The export of index `at`, as its devices, too.
    ///
    /// # Errors
    /// Errors of [`DeviceKind::add_to`].
    pub(crate) fn add_to(&mut self, at: usize, export: AnyExport) -> Result<AnyExport, CliError> {
        let kinds: [&mut dyn DeviceKind; 2] = [&mut self.nodes, &mut self.sockets];
        kinds.into_iter().try_fold(export, |export, kind| kind.add_to(at, export))
    }

    /// The local device of the export of index `at`, if it has one.
    pub(crate) fn local(&self, at: usize) -> Option<Arc<UblkDevice>> {
        self.nodes.device(at)
    }

    /// Where the export of index `at` is found on this host, as a device.
    pub(crate) fn local_places(&self, at: usize) -> impl Iterator<Item = String> {
        self.places(at, true)
    }

    /// Where clients on other hosts find the export of index `at`.
    pub(crate) fn other_places(&self, at: usize) -> impl Iterator<Item = String> {
        self.places(at, false)
    }

    fn places(&self, at: usize, local: bool) -> impl Iterator<Item = String> {
        let kinds = self.kinds().into_iter().filter(move |kind| kind.is_local() == local);
        kinds.flat_map(move |kind| kind.places(at))
    }

    /// Adds what programs are told of the devices of the export of index `at` to its object, `export`.
    pub(crate) fn describe(&self, at: usize, export: &mut Value) {
        self.kinds().into_iter().for_each(|kind| kind.describe(at, export));
    }

    /// The files that their server opens while it serves.
    pub(crate) fn add_files(&self, files: &mut FileAccess) {
        self.kinds().into_iter().for_each(|kind| kind.add_files(files));
    }

    /// Has the local devices appear, which cannot be named before, or go on.
    ///
    /// # Errors
    /// Errors of [`DeviceKind::start`].
    pub(crate) fn start(&self) -> Result<(), CliError> {
        self.kinds().into_iter().try_for_each(DeviceKind::start)
    }
}
