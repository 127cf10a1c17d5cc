//! An object of a store as the target of a copy: a disk that is written once, gathered to parts that
//! are uploaded.
//!
//! Invariant: each byte is in one request to write or to zero. At most `at_once` parts and one that
//! is being filled are in memory. That is enough: requests are begun in the order of their
//! positions, so of the parts that wait for bytes only one waits for bytes that no request has yet.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};

use nowait::ByteRange;
use nowait_remote::{ObjectUpload, ObjectUrl, UploadOptions};
use rustix::event::PollFlags;
use rustix::io::Errno;

use crate::endpoint::{Capabilities, Completed, CopyOperation, CopyRequest, Endpoint};
use crate::error::{Error, reason};

/// Positions of requests are multiples of this, as with files.
const GRANULE_BYTES: u64 = 4096;
/// The longest read or write in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// The longest range that one request zeroes, in bytes: short enough that progress is visible.
const MAX_ZERO_BYTES: u64 = 64 << 20;

/// Begins an upload of a disk of `size` bytes to `url`; `replaces` allows that there is an object.
///
/// # Errors
/// Like [`ObjectUpload::begin`].
pub(crate) fn open(url: &ObjectUrl, size: u64, replaces: bool) -> Result<Box<dyn Endpoint>, Error> {
    let options = UploadOptions { replaces, ..UploadOptions::default() };
    let upload = ObjectUpload::begin(url, size, options).map_err(|what| Error::at(url, what))?;
    Ok(Box::new(ObjectEndpoint {
        limit: upload.parts_at_once() + 1,
        part_bytes: upload.part_bytes(),
        upload: Some(upload),
        name: url.to_string(),
        size,
        parts: BTreeMap::new(),
        requests: VecDeque::new(),
        done: VecDeque::new(),
        flush: None,
    }))
}

struct ObjectEndpoint {
    /// `None` when it is complete.
    upload: Option<ObjectUpload>,
    name: String,
    size: u64,
    part_bytes: u64,
    /// The most parts in memory.
    limit: usize,
    /// The parts in memory by their index; `None` is one that is being sent.
    parts: BTreeMap<u64, Option<Part>>,
    /// Requests whose bytes are not all in parts yet.
    requests: VecDeque<Gathering>,
    done: VecDeque<Completed>,
    flush: Option<u64>,
}

/// A part that waits for bytes.
struct Part {
    data: Vec<u8>,
    /// Bytes that have not come.
    missing: u64,
}

struct Gathering {
    request: CopyRequest,
    /// Bytes of its range that are in parts.
    taken: u64,
}

impl ObjectEndpoint {
    /// Puts bytes of `gathering` into parts, as long as there may be more of these. Returns whether all
    /// of it is there.
    fn gather(&mut self, gathering: &mut Gathering) -> Result<bool, Error> {
        let Gathering { request, taken } = gathering;
        while *taken < request.range.len {
            let pos = request.range.pos + *taken;
            let (index, start) = (pos / self.part_bytes, pos % self.part_bytes);
            let part_len = self.part_bytes.min(self.size - index * self.part_bytes);
            if !self.parts.contains_key(&index) {
                if self.parts.len() >= self.limit {
                    return Ok(false);
                }
                self.parts.insert(index, Some(Part::new(part_len)?));
            }
            let len = (part_len - start).min(request.range.len - *taken);
            let from = request.memory.as_ref().and_then(|it| it.get(*taken as usize..));
            let from = from.map(|it| it.get(..len as usize).unwrap_or_default());
            let place = self.parts.get_mut(&index);
            let Some(part) = place.and_then(Option::as_mut) else {
                return Err(Error::at(&self.name, "a byte was written twice"));
            };
            if matches!(request.operation, CopyOperation::Write(_)) {
                let to = part.data.get_mut(start as usize..(start + len) as usize);
                match (to, from) {
                    (Some(to), Some(from)) if to.len() == from.len() => to.copy_from_slice(from),
                    _ => return Err(Error::at(&self.name, "a request without memory")),
                }
            }
            part.missing = part.missing.saturating_sub(len);
            *taken += len;
            if part.missing == 0 {
                self.send(index);
            }
        }
        Ok(true)
    }

    fn send(&mut self, index: u64) {
        let part = self.parts.get_mut(&index).and_then(Option::take);
        if let (Some(part), Some(upload)) = (part, &self.upload) {
            upload.send(index as usize, part.data);
        }
    }
}

impl Part {
    /// A part of zeros.
    fn new(len: u64) -> Result<Self, Error> {
        let mut data = Vec::new();
        let no_memory = |_| Error::at(&"memory", reason(Errno::NOMEM.raw_os_error()));
        data.try_reserve_exact(len as usize).map_err(no_memory)?;
        data.resize(len as usize, 0);
        Ok(Self { data, missing: len })
    }
}

impl Endpoint for ObjectEndpoint {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            size: self.size,
            block: 1,
            alignment: GRANULE_BYTES,
            max_bytes: MAX_BYTES,
            max_zero_bytes: MAX_ZERO_BYTES,
            has_status: false,
            has_flush: true,
        }
    }

    fn submit(&mut self, request: CopyRequest) {
        match request.operation {
            CopyOperation::Flush => self.flush = Some(request.tag),
            _ => self.requests.push_back(Gathering { request, taken: 0 }),
        }
    }

    fn advance(&mut self) -> Result<(), Error> {
        let Some(upload) = &self.upload else { return Ok(()) };
        while let Some(index) = upload.next_sent().map_err(|what| Error::at(&self.name, what))? {
            self.parts.remove(&(index as u64));
        }
        for mut gathering in std::mem::take(&mut self.requests) {
            if self.gather(&mut gathering)? {
                let CopyRequest { range, tag, memory, .. } = gathering.request;
                let (extents, unreadable) = (Vec::new(), false);
                self.done.push_back(Completed { tag, range, memory, extents, unreadable });
            } else {
                self.requests.push_back(gathering);
            }
        }
        if self.parts.is_empty()
            && self.requests.is_empty()
            && let Some(tag) = self.flush.take()
        {
            let (range, extents) = (ByteRange::new(0, 0), Vec::new());
            self.done.push_back(Completed { tag, range, memory: None, extents, unreadable: false });
        }
        Ok(())
    }

    fn next(&mut self) -> Option<Completed> {
        self.done.pop_front()
    }

    fn report_unreadable(&mut self) {}

    /// Makes the object visible. It is not interrupted: the store has made it visible or not.
    fn finish(&mut self) -> Result<(), Error> {
        let completed = self.upload.take().map_or(Ok(()), ObjectUpload::complete);
        completed.map_err(|what| Error::at(&self.name, what))
    }

    fn abandon(&mut self) -> Result<(), String> {
        self.upload.take().map_or(Ok(()), ObjectUpload::abort)
    }

    fn poll_fds<'a>(&'a self, poll_fds: &mut Vec<(BorrowedFd<'a>, PollFlags)>) {
        poll_fds.extend(self.upload.iter().map(|upload| (upload.as_fd(), PollFlags::IN)));
    }
}
