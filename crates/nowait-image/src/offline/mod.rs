//! Offline operations, on images that are not served: create, check, repair, resize, commit, map, bitmaps.

pub mod map;
pub mod check;
pub mod repair;
pub mod create;
pub mod bitmap_changes;
pub mod resize;
pub mod commit;
