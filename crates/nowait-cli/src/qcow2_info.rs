//! What the header of a qcow2 image says, as `qemu-img info` says it.
//!
//! Invariant: only IMAGE itself is opened, for reading and without a lock; a damaged or unsupported
//! image is described as far as its header makes sense.
//! Knows: error, size. Known by: info.

use std::path::Path;

use nowait_image::{Compression, Header, HostFile};
use serde_json::{Map, Value, json};

use crate::error::CliError;
use crate::size::human;

pub(crate) struct Qcow2Info {
    header: Header,
    /// The backing file's path from here on, not only from the image's directory on.
    full_backing: Option<String>,
}

impl Qcow2Info {
    pub(crate) fn read(image: &Path) -> Result<Self, CliError> {
        let header = HostFile::open(image, false)
            .and_then(|file| Header::read(&file))
            .map_err(|error| CliError::new(error.to_string()))?;
        let full_backing = header.backing.as_ref().map(|backing| {
            let directory = image.parent().unwrap_or(Path::new(""));
            directory.join(&backing.name).to_string_lossy().into_owned()
        });
        Ok(Self { header, full_backing })
    }

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
    pub(crate) fn in_json(&self) -> Map<String, Value> {
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
            let name = header.data_file.as_ref().map(|name| name.to_string_lossy());
            data["data-file"] = json!(name);
            data["data-file-raw"] = json!(header.is_data_file_raw());
        }
        let mut object = Map::new();
        let mut put = |key: &str, value: Value| object.insert(key.to_owned(), value);
        put("virtual-size", json!(header.size));
        put("cluster-size", json!(header.cluster_bytes()));
        put("dirty-flag", json!(header.is_dirty()));
        put("format-specific", json!({ "type": "qcow2", "data": data }));
        put("snapshots_count", json!(header.snapshots));
        if let Some(backing) = &header.backing {
            put("backing-filename", json!(backing.name.to_string_lossy()));
            put("full-backing-filename", json!(self.full_backing));
            if let Some(format) = &backing.format {
                put("backing-filename-format", json!(format));
            }
        }
        object
    }

    /// Lines for people: a name and a value each.
    pub(crate) fn in_words(&self) -> Vec<(&'static str, String)> {
        let header = &self.header;
        let mut lines = vec![
            ("format", format!("qcow2, version {}", header.version)),
            ("disk size", human(header.size)),
            ("clusters", human(header.cluster_bytes())),
        ];
        if let Some(backing) = &header.backing {
            let format = backing.format.as_deref().unwrap_or("format not recorded");
            lines.push(("backing", format!("{} ({})", shown(&backing.name), shown(format))));
        }
        if header.has_data_file() {
            let name = header.data_file.as_deref().map_or("not recorded".into(), shown);
            lines.push(("data file", name));
        }
        if header.snapshots > 0 {
            lines.push(("snapshots", header.snapshots.to_string()));
        }
        if let Err(why) = header.supported(true) {
            lines.push(("note", why));
        }
        lines
    }
}

/// A name out of the image, without what could move a terminal's cursor.
fn shown(name: impl AsRef<std::ffi::OsStr>) -> String {
    let name = name.as_ref().to_string_lossy();
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
