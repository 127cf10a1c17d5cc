//! `nowait info` of an export of an NBD server, an object or an image of a Ceph cluster: what the server
//! says of it.
//!
//! Invariant: it is opened for reading only; the keys of the JSON object are those of a file,
//! null where they say nothing of it.

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nowait::{ByteRange, ExtentStatus, Storage};
use nowait_daemon::error::{CliError, os_message, plain};
use nowait_daemon::size::human;
use nowait_image::{Format, ImageFile, ImageInfo};
use nowait_remote::{
    Location, NbdOptions, NbdStorage, ObjectStorage, RbdOptions, RbdStorage, StoreCounts,
};
use serde_json::{Value, json};

use crate::args::info_args::InfoArgs;
use crate::header_lines::header_lines;
use crate::output;
use nowait_daemon::disks::waiting;

/// Extents that are counted at most; what follows is not told.
const MAX_EXTENTS: usize = 1 << 20;

enum Kind {
    NbdExport,
    CephImage,
    /// With its store, its version, and how the store has answered.
    Object {
        store: &'static str,
        version: String,
        counts: Box<StoreCounts>,
    },
}

struct Facts {
    kind: Kind,
    size: u64,
    block: u32,
    read_only: bool,
    /// Of an export.
    abilities: Vec<&'static str>,
    /// Empty where the server does not tell.
    extents: Vec<ExtentStatus>,
    header: Option<ImageInfo>,
}

pub(crate) fn run(args: &InfoArgs, location: &Location) -> Result<(), CliError> {
    let image = &args.image;
    let refused = |error: String| CliError::at(image, error);
    let facts = match location {
        Location::Object(url) => {
            let options = args.auth.options().object();
            let storage = waiting::on([location], || ObjectStorage::open(url, &options));
            let storage = storage.map_err(refused)?;
            let (version, counters) = (storage.identity(), storage.counters().clone());
            let mut facts = gather(args, Arc::new(storage))?;
            let counts = Box::new(counters.counts());
            facts.kind = Kind::Object { store: url.kind(), version, counts };
            facts
        }
        Location::Nbd(uri) => {
            let open = || NbdStorage::open(uri, &NbdOptions::default());
            let storage = waiting::on([location], open);
            let storage = Arc::new(storage.map_err(refused)?);
            let mut facts = gather(args, storage.clone())?;
            facts.abilities = storage.abilities();
            facts.read_only = storage.is_export_read_only();
            if !storage.tells_extents() {
                facts.extents.clear();
            }
            facts
        }
        Location::Rbd(image) => {
            let open = || RbdStorage::open(image, RbdOptions::default());
            let storage = waiting::on([location], open).map_err(refused)?;
            let mut facts = gather(args, Arc::new(storage))?;
            (facts.kind, facts.read_only) = (Kind::CephImage, image.is_snapshot());
            facts
        }
        Location::File(_) => return Err(CliError::at(image, "it is not a URI")),
    };
    output::print(match args.json {
        true => format!("{}\n", in_json(image, &facts)),
        false => in_words(image, &facts),
    })
}

/// Facts that every storage has.
fn gather(args: &InfoArgs, storage: Arc<dyn Storage>) -> Result<Facts, CliError> {
    let image = &args.image;
    let failed = |error: nowait::Error| CliError::at(image, os_message(&io::Error::from(error)));
    let size = storage.size().map_err(failed)?;
    let properties = storage.properties();
    let mut extents = Vec::new();
    if size > 0 {
        let all = ByteRange::new(0, size);
        storage.extents(all, MAX_EXTENTS, &mut extents).map_err(failed)?;
    }
    let header = args.format.map(|format| header(format, image, storage)).transpose()?.flatten();
    Ok(Facts {
        kind: Kind::NbdExport,
        size,
        block: properties.zeroing_block,
        read_only: properties.read_only,
        abilities: Vec::new(),
        extents,
        header,
    })
}

/// The header of the image in `storage`. Images below it are not opened.
fn header(
    format: Format,
    image: &Path,
    storage: Arc<dyn Storage>,
) -> Result<Option<ImageInfo>, CliError> {
    let file = ImageFile::on_storage(image.to_owned(), storage);
    format.info(&file, image, None).map_err(|error| CliError::of_image(&error))
}

