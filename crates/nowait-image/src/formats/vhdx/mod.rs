//! The VHDX format of Hyper-V, version 1, which is only read: fixed and dynamic.
//!
//! Invariant: an image with a parent, or with a log that was not played back, is refused.

mod region_table;
mod vhdx_metadata;
mod block_table;
mod vhdx_image;

use crate::formats::driver::Driver;
use crate::formats::format::Format;
use crate::formats::mapped_content;

pub(crate) const DRIVER: Driver = Driver {
    format: Format::Vhdx,
    name: "vhdx",
    aliases: &[],
    endings: &["vhdx"],
    guessed_ending: Some("vhdx"),
    size_unit: 512,
    writable: false,
    has_snapshots: false,
    magics: &[region_table::MAGIC],
    open: vhdx_image::open,
    create: None,
    check: None,
    map: mapped_content::map,
    resize: None,
    commit: None,
    info: vhdx_image::info,
};
