//! A new image with compressed clusters as the target of a copy.
//!
//! Invariant: each cluster is compressed and written by the worker that runs its request; only the choice of its
//! place is behind a lock.

use std::io;
use std::sync::Mutex;

use nowait::{ByteRange, ExtentStatus};
use nowait_image::{ClusterCompressor, Compression, ImageBuilder, ImageFile};
use rustix::io::Errno;

use crate::endpoint::{Capabilities, CopyOperation, Endpoint};
use crate::error::{Error, os_message};
use crate::worker_endpoint::{self, UNSUPPORTED, WorkerDisk, lock};

/// The longest write in bytes, if clusters are not larger.
const MAX_BYTES: u64 = 4 << 20;

/// The state that the workers share.
struct CompressedImage {
    image: Mutex<Box<dyn ImageBuilder>>,
    file: ImageFile,
    size: u64,
    cluster_bytes: u64,
    compression: Compression,
    /// Compressors that no worker uses.
    compressors: Mutex<Vec<ClusterCompressor>>,
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
    let (cluster_bytes, compression, size) =
        (image.cluster_bytes(), image.compression(), image.size());
    let (image, compressors) = (Mutex::new(image), Mutex::default());
    let disk = CompressedImage { image, file, size, cluster_bytes, compression, compressors };
    worker_endpoint::open(name, disk)
}

impl CompressedImage {
    /// Writes `data`, the whole clusters of the disk from `pos` on.
    fn write(&self, pos: u64, data: &[u8]) -> io::Result<()> {
        let spare = lock(&self.compressors).pop();
        let new = || ClusterCompressor::new(self.compression, self.cluster_bytes);
        let mut compressor = spare.or_else(new).ok_or(Errno::NOMEM)?;
        let (mut packed, mut lens) = (Vec::new(), Vec::new());
        let clusters = data.chunks(self.cluster_bytes as usize);
        for cluster in clusters.clone() {
            lens.push(compressor.compress(cluster).map(|bytes| {
                packed.extend_from_slice(bytes);
                bytes.len()
            }));
        }
        lock(&self.compressors).push(compressor);
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

impl WorkerDisk for CompressedImage {
    fn capabilities(&self) -> Capabilities {
        let cluster = self.cluster_bytes;
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

    fn run(
        &self,
        operation: &CopyOperation,
        range: ByteRange,
        memory: &mut [u8],
    ) -> Result<Vec<ExtentStatus>, String> {
        let failed = |error| format!("cannot write: {}", os_message(&error));
        match operation {
            CopyOperation::Write(runs) => {
                for run in runs.iter().filter(|run| !run.zero) {
                    let data = run.of(memory).ok_or(UNSUPPORTED)?;
                    self.write(range.pos + run.start as u64, data).map_err(failed)?;
                }
            }
            CopyOperation::Flush => self.file.sync().map_err(failed)?,
            CopyOperation::Read | CopyOperation::Zero | CopyOperation::Status => {
                return Err(UNSUPPORTED.into());
            }
        }
        Ok(Vec::new())
    }

    fn finish(&self) -> Result<(), String> {
        let written = lock(&self.image).finish(&self.file);
        written.map_err(|error| format!("cannot write the image's tables: {}", os_message(&error)))
    }
}
