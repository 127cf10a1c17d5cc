//! Use of an image of a Ceph cluster, in every build.

use std::time::Duration;

use crate::nbd::NbdOptions;

/// How an image of a cluster is used.
#[derive(Clone, Copy, Debug)]
pub struct RbdOptions {
    /// How long requests wait for the cluster before they fail, at least a second.
    pub timeout: Duration,
    /// It is only read.
    pub read_only: bool,
}

impl Default for RbdOptions {
    fn default() -> Self {
        Self { timeout: NbdOptions::default().reconnect, read_only: true }
    }
}
