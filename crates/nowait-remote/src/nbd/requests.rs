//! The requests that were sent to the server, and what it answers.
//!
//! Invariant: a reply is taken only if it is to a part of a request that is not answered yet, and its
//! data only within that part; every other reply closes the connection.

use nowait::ExtentStatus;
use nowait_nbd as nbd;
use nowait_nbd::client::{BROKEN, Outcome, Replies, SplitRequest, UNASKED};
use nowait_nbd::{Extents, RequestHeader};
use slab::Slab;

use crate::nbd::job::{Command, Job};

/// A job that is with the server.
pub(super) struct Asked {
    pub(super) job: Job,
    /// Its place in the order in which jobs were asked.
    pub(super) number: u64,
    /// Of a flush, the next change of the replay log when it was asked.
    pub(super) covers: u64,
    request: SplitRequest,
    /// The errno that the server answered, or 0.
    pub(super) errno: i32,
    pub(super) extents: Vec<ExtentStatus>,
}

impl Asked {
    /// `job`, in parts of at most `part_bytes` where it has data.
    pub(super) fn new(mut job: Job, number: u64, covers: u64, part_bytes: u64) -> Self {
        let len = job.range.len;
        let part_bytes = match job.command {
            Command::Read | Command::Write => part_bytes,
            Command::Flush | Command::Zero { .. } | Command::Status => len.max(1),
        };
        let parts = len.div_ceil(part_bytes).max(1) as usize;
        if job.command == Command::Read {
            job.data = vec![0; len as usize];
        }
        let command = match job.command {
            Command::Read => nbd::CMD_READ,
            Command::Write => nbd::CMD_WRITE,
            Command::Flush => nbd::CMD_FLUSH,
            Command::Zero { .. } => nbd::CMD_WRITE_ZEROES,
            Command::Status => nbd::CMD_BLOCK_STATUS,
        };
        let request = SplitRequest::new(command, job.range.pos, len, (parts, part_bytes));
        Self { job, number, covers, request, errno: 0, extents: Vec::new() }
    }

    /// The headers of all parts for the request with this `index`, each with the range of its data in
    /// the job's.
    pub(super) fn headers(
        &self,
        index: usize,
        has_fua: bool,
    ) -> impl Iterator<Item = (RequestHeader, Option<(usize, usize)>)> {
        let command = self.request.command();
        let flags = match self.job.command {
            Command::Write if self.job.durable && has_fua => nbd::CMD_FLAG_FUA,
            Command::Zero { keep: true } => nbd::CMD_FLAG_NO_HOLE,
            _ => 0,
        };
        (0..self.request.parts()).map(move |part| {
            let cookie = SplitRequest::cookie(index, part);
            // A flush has no range.
            let (offset, length) = match command {
                nbd::CMD_FLUSH => (0, 0),
                _ => self.request.part(part).unwrap_or_default(),
            };
            let data = (command == nbd::CMD_WRITE)
                .then(|| ((offset - self.job.range.pos) as usize, length as usize));
            (RequestHeader { flags, command, cookie, offset, length }, data)
        })
    }

    /// Whether both change bytes of one range.
    pub(super) fn conflicts(&self, job: &Job) -> bool {
        let (own, other) = (self.job.range, job.range);
        self.job.command.changes() && own.pos < other.end() && other.pos < own.end()
    }
}

/// The requests of a connection, as its server answers them.
pub(super) struct Answers<'a> {
    pub(super) asked: &'a mut Slab<Asked>,
    /// The id of the block status context.
    pub(super) context: Option<u32>,
    /// The indices of the requests that have completed.
    pub(super) completed: &'a mut Vec<usize>,
}

impl Answers<'_> {
    /// The request of `cookie`.
    fn asked(&mut self, cookie: u64) -> Outcome<&mut Asked> {
        self.asked.get_mut(SplitRequest::index_of(cookie)).ok_or_else(|| UNASKED.into())
    }
}

