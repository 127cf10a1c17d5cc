//! What is inside a disk image: raw and qcow2, chains of backing files, and what looks after them.
//!
//! [`Chain::open`] opens an image and all that it stands on, and refuses with one line what is not
//! supported. [`mod@map`] says what is where in it, [`mod@check`] whether its metadata holds together;
//! [`mod@create`], [`mod@resize`] and [`mod@commit`] make and change images that nobody else uses;
//! [`NewImage`] is one that somebody else writes the data of. [`mod@served`] reads and writes a qcow2 image as a map of the engine; [`mod@map`] says
//! what is where in it, [`mod@check`] whether its metadata holds together.
//! Formats are never guessed where somebody else may have chosen the bytes; see [`Format::probe`].
//!
//! The modules are listed in the order in which they know each other.
#![deny(unsafe_code)]

pub mod lock;
mod error;
mod breaks;
#[cfg(test)]
mod recorder;
#[cfg(feature = "sim")]
mod simulated;
mod host;
mod header;
mod encode;
mod partial;
mod places;
mod chain;
mod entry;
mod tables;
mod refcounts;
pub mod map;
mod references;
mod walk;
pub mod check;
pub mod repair;
mod storage;
mod reader;
mod layout;
pub mod create;
mod new_image;
mod counts;
mod editor;
pub mod resize;
mod empty;
pub mod commit;
#[cfg(test)]
mod cuts;
pub mod served;

#[cfg(feature = "sim")]
pub use breaks::{Flaw, make};
pub use chain::{Chain, ChainOptions, Content, Format, Layer, Locking, MAX_LAYERS};
pub use error::ImageError;
pub use header::{BackingName, Compression, Header, MAGIC};
pub use host::HostFile;
pub use new_image::NewImage;
pub use partial::{Partial, Replaces};
pub use reader::Reader;
