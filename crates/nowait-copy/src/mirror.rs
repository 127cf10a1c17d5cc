//! A disk that is copied while it is written to: first all of it, then again what has changed meanwhile.
//!
//! Invariant: the caller knows what has changed; what was copied before a change is copied again. The disks stay open when
//! the copy ends, because the target may be served next.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use nowait::{BlockDevice, BlockMap, ByteRange};

use crate::copy_loop::{Endpoints, Progress, Rate, Timing};
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::file_endpoint::{self, Content};
use crate::transfer::{self, Ended, Zeros};
use crate::zero_map::{ExtentIterator, ZeroMap};

/// The longest read or write in bytes: short enough that requests of others wait little behind one.
const REQUEST_BYTES: u64 = 256 << 10;
/// Bytes of memory for what is in flight.
const MEMORY_BYTES: usize = 8 << 20;
/// Data is searched for zeros in blocks of this many bytes.
const ZERO_BLOCK_BYTES: usize = 4096;

/// A disk of a mirror, and what it is called in messages.
#[derive(Clone)]
pub struct MirroredDisk {
    /// A path or a URI.
    pub name: String,
    /// The disk; others may use it meanwhile.
    pub device: Arc<BlockDevice<dyn BlockMap>>,
}

/// How a part of a mirror has ended that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorPart {
    /// All that was asked for is done.
    Complete,
    /// The deadline came first: what was asked for is done in part. [`Mirror::settle`] comes next.
    Late,
}

/// A copy of a disk that others write to.
pub struct Mirror<'a> {
    endpoints: Endpoints<'a>,
    /// Requests in flight since a part that was late.
    left_over: usize,
}

impl<'a> Mirror<'a> {
    /// A mirror of `source`, which `target` is at least as large as. `report_progress` is called about ten times a second
    /// while something is copied, with what of the part is done; when `cancel` is set, each call ends within about 0.2 s.
    /// With `rate` at most that many bytes a second are copied.
    ///
    /// # Errors
    /// There is no queue, or no thread, for the requests; the target is smaller.
    pub fn new(
        source: &MirroredDisk,
        target: &MirroredDisk,
        rate: Option<u64>,
        cancel: &'a AtomicBool,
        report_progress: &'a mut dyn FnMut(Progress),
    ) -> Result<Self, Error> {
        let open = |disk: &MirroredDisk| {
            file_endpoint::open(disk.name.clone(), disk.device.clone(), Content::Raw)
        };
        let (from, to): (Box<dyn Endpoint>, Box<dyn Endpoint>) = (open(source)?, open(target)?);
        let (size, room) = (from.capabilities().size, to.capabilities().size);
        if room < size {
            let what = format!("it is too small: it has {room} bytes, the disk has {size}");
            return Err(Error::at(&target.name, what));
        }
        let alignment = from.capabilities().alignment.max(to.capabilities().alignment);
        let endpoints = Endpoints {
            size,
            request_bytes: REQUEST_BYTES.max(alignment),
            alignment,
            memory: MEMORY_BYTES,
            source: from,
            target: to,
            cancel,
            report_progress,
            has_written: false,
            is_incremental: false,
            compares: false,
            timing: Timing { rate: rate.map(Rate::new), ..Timing::default() },
        };
        Ok(Self { endpoints, left_over: 0 })
    }

    /// Bytes of the disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.endpoints.size
    }

    /// Whether something was written to the target.
    #[must_use]
    pub fn has_written(&self) -> bool {
        self.endpoints.has_written
    }

    /// Copies all of the disk; what reads as zeros is not written where `target_is_zero`, or where the target says so.
    ///
    /// # Errors
    /// An error of either side; [`Error::Interrupted`].
    pub fn copy_all(&mut self, target_is_zero: bool) -> Result<(), Error> {
        self.endpoints.timing.deadline = None;
        self.endpoints.is_incremental = false;
        let extents = self.endpoints.extents(target_is_zero);
        transfer::copy(&mut self.endpoints, extents, zeros(target_is_zero)).map(drop)
    }

    /// Copies `ranges` of the disk, which are in order, until `deadline` at most.
    ///
    /// # Errors
    /// Like [`Mirror::copy_all`].
    pub fn copy_ranges(
        &mut self,
        ranges: &[ByteRange],
        deadline: Option<Instant>,
    ) -> Result<MirrorPart, Error> {
        self.endpoints.timing.deadline = deadline;
        self.endpoints.is_incremental = true;
        let clean = ZeroMap::outside(self.endpoints.size, ranges);
        let extents = ExtentIterator::incremental(self.endpoints.size, clean);
        let ended = transfer::copy(&mut self.endpoints, extents, zeros(false))?;
        Ok(self.ended(ended))
    }

    /// Makes what was copied durable, until `deadline` at most.
    ///
    /// # Errors
    /// Like [`Mirror::copy_all`].
    pub fn flush(&mut self, deadline: Option<Instant>) -> Result<MirrorPart, Error> {
        self.endpoints.timing.deadline = deadline;
        let ended = transfer::flush(&mut self.endpoints)?;
        Ok(self.ended(ended))
    }

    /// Waits for what a part that was late has left in flight; the disks can be used meanwhile.
    ///
    /// # Errors
    /// Like [`Mirror::copy_all`].
    pub fn settle(&mut self) -> Result<(), Error> {
        let left_over = std::mem::take(&mut self.left_over);
        transfer::settle(&mut self.endpoints, left_over)
    }

    fn ended(&mut self, ended: Ended) -> MirrorPart {
        match ended {
            Ended::Complete(_) => MirrorPart::Complete,
            Ended::Late(requests) => {
                self.left_over += requests;
                MirrorPart::Late
            }
        }
    }
}

