//! Power cuts during offline operations.

pub(crate) mod observed_storage;
pub(crate) mod write_log;
pub(crate) mod power_loss;
mod bitmap_power_loss;
mod raw_bitmap_power_loss;
