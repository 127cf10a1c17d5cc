//! Copies a disk to another: files, qcow2 images, block devices, NBD exports and objects of stores on
//! either side.
//!
//! For programs that move whole disks: backups, migrations, installers.
//!
//! One thread keeps many requests in flight on both sides and sleeps while none can progress.
//! Ranges known to read as zeros are neither read nor written. A new file is written under a
//! temporary name and renamed when it is complete and on storage, so that an interrupted copy never
//! looks like a complete one. Each module uses only modules listed before it.
#![deny(unsafe_code)]

mod error;
mod zero_detection;
mod lost_ranges;
mod buffer_pool;
mod endpoint;
mod file_endpoint;
mod worker_endpoint;
mod compressed_endpoint;
mod program_disk;
mod object_endpoint;
mod nbd;
mod rescue;
mod zero_map;
mod copy_loop;
mod first_bytes;
mod transfer;
mod verify;
mod open;
mod increment_target;
mod copy;
mod mirror;

pub use copy::{Options, Phase, Progress, REQUEST_BYTES, Report, copy};
pub use error::Error;
pub use increment_target::{Changes, Increment, IncrementTarget};
pub use lost_ranges::Lost;
pub use mirror::{Mirror, MirrorPart, MirroredDisk};
#[cfg(feature = "fuzz")]
pub use nbd::fuzz;
pub use nowait_remote::Location;
pub use program_disk::{CopySide, CopySource, CopyTarget, SourceDisk, TargetDisk};
