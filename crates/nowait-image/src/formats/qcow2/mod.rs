//! The qcow2 format: its header, its tables and their entries.

pub(crate) mod header;
pub(crate) mod bitmaps;
pub(crate) mod encode;
pub(crate) mod entries;
pub(crate) mod lookup;
pub(crate) mod refcounts;
pub(crate) mod layout;
pub(crate) mod builder;
