//! What the two programs of this package share: `nowait`, and `nowait-bench`, which `nowait bench`
//! runs.

pub mod process;
pub mod error;
mod journal;
pub mod log;
pub mod sandbox;
pub mod size;
pub mod bench_args;
