//! A new image with compressed clusters as the target of a copy: workers compress on all processors.
//!
//! Invariant: each accepted write is returned once, with its memory, when its bytes are in the file. The thread of the
//! copy neither compresses nor writes; workers end when the endpoint is dropped.

use std::num::NonZero;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::{io, thread};

use nowait::ByteRange;
use nowait_image::{ClusterCompressor, Compression, ImageBuilder, ImageFile};
use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;

use crate::endpoint::{Capabilities, Completed, CopyOperation, CopyRequest, Endpoint};
use crate::error::{Error, os_message};

/// The longest write in bytes, if clusters are not larger.
const MAX_BYTES: u64 = 4 << 20;

/// The state that the workers share.
struct Shared {
    image: Mutex<Box<dyn ImageBuilder>>,
    file: ImageFile,
    cluster_bytes: u64,
    compression: Compression,
    /// Counts ended requests, for the thread of the copy.
    ended: OwnedFd,
}

struct CompressedEndpoint {
    name: String,
    shared: Arc<Shared>,
    size: u64,
    /// `None` when no more requests follow.
    jobs: Option<Sender<CopyRequest>>,
    results: Receiver<io::Result<Completed>>,
    done: Vec<Completed>,
    workers: Vec<JoinHandle<()>>,
}

/// The target of `image`, whose data goes to the empty `file`.
///
/// # Errors
/// No thread could be started.
pub(crate) fn open(
    name: String,
    image: Box<dyn ImageBuilder>,
    file: ImageFile,
) -> Result<Box<dyn Endpoint>, Error> {
    let failed = |error: io::Error| Error::at(&name, os_message(&error));
    let ended = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
    let ended = ended.map_err(|errno| failed(errno.into()))?;
    let (cluster_bytes, compression, size) =
        (image.cluster_bytes(), image.compression(), image.size());
    let image = Mutex::new(image);
    let shared = Arc::new(Shared { image, file, cluster_bytes, compression, ended });
    let (jobs, taken) = channel();
    let taken = Arc::new(Mutex::new(taken));
    let (ends, results) = channel();
    let mut workers = Vec::new();
    for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
        let (shared, taken, ends) = (shared.clone(), taken.clone(), ends.clone());
        let worker = thread::Builder::new().name("compress".into());
        let worker = worker.spawn(move || work(&shared, &taken, &ends)).map_err(failed)?;
        workers.push(worker);
    }
    let (jobs, done) = (Some(jobs), Vec::new());
    Ok(Box::new(CompressedEndpoint { name, shared, size, jobs, results, done, workers }))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs requests until there are no more.
fn work(
    shared: &Shared,
    jobs: &Mutex<Receiver<CopyRequest>>,
    ends: &Sender<io::Result<Completed>>,
) {
    let mut compressor = ClusterCompressor::new(shared.compression, shared.cluster_bytes);
    loop {
        let Ok(request) = lock(jobs).recv() else { return };
        let result = match &mut compressor {
            Some(compressor) => shared.run(request, compressor),
            None => Err(Errno::NOMEM.into()),
        };
        let is_over = ends.send(result).is_err();
        // It cannot be full: there are far fewer requests.
        let _ = rustix::io::write(&shared.ended, &1u64.to_ne_bytes());
        if is_over {
            return;
        }
    }
}

impl Shared {
    fn run(
        &self,
        request: CopyRequest,
        compressor: &mut ClusterCompressor,
    ) -> io::Result<Completed> {
        let CopyRequest { operation, range, tag, memory } = request;
        match operation {
            CopyOperation::Write(runs) => {
                let bytes = memory.as_deref().unwrap_or_default();
                runs.iter().filter(|run| !run.zero).try_for_each(|run| {
                    let data = bytes.get(run.start..).and_then(|it| it.get(..run.len));
                    let data = data.ok_or(Errno::INVAL)?;
                    self.write(range.pos + run.start as u64, data, compressor)
                })?;
            }
            CopyOperation::Flush => self.file.sync()?,
            CopyOperation::Read | CopyOperation::Zero | CopyOperation::Status => {
                return Err(Errno::OPNOTSUPP.into());
            }
        }
        Ok(Completed { tag, range, memory, extents: Vec::new(), unreadable: false })
    }

