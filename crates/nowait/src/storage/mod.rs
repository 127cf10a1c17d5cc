//! The bytes of a file, a block device or a simulated disk.

pub(crate) mod descriptor;
pub(crate) mod file;
