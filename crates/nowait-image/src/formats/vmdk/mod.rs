//! The VMDK format of VMware, versions 1 to 3, which is only read: one file or several, sparse, flat or
//! compressed for a stream.
//!
//! Invariant: an image names its parts by the names of files beside it; one with a parent is refused.

mod descriptor;
mod sparse_header;
mod grains;
mod vmdk_image;

use crate::formats::driver::Driver;
use crate::formats::format::Format;
use crate::formats::mapped_content;

pub(crate) const DRIVER: Driver = Driver {
    format: Format::Vmdk,
    name: "vmdk",
    aliases: &[],
    endings: &["vmdk"],
    guessed_ending: Some("vmdk"),
    size_unit: 512,
    writable: false,
    has_snapshots: false,
    magics: &[&sparse_header::MAGIC, descriptor::FIRST_LINE],
    open: vmdk_image::open,
    create: None,
    check: None,
    map: mapped_content::map,
    resize: None,
    commit: None,
    info: vmdk_image::info,
};
