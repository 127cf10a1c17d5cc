//! Benchmarks: nowait compared with the other NBD servers of this host, each mechanism of the
//! engine on against off, copies of disks by several programs, the library's files beside those of other runtimes, a client beside neighbours that
//! misbehave, and what backups cost the writers. No figure is reported without one to compare it with.
//!
//! For the program `nowait-bench`, and for its tests.
//!
//! Invariant: within one table every server gets the same file, processor, client, caching and
//! encryption. The measurements are short and alternate, so that a slowdown of the machine affects
//! all servers.
//!
//! Method: each server is started in turn on the file (only one has it open at a time, because QEMU
//! locks images), warmed up, measured and stopped. This is repeated, and the median of the rounds
//! is reported with the lowest and the highest. Client and server each have their own processor, so
//! a figure states the throughput of a server on **one** processor, however many threads it starts.
//! The client sleeps in the kernel while it waits, as real clients do.

mod error;
mod address;
mod table;
mod workload;
mod certificates;
mod process_stats;
mod cpus;
mod cancel;
mod machine;
mod other_programs;
mod image_kind;
mod test_file;
mod server;
mod args;
mod bench;
mod report;
mod offsets;
mod client;
mod split_queue;
mod vhost_client;
mod test_images;
mod samples;
mod measurement;
mod peers;
mod copying;
mod library;
mod isolation;
mod backup;
mod ablation;

use std::io::Write;

pub use args::{BenchArgs, What};
pub use bench::Bench;
pub use cancel::CancelFlag;
pub use error::Error;
pub use report::Report;
pub use server::ServerKind;
pub use workload::{Caching, Transport};

/// Measures, writes the result to `out` and returns it. What fails is left out of its table, or named there, and named
/// in the report.
///
/// # Errors
/// [`Error::NoRow`] and [`Error::File`] before anything is started, [`Error::NoServer`] if nothing
/// can be, [`Error::System`] if `out` cannot be written or what is measured on cannot be made.
pub fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    match bench.args.what {
        What::Peers | What::Images => peers::run(bench, out),
        What::Copy => copying::run(bench, out),
        What::Library => library::run(bench, out),
        What::Isolation => isolation::run(bench, out),
        What::Backup => backup::run(bench, out),
        What::Nowait if !bench.args.device.is_empty() => ablation::run_devices(bench, out),
        _ => ablation::run(bench, out),
    }
}
