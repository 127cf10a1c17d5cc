//! A device: an open image, its workers, and the rules that every door keeps.
//!
//! Invariant: a door never answers with memory that was not read for the request (C55, C56), and
//! never does part of a request (C25).
//! Knows: the engine crate. Known by: nbd.

use std::sync::Arc;

use nowait::{Completion, Disk, Io, Map, Op, Range, Workers};

/// One image as a block device.
pub struct Device<M> {
    disk: Arc<Disk<M>>,
    workers: Workers,
    name: String,
    description: String,
    /// What its first bytes must not become; nothing if they may be anything.
    forbidden: &'static [u8],
}

impl<M: Map> Device<M> {
    /// A device on `disk` with at most `workers` threads that may block. Clients ask for it as
    /// `name`; `description` is for people.
    #[must_use]
    pub fn new(disk: Arc<Disk<M>>, workers: u32, name: String, description: String) -> Self {
        let workers = Workers::new(&disk, workers);
        Self { disk, workers, name, description, forbidden: &[] }
    }

    /// The same, where every write is refused (`EPERM`) that could make it begin with `bytes`: for
    /// an image whose format was guessed from its not beginning so. None of `bytes` is 0.
    #[must_use]
    pub fn never_beginning(self, bytes: &'static [u8]) -> Self {
        Self { forbidden: bytes, ..self }
    }

    /// Whether writing `bytes` at `pos` is refused. Of all writes to the first bytes the last one
    /// stays as it is, so it is enough to refuse those that bring nothing else there. What is
    /// discarded or zeroed is not `bytes` afterwards.
    #[inline]
    pub(crate) fn forbids(&self, pos: u64, bytes: &[u8]) -> bool {
        if pos >= self.forbidden.len() as u64 {
            return false;
        }
        let there = self.forbidden.iter().skip(pos as usize);
        !bytes.is_empty() && there.zip(bytes).all(|(forbidden, byte)| forbidden == byte)
    }

    /// As [`Device::new`], with workers that somebody else has made.
    #[cfg(feature = "sim")]
    pub(crate) fn with_workers(disk: Arc<Disk<M>>, workers: Workers) -> Self {
        let (name, description) = (String::new(), String::new());
        Self { disk, workers, name, description, forbidden: &[] }
    }

    /// The image.
    #[must_use]
    pub fn disk(&self) -> &Arc<Disk<M>> {
        &self.disk
    }

    pub(crate) fn workers(&self) -> Workers {
        self.workers.clone()
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn description(&self) -> &str {
        &self.description
    }

    /// The range of a request, or the errno that refuses it as a whole (C02, C25): `EPERM` for a
    /// change on a read-only device; past the end `ENOSPC` for what stores something there, and
    /// `EINVAL` for the rest (NBD proto.md, "Error values").
    #[inline]
    pub(crate) fn range(&self, op: Op, pos: u64, len: u64) -> Result<Range, i32> {
        let changes = op.changes();
        if changes && self.disk.is_read_only() {
            return Err(libc::EPERM);
        }
        match pos.checked_add(len) {
            Some(end) if end <= self.disk.size() => Ok(Range::new(pos, len)),
            _ if matches!(op, Op::Write | Op::Zero) => Err(libc::ENOSPC),
            _ => Err(libc::EINVAL),
        }
    }
}

/// What a completed request came to, for a door: all of it, or an errno. A short one is `EIO`
/// (C55): the image was cut behind the server's back.
#[inline]
pub(crate) fn verdict(completion: &Completion) -> Result<(), i32> {
    let Io { op, range, .. } = completion.io;
    match completion.result() {
        Ok(done) if done == range.len || op == Op::Flush => Ok(()),
        Ok(_) => Err(libc::EIO),
        Err(error) => Err(error.errno()),
    }
}