impl Facts {
    /// Extents with data, their bytes, and those of the others.
    fn layout(&self) -> Option<(u64, u64, u64)> {
        let bytes = |hole| -> u64 {
            self.extents.iter().filter(|it| it.hole == hole).map(|it| it.len).sum()
        };
        let count = self.extents.iter().filter(|it| !it.hole).count() as u64;
        (!self.extents.is_empty()).then(|| (count, bytes(false), bytes(true)))
    }
}

fn in_json(image: &Path, facts: &Facts) -> Value {
    let layout = facts.layout();
    let mut object = json!({
        "filename": image.to_string_lossy(),
        "format": facts.header.as_ref().map_or("raw", |header| header.format.name()),
        "virtual-size": facts.size,
        "actual-size": 0,
        "dirty-flag": false,
        "image": image.to_string_lossy(),
        "kind": match facts.kind {
            Kind::NbdExport => "nbd_export",
            Kind::CephImage => "ceph_image",
            Kind::Object { .. } => "object",
        },
        "size_bytes": facts.size,
        "allocated_bytes": null,
        "data_extents": layout.map(|(count, _, _)| count),
        "data_bytes": layout.map(|(_, data, _)| data),
        "hole_bytes": layout.map(|(_, _, holes)| holes),
        "direct_io": null,
        "direct_io_reason": null,
        "memory_alignment_bytes": null,
        "offset_alignment_bytes": facts.block,
        "read_offset_alignment_bytes": facts.block,
        "queue": null,
        "queue_reason": null,
        "registered_bytes_limit": null,
        "qcow2_header": facts.header.as_ref().is_some_and(|it| it.format == Format::Qcow2),
        "read_only": facts.read_only,
        "abilities": facts.abilities,
    });
    let Value::Object(keys) = &mut object else { return object };
    if let Kind::Object { store, version, counts } = &facts.kind {
        keys.insert("store".into(), json!(store));
        keys.insert("object_version".into(), json!(version));
        keys.insert("store_requests".into(), json!(counts.requests()));
        keys.insert("store_seconds".into(), json!(counts.latency_sum.as_secs_f64()));
        keys.insert("store_retries".into(), json!(counts.retries));
    }
    if let Some(header) = &facts.header {
        keys.extend(header.json.clone());
    }
    object
}

fn in_words(image: &Path, facts: &Facts) -> String {
    let (data, holes) = match facts.layout() {
        Some((count, data, holes)) => {
            let extents = if count == 1 { "extent" } else { "extents" };
            (format!("{} in {count} {extents}", human(data)), human(holes))
        }
        None => ("not told".into(), "not told".into()),
    };
    let kind = match &facts.kind {
        Kind::NbdExport if facts.read_only => "NBD export, read-only".to_owned(),
        Kind::NbdExport => "NBD export".to_owned(),
        Kind::CephImage if facts.read_only => "snapshot of a Ceph image, read-only".to_owned(),
        Kind::CephImage => "Ceph image".to_owned(),
        Kind::Object { store, .. } => format!("object of {store}, read-only"),
    };
    let mut lines = vec![("image", plain(&image.display().to_string())), ("kind", kind)];
    match &facts.header {
        Some(header) => lines.extend(header_lines(header, facts.size, "not told".into())),
        None => lines.extend([("format", "raw".into()), ("virtual size", human(facts.size))]),
    }
    lines.extend([("data", data), ("holes", holes)]);
    match &facts.kind {
        Kind::CephImage => {}
        Kind::NbdExport => lines.extend([
            ("block", format!("{} bytes", facts.block)),
            ("abilities", facts.abilities.join(", ")),
        ]),
        Kind::Object { version, counts, .. } => {
            let StoreCounts { retries, latency_sum, .. } = &**counts;
            let (requests, ms) = (counts.requests(), latency_sum.as_millis());
            let asked = format!("{requests} requests in {ms} ms, {retries} retries");
            lines.extend([("version", plain(version)), ("store", asked)]);
        }
    }
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:<14}{value}", format!("{name}:"));
    }
    text
}
