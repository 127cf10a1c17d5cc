//! Storages that this build leaves out, by the names of those that it could have.
//!
//! Invariant: a location of such a storage cannot be made, so nothing of it can be reached: the refusal of a
//! name says which cargo feature is missing.

mod disabled_kind;
#[cfg(not(feature = "object-stores"))]
pub(crate) mod object;
#[cfg(not(feature = "ceph"))]
pub(crate) mod ceph;