fn zeros(target_is_zero: bool) -> Zeros {
    Zeros { block: ZERO_BLOCK_BYTES, target_is_zero }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::time::Duration;

    use nowait::OpenOptions;
    use nowait_testkit::Random;
    use tempfile::NamedTempFile;

    use super::*;

    const SIZE: u64 = 3 << 20;

    fn disk(file: &NamedTempFile) -> MirroredDisk {
        let device = BlockDevice::open(file.path(), OpenOptions::default()).unwrap();
        MirroredDisk { name: file.path().display().to_string(), device: Arc::new(device) }
    }

    fn file(bytes: u64) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn all_is_copied_and_then_the_ranges_that_are_told_and_nothing_else() {
        let mut random = Random::from_seed(nowait_testkit::seed());
        let (from, to) = (file(SIZE), file(SIZE));
        let data = vec![7; 1 << 20];
        from.as_file().write_all_at(&data, 1 << 20).unwrap();
        let cancel = AtomicBool::new(false);
        let mut last = None;
        let mut report = |progress| last = Some(progress);
        let mut mirror = Mirror::new(&disk(&from), &disk(&to), None, &cancel, &mut report).unwrap();
        mirror.copy_all(true).unwrap();
        assert_eq!(content(to.as_file()), content(from.as_file()));
        assert!(to.as_file().metadata().unwrap().blocks() * 512 < 2 << 20, "zeros stay holes");
        for _ in 0..8 {
            let before = content(to.as_file());
            let granule = random.below(SIZE >> 16) << 16;
            from.as_file().write_all_at(&[random.below(3) as u8; 1 << 16], granule).unwrap();
            let elsewhere = (granule + (1 << 16)) % SIZE;
            from.as_file().write_all_at(&[9; 512], elsewhere).unwrap();
            let ranges = [ByteRange::new(granule, 1 << 16)];
            assert_eq!(mirror.copy_ranges(&ranges, None).unwrap(), MirrorPart::Complete);
            let (after, source) = (content(to.as_file()), content(from.as_file()));
            let changed = granule as usize..granule as usize + (1 << 16);
            assert_eq!(after[changed.clone()], source[changed.clone()]);
            assert_eq!(after[..changed.start], before[..changed.start]);
            assert_eq!(after[changed.end..], before[changed.end..]);
        }
        assert_eq!(mirror.flush(None).unwrap(), MirrorPart::Complete);
        drop(mirror);
        assert!(last.is_some());
    }

    #[test]
    fn a_part_ends_at_its_deadline_and_the_mirror_goes_on() {
        let (from, to) = (file(SIZE), file(SIZE));
        from.as_file().write_all_at(&vec![7; SIZE as usize], 0).unwrap();
        let (cancel, mut report) = (AtomicBool::new(false), |_| {});
        let mut mirror = Mirror::new(&disk(&from), &disk(&to), None, &cancel, &mut report).unwrap();
        let all = [ByteRange::new(0, SIZE)];
        let past = Instant::now();
        assert_eq!(mirror.copy_ranges(&all, Some(past)).unwrap(), MirrorPart::Late);
        mirror.settle().unwrap();
        let later = Instant::now() + Duration::from_secs(3600);
        assert_eq!(mirror.copy_ranges(&all, Some(later)).unwrap(), MirrorPart::Complete);
        assert_eq!(content(to.as_file()), content(from.as_file()));
        cancel.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(mirror.copy_ranges(&all, None), Err(Error::Interrupted));
    }

    #[test]
    fn a_smaller_target_is_refused_and_one_of_the_same_size_is_not() {
        let (cancel, from) = (AtomicBool::new(false), file(SIZE));
        for (bytes, fits) in [(SIZE - 512, false), (SIZE, true)] {
            let (to, mut report) = (file(bytes), |_| {});
            let mirror = Mirror::new(&disk(&from), &disk(&to), None, &cancel, &mut report);
            assert_eq!(mirror.is_ok(), fits, "{bytes}");
        }
    }
}
