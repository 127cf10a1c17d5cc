//! The targets.
//!
//! Knows: target, pieces, wire. Known by: run.

mod handshake;
mod image;
mod changed;
mod transmission;
mod segments;
mod client;

use crate::target::Target;

/// All of them.
pub const ALL: [&Target; 6] = [
    &handshake::TARGET,
    &transmission::TARGET,
    &image::TARGET,
    &changed::TARGET,
    &segments::TARGET,
    &client::TARGET,
];

/// The one with this name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static Target> {
    ALL.into_iter().find(|target| target.name == name)
}
