//! The dirty bitmaps of a raw disk: a file of their own, which is a qcow2 image whose external raw data file is the disk.
//!
//! Invariant: no byte of the disk is read or written through that file, and no other file that it names is opened. Bitmaps
//! that may lack a change of the disk are never used as they are: all of each is dirty.

pub(crate) mod disk_record;
pub(crate) mod bitmaps_file_system;
pub(crate) mod bitmaps_place;
pub(crate) mod bitmaps_file;

pub use bitmaps_place::BitmapsPlace;
