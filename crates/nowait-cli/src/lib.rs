//! Parts of the command that the program `nowait-bench`, which `nowait bench` runs, has too.

pub mod process;
pub mod error;
mod journal;
pub mod log;
pub mod sandbox;
pub mod size;
pub mod bench_args;