    /// Writes `data`, the whole clusters of the disk from `pos` on.
    fn write(&self, pos: u64, data: &[u8], compressor: &mut ClusterCompressor) -> io::Result<()> {
        let (mut packed, mut lens) = (Vec::new(), Vec::new());
        let clusters = data.chunks(self.cluster_bytes as usize);
        for cluster in clusters.clone() {
            lens.push(compressor.compress(cluster).map(|bytes| {
                packed.extend_from_slice(bytes);
                bytes.len()
            }));
        }
        let places = self.allocate(pos, &lens)?;
        let mut rest = &packed[..];
        // Adjacent compressed clusters are written together.
        let mut joined: Option<(u64, usize)> = None;
        for ((cluster, len), at) in clusters.zip(lens).zip(places) {
            match (len, &mut joined) {
                (None, _) => self.file.write_at(at, cluster)?,
                (Some(len), Some((start, sum))) if *start + *sum as u64 == at => *sum += len,
                (Some(len), _) => self.flush_joined(joined.replace((at, len)), &mut rest)?,
            }
        }
        self.flush_joined(joined, &mut rest)
    }

    fn flush_joined(&self, joined: Option<(u64, usize)>, rest: &mut &[u8]) -> io::Result<()> {
        let Some((at, len)) = joined else { return Ok(()) };
        let (now, later) = rest.split_at_checked(len).unwrap_or((rest, &[]));
        *rest = later;
        self.file.write_at(at, now)
    }

    /// The positions in the file of the clusters of the disk from `pos` on, which have these lengths if they are
    /// compressed.
    fn allocate(&self, pos: u64, lens: &[Option<usize>]) -> io::Result<Vec<u64>> {
        let mut image = lock(&self.image);
        let positions = (pos..).step_by(self.cluster_bytes as usize);
        let place = |(pos, len): (u64, &Option<usize>)| match len {
            Some(len) => image.allocate_packed(pos, *len as u64),
            None => {
                let places = image.allocate(ByteRange::new(pos, self.cluster_bytes));
                places.first().map(|place| place.pos).ok_or(Errno::INVAL.into())
            }
        };
        positions.zip(lens).map(place).collect()
    }
}

impl Endpoint for CompressedEndpoint {
    fn capabilities(&self) -> Capabilities {
        let cluster = self.shared.cluster_bytes;
        Capabilities {
            size: self.size,
            block: cluster,
            alignment: cluster,
            max_bytes: MAX_BYTES.max(cluster),
            max_zero_bytes: 0,
            has_status: false,
            has_flush: true,
        }
    }

    fn submit(&mut self, request: CopyRequest) {
        if let Some(jobs) = &self.jobs {
            // Workers take requests as long as there is a sender.
            let _ = jobs.send(request);
        }
    }

    fn advance(&mut self) -> Result<(), Error> {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.ended, &mut count);
        loop {
            let result = match self.results.try_recv() {
                Ok(result) => result,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => Err(Errno::CANCELED.into()),
            };
            let failed = |error| format!("cannot write: {}", os_message(&error));
            self.done.push(result.map_err(|error| Error::at(&self.name, failed(error)))?);
        }
    }

    fn next(&mut self) -> Option<Completed> {
        self.done.pop()
    }

    fn report_unreadable(&mut self) {}

    fn finish(&mut self) -> Result<(), Error> {
        let written = lock(&self.shared.image).finish(&self.shared.file);
        let what = |error| format!("cannot write the image's tables: {}", os_message(&error));
        written.map_err(|error| Error::at(&self.name, what(error)))
    }

    fn poll_fds<'a>(&'a self, poll_fds: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        poll_fds.push((self.shared.ended.as_fd(), PollFlags::IN));
    }
}

impl Drop for CompressedEndpoint {
    fn drop(&mut self) {
        drop(self.jobs.take());
        for worker in self.workers.drain(..) {
            // A panic of a worker has already been reported by the panic hook.
            let _ = worker.join();
        }
    }
}
