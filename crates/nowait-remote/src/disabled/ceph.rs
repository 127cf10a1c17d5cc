//! Images of Ceph clusters in a build without them.

use std::time::Duration;

use crate::disabled::disabled_kind::{
    DisabledKind, DisabledLocation, DisabledStorage, never_called,
};
use crate::rbd_options::RbdOptions;

/// The kind of the images of Ceph clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CephImages {}

impl DisabledKind for CephImages {
    const SCHEMES: &'static [&'static str] = &["rbd:"];
    const REFUSAL: &'static str =
        "this nowait was built without Ceph (it is the cargo feature \"ceph\")";
}

/// The name of an image in a Ceph cluster.
pub type RbdLocation = DisabledLocation<CephImages>;

/// An image of a Ceph cluster.
pub type RbdStorage = DisabledStorage<CephImages>;

impl DisabledLocation<CephImages> {
    never_called! {
        is_snapshot(self: &Self) -> bool;
    }
}

impl DisabledStorage<CephImages> {
    never_called! {
        open(location: &RbdLocation, RbdOptions) -> Result<Self, String>;
    }

    /// Loads no library.
    ///
    /// # Errors
    /// Always: this build has no use for it.
    pub fn load_library() -> Result<(), String> {
        Err(CephImages::REFUSAL.into())
    }

    /// Returns: no image is open.
    pub const fn wait_until_closed(_: Duration) {}
}
