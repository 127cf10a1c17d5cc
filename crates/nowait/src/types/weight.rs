//! Weights of devices that share something.

use std::ops::RangeInclusive;

/// The weight of a device that has none set.
pub const DEFAULT_WEIGHT: u32 = 100;
/// Weights that a device may have.
pub const WEIGHTS: RangeInclusive<u32> = 1..=10_000;
