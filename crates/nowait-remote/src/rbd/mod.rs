//! Images in a Ceph cluster, by the cluster's own library (librbd), which is loaded when the first one
//! is opened: a machine without it builds and does everything else.

mod rbd_location;
mod request_errno;
mod librbd;
mod rbd_storage;

pub use rbd_location::RbdLocation;
pub use rbd_storage::RbdStorage;
