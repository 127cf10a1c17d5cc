//! Block status: which bytes of a disk are data, holes or zeros.
//!
//! Invariant: a scan ends after a bounded amount of work, counted in lookups; its spans are true,
//! and there is at least one. An image without mappings in a run is looked up once for that run,
//! however many runs the images below it have there. A hole of a file counts only if the file
//! system reported it after the lookup in the tables: an older hole may have been filled by a write
//! that allocated the cluster in between, over bytes of a backing image that were not zero. So the
//! lookups are made in batches, and the file systems are asked after each batch.

use std::sync::Arc;

use nowait::{ByteRange, Error, ExtentStatus, Storage};

use crate::qcow2_disk::backing_chain::{BackingChain, Mapping, Resolved};

/// The most lookups of one block status of a qcow2 image in tables that are in memory: some 10 ms.
/// Beyond it: the reply ends there, and the client asks for the rest.
const MAX_WORK: usize = 32 << 10;
/// The work that a read of tables or a query to a file system counts for: some 100 µs at most.
const READ_WORK: usize = 256;
const SEEK_WORK: usize = 4;
/// The fewest bytes of a file in one query to its file system.
const SEEK_BYTES: u64 = 16 << 20;
/// The most runs of data and holes in the answer to such a query.
/// Beyond it: another query asks for those behind them.
const MAX_HOLES: usize = 512;

/// Most lookups in a batch: as many holes, and the data between them, are in one answer of a file
/// system.
const BATCH_LOOKUPS: usize = MAX_HOLES / 2;

/// A run of a file with data or without.
#[derive(Clone, Copy)]
struct FileRun {
    range: ByteRange,
    hole: bool,
    /// [`StatusScan::batch`] at the time of the file system's answer.
    batch: u64,
}

/// The mapping of a run of the disk.
struct Found {
    mapping: Mapping,
    /// [`ExtentStatus::depth`].
    depth: u8,
    len: u64,
}

/// Images on top of each other that are scanned.
pub(crate) trait ScannedImages {
    /// Number of images, and of files.
    fn images(&self) -> usize;
    fn files(&self) -> usize;

    /// Bytes of the disk.
    fn size(&self) -> u64;

    /// The file with this number.
    fn file(&self, file: u8) -> Option<&Arc<dyn Storage>>;

    /// Like [`BackingChain::scan_image`].
    fn scan_image(&self, image: u8, pos: u64, len: u64) -> Result<Resolved, Error>;
}

impl ScannedImages for BackingChain {
    fn images(&self) -> usize {
        self.count()
    }

    fn files(&self) -> usize {
        1 + self.files_below().count()
    }

    fn size(&self) -> u64 {
        self.header().size
    }

    fn file(&self, file: u8) -> Option<&Arc<dyn Storage>> {
        Some(self.data_file(file))
    }

    fn scan_image(&self, image: u8, pos: u64, len: u64) -> Result<Resolved, Error> {
        Self::scan_image(self, image, pos, len)
    }
}

/// One scan through a part of a disk.
pub(crate) struct StatusScan<'a, S> {
    images: &'a S,
    /// The end of the part.
    end: u64,
    /// For each image, the top one first: it has no mapping from the scan's position up to here.
    unmapped_to: Vec<u64>,
    /// For each file, the last answer of its file system, in order.
    runs: Vec<Vec<FileRun>>,
    /// Number of the batch of lookups.
    batch: u64,
    work: usize,
}

impl<'a, S: ScannedImages> StatusScan<'a, S> {
    /// A scan of the disk up to `end`.
    pub(crate) fn new(images: &'a S, end: u64) -> Self {
        let (unmapped_to, runs) = (vec![0; images.images()], vec![Vec::new(); images.files()]);
        Self { images, end, unmapped_to, runs, batch: 0, work: 0 }
    }

    /// Appends spans of `range`, about `limit` at most, as far as the work limit allows; at least
    /// one.
    ///
    /// # Errors
    /// `EIO` where a table is damaged; the errno of a failed read.
    pub(crate) fn scan(
        &mut self,
        range: ByteRange,
        limit: usize,
        spans: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        let mut pos = range.pos;
        let mut batch = Vec::new();
        while pos < range.end() && spans.len() < limit && self.work < MAX_WORK {
            let rest = ByteRange::new(pos, range.end() - pos);
            self.look_up(rest, limit - spans.len(), &mut batch)?;
            for Found { mapping, depth, len } in batch.drain(..) {
                match mapping {
                    Mapping::Zeros => push(spans, ExtentStatus { len, hole: true, depth }),
                    Mapping::Compressed { .. } => {
                        push(spans, ExtentStatus { len, hole: false, depth });
                    }
                    Mapping::Data { file, pos, .. } => {
                        self.push_file_status(file, ByteRange::new(pos, len), depth, spans);
                    }
                }
                pos += len;
            }
        }
        Ok(())
    }

