//! Benchmarks: nowait compared with the other NBD servers of this host, each mechanism of the
//! engine on against off, copies of disks by several programs, and a client beside neighbours that
//! misbehave. No figure is reported without one to compare it with.
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
mod page;
mod table;
mod workload;
mod certificates;
mod process_stats;
mod cpus;
mod cancel;
mod report;
mod offsets;
mod client;
mod split_queue;
mod vhost_client;
mod test_file;
mod server;
mod test_images;
mod fio;
mod samples;
mod measurement;
mod peers;
mod image_formats;
mod copying;
mod isolation;
mod ablation;

pub use ablation::{DevicesOptions, EngineOptions, TableSelection, run_devices, run_engine};
pub use cancel::CancelFlag;
pub use copying::{CopyOptions, run_copies};
pub use error::Error;
pub use image_formats::{ImagesOptions, run_images};
pub use isolation::{IsolationOptions, run_isolation};
pub use peers::{PeersOptions, run_peers};
pub use report::{Output, Report, RunOptions};
pub use server::ServerKind;
pub use workload::{Caching, ClientKind, Transport};
