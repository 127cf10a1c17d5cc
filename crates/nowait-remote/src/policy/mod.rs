//! Decisions of a client of a store, without I/O: when it asks again, which blocks it asks for at
//! once, and which ones ahead.
//!
//! Invariant: a decision depends on its arguments only, so that the simulation of many hosts
//! (`nowait-sim --mode hosts`) makes those that are shipped.

mod back_off;
mod pace;
mod block_runs;
mod prefetch_order;
mod read_ahead;

pub use back_off::BackOff;
pub use block_runs::block_runs;
pub use pace::Pace;
pub use prefetch_order::{PrefetchCursor, PrefetchOrder};
pub use read_ahead::ReadAhead;

/// Bytes of a block: what is asked for and kept as a whole.
pub const BLOCK_BYTES: u64 = 64 << 10;
