//! Backups of disks that go on being written, by clients of a server in this process.
//!
//! Invariant: what a backup reads is compared with a copy of the disk that was taken at its instant, while nothing was in
//! flight.

mod scene;
mod bitmaps;
mod durable_commits;
mod instants;
mod scratch;
