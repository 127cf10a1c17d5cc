//! Offline operations, on images that are not served: create, check, repair, resize, commit, map.

pub mod map;
pub mod check;
pub mod repair;
pub mod create;
pub mod resize;
pub mod commit;
