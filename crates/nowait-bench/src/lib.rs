//! Measures nowait beside the other NBD servers of this machine, and each mechanism of the engine on
//! against off, and copies of disks by each program that makes them, so that a figure never stands alone.
//!
//! Invariant: within one table every server gets the same file, the same processor, the same client and the
//! same kind of caching and encryption, in turns short enough that a machine which slows down slows down for all of them.
//! Knows: the servers only as programs, the NBD protocol as a client, and the engine as a library
//! (`engine`). Known by: the command line.
//!
//! How a figure comes about: each server is started in turn on the file (only one has it open at a time, as
//! QEMU locks images), warmed up, measured and stopped; the turns are repeated, and the median of the
//! rounds is reported with the lowest and the highest. Client and server each have one processor of their
//! own, so a figure says what a server makes of **one** processor, however many threads it starts. The
//! client sleeps in the kernel while it has nothing to do, as real clients do.

mod error;
mod address;
mod page;
mod wire;
mod workload;
mod certificates;
mod session;
mod usage;
mod cpus;
mod stop;
mod client;
mod target;
mod server;
mod comparison;
mod fio;
mod fio_client;
mod report;
mod turn;
mod peers_page;
mod peers;
mod copying;
mod gallery;
mod images_report;
mod images;
mod engine;

pub use comparison::{Comparison, Row, Sample, Spread};
pub use copying::{
    Content, Copier, CopyOptions, CopyReport, CopyRow, CopySample, CopyTable, Route, run_copies,
};
pub use engine::{
    Cell, EngineOptions, EngineReport, EngineRow, EngineSample, Gain, Latency, Source, Table, Unit,
    What, run_engine,
};
pub use error::Error;
pub use gallery::ImageKind;
pub use images::{ImageScene, ImagesOptions, run_images};
pub use images_report::{ImageFailure, ImageRow, ImageTable, ImagesReport, Subject};
pub use peers::{Output, PeersOptions, run};
pub use report::{Failure, Machine, MeasuredFile, Report};
pub use server::ServerKind;
pub use stop::Stop;
pub use workload::{Caching, ClientKind, Direction, Neighbour, Order, Terms, Transport, Workload};
