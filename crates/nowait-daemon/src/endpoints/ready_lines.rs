//! The lines in which a server says that clients can connect, and where.
//!
//! Invariant: with `--json` there is one line, an object.

use nowait_nbd::Address;
use nowait_server::QueueKind;

use crate::config::export_spec::NamedExport;
use crate::config::{Encryption, ServeConfig};
use crate::devices::Devices;
use crate::disks::open_disk::OpenedDisk;

/// The lines that say where clients can connect; with `--json` one object.
pub(crate) fn ready_lines(
    config: &ServeConfig,
    all: &[OpenedDisk],
    kind: QueueKind,
    listens: &[Address],
    devices: &Devices,
) -> String {
    let queue = match kind {
        QueueKind::Auto | QueueKind::Uring | QueueKind::Polled => "uring",
        QueueKind::Threads => "threads",
    };
    let exports = all.iter().enumerate().map(|(at, opened)| {
        let mut export = serde_json::json!({
            "name": opened.named.name,
            "image": opened.named.image.to_string_lossy(),
            "format": opened.image.format().name(),
            "uris": uris(config, listens, &opened.named),
            "size_bytes": opened.image.size(),
            "read_only": opened.image.is_read_only(),
            "direct_io": opened.image.is_direct(),
        });
        devices.describe(at, &mut export);
        export
    });
    if config.json {
        let mut ready = serde_json::json!({
            "event": "ready",
            "exports": exports.collect::<Vec<_>>(),
            "tls": match config.encryption() {
                Encryption::Off => "off",
                Encryption::Offered(_) => "on",
                Encryption::Required { .. } => "require",
            },
            "queue": queue,
            "threads": config.threads(),
            // The former name.
            "queues": config.threads(),
            "pid": std::process::id(),
        });
        // The keys of the first export are at the top level, too.
        for key in ["image", "format", "uris", "size_bytes", "read_only", "direct_io"] {
            ready[key] = ready["exports"][0][key].clone();
        }
        format!("{ready}\n")
    } else {
        let uris = all.iter().flat_map(|opened| uris(config, listens, &opened.named));
        let local = (0..all.len()).flat_map(|at| devices.local_places(at));
        let others = (0..all.len()).flat_map(|at| devices.other_places(at));
        let places = local.chain(uris).chain(others);
        places.map(|place| format!("serving {place}\n")).collect()
    }
}

/// The URIs of `named`, one for each address.
pub(crate) fn uris(config: &ServeConfig, listens: &[Address], named: &NamedExport) -> Vec<String> {
    let tls = config.requires_tls();
    listens.iter().map(|listen| listen.uri(&named.name, tls)).collect()
}

/// Commands that can be tried at `uri`, for a user who has given nothing.
pub(crate) fn hint(uri: &str) -> String {
    format!("try:  nbdinfo '{uri}'\n      qemu-img info '{uri}'\n      nbdcopy '{uri}' copy.img")
}
