//! Chains of backups of a disk in a directory or an object store: whole points and points of changes, of compressed blocks with checksums.
//!
//! For programs that back up disks and restore them to any point.
//!
//! A point is a manifest and, if it has blocks, data files. The manifest comes last, and names all that it needs, so
//! that a backup that is interrupted never looks like a point. Everything in the files is checked as a stranger's.
//! Each module uses only modules listed before it.
#![forbid(unsafe_code)]

mod block;
mod manifest;
mod table;
mod place;
mod directory;
mod store_lock;
mod store_place;
mod chain_place;
#[cfg(feature = "encryption")]
mod encryption;
#[cfg(not(feature = "encryption"))]
mod disabled;
mod chain;
mod data_files;
mod data_writer;
mod point_disk;
mod point_storage;
mod new_point;
mod verify;
mod prune;
#[cfg(feature = "fuzz")]
pub mod fuzz;

pub use chain::{Chain, ListedPoint, PointInfo};
pub use chain_place::ChainPlace;
#[cfg(not(feature = "encryption"))]
pub use disabled::Keys;
#[cfg(feature = "encryption")]
pub use encryption::Keys;
pub use new_point::{Contents, NewPoint};
pub use place::Access;
pub use point_disk::PointDisk;
pub use point_storage::PointStorage;
pub use prune::{Keep, Pruned, prune};
pub use verify::{Damage, PointHealth, verify};

#[cfg(test)]
mod tests;
#[cfg(test)]
mod interrupted_backup_tests;
