//! Whether a target is the one that an earlier replication has left: some places of it are compared with the disk.
//!
//! Invariant: only bytes that the bitmap calls the same are compared, as of the instant of a backup. A difference is proof that the
//! target is another one, or was changed; no difference proves nothing.

use std::sync::Arc;

use nowait::{BlockDevice, BlockMap, BlockingFile, ByteRange, Error, ExtentStatus};
use nowait_server::FrozenChanges;

/// Places that are compared, spread evenly over the disk.
const PLACES: u64 = 64;
/// Bytes of a place.
const PLACE_BYTES: u64 = 64 << 10;

type Device = Arc<BlockDevice<dyn BlockMap>>;

/// A disk at an instant, and a target that has all of it but `changes`.
pub(crate) struct TargetComparison<'a> {
    source: BlockingFile<dyn BlockMap>,
    target: BlockingFile<dyn BlockMap>,
    changes: &'a FrozenChanges,
    size: u64,
}

impl<'a> TargetComparison<'a> {
    pub(crate) fn new(source: Device, target: Device, changes: &'a FrozenChanges) -> Self {
        let size = source.size().min(target.size());
        let (source, target) = (BlockingFile::new(source), BlockingFile::new(target));
        Self { source, target, changes, size }
    }

    /// A byte from which on the two differ, if that was found. `is_over` tells that the search is to end.
    ///
    /// # Errors
    /// Those of either side.
    pub(crate) fn find_difference(&self, is_over: &dyn Fn() -> bool) -> Result<Option<u64>, Error> {
        let part = self.size.div_ceil(PLACES).next_multiple_of(PLACE_BYTES).max(PLACE_BYTES);
        let mut memory = [vec![0; PLACE_BYTES as usize], vec![0; PLACE_BYTES as usize]];
        for begin in (0..self.size).step_by(part as usize) {
            if is_over() {
                return Ok(None);
            }
            let end = self.size.min(begin + part);
            let from = begin + fastrand::u64(..end - begin) / PLACE_BYTES * PLACE_BYTES;
            let place = match self.place(from, end)? {
                None => self.place(begin, from)?,
                place => place,
            };
            let Some(place) = place else { continue };
            let [was, is] = &mut memory;
            let (was, is) = (was.get_mut(..place.len as usize), is.get_mut(..place.len as usize));
            let (Some(was), Some(is)) = (was, is) else { continue };
            self.source.read_at(was, place.pos)?;
            self.target.read_at(is, place.pos)?;
            if let Some(at) = was.iter().zip(&*is).position(|(was, is)| was != is) {
                return Ok(Some(place.pos + at as u64));
            }
        }
        Ok(None)
    }

    /// The first place between `from` and `end` that has data and is the same on the target. Holes say little: those of any two disks
    /// are the same.
    fn place(&self, from: u64, end: u64) -> Result<Option<ByteRange>, Error> {
        let mut at = from;
        let mut extents: Vec<ExtentStatus> = Vec::new();
        while at < end {
            extents.clear();
            self.source.status(ByteRange::new(at, end - at), &mut extents)?;
            let before = at;
            for extent in &extents {
                let extent_end = end.min(at.saturating_add(extent.len));
                while !extent.hole && at < extent_end {
                    let place = ByteRange::new(at, PLACE_BYTES.min(extent_end - at));
                    if !self.changes.are_in(place) {
                        return Ok(Some(place));
                    }
                    at = place.end();
                }
                at = extent_end;
            }
            if at == before {
                return Ok(None);
            }
        }
        Ok(None)
    }
}
