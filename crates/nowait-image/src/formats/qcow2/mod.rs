//! The qcow2 format: its header, its tables and their entries, and the operations on images that are not
//! served.

pub(crate) mod header;
pub(crate) mod bitmaps;
pub(crate) mod bitmap_marks;
pub(crate) mod snapshots;
pub(crate) mod stored_bits;
pub(crate) mod encode;
pub(crate) mod entries;
pub(crate) mod subclusters;
pub(crate) mod lookup;
pub(crate) mod read_ahead;
pub(crate) mod backing_tables;
pub(crate) mod table_reader;
pub(crate) mod refcounts;
pub(crate) mod layout;
pub(crate) mod builder;
pub(crate) mod content;
pub(crate) mod check;
pub(crate) mod cluster_map;
pub(crate) mod empty_image;
pub(crate) mod offline_allocator;
pub(crate) mod editor;
pub(crate) mod bitmap_slot;
pub(crate) mod bitmap_editor;
pub(crate) mod grow_shrink;
pub(crate) mod make_empty;
pub(crate) mod merge_down;
pub(crate) mod qcow2_info;

use crate::formats::driver::{Checking, Creation, Driver, ImageBuilder};
use crate::formats::format::Format;

pub(crate) const DRIVER: Driver = Driver {
    format: Format::Qcow2,
    name: "qcow2",
    aliases: &[],
    endings: &["qcow2", "qcow"],
    guessed_ending: None,
    size_unit: layout::SECTOR_BYTES,
    writable: true,
    has_snapshots: true,
    magics: &[&header::MAGIC],
    open: content::open,
    create: Some(Creation {
        check: empty_image::check_terms,
        write: empty_image::write,
        builder: Some(|size, cluster_bytes, compression| {
            let mut builder = builder::Qcow2Builder::new(size, cluster_bytes)?;
            if let Some(compression) = compression {
                builder = builder.with_compression(compression);
            }
            Ok(Box::new(builder) as Box<dyn ImageBuilder>)
        }),
    }),
    check: Some(Checking { check: check::check, repair: check::refcount_repair::repair }),
    map: cluster_map::open,
    resize: Some(grow_shrink::resize),
    commit: Some(merge_down::commit),
    info: qcow2_info::read,
};
