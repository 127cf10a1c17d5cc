//! Backups: a disk as it was at an instant, while it goes on being written (C78 to C80, decision 050).
//!
//! Invariant: of exports whose backups begin together none has changed between their instants; either all of them have a
//! backup then, or none.

pub(crate) mod block_states;
pub(crate) mod scratch;
pub(crate) mod point_in_time;
pub(crate) mod backup_device;
pub(crate) mod backup_spec;
pub(crate) mod running_backup;
#[cfg(feature = "sim")]
pub(crate) mod sim_backup;
