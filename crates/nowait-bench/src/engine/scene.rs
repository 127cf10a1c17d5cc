//! What all turns have in common: the file, opened in the way each needs, and how long a turn is.
//!
//! Invariant: a file that may not be overwritten is opened for reading only.
//! Knows: target, drive, places. Known by: tables.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nowait::{Config, Disk, Engine, Extents, Identity, Map, Null, OpenOptions, Uring, Workers};
use tempfile::TempDir;

use super::EngineOptions;
use super::drive::{Pace, Stretch, warm_and_drive};
use super::places::{Places, Region};
use super::table::Sample;
use crate::error::Error;
use crate::stop::Stop;
use crate::target::{Access, Target};
use crate::workload::{Caching, Direction, Workload};

/// What is used of a file: more says nothing more.
const BYTES_MAX: u64 = 1 << 30;

/// Where turns are taken.
pub(crate) struct Scene<'a> {
    target: &'a Target,
    pub(crate) path: &'a Path,
    /// What of the file is used.
    pub(crate) bytes: u64,
    pub(crate) writable: bool,
    /// Whether the page cache is bypassed.
    pub(crate) direct: bool,
    pub(crate) duration: Duration,
    pub(crate) latency: &'a [Duration],
    pub(crate) stop: &'a Stop,
    /// For files of its own.
    scratch: TempDir,
}

impl<'a> Scene<'a> {
    pub(crate) fn set(target: &'a Target, options: &'a EngineOptions) -> Result<Scene<'a>, Error> {
        // Beside a file that was made for the occasion; nothing is put beside one that was not.
        let beside = target.path.parent().filter(|_| target.was_made()).map(Path::to_owned);
        let parent = beside
            .or_else(|| std::env::var_os("TMPDIR").map(PathBuf::from))
            .unwrap_or_else(|| PathBuf::from("/var/tmp"));
        let scratch = tempfile::Builder::new().prefix("nowait-bench-").tempdir_in(parent);
        let mut scene = Scene {
            target,
            path: &target.path,
            bytes: target.bytes.min(BYTES_MAX),
            writable: target.access == Access::ReadWrite,
            direct: false,
            duration: options.duration,
            latency: &options.latency,
            stop: &options.stop,
            scratch: scratch.map_err(Error::system("making a directory for a sparse file"))?,
        };
        let file_error = |error: nowait::Error| Error::File {
            path: target.path.clone(),
            problem: error.to_string(),
        };
        let disk = Disk::open_mapped(scene.path, scene.open_options()).map_err(file_error)?;
        scene.direct = disk.is_direct();
        Ok(scene)
    }

    fn open_options(&self) -> OpenOptions {
        OpenOptions { read_only: !self.writable, ..OpenOptions::default() }
    }

    /// The directions that may be measured on the file.
    pub(crate) fn directions(&self) -> &'static [Direction] {
        if self.writable { &[Direction::Read, Direction::Write] } else { &[Direction::Read] }
    }

    pub(crate) fn region(&self, block_bytes: usize) -> Region {
        Region { start: 0, bytes: self.bytes, block: block_bytes as u64 }
    }

    /// Endless places of a load, anywhere in the file.
    pub(crate) fn places(&self, load: &Workload) -> Places {
        Places::endless(load.order, self.region(load.block_bytes), 1)
    }

    pub(crate) fn pace(&self, timed: bool) -> Pace<'a> {
        Pace { duration: self.duration, stop: self.stop, timed }
    }

    /// The file, every byte of which is taken for mapped.
    pub(crate) fn disk(&self) -> io::Result<Arc<Disk<Identity>>> {
        Ok(Arc::new(Disk::open_mapped(self.path, self.open_options())?))
    }

    /// The file with what is known of its holes; nothing is with `hint` off.
    pub(crate) fn hinted_disk(&self, path: &Path, hint: bool) -> io::Result<Arc<Disk<Extents>>> {
        let read_only = path == self.path && !self.writable;
        let options = OpenOptions { read_only, no_hint: !hint, ..OpenOptions::default() };
        let disk = Disk::open(path, options)?;
        disk.scan();
        Ok(Arc::new(disk))
    }

    /// The file as another program would open it.
    pub(crate) fn plain(&self, path: &Path, direct: bool) -> io::Result<File> {
        let flags = if direct { rustix::fs::OFlags::DIRECT.bits().cast_signed() } else { 0 };
        fs::OpenOptions::new().read(true).write(self.writable).custom_flags(flags).open(path)
    }

    /// Takes out of the page cache what another way in has left there: direct I/O over it waits.
    pub(crate) fn drop_cache(&self) -> io::Result<()> {
        self.target.prepare(Caching::Direct)
    }

    /// A file of `bytes` without any storage. It is emptied rather than made anew, as file systems
    /// clean up after a removed one later, which would fall into the turn.
    pub(crate) fn sparse(&self, bytes: u64) -> io::Result<PathBuf> {
        let path = self.scratch.path().join("sparse.img");
        let file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(&path)?;
        file.set_len(bytes)?;
        file.sync_all()?;
        Ok(path)
    }

    /// Measures `load` on the file through a ring.
    pub(crate) fn on_file(&self, load: &Workload, config: Config) -> io::Result<Sample> {
        let disk = self.disk()?;
        let mut engine = ring_engine(&disk, &Workers::new(&disk, config.workers), config)?;
        self.stretch(load, |places, pace| warm_and_drive(&mut engine, load, places, pace), true)
    }

    /// Measures `load` on a queue that does nothing.
    pub(crate) fn on_null(&self, load: &Workload, config: Config) -> io::Result<Sample> {
        let disk = self.disk()?;
        let workers = Workers::new(&disk, config.workers);
        let mut engine = Engine::new(disk, workers, Null::new()?, config)?;
        self.stretch(load, |places, pace| warm_and_drive(&mut engine, load, places, pace), false)
    }

    /// Measures one loop.
    pub(crate) fn stretch(
        &self,
        load: &Workload,
        run: impl FnOnce(&mut Places, Pace<'_>) -> io::Result<Stretch>,
        timed: bool,
    ) -> io::Result<Sample> {
        run(&mut self.places(load), self.pace(timed))?.sample()
    }
}

/// An engine on a ring.
pub(crate) fn ring_engine<M: Map>(
    disk: &Arc<Disk<M>>,
    workers: &Workers,
    config: Config,
) -> io::Result<Engine<Uring, M>> {
    let queue = Uring::new(disk.fd())?;
    Ok(Engine::new(disk.clone(), workers.clone(), queue, config)?)
}
