//! Hooks of a simulation in the shipped code. Without the feature `sim` they do nothing.

pub(crate) mod injected_bug;
pub(crate) mod yield_point;
