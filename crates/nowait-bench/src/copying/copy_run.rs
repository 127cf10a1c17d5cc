//! One timed copy from a prepared source to a new target.
//!
//! Invariant: before each copy no page is dirty, no page of the source is in the page cache, and no
//! target exists except an export of zeros.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fastrand::Rng;
use nowait_nbd::Address;
use rustix::fs::Advice;

use crate::address;
use crate::copying::copy_case::{Content, Copier, End, Route};
use crate::copying::timed;
use crate::process_stats::process_ns;
use crate::server::{Server, remove_if_there};

const MIB: u64 = 1 << 20;
/// The unit of `st_blocks` (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// One copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CopySample {
    /// Seconds until the program had ended.
    pub(crate) ended_s: f64,
    /// Seconds until what it wrote was on storage.
    pub(crate) stored_s: f64,
    /// Seconds of processor time of the program.
    pub(crate) copier_cpu_s: f64,
    /// Seconds of processor time of the server, if the route has one.
    pub(crate) server_cpu_s: Option<f64>,
    /// Seconds of processor time of the whole machine until the written data was on storage. This
    /// includes later writeback by the kernel, and all other processes.
    pub(crate) machine_cpu_s: f64,
    /// MiB that the target occupies on its file system.
    pub(crate) taken_mib: f64,
}

impl CopySample {
    /// The processor time of the program and the server.
    pub(crate) fn cpu_s(&self) -> f64 {
        self.copier_cpu_s + self.server_cpu_s.unwrap_or(0.0)
    }
}

/// The directories and the size of a copy.
pub(crate) struct CopyRun<'a> {
    pub(crate) directory: &'a Path,
    /// The directory of the socket of the server: a short path.
    pub(crate) scratch: &'a Path,
    pub(crate) nowait: &'a Path,
    /// Bytes of the disk, whole MiB.
    pub(crate) bytes: u64,
}

impl CopyRun<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Creates the sources of all routes: a raw file and a qcow2 image of it.
    pub(crate) fn prepare(&self, content: Content) -> io::Result<()> {
        let raw = self.path("source.raw");
        let file = File::create(&raw)?;
        file.set_len(self.bytes)?;
        let mut random = Rng::with_seed(1);
        let mut data = vec![0; content.data_bytes];
        for pos in (0..self.bytes).step_by(MIB as usize) {
            random.fill(&mut data);
            file.write_all_at(&data, pos)?;
        }
        file.sync_all()?;
        let image = self.path("source.qcow2");
        let mut command = Command::new(self.nowait);
        command.args(["copy", "--force", "-O", "qcow2"]).args([&raw, &image]);
        timed::run(&mut command, &File::open(self.directory)?).map(drop)
    }

    /// Copies on `route`.
    ///
    /// # Errors
    /// The last message of the program or the server, or the error of the system.
    pub(crate) fn run(&self, copier: Copier, route: Route) -> io::Result<CopySample> {
        let source = self.path(&format!("source.{}", route.from.format()));
        let target = self.path(&format!("target.{}", route.to.format()));
        remove_if_there(&target)?;
        let directory = File::open(self.directory)?;
        rustix::fs::syncfs(&directory)?;
        rustix::fs::fadvise(File::open(&source)?, 0, None, Advice::DontNeed)?;
        let server = match (route.from, route.to) {
            (End::Nbd, _) => Some(self.serve(&source, &["--read-only"])?),
            (_, End::Nbd) => {
                File::create(&target)?.set_len(self.bytes)?;
                Some(self.serve(&target, &[])?)
            }
            _ => None,
        };
        let uri = Address::Unix(self.scratch.join("socket")).uri("", false);
        let name = |end: End, path: &Path| match end {
            End::Nbd => uri.clone(),
            End::File(_) => path.to_string_lossy().into_owned(),
        };
        let (from, to) = (name(route.from, &source), name(route.to, &target));
        let mut command = copier.command(self.nowait, route, &from, &to);
        let used = |server: &Option<Server>| {
            server.as_ref().map(|server| process_ns(server.pid())).transpose()
        };
        let before = used(&server)?;
        let timed = timed::run(&mut command, &directory)?;
        let server_ns = used(&server)?.zip(before).map(|(now, before)| now.saturating_sub(before));
        if let Some(server) = server {
            server.stop()?;
        }
        let taken = fs::metadata(&target)?.blocks() * STAT_BLOCK_BYTES;
        remove_if_there(&target)?;
        Ok(CopySample {
            taken_mib: taken as f64 / MIB as f64,
            ended_s: timed.ended.as_secs_f64(),
            stored_s: timed.stored.as_secs_f64(),
            copier_cpu_s: timed.processor.as_secs_f64(),
            server_cpu_s: server_ns.map(|ns| Duration::from_nanos(ns).as_secs_f64()),
            machine_cpu_s: timed.machine.as_secs_f64(),
        })
    }

    fn serve(&self, file: &Path, extra: &[&str]) -> io::Result<Server> {
        let arguments = extra.iter().map(OsString::from).chain([file.into()]);
        let mut server = Server::of_nowait(self.nowait, arguments, self.scratch)?;
        let ready = server.when_ready(address::check);
        ready.map_err(|e| io::Error::other(format!("the server: {e}{}", server.last_message())))?;
        Ok(server)
    }
}
