//! Copies a disk to another: files, qcow2 images, block devices and NBD exports on either side.
//!
//! One thread keeps many requests in flight on both sides and sleeps while all are out. What reads
//! as zeros is neither read nor written where that can be known. A file is written under another
//! name and gets its own when it is complete and on storage, so that a copy that was cut never
//! looks like a whole one. The modules are listed in the order in which they know each other.
#![deny(unsafe_code)]

mod error;
mod place;
mod zeros;
mod memory;
mod port;
mod file_port;
mod nbd;
mod extents;
mod pair;
mod transfer;
mod verify;
mod ends;
mod job;

pub use error::Error;
pub use job::{Options, Phase, Progress, REQUEST_BYTES, Report, copy};
#[cfg(feature = "fuzz")]
pub use nbd::fuzz;
pub use place::{Place, Uri};
