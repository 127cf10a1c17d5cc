//! The implementation of each command.

pub(crate) mod info_remote;
pub(crate) mod info;
pub(crate) mod map;
pub(crate) mod moves;
pub(crate) mod check;
pub(crate) mod create;
pub(crate) mod replications;
pub(crate) mod resize;
pub(crate) mod commit;
pub(crate) mod ublk;
pub(crate) mod backups;
pub(crate) mod bitmaps;
pub(crate) mod control;
#[cfg(feature = "control")]
pub(crate) mod top_layout;
#[cfg(feature = "control")]
pub(crate) mod top;
pub(crate) mod copy;
pub(crate) mod backup_chain;
pub(crate) mod bench;
pub(crate) mod setup;
