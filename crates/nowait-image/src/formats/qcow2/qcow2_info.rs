//! The header of a qcow2 image in the form of `qemu-img info`.
//!
//! Invariant: only IMAGE itself is opened, for reading and without a lock; a damaged or unsupported
//! image is described as far as its header makes sense.

use std::ffi::OsStr;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{ImageError, plain};
use crate::formats::decompress::Compression;
use crate::formats::driver::{Fact, ImageInfo};
use crate::formats::format::Format;
use crate::formats::qcow2::bitmaps::Bitmap;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::snapshots::Snapshot;
use crate::image_file::ImageFile;

/// Nanoseconds in a second.
const NANOS: u64 = 1_000_000_000;

struct Qcow2Info {
    header: Header,
    /// The backing file's path relative to the current directory, not to the image's.
    full_backing: Option<String>,
    /// Empty also where the bitmap directory is damaged.
    bitmaps: Vec<Bitmap>,
    /// Empty also where their table is damaged.
    snapshots: Vec<Snapshot>,
}

/// Reads the header from `file`, the image at path `image`.
///
/// # Errors
/// Like [`Header::read`].
pub(crate) fn read(
    file: &ImageFile,
    image: &Path,
    snapshot: Option<&OsStr>,
) -> Result<Option<ImageInfo>, ImageError> {
    let header = Header::read(file)?;
    let header = match snapshot {
        Some(snapshot) => header.of_snapshot(file, snapshot)?,
        None => header,
    };
    let snapshots = Snapshot::all(file, &header).unwrap_or_default();
    let bitmaps = Bitmap::all(file, &header).unwrap_or_default();
    let full_backing = header.backing.as_ref().map(|backing| {
        let directory = image.parent().unwrap_or(Path::new(""));
        backing.full(directory).to_string_lossy().into_owned()
    });
    let info = Qcow2Info { header, full_backing, bitmaps, snapshots };
    Ok(Some(ImageInfo {
        format: Format::Qcow2,
        title: format!("qcow2, version {}", info.header.version),
        size: info.header.size,
        json: info.in_json(),
        lines: info.in_words(),
        note: info.header.supported(true).err(),
    }))
}

impl Qcow2Info {
    fn compression(&self) -> &'static str {
        match self.header.compression {
            Compression::Deflate => "zlib",
            Compression::Zstd => "zstd",
            Compression::Unknown(_) => "unknown",
        }
    }

    fn version(&self) -> &'static str {
        if self.header.version < 3 { "0.10" } else { "1.1" }
    }

    /// The keys that `qemu-img info --output=json` has for such an image.
    fn in_json(&self) -> Map<String, Value> {
        let header = &self.header;
        let mut data = json!({
            "compat": self.version(),
            "compression-type": self.compression(),
            "refcount-bits": 1u64 << header.refcount_order,
        });
        if header.version >= 3 {
            data["lazy-refcounts"] = json!(header.has_lazy_refcounts());
            data["corrupt"] = json!(header.is_corrupt());
            data["extended-l2"] = json!(header.has_extended_l2());
        }
        if header.has_data_file() {
            if let Some(name) = &header.data_file {
                data["data-file"] = json!(name.to_string_lossy());
            }
            data["data-file-raw"] = json!(header.is_data_file_raw());
        }
        if !self.bitmaps.is_empty() {
            data["bitmaps"] = self.bitmaps.iter().map(bitmap_in_json).collect();
        }
        let mut object = Map::new();
        let mut put = |key: &str, value: Value| object.insert(key.to_owned(), value);
        put("virtual-size", json!(header.size));
        put("cluster-size", json!(header.cluster_bytes()));
        put("dirty-flag", json!(header.is_dirty()));
        put("format-specific", json!({ "type": "qcow2", "data": data }));
        put("snapshots_count", json!(header.snapshots));
        if !self.snapshots.is_empty() {
            put("snapshots", self.snapshots.iter().map(snapshot_in_json).collect());
        }
        if let Some(backing) = &header.backing {
            put("backing-filename", json!(backing.name.to_string_lossy()));
            put("full-backing-filename", json!(self.full_backing));
            if let Some(format) = &backing.format {
                put("backing-filename-format", json!(format));
            }
        }
        object
    }

    /// Lines of text, a name and a fact each, in the words of `qemu-img info`.
    fn in_words(&self) -> Vec<(&'static str, Fact)> {
        let header = &self.header;
        let mut lines = vec![("cluster size", Fact::Bytes(header.cluster_bytes()))];
        if header.has_extended_l2() {
            lines.push(("subcluster size", Fact::Bytes(header.unit_bytes())));
        }
        let mut tell = |name, words| lines.push((name, Fact::Words(words)));
        if let Some(backing) = &header.backing {
            let format = backing.format.as_deref().unwrap_or("format not recorded");
            tell("backing file", format!("{} ({})", shown(&backing.name), shown(format)));
        }
        if header.has_data_file() {
            let name = header.data_file.as_deref().map_or("not recorded".into(), shown);
            tell("data file", name);
        }
        if header.compression != Compression::Deflate {
            tell("compression", self.compression().to_owned());
        }
        if header.snapshots > 0 {
            tell("snapshots", header.snapshots.to_string());
            self.snapshots
                .iter()
                .for_each(|snapshot| tell("snapshot", snapshot_in_words(snapshot)));
        }
        if !self.bitmaps.is_empty() {
            tell("bitmaps", self.bitmaps.len().to_string());
            self.bitmaps.iter().for_each(|bitmap| tell("bitmap", bitmap_in_words(bitmap)));
        }
        lines
    }
}

