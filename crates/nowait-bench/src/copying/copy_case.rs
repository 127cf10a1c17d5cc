//! The cases of the copy benchmark: contents, routes, copiers and their command lines.
//!
//! Invariant: all copiers on one route have the same source and the same kind of target, which is
//! new or zeros.

use std::path::Path;
use std::process::Command;

/// The content of the disk that is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub(crate) name: &'static str,
    /// Bytes of random data in each MiB.
    pub(crate) data_bytes: usize,
    /// How much larger than `--size` the disk is.
    pub(crate) factor: u64,
}

pub(crate) const CONTENTS: [Content; 2] = [
    Content { name: "full", data_bytes: 1 << 20, factor: 1 },
    Content { name: "sparse", data_bytes: 64 << 10, factor: 2 },
];

/// A source or a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// A file of this format; a target is new.
    File(&'static str),
    /// An export of a raw file; as a target it is zeros.
    Nbd,
}

impl End {
    pub(crate) fn format(self) -> &'static str {
        match self {
            End::File(format) => format,
            End::Nbd => "raw",
        }
    }
}

/// A kind of source and a kind of target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) name: &'static str,
    pub(crate) from: End,
    pub(crate) to: End,
}

const RAW: End = End::File("raw");
const QCOW2: End = End::File("qcow2");

pub(crate) const ROUTES: [Route; 5] = [
    Route { name: "raw to raw", from: RAW, to: RAW },
    Route { name: "raw to qcow2", from: RAW, to: QCOW2 },
    Route { name: "qcow2 to raw", from: QCOW2, to: RAW },
    Route { name: "file to NBD", from: RAW, to: End::Nbd },
    Route { name: "NBD to file", from: End::Nbd, to: RAW },
];

/// A program that copies, with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copier {
    /// The command as shown in tables and JSON.
    pub(crate) name: &'static str,
    /// Whether the copy is on storage when the program ends.
    pub(crate) flushes: bool,
    /// Whether it is measured only on routes with NBD, or only on those without.
    nbd: Option<bool>,
}

/// The copiers in the order of the tables. Those that do not flush copy through the page cache, and
/// so does nbdcopy.
pub(crate) const COPIERS: [Copier; 6] = [
    Copier { name: NOWAIT, flushes: true, nbd: None },
    Copier { name: "qemu-img convert -T none -t none", flushes: true, nbd: None },
    Copier { name: "qemu-img convert -T none -t none -W -m 16", flushes: true, nbd: Some(false) },
    Copier { name: "qemu-img convert", flushes: false, nbd: None },
    Copier { name: "nbdcopy --flush", flushes: true, nbd: Some(true) },
    Copier { name: "nbdcopy", flushes: false, nbd: Some(true) },
];
pub(crate) const NOWAIT: &str = "nowait copy";

impl Copier {
    pub(crate) fn takes(self, route: Route) -> bool {
        let has_nbd = route.from == End::Nbd || route.to == End::Nbd;
        self.nbd.is_none_or(|nbd| nbd == has_nbd)
    }

    /// The command that copies `from` to `to` on `route`.
    pub(crate) fn command(self, nowait: &Path, route: Route, from: &str, to: &str) -> Command {
        let mut words = self.name.split(' ');
        let program = words.next().unwrap_or_default();
        let path = if self.name == NOWAIT { nowait } else { Path::new(program) };
        let mut command = Command::new(path);
        command.args(words);
        let format_option = match program {
            "nowait" => Some("--from-format"),
            "qemu-img" => Some("-f"),
            _ => None,
        };
        if let Some(option) = format_option {
            command.args([option, route.from.format(), "-O", route.to.format()]);
        }
        // The target exists and is known to read as zeros.
        match program {
            "qemu-img" if route.to == End::Nbd => command.args(["-n", "--target-is-zero"]),
            "nbdcopy" if route.to == End::Nbd => command.arg("--destination-is-zero"),
            _ => &mut command,
        };
        command.args([from, to]);
        command
    }
}
