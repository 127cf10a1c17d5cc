//! The images of a server: opened, served, exchanged.

pub(crate) mod parallel_map;
pub mod waiting;
pub(crate) mod default_image;
pub(crate) mod descriptor_need;
pub(crate) mod open_disk;
pub(crate) mod served_disks;
pub(crate) mod allowed_places;
pub(crate) mod image_exchange;