/// The object of `qemu-img info --output=json`, and the size of the disk.
fn snapshot_in_json(snapshot: &Snapshot) -> Value {
    let (name, id) =
        (String::from_utf8_lossy(&snapshot.name), String::from_utf8_lossy(&snapshot.id));
    let mut object = json!({
        "id": id,
        "name": name,
        "vm-state-size": snapshot.vm_state_bytes,
        "disk-size": snapshot.disk_bytes,
        "date-sec": snapshot.date.0,
        "date-nsec": snapshot.date.1,
        "vm-clock-sec": snapshot.vm_clock / NANOS,
        "vm-clock-nsec": snapshot.vm_clock % NANOS,
    });
    if let Some(count) = snapshot.icount {
        object["icount"] = json!(count);
    }
    object
}

fn snapshot_in_words(snapshot: &Snapshot) -> String {
    let Snapshot { id, name, disk_bytes, vm_state_bytes, .. } = snapshot;
    let shown = |bytes: &[u8]| plain(&String::from_utf8_lossy(bytes));
    let date = chrono::DateTime::from_timestamp(snapshot.date.0.into(), 0);
    let date = date.map_or(String::new(), |date| date.to_string());
    let (id, name) = (shown(id), shown(name));
    format!("{name} (ID {id}), {date}, disk {disk_bytes} bytes, VM state {vm_state_bytes} bytes")
}

fn bitmap_in_words(bitmap: &Bitmap) -> String {
    let name = plain(&bitmap.name);
    let records = if bitmap.auto { ", records" } else { "" };
    let state = match (bitmap.in_use, bitmap.kept) {
        (false, _) => "",
        (true, true) => ", in use",
        (true, false) => ", inconsistent",
    };
    format!("{name}, granules of {} bytes{records}{state}", bitmap.granularity)
}

fn bitmap_in_json(bitmap: &Bitmap) -> Value {
    let flags = [("in-use", bitmap.in_use), ("auto", bitmap.auto)];
    let flags: Vec<_> = flags.into_iter().filter(|(_, set)| *set).map(|(name, _)| name).collect();
    json!({ "name": bitmap.name, "granularity": bitmap.granularity, "flags": flags })
}

/// A name from the image, without control characters.
fn shown(name: impl AsRef<std::ffi::OsStr>) -> String {
    plain(&name.as_ref().to_string_lossy())
}
