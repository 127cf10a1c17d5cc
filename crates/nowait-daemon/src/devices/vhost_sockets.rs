//! The sockets of virtual machines at which exports of a server are.
//!
//! Invariant: each socket belongs to one export, by its index.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;

use crate::config::ServeConfig;
use crate::config::export_spec::NamedExport;
use crate::config::vhost_user_spec::DevicePlace;
use crate::disks::open_disk::OpenedDisk;
use crate::error::CliError;
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

/// The vhost-user sockets of each of `all`.
pub(crate) fn vhost_user_paths(config: &ServeConfig, all: &[OpenedDisk]) -> Vec<Vec<String>> {
    let named: Vec<NamedExport> = all.iter().map(|opened| opened.named.clone()).collect();
    let mut paths = vec![Vec::new(); all.len()];
    for socket in &config.vhost_user {
        let index = socket.export_of(&named).ok();
        if let Some(its) = index.and_then(|index| paths.get_mut(index)) {
            its.push(socket.socket.to_string());
        }
    }
    paths
}
