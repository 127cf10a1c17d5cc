//! Benchmarks: nowait compared with the other NBD servers of this machine, each mechanism of the
//! engine on against off, and copies of disks by several programs. No figure is reported without
//! one to compare it with.
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
mod wire;
mod workload;
mod certificates;
mod session;
mod process_stats;
mod cpus;
mod cancel;
mod client;
mod test_file;
mod server;
mod comparison;
mod fio;
mod fio_client;
mod report;
mod measurement;
mod nbd_servers_page;
mod nbd_servers;
mod copying;
mod test_images;
mod qcow2_report;
mod qcow2_bench;
mod ablation;

pub use ablation::{
    Cell, EngineOptions, EngineReport, EngineRow, EngineSample, Latency, Metric, Source, Table,
    TableSelection, Unit, run_engine,
};
pub use cancel::CancelFlag;
pub use comparison::{Comparison, MinMedianMax, Row, Sample};
pub use copying::{
    Content, Copier, CopyCase, CopyOptions, CopyReport, CopyRow, CopySample, CopyTable, run_copies,
};
pub use error::Error;
pub use nbd_servers::{Output, PeersOptions, run};
pub use qcow2_bench::{ImageCase, ImagesOptions, run_images};
pub use qcow2_report::{ImageFailure, ImageRow, ImageTable, ImagesReport, Subject};
pub use report::{Failure, Machine, MeasuredFile, Report};
pub use server::ServerKind;
pub use test_images::ImageKind;
pub use workload::{
    BackgroundLoad, Caching, ClientKind, Conditions, Direction, Order, Transport, Workload,
};