impl Replies for Answers<'_> {
    fn simple(&mut self, cookie: u64, error: u32) -> Outcome<Option<(u64, u64)>> {
        if error != 0 {
            return self.error(cookie, error, "").map(|()| None);
        }
        self.asked(cookie)?.request.simple(cookie)
    }

    fn data(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
        self.asked(cookie)?.request.content(cookie, offset, length)
    }

    fn hole(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
        self.data(cookie, offset, length)?;
        let memory = self.memory(cookie, offset).and_then(|rest| rest.get_mut(..length as usize));
        memory.ok_or(BROKEN)?.fill(0);
        Ok(())
    }

    /// Takes the extents within the range; a hole is what reads as zeros.
    fn status(&mut self, cookie: u64, context: u32, extents: Extents<'_>) -> Outcome<()> {
        let own = self.context == Some(context);
        let asked = self.asked(cookie)?;
        if !own {
            return asked.request.of_status(cookie);
        }
        let taken = asked.request.status(cookie, extents)?.into_iter();
        let extent = |(len, flags)| ExtentStatus::top(len, flags & u64::from(nbd::STATE_ZERO) != 0);
        asked.extents = taken.map(extent).collect();
        Ok(())
    }

    /// A server that shuts down closes the connection: another one may follow it.
    fn error(&mut self, cookie: u64, error: u32, words: &str) -> Outcome<()> {
        let asked = self.asked(cookie)?;
        asked.request.message(cookie)?;
        if error == nbd::ESHUTDOWN {
            return Err("the server is shutting down".into());
        }
        tracing::debug!("the server answered error {error} to a request: {words:?}");
        asked.errno = errno_of(error);
        Ok(())
    }

    fn done(&mut self, cookie: u64) -> Outcome<()> {
        let asked = self.asked(cookie)?;
        if asked.request.done(cookie, asked.errno != 0)? {
            self.completed.push(SplitRequest::index_of(cookie));
        }
        Ok(())
    }

    fn memory(&mut self, cookie: u64, offset: u64) -> Option<&mut [u8]> {
        let asked = self.asked.get_mut(SplitRequest::index_of(cookie))?;
        if asked.job.command != Command::Read {
            return None;
        }
        let at = usize::try_from(offset.checked_sub(asked.job.range.pos)?).ok()?;
        asked.job.data.get_mut(at..)
    }
}

/// The errno of an NBD error value, which is the same number on Linux for those that there are (NBD
/// proto.md, "Error values").
fn errno_of(error: u32) -> i32 {
    match error {
        nbd::EPERM => libc::EPERM,
        nbd::ENOMEM => libc::ENOMEM,
        nbd::EINVAL => libc::EINVAL,
        nbd::ENOSPC => libc::ENOSPC,
        nbd::EOVERFLOW => libc::EOVERFLOW,
        nbd::ENOTSUP => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::job::Origin;
    use nowait::ByteRange;

    fn table(command: Command, len: u64) -> Slab<Asked> {
        let (range, origin) = (ByteRange::new(4096, len), Origin::Replay);
        let job =
            Job { command, range, durable: false, data: Vec::new(), was_asked: false, origin };
        let mut asked = Slab::new();
        asked.insert(Asked::new(job, 0, 0, 1024));
        asked
    }

    fn answers<'a>(asked: &'a mut Slab<Asked>, completed: &'a mut Vec<usize>) -> Answers<'a> {
        Answers { asked, context: Some(1), completed }
    }

    #[test]
    fn a_read_ends_when_each_part_was_answered_with_its_bytes() {
        let (mut asked, mut completed) = (table(Command::Read, 2000), Vec::new());
        let mut it = answers(&mut asked, &mut completed);
        let second = 1 << 32;
        assert_eq!(it.simple(second, 0), Ok(Some((4096 + 1024, 976))));
        it.done(second).unwrap();
        it.hole(0, 4096, 1000).unwrap();
        it.data(0, 4096 + 1000, 24).unwrap();
        it.done(0).unwrap();
        assert_eq!(completed, [0]);
    }
}
