//! The targets.

mod handshake;
mod image;
mod read_only_image;
mod vmdk_image;
mod vhdx_image;
mod tree;
mod image_names;
mod image_ops;
mod bitmaps;
mod raw_bitmaps;
mod refcounts;
mod transmission;
mod segments;
mod client;
mod virtqueue;
mod control;
mod remote;
mod launcher;
mod backup;

use crate::target::Target;

/// All targets.
pub const ALL: [&Target; 17] = [
    &handshake::TARGET,
    &transmission::TARGET,
    &image::TARGET,
    &vmdk_image::TARGET,
    &vhdx_image::TARGET,
    &image_names::TARGET,
    &image_ops::TARGET,
    &bitmaps::TARGET,
    &raw_bitmaps::TARGET,
    &refcounts::TARGET,
    &segments::TARGET,
    &client::TARGET,
    &virtqueue::TARGET,
    &control::TARGET,
    &remote::TARGET,
    &launcher::TARGET,
    &backup::TARGET,
];

/// The target with this name.
pub fn by_name(name: &str) -> Option<&'static Target> {
    ALL.into_iter().find(|target| target.name == name)
}
