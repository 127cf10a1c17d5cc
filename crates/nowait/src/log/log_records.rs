//! Reads records of a log: one by its position, or one after the other.
//!
//! Invariant: only durable records are read. Where a segment of the log does not have what it must have,
//! that is an error with the position, unless the segment was freed meanwhile.

use crate::log::Log;
use crate::log::append_queue::AppendQueue;
use crate::log::log_format::{GROUP_HEADER, is_record_position};
use crate::log::log_position::LogPosition;
use crate::log::segment_reader::{
    MANY_RECORDS, ONE_RECORD, ReadFailure, SegmentReader, damaged, read_header,
};
use crate::log::segments::Segments;
use crate::types::byte_range::ByteRange;
use crate::types::error::{Error, Operation};

/// A record that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// Its position.
    pub position: LogPosition,
    /// Its data.
    pub data: Vec<u8>,
}

/// The records of a log from some position on, in their order ([`crate::Log::records`]). Behind the last
/// durable record it returns `None`, and when others have been appended it goes on with these. After an
/// error it returns the same again.
pub struct LogRecords {
    log: Log,
    /// The position of the next record or group.
    next: u64,
    segment: Option<OpenSegment>,
}

/// The segment that is read.
struct OpenSegment {
    reader: SegmentReader,
    /// The end of its last group, once it is not the last segment.
    end: Option<u64>,
}

/// The error for a position without a record in the log.
const fn no_data(position: u64) -> Error {
    Error::new(libc::ENODATA, Operation::Read).at(ByteRange::new(position, 1))
}

/// The error to report if reading at `position` has failed: that its segment was freed meanwhile, if it was.
fn explain(segments: &Segments, position: u64, failure: ReadFailure) -> Error {
    let (number, _) = segments.layout.place_of(position);
    match failure {
        _ if number < segments.first() => no_data(position),
        ReadFailure::Mismatch => damaged(position),
        ReadFailure::Storage(error) => error,
    }
}

/// Opens segment `number`.
fn open(segments: &Segments, number: u64, window: u64) -> Result<SegmentReader, ReadFailure> {
    let storage = segments.open(number)?;
    let header = match read_header(&*storage) {
        Err(error) if error.errno() == libc::EBADMSG => return Err(ReadFailure::Mismatch),
        header => header?,
    };
    match header.layout == segments.layout && header.number == number {
        true => Ok(SegmentReader::new(storage, segments.layout, number, window)?),
        false => Err(ReadFailure::Mismatch),
    }
}

/// The data of the record at `position`. `kept` is the reader of an earlier call, and of the next one.
///
/// # Errors
/// The errors of [`crate::Log::read`].
pub(crate) fn read_one(
    queue: &AppendQueue,
    position: u64,
    kept: &mut Option<SegmentReader>,
) -> Result<Vec<u8>, Error> {
    let (segments, end) = (&queue.segments, queue.durable());
    let (number, _) = segments.layout.place_of(position);
    if number < segments.first() || position >= end {
        return Err(no_data(position));
    }
    if !is_record_position(position) {
        return Err(Error::new(libc::EINVAL, Operation::Validate).at(ByteRange::new(position, 1)));
    }
    let mut read = || {
        let reader = match kept.take().filter(|reader| reader.number() == number) {
            Some(reader) => kept.insert(reader),
            None => kept.insert(open(segments, number, ONE_RECORD)?),
        };
        reader.record(position, end)
    };
    read().map(|(data, _)| data).map_err(|failure| explain(segments, position, failure))
}

impl LogRecords {
    pub(crate) fn new(log: Log, next: u64) -> Self {
        Self { log, next, segment: None }
    }

    fn read_next(&mut self) -> Result<Option<LogRecord>, ReadFailure> {
        let Self { log, next, segment } = self;
        let queue = log.queue();
        let (segments, layout) = (&queue.segments, queue.segments.layout);
        loop {
            let durable = queue.durable();
            let (number, last) = (layout.place_of(*next).0, layout.place_of(durable).0);
            if *next >= durable {
                return Ok(None);
            }
            if number < segments.first() {
                return Err(ReadFailure::Storage(no_data(*next)));
            }
            let open = match segment.take().filter(|open| open.reader.number() == number) {
                Some(open) => segment.insert(open),
                None => {
                    let reader = open(segments, number, MANY_RECORDS)?;
                    segment.insert(OpenSegment { reader, end: None })
                }
            };
            if number < last && open.end.is_none() {
                let following = segments.open(number + 1)?;
                open.end = Some(read_header(&*following)?.previous_end);
            }
            let end = open.end.unwrap_or(durable);
            if *next >= end {
                *next = layout.first_group(number + 1);
                continue;
            }
            let mut position = *next;
            if !is_record_position(position) {
                let group = open.reader.group(position, end)?;
                group.ok_or(ReadFailure::Mismatch)?;
                position += GROUP_HEADER as u64;
            }
            let (data, after) = open.reader.record(position, end)?;
            *next = after;
            return Ok(Some(LogRecord { position: LogPosition::new(position), data }));
        }
    }
}

impl Iterator for LogRecords {
    type Item = Result<LogRecord, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let read = self.read_next();
        read.map_err(|failure| explain(&self.log.queue().segments, self.next, failure)).transpose()
    }
}

impl std::fmt::Debug for LogRecords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogRecords").field("next", &self.next).finish_non_exhaustive()
    }
}