    /// Looks up a batch of at most `max` mappings from the start of `range` on; at least one.
    fn look_up(
        &mut self,
        range: ByteRange,
        max: usize,
        batch: &mut Vec<Found>,
    ) -> Result<(), Error> {
        self.batch += 1;
        let mut pos = range.pos;
        while pos < range.end()
            && batch.len() < max.min(BATCH_LOOKUPS)
            && (batch.is_empty() || self.work < MAX_WORK)
        {
            let (mapping, depth, len) = self.find(pos)?;
            let len = len.min(range.end() - pos);
            batch.push(Found { mapping, depth, len });
            pos += len;
        }
        Ok(())
    }

    /// The mapping at `pos`, its image ([`ExtentStatus::depth`]), and for how many bytes.
    fn find(&mut self, pos: u64) -> Result<(Mapping, u8, u64), Error> {
        let mut len = self.end.min(self.images.size()).saturating_sub(pos);
        if len == 0 {
            return Ok((Mapping::Zeros, 0, u64::MAX));
        }
        let max = len;
        self.work += 1;
        for (image, unmapped_to) in (0..).zip(&mut self.unmapped_to) {
            if *unmapped_to <= pos {
                let resolved = self.images.scan_image(image, pos, max)?;
                self.work += 1 + resolved.reads * READ_WORK;
                if let Some(found) = resolved.found {
                    return Ok((found, image + 1, len.min(resolved.len)));
                }
                *unmapped_to = pos + resolved.len;
            }
            len = len.min(*unmapped_to - pos);
        }
        Ok((Mapping::Zeros, 0, len))
    }

    /// Appends the data and holes of `range` of a file, which is data by the image's tables: a
    /// discarded cluster is a hole of the file. A part that the file system does not report is
    /// data.
    fn push_file_status(
        &mut self,
        file: u8,
        range: ByteRange,
        depth: u8,
        spans: &mut Vec<ExtentStatus>,
    ) {
        let mut pos = range.pos;
        while pos < range.end() {
            let rest = ByteRange::new(pos, range.end() - pos);
            let (len, hole) = self.run_at(file, rest);
            push(spans, ExtentStatus { len, hole, depth });
            pos += len;
        }
    }

    /// For how many bytes from the beginning of `range` the file has data, or a hole.
    fn run_at(&mut self, file: u8, range: ByteRange) -> (u64, bool) {
        let known = match self.known_run(file, range.pos) {
            Some(run) => Some(run),
            None => {
                self.refill_runs(file, range);
                self.known_run(file, range.pos)
            }
        };
        known.map_or((range.len, false), |run| {
            (range.len.min(run.range.end() - range.pos), run.hole)
        })
    }

    /// The run of a file that contains `pos`, if it is known well enough for this batch.
    fn known_run(&self, file: u8, pos: u64) -> Option<FileRun> {
        let runs = self.runs.get(usize::from(file))?;
        let run = runs.get(runs.partition_point(|run| run.range.end() <= pos)).copied()?;
        (run.range.pos <= pos && (!run.hole || run.batch == self.batch)).then_some(run)
    }

    /// Queries the file system for the runs of a file from the beginning of `range` on.
    fn refill_runs(&mut self, file: u8, range: ByteRange) {
        let queried = ByteRange::new(range.pos, range.len.max(SEEK_BYTES));
        let (reported, batch) = (self.query(file, queried, MAX_HOLES), self.batch);
        let Some(runs) = self.runs.get_mut(usize::from(file)) else { return };
        runs.clear();
        let mut pos = range.pos;
        for ExtentStatus { len, hole, .. } in reported {
            runs.push(FileRun { range: ByteRange::new(pos, len), hole, batch });
            pos += len;
        }
    }

    /// The runs of `range` of a file, about `limit` of them at most, as the file system reports
    /// them.
    fn query(&mut self, file: u8, range: ByteRange, limit: usize) -> Vec<ExtentStatus> {
        let mut reported = Vec::new();
        // If the query fails, all is data.
        let storage = self.images.file(file);
        if storage.is_none_or(|it| it.extents(range, limit, &mut reported).is_err()) {
            reported = vec![ExtentStatus::top(range.len, false)];
        }
        self.work += SEEK_WORK * (1 + reported.len());
        reported
    }
}

/// Appends a span, or extends the last one.
fn push(spans: &mut Vec<ExtentStatus>, span: ExtentStatus) {
    match spans.last_mut() {
        Some(last) if (last.hole, last.depth) == (span.hole, span.depth) => last.len += span.len,
        _ => spans.push(span),
    }
}
