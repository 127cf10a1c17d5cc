//! The header of a qcow2 image in the form of `qemu-img info`.
//!
//! Invariant: only IMAGE itself is opened, for reading and without a lock; a damaged or unsupported
//! image is described as far as its header makes sense.

use std::path::Path;

use nowait_image::{Bitmap, Compression, Header, ImageError, ImageFile};
use serde_json::{Map, Value, json};

use crate::error::plain;
use crate::size::human;

pub(crate) struct Qcow2Info {
    header: Header,
    /// The backing file's path relative to the current directory, not to the image's.
    full_backing: Option<String>,
    /// Empty also where the bitmap directory is damaged.
    bitmaps: Vec<Bitmap>,
}

impl Qcow2Info {
    /// Reads it from `file`, the image at path `image`.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub(crate) fn read(file: &ImageFile, image: &Path) -> Result<Self, ImageError> {
        let header = Header::read(file)?;
        let bitmaps = Bitmap::all(file, &header).unwrap_or_default();
        let full_backing = header.backing.as_ref().map(|backing| {
            let directory = image.parent().unwrap_or(Path::new(""));
            backing.full(directory).to_string_lossy().into_owned()
        });
        Ok(Self { header, full_backing, bitmaps })
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
        if let Some(backing) = &header.backing {
            put("backing-filename", json!(backing.name.to_string_lossy()));
            put("full-backing-filename", json!(self.full_backing));
            if let Some(format) = &backing.format {
                put("backing-filename-format", json!(format));
            }
        }
        object
    }

    /// Lines of text, a name and a value each, in the words of `qemu-img info`. `file_bytes` is the
    /// length of the file, `space` the text for its allocated space.
    pub(crate) fn in_words(&self, file_bytes: u64, space: String) -> Vec<(&'static str, String)> {
        let header = &self.header;
        let mut lines = vec![
            ("format", format!("qcow2, version {}", header.version)),
            ("virtual size", human(header.size)),
            ("disk size", space),
            ("file length", human(file_bytes)),
            ("cluster size", human(header.cluster_bytes())),
        ];
        if let Some(backing) = &header.backing {
            let format = backing.format.as_deref().unwrap_or("format not recorded");
            lines.push(("backing file", format!("{} ({})", shown(&backing.name), shown(format))));
        }
        if header.has_data_file() {
            let name = header.data_file.as_deref().map_or("not recorded".into(), shown);
            lines.push(("data file", name));
        }
        if header.snapshots > 0 {
            lines.push(("snapshots", header.snapshots.to_string()));
        }
        if !self.bitmaps.is_empty() {
            lines.push(("bitmaps", self.bitmaps.len().to_string()));
        }
        lines
    }

    /// Why the image cannot be served writable, if so.
    pub(crate) fn note(&self) -> Option<(&'static str, String)> {
        self.header.supported(true).err().map(|why| ("note", why))
    }
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
