//! The ports that web servers have redirected to, so that a server that is confined later may connect to them.
//!
//! Invariant: a port is listed only after an answer had come from there.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

static PORTS: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// The TCP ports to which web servers have redirected this process so far, with success.
#[must_use]
pub fn redirect_ports() -> Vec<u16> {
    PORTS.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
}

/// Redirects to `ports` have led to an answer.
pub(super) fn learn(ports: &[u16]) {
    PORTS.lock().unwrap_or_else(PoisonError::into_inner).extend(ports);
}
