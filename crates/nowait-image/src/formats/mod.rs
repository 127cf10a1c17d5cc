//! The formats of images: a table with a row for each, and the code of each in its own folder.
//!
//! A format is known by name nowhere else but here: the rest of the crate, and its users, ask the row
//! ([`driver::Driver`]) of an image's [`format::Format`].

pub(crate) mod format;
pub(crate) mod decompress;
pub(crate) mod compress;
pub(crate) mod decompressed_cache;
pub(crate) mod mapped_disk;
pub(crate) mod table_blocks;
pub(crate) mod layer;
pub(crate) mod chain_reader;
pub(crate) mod driver;
pub(crate) mod raw;
pub(crate) mod mapped_content;
pub(crate) mod qcow2;
pub(crate) mod vmdk;
pub(crate) mod vhdx;
pub(crate) mod table;
pub(crate) mod signature;
pub(crate) mod probe;

pub use table::{by_ending, by_name, names};
