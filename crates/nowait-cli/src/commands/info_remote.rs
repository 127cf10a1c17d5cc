//! `nowait info` of an export of an NBD server: what the server says of it.
//!
//! Invariant: the export is opened for reading only; the keys of the JSON object are those of a file,
//! null where they say nothing of an export.

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nowait::{ByteRange, ExtentStatus, Storage};
use nowait_cli::error::{CliError, os_message, plain};
use nowait_cli::size::human;
use nowait_image::{Chain, ChainOptions, Format};
use nowait_nbd::NbdUri;
use nowait_remote::{NbdOptions, NbdStorage};
use serde_json::{Value, json};

use crate::args::info_args::InfoArgs;
use crate::qcow2_info::Qcow2Info;
use crate::{open_chain, output};

/// Extents that are counted at most; what follows is not told.
const MAX_EXTENTS: usize = 1 << 20;

struct Facts {
    size: u64,
    block: u32,
    read_only: bool,
    abilities: Vec<&'static str>,
    /// Empty where the server does not tell.
    extents: Vec<ExtentStatus>,
    header: Option<Qcow2Info>,
}

pub(crate) fn run(args: &InfoArgs, uri: &NbdUri) -> Result<(), CliError> {
    let image = &args.image;
    let failed = |error: nowait::Error| CliError::at(image, os_message(&io::Error::from(error)));
    let storage = NbdStorage::open(uri, &NbdOptions::default());
    let storage = Arc::new(storage.map_err(|error| CliError::at(image, error))?);
    let size = storage.size().map_err(failed)?;
    let mut extents = Vec::new();
    if storage.tells_extents() && size > 0 {
        let all = ByteRange::new(0, size);
        storage.extents(all, MAX_EXTENTS, &mut extents).map_err(failed)?;
    }
    let header =
        (args.format == Some(Format::Qcow2)).then(|| header(image, &storage)).transpose()?;
    let facts = Facts {
        size,
        block: storage.properties().zeroing_block,
        read_only: storage.is_export_read_only(),
        abilities: storage.abilities(),
        extents,
        header,
    };
    output::print(match args.json {
        true => format!("{}\n", in_json(image, &facts)),
        false => in_words(image, &facts),
    })
}

fn header(image: &Path, storage: &Arc<NbdStorage>) -> Result<Qcow2Info, CliError> {
    let options =
        ChainOptions { format: Some(Format::Qcow2), damaged: true, ..ChainOptions::default() };
    let chain = Chain::open_storage(image, storage.clone(), &options);
    let header = chain.and_then(|chain| Qcow2Info::read(&chain.top().file, image));
    header.map_err(|error| open_chain::failed(&error))
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
        "format": if facts.header.is_some() { "qcow2" } else { "raw" },
        "virtual-size": facts.size,
        "actual-size": 0,
        "dirty-flag": false,
        "image": image.to_string_lossy(),
        "kind": "nbd_export",
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
        "qcow2_header": facts.header.is_some(),
        "read_only": facts.read_only,
        "abilities": facts.abilities,
    });
    if let (Some(header), Value::Object(object)) = (&facts.header, &mut object) {
        object.extend(header.in_json());
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
    let kind = if facts.read_only { "NBD export, read-only" } else { "NBD export" };
    let mut lines = vec![("image", plain(&image.display().to_string())), ("kind", kind.to_owned())];
    match &facts.header {
        Some(header) => lines.extend(header.in_words(facts.size, "not told".into())),
        None => lines.extend([("format", "raw".into()), ("virtual size", human(facts.size))]),
    }
    lines.extend([
        ("data", data),
        ("holes", holes),
        ("block", format!("{} bytes", facts.block)),
        ("abilities", facts.abilities.join(", ")),
    ]);
    let mut text = String::new();
    for (name, value) in lines {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:<14}{value}", format!("{name}:"));
    }
    text
}
