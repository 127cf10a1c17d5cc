//! Offline operations, on images that are not served: create, check, resize, commit, map.

pub mod map;
pub mod check;
pub mod create;
pub(crate) mod offline_allocator;
pub(crate) mod editor;
pub mod resize;
pub(crate) mod make_empty;
pub mod commit;
