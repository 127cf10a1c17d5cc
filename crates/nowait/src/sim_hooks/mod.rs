//! Hooks of a simulation in the shipped code. Without the feature `sim` they do nothing.

pub(crate) mod injected_bug;
#[cfg_attr(not(feature = "sim"), path = "no_yield_point.rs")]
pub(crate) mod yield_point;
