//! The sockets of virtual machines at which exports of a server are.
//!
//! Invariant: each socket belongs to one export, by its index.

use std::collections::HashMap;
use std::fmt;
use std::os::unix::net::UnixStream;

use nowait_control::ControlError;
use nowait_nbd::Address;
use nowait_server::{AnyExport, DeviceSocket, Listener, NewDevice, PausedDevice};
use serde_json::Value;

use crate::config::ServeConfig;
use crate::config::export_spec::ExportIndices;
use crate::config::listen_address;
use crate::config::vhost_user_spec::DevicePlace;
use crate::devices::device_kind::DeviceKind;
use crate::disks::allowed_places::AllowedPlaces;
use crate::disks::open_disk::OpenedDisk;
use crate::error::{CliError, bind_failure};

/// How a socket at `path` is called.
fn place(path: impl fmt::Display) -> String {
    format!("vhost-user:{path}")
}

/// Where the VMMs of a device of another process connect, if they do.
pub(crate) fn place_of(device: &PausedDevice) -> Option<String> {
    let path = device.listener.as_ref()?.unix_path()?;
    Some(place(path.display()))
}

/// Binds the socket `path` of an export that is added, which has to be one of `allowed`. Returns also where it is.
///
/// # Errors
/// It is not allowed, not valid, or cannot be bound.
pub(crate) fn added(
    path: &str,
    allowed: &AllowedPlaces,
) -> Result<(NewDevice, String), ControlError> {
    let path = allowed.socket(path)?;
    let shown = path.display();
    listen_address::unix(path.clone()).map_err(ControlError::Invalid)?;
    let failed = |error| ControlError::Conflict(format!("{shown}: {error}"));
    let socket = DeviceSocket::Listener(Listener::unix(&path).map_err(failed)?);
    Ok((socket.into(), place(shown)))
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
}

impl DeviceKind for VhostSockets {
    fn is_empty(&self) -> bool {
        self.by_export.iter().all(Vec::is_empty)
    }

    fn places(&self, at: usize) -> Vec<String> {
        self.by_export.get(at).into_iter().flatten().map(place).collect()
    }

    fn describe(&self, at: usize, export: &mut Value) {
        let sockets = self.by_export.get(at).into_iter().flatten().map(DevicePlace::to_string);
        export["vhost_user"] = sockets.collect();
    }

    /// The sockets are bound.
    fn add_to(&mut self, at: usize, export: AnyExport) -> Result<AnyExport, CliError> {
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
