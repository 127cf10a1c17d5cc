//! Work that every runtime has to do, and the loop of a task.
//!
//! Invariant: the loop is the same for all runtimes; they differ in the calls that open, read and write, and in how
//! they run tasks.

use std::fs::{self, File, OpenOptions};
use std::future::Future;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::TryStreamExt;
use futures_util::stream::FuturesUnordered;
use rustix::time::{ClockId, clock_gettime};

/// The alignment of memory, positions and lengths: that of every device.
pub const ALIGNMENT: usize = 4096;
/// The flag of open(2) for direct I/O.
pub const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits().cast_signed();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Reads at random places.
    Read,
    /// Writes at random places.
    Write,
    /// Reads each file once, in order.
    Scan,
}

/// The arguments.
#[derive(Clone, Debug)]
pub struct Load {
    directory: PathBuf,
    /// Bytes of a request.
    pub block: usize,
    /// Requests in flight.
    pub depth: usize,
    files: usize,
    duration: Duration,
    pub work: Work,
}

/// Requests that were done, in which time, and for which processor time of the process.
#[derive(Debug)]
pub struct Figures {
    pub requests: u64,
    pub seconds: f64,
    pub cpu_seconds: f64,
}

/// The end of a transfer: the bytes that were moved, and the buffer.
pub type Moved<B> = (io::Result<usize>, B);

/// A file of a runtime.
pub trait RuntimeFile: Sized + 'static {
    /// Memory for one block, where the runtime takes it from the program.
    type Buffer;

    fn buffer(block: usize) -> io::Result<Self::Buffer>;

    /// Fills the buffer, of `block` bytes.
    fn read(
        &self,
        buffer: Self::Buffer,
        block: usize,
        pos: u64,
    ) -> impl Future<Output = Moved<Self::Buffer>>;

    /// Writes the buffer, of `block` bytes.
    fn write(
        &self,
        buffer: Self::Buffer,
        block: usize,
        pos: u64,
    ) -> impl Future<Output = Moved<Self::Buffer>>;
}

/// A task, which ends with the number of its requests.
pub type Task = Pin<Box<dyn Future<Output = io::Result<u64>>>>;

impl Load {
    /// `DIRECTORY BLOCK DEPTH FILES SECONDS read|write|scan`; `None` if they are not.
    pub fn parse(words: &[String]) -> Option<Self> {
        let [directory, block, depth, files, seconds, work] = words else { return None };
        let number = |word: &String| word.parse().ok().filter(|n: &usize| *n > 0);
        let work = match work.as_str() {
            "read" => Work::Read,
            "write" => Work::Write,
            "scan" => Work::Scan,
            _ => return None,
        };
        let (block, depth, files) = (number(block)?, number(depth)?, number(files)?);
        let is_good = block.is_multiple_of(ALIGNMENT) && (work != Work::Scan || depth == 1);
        let duration = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        let directory = directory.into();
        is_good.then_some(Self { directory, block, depth, files, duration, work })
    }

    /// The paths of the files.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        (0..self.files).map(|number| self.directory.join(number.to_string()))
    }

    /// The files, opened by `open`.
    pub fn open<T>(&self, open: impl Fn(&Path) -> io::Result<T>) -> io::Result<Vec<T>> {
        self.paths().map(|path| open(&path).map_err(|error| at(&path, error))).collect()
    }

    /// The files, opened with the options of `open(2)` that this load takes: past the page cache, but for a scan.
    pub fn open_plain(&self) -> io::Result<Vec<File>> {
        let mut options = OpenOptions::new();
        options.read(true).write(self.work == Work::Write);
        options.custom_flags(if self.work == Work::Scan { 0 } else { DIRECT });
        self.open(|path| options.open(path))
    }

    /// Keeps requests in flight, each by a task that `spawn` runs and whose end it returns, until the time is over.
    pub async fn run<F: RuntimeFile, T: Future<Output = io::Result<u64>>>(
        &self,
        files: Vec<F>,
        spawn: impl Fn(Task) -> T,
    ) -> io::Result<Figures> {
        let (started, files) = (Started::now(), Arc::<[F]>::from(files));
        let tasks: FuturesUnordered<T> = (0..self.depth)
            .map(|number| spawn(Box::pin(self.clone().task(files.clone(), number, started))))
            .collect();
        let requests = tasks.try_fold(0, async |all, done| Ok(all + done)).await?;
        Ok(started.figures(requests))
    }

    /// Task `number`: one request after the other. Returns how many were done.
    pub async fn task<F: RuntimeFile>(
        self,
        files: Arc<[F]>,
        number: usize,
        started: Started,
    ) -> io::Result<u64> {
        let (block, bytes) = (self.block, fs::metadata(self.directory.join("0"))?.len());
        let blocks = bytes / block as u64;
        let mut random = Rng::with_seed(number as u64);
        let mut buffer = F::buffer(block)?;
        let mut done = 0;
        while started.begin.elapsed() < self.duration {
            let (file, place) = match self.work {
                Work::Scan => ((done / blocks) as usize, done % blocks),
                Work::Read | Work::Write => (random.usize(..files.len()), random.u64(..blocks)),
            };
            let Some(file) = files.get(file) else { break };
            let pos = place * block as u64;
            let moved;
            (moved, buffer) = match self.work {
                Work::Read | Work::Scan => file.read(buffer, block, pos).await,
                Work::Write => file.write(buffer, block, pos).await,
            };
            if moved? != block {
                return Err(io::Error::other("a transfer was cut short"));
            }
            done += 1;
        }
        Ok(done)
    }
}

/// When the files were open: the clock on the wall, and the processor time of the process.
#[derive(Clone, Copy)]
pub struct Started {
    begin: Instant,
    cpu: Duration,
}

impl Started {
    pub fn now() -> Self {
        Self { cpu: cpu_time(), begin: Instant::now() }
    }

    pub fn figures(self, requests: u64) -> Figures {
        let cpu = cpu_time().saturating_sub(self.cpu);
        let seconds = self.begin.elapsed().as_secs_f64();
        Figures { requests, seconds, cpu_seconds: cpu.as_secs_f64() }
    }
}

/// An error with the path that it is about.
pub fn at(path: &Path, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
