//! Disk images in the formats of [`formats`], with their chains of backing files, and the operations on them.
//!
//! For programs that read or write disk images by themselves: servers, backup tools, converters.
//!
//! [`open()`] opens an image as a block device, and [`Chain::open`] its files for the operations on
//! them: both refuse with one line what is not supported. [`mod@map`] reports the mapping of an image, [`mod@check`] whether its metadata is
//! consistent; [`mod@create`], [`mod@resize`] and [`mod@commit`] make and change images that no
//! other process uses; [`Qcow2Builder`] makes the metadata of an image whose data the caller
//! writes. [`mod@qcow2_disk`] reads and writes a qcow2 image as a map of the engine. A format is
//! never guessed where a guest may have chosen the bytes; see [`Format::probe`].
//!
//! The modules are listed in the order of their dependencies.
#![deny(unsafe_code)]

pub mod lock;
pub mod lock_holder;
mod mounts;
mod error;
mod injected_bug;
#[cfg(test)]
mod tests;
mod file_name;
mod snapshot_name;
mod image_file;
pub mod formats;
mod atomic_file;
mod named_storages;
mod path_policy;
mod backing_name;
mod warning;
mod handed_over;
mod base_version;
mod chain;
mod offline;
mod raw_bitmaps;
pub mod qcow2_disk;
mod open_bitmaps;
mod read_only_disk;
mod image;
#[cfg(feature = "sim")]
mod sim_raw_disk;

pub use atomic_file::{AtomicFile, OverwritePolicy};
pub use backing_name::url_of_backing;
pub use chain::{Chain, ChainOptions, Locking, MAX_LAYERS, Purpose};
pub use error::{ImageError, create_message, open_message, os_message, plain};
pub use formats::chain_reader::ChainReader;
pub use formats::compress::ClusterCompressor;
pub use formats::decompress::Compression;
pub use formats::driver::{Driver, Fact, ImageBuilder, ImageInfo};
pub use formats::format::Format;
pub use formats::layer::{BackingName, Layer};
pub use formats::qcow2::bitmaps::Bitmap;
pub use formats::qcow2::builder::Qcow2Builder;
pub use formats::qcow2::header::{Header, MAGIC};
pub use formats::qcow2::stored_bits::StoredBits;
pub use formats::signature::{PROBE_BYTES, Signature, mark_raw, settle_raw};
pub use handed_over::HandedOver;
pub use image::{Image, bitmaps_of, open, open_storage};
pub use image_file::{ImageFile, NO_MEDIUM};
#[cfg(feature = "sim")]
pub use injected_bug::{ImageBug, inject};
pub use mounts::in_use;
pub use named_storages::NamedStorages;
pub use offline::{bitmap_changes, check, commit, create, map, repair, resize};
pub use qcow2_disk::bitmap_store::{BitmapBits, BitmapStore, RestingRegions};
pub use raw_bitmaps::BitmapsPlace;
#[cfg(feature = "sim")]
pub use sim_raw_disk::{SimRawDisk, SimRawImage};
pub use snapshot_name::{file_in, snapshot_in};
pub use warning::Warning;
