//! Many hosts that boot from one image in a store: what the store has to bear, and how long the boots
//! take, with and without caches and a record of an earlier boot. Time is virtual and no byte moves.
//!
//! Invariant: the same parameters give the same outcome. What a client decides (pauses, runs of
//! blocks, order of prefetch) is code of crate `nowait-remote`.

pub mod parameters;
mod timeline;
mod boot_read;
mod recorded_boot;
mod synthetic_boot;
mod boot_trace;
mod block_set;
mod rates;
mod request;
mod origin;
mod site;
mod transfers;
mod machine;
pub mod outcome;
mod fleet;

#[cfg(test)]
mod tests;

pub use fleet::simulate;
