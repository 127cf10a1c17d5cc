//! The formats of images: how one is recognised, and the code of each in its own folder.

pub(crate) mod qcow2;
pub(crate) mod signature;
pub(crate) mod format;
