//! Opening a log: which segments it has, and where its last group ends.
//!
//! A group is written only when all before it are durable, so that a loss of power leaves at most one
//! that is torn: the last one begun. Where a group is not whole, the log ends, unless a group follows: then
//! it was durable once, and is damaged.
//!
//! Invariant: nothing is written over that could be a damaged group.

use std::sync::Arc;

use crate::log::log_directory::LogDirectory;
use crate::log::log_format::{BLOCK, BLOCK_BYTES, Layout};
use crate::log::log_options::LogOptions;
use crate::log::segment_names::SegmentName;
use crate::log::segment_reader::{MANY_RECORDS, SegmentReader, damaged, read_header};
use crate::log::segments::{Segments, WriteFailure};
use crate::storage::Storage;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};

/// A log as it was found.
pub(crate) struct Recovered {
    pub(crate) segments: Segments,
    /// The last segment, and its number.
    pub(crate) last: (u64, Arc<dyn Storage>),
    /// The position after the last group.
    pub(crate) end: u64,
}

/// The files of a log.
struct Found {
    segments: Vec<u64>,
    spares: Vec<u64>,
}

/// Finds the log in `directory`, or makes one with the number `id`.
///
/// # Errors
/// The errors of [`crate::Log::open`].
pub(crate) fn recover(
    directory: Arc<dyn LogDirectory>,
    options: LogOptions,
    id: u64,
) -> Result<Recovered, Error> {
    let Found { segments, spares } = find(&*directory, options.spares)?;
    // A process that was killed may have left names that are not durable.
    directory.sync()?;
    let (Some(&first), Some(&last)) = (segments.first(), segments.last()) else {
        return begin(directory, options, id, spares);
    };
    let storage = directory.open_settled(&SegmentName::Segment(last).text())?;
    let header = read_header(&*storage)?;
    let layout = header.layout;
    if header.number != last || storage.size()? < layout.segment_bytes {
        return Err(damaged(last.saturating_mul(layout.segment_bytes)));
    }
    let missing = (first..last).zip(&segments).find(|(number, found)| number != *found);
    if let Some((number, _)) = missing {
        let range = ByteRange::new(number * layout.segment_bytes, layout.segment_bytes);
        return Err(Error::new(libc::ENOENT, Operation::Open).at(range));
    }
    let end = end_of(&storage, layout, last)?;
    let segments = Segments::new(directory, layout, options.spares, first, spares);
    Ok(Recovered { segments, last: (last, storage), end })
}

/// Lists the files, and removes those that were not finished and those that are too many.
fn find(directory: &dyn LogDirectory, most_spares: u32) -> Result<Found, Error> {
    let mut found = Found { segments: Vec::new(), spares: Vec::new() };
    for name in directory.names()? {
        match SegmentName::parse(&name) {
            Some(SegmentName::Segment(number)) => found.segments.push(number),
            Some(SegmentName::Spare(number)) if found.spares.len() < most_spares as usize => {
                found.spares.push(number);
            }
            Some(SegmentName::Spare(_) | SegmentName::New(_)) => directory.remove(&name)?,
            None => {}
        }
    }
    found.segments.sort_unstable();
    found.spares.sort_unstable();
    Ok(found)
}

/// A new log.
fn begin(
    directory: Arc<dyn LogDirectory>,
    options: LogOptions,
    id: u64,
    spares: Vec<u64>,
) -> Result<Recovered, Error> {
    if !options.create {
        return Err(Error::new(libc::ENOENT, Operation::Open));
    }
    // Spare files without a segment may be of another size.
    for number in spares {
        directory.remove(&SegmentName::Spare(number).text())?;
    }
    let layout = Layout { id, segment_bytes: options.segment_bytes };
    let segments = Segments::new(directory, layout, options.spares, 1, Vec::new());
    let storage = segments.begin(1, 0).map_err(WriteFailure::error)?;
    Ok(Recovered { segments, last: (1, storage), end: layout.first_group(1) })
}

/// The position after the last group of segment `number`, which is the last one.
fn end_of(storage: &Arc<dyn Storage>, layout: Layout, number: u64) -> Result<u64, Error> {
    let mut reader = SegmentReader::new(storage.clone(), layout, number, MANY_RECORDS)?;
    let limit = (number + 1) * layout.segment_bytes;
    let mut end = layout.first_group(number);
    while let Some(next) = reader.whole_group(end, limit)? {
        end = next;
    }
    let later = (end + BLOCK_BYTES..limit).step_by(BLOCK as usize);
    for position in later {
        if reader.group(position, limit)?.is_some() {
            return Err(damaged(end));
        }
    }
    Ok(end)
}
