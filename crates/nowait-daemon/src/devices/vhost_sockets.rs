//! The sockets of virtual machines at which exports of a server are.
//!
//! Invariant: each socket belongs to one export, by its index.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;

use nowait_nbd::Address;
use nowait_server::{AnyExport, DeviceSocket, Listener};

use crate::config::ServeConfig;
use crate::config::export_spec::ExportIndices;
use crate::config::vhost_user_spec::DevicePlace;
use crate::disks::open_disk::OpenedDisk;
use crate::error::{CliError, bind_failure};
use crate::process::systemd;

/// The connections of virtual machines that were handed over, by their descriptors; none if this
/// program takes over those of another one. To be called before this process opens any descriptor.
pub(crate) fn connections(
    config: &ServeConfig,
    takes_over: bool,
) -> Result<HashMap<i32, UnixStream>, CliError> {
    if takes_over {
        return Ok(HashMap::new());
    }
    let numbers = config.vhost_user.iter().filter_map(|socket| match socket.socket {
        DevicePlace::Descriptor(number) => Some(number),
        DevicePlace::Path(_) | DevicePlace::ConnectsTo(_) => None,
    });
    numbers.map(|number| Ok((number, systemd::connection(number)?))).collect()
}

/// The sockets of a server.
pub(crate) struct VhostSockets {
    /// Where they are, by the indices of their exports.
    by_export: Vec<Vec<DevicePlace>>,
    /// Connections that this process has inherited, by their descriptors.
    connections: HashMap<i32, UnixStream>,
    /// The sockets are another program's, which hands them over later.
    takes_over: bool,
}

impl VhostSockets {
    /// The sockets of `config` for exports of `all`.
    ///
    /// # Errors
    /// A socket names an export that is missing.
    pub(crate) fn of(
        config: &ServeConfig,
        all: &[OpenedDisk],
        connections: HashMap<i32, UnixStream>,
        takes_over: bool,
    ) -> Result<Self, CliError> {
        let exports = ExportIndices::of(all.iter().map(|opened| &opened.named));
        let mut by_export = vec![Vec::new(); all.len()];
        for socket in &config.vhost_user {
            match socket.export_of(&exports) {
                Ok(at) => by_export
                    .get_mut(at)
                    .into_iter()
                    .for_each(|its| its.push(socket.socket.clone())),
                // The other program has removed it.
                Err(_) if takes_over => {}
                Err(why) => return Err(CliError::new(why)),
            }
        }
        Ok(Self { by_export, connections, takes_over })
    }

    /// Whether no export has one.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_export.iter().all(Vec::is_empty)
    }

    /// Sockets of the export of index `at`, as given.
    pub(crate) fn places(&self, at: usize) -> Vec<String> {
        self.by_export.get(at).into_iter().flatten().map(DevicePlace::to_string).collect()
    }

    /// The export of index `at`, at its sockets, which are bound.
    ///
    /// # Errors
    /// One cannot be bound.
    pub(crate) fn add_to(&mut self, at: usize, export: AnyExport) -> Result<AnyExport, CliError> {
        if self.takes_over {
            return Ok(export);
        }
        self.by_export.get(at).into_iter().flatten().try_fold(export, |export, place| {
            let socket = match place {
                DevicePlace::Path(path) => {
                    let listener = Listener::unix(path);
                    let failed = |error| bind_failure(&Address::Unix(path.clone()), &error);
                    DeviceSocket::Listener(listener.map_err(failed)?)
                }
                DevicePlace::ConnectsTo(path) => DeviceSocket::ConnectsTo(path.clone()),
                DevicePlace::Descriptor(number) => match self.connections.remove(number) {
                    Some(connection) => DeviceSocket::Connected(connection),
                    None => return Ok(export),
                },
            };
            Ok(export.with_device(socket))
        })
    }
}
