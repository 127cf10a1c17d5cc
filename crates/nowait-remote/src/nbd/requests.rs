//! The requests that were sent to the server, and what it answers.
//!
//! Invariant: a reply is taken only if it is to a part of a request that is not answered yet, and its
//! data only within that part; every other reply ends the connection.

use nowait::{ByteRange, ExtentStatus};
use nowait_nbd as nbd;
use nowait_nbd::client::{Outcome, Replies};
use nowait_nbd::{Extents, RequestHeader};
use slab::Slab;

use crate::nbd::job::{Command, Job};

const UNASKED: &str = "the server answered a request that was never made";
const BROKEN: &str = "the server's replies make no sense";

/// The most messages about one request: a server that sends holes and data by turns has a reason for
/// many, but not without end.
/// Beyond it: the connection is made again.
const MAX_MESSAGES: u32 = 1 << 20;

/// A job that is with the server.
pub(super) struct Asked {
    pub(super) job: Job,
    /// Its place in the order in which jobs were asked.
    pub(super) number: u64,
    /// Of a flush, the next change of the replay log when it was asked.
    pub(super) covers: u64,
    /// It is sent in parts of this many bytes.
    part_bytes: u64,
    /// The parts that were answered.
    answered: Vec<bool>,
    left: usize,
    /// Bytes of a read that have come.
    received: u64,
    /// Messages of the server about it so far.
    messages: u32,
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
        let (answered, extents) = (vec![false; parts], Vec::new());
        Self {
            job,
            number,
            covers,
            part_bytes,
            answered,
            left: parts,
            received: 0,
            messages: 0,
            errno: 0,
            extents,
        }
    }

    /// The headers of all parts for the request with this `index`, each with the range of its data in
    /// the job's.
    pub(super) fn headers(
        &self,
        index: usize,
        has_fua: bool,
    ) -> impl Iterator<Item = (RequestHeader, Option<(usize, usize)>)> {
        let (command, flags) = match self.job.command {
            Command::Read => (nbd::CMD_READ, 0),
            Command::Write if self.job.durable && has_fua => (nbd::CMD_WRITE, nbd::CMD_FLAG_FUA),
            Command::Write => (nbd::CMD_WRITE, 0),
            Command::Flush => (nbd::CMD_FLUSH, 0),
            Command::Zero { keep: true } => (nbd::CMD_WRITE_ZEROES, nbd::CMD_FLAG_NO_HOLE),
            Command::Zero { keep: false } => (nbd::CMD_WRITE_ZEROES, 0),
            Command::Status => (nbd::CMD_BLOCK_STATUS, 0),
        };
        (0..self.answered.len()).map(move |part| {
            let cookie = (part as u64) << 32 | index as u64;
            // A flush has no range.
            let range = match command {
                nbd::CMD_FLUSH => ByteRange::new(0, 0),
                _ => self.part(part).unwrap_or(ByteRange::new(0, 0)),
            };
            let data = (command == nbd::CMD_WRITE)
                .then(|| ((range.pos - self.job.range.pos) as usize, range.len as usize));
            let (offset, length) = (range.pos, range.len);
            (RequestHeader { flags, command, cookie, offset, length }, data)
        })
    }

    /// The range of a part that there is.
    fn part(&self, part: usize) -> Option<ByteRange> {
        let start = (part as u64).checked_mul(self.part_bytes)?;
        let left = self.job.range.len.checked_sub(start).filter(|&left| left > 0)?;
        Some(ByteRange::new(self.job.range.pos + start, left.min(self.part_bytes)))
    }

    /// Whether both change bytes of one range.
    pub(super) fn conflicts(&self, job: &Job) -> bool {
        let (own, other) = (self.job.range, job.range);
        self.job.command.changes() && own.pos < other.end() && other.pos < own.end()
    }

    /// Whether what the server has answered is all that was asked for.
    fn is_complete(&self) -> bool {
        self.errno != 0
            || match self.job.command {
                Command::Read => self.received == self.job.range.len,
                Command::Status => !self.extents.is_empty(),
                Command::Write | Command::Flush | Command::Zero { .. } => true,
            }
    }
}

/// The requests of a connection, as its server answers them.
pub(super) struct Answers<'a> {
    pub(super) asked: &'a mut Slab<Asked>,
    /// The id of the block status context.
    pub(super) context: Option<u32>,
    /// The indices of the requests that have ended.
    pub(super) ended: &'a mut Vec<usize>,
}

fn index_of(cookie: u64) -> (usize, usize) {
    (cookie as u32 as usize, (cookie >> 32) as usize)
}

impl Answers<'_> {
    /// The request with a part that is not answered.
    fn request(&mut self, cookie: u64) -> Outcome<&mut Asked> {
        let (index, part) = index_of(cookie);
        let asked = self.asked.get_mut(index);
        let asked =
            asked.filter(|asked| asked.answered.get(part) == Some(&false)).ok_or(UNASKED)?;
        asked.messages += 1;
        if asked.messages > MAX_MESSAGES || asked.received > asked.job.range.len {
            return Err(BROKEN.into());
        }
        Ok(asked)
    }

    /// The read of whose part `length` bytes at `offset` come.
    fn read(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<&mut Asked> {
        let asked = self.request(cookie)?;
        let part = asked.part(index_of(cookie).1).ok_or(BROKEN)?;
        let end = offset.checked_add(length).filter(|&end| end <= part.end());
        if asked.job.command != Command::Read || length == 0 || offset < part.pos || end.is_none() {
            return Err(BROKEN.into());
        }
        asked.received += length;
        Ok(asked)
    }
}

impl Replies for Answers<'_> {
    fn simple(&mut self, cookie: u64, error: u32) -> Outcome<Option<(u64, u64)>> {
        if error != 0 {
            return self.error(cookie, error, "").map(|()| None);
        }
        let asked = self.request(cookie)?;
        match asked.job.command {
            Command::Read => {
                let part = asked.part(index_of(cookie).1).ok_or(BROKEN)?;
                asked.received += part.len;
                Ok(Some((part.pos, part.len)))
            }
            Command::Status => Err(BROKEN.into()),
            Command::Write | Command::Flush | Command::Zero { .. } => Ok(None),
        }
    }

    fn data(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
        self.read(cookie, offset, length).map(drop)
    }

    fn hole(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
        self.read(cookie, offset, length)?;
        let memory = self.memory(cookie, offset).and_then(|rest| rest.get_mut(..length as usize));
        memory.ok_or(BROKEN)?.fill(0);
        Ok(())
    }

    /// Takes the extents within the range; a hole is what reads as zeros.
    fn status(&mut self, cookie: u64, context: u32, extents: Extents<'_>) -> Outcome<()> {
        let own = self.context == Some(context);
        let asked = self.request(cookie)?;
        if asked.job.command != Command::Status {
            return Err(BROKEN.into());
        }
        if !own {
            return Ok(());
        }
        asked.extents.clear();
        let mut left = asked.job.range.len;
        for (len, flags) in extents {
            if len == 0 {
                return Err(BROKEN.into());
            }
            let len = len.min(left);
            if len > 0 {
                let zero = flags & u64::from(nbd::STATE_ZERO) != 0;
                asked.extents.push(ExtentStatus::top(len, zero));
            }
            left -= len;
        }
        Ok(())
    }

    /// A server that shuts down ends the connection: another one may follow it.
    fn error(&mut self, cookie: u64, error: u32, words: &str) -> Outcome<()> {
        let asked = self.request(cookie)?;
        if error == nbd::ESHUTDOWN {
            return Err("the server is shutting down".into());
        }
        tracing::debug!("the server answered error {error} to a request: {words:?}");
        asked.errno = errno_of(error);
        Ok(())
    }

    fn done(&mut self, cookie: u64) -> Outcome<()> {
        let (index, part) = index_of(cookie);
        let asked = self.request(cookie)?;
        if let Some(answered) = asked.answered.get_mut(part) {
            *answered = true;
        }
        asked.left -= 1;
        if asked.left > 0 {
            return Ok(());
        }
        if !asked.is_complete() {
            return Err("the server answered a request only in part".into());
        }
        self.ended.push(index);
        Ok(())
    }

    fn memory(&mut self, cookie: u64, offset: u64) -> Option<&mut [u8]> {
        let asked = self.asked.get_mut(index_of(cookie).0)?;
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

    fn table(command: Command, len: u64) -> Slab<Asked> {
        let (range, origin) = (ByteRange::new(4096, len), Origin::Replay);
        let job =
            Job { command, range, durable: false, data: Vec::new(), was_asked: false, origin };
        let mut asked = Slab::new();
        asked.insert(Asked::new(job, 0, 0, 1024));
        asked
    }

    fn answers<'a>(asked: &'a mut Slab<Asked>, ended: &'a mut Vec<usize>) -> Answers<'a> {
        Answers { asked, context: Some(1), ended }
    }

    #[test]
    fn a_read_ends_when_each_part_was_answered_with_its_bytes() {
        let (mut asked, mut ended) = (table(Command::Read, 2000), Vec::new());
        let mut it = answers(&mut asked, &mut ended);
        let second = 1 << 32;
        assert_eq!(it.simple(second, 0), Ok(Some((4096 + 1024, 976))));
        it.done(second).unwrap();
        it.hole(0, 4096, 1000).unwrap();
        it.data(0, 4096 + 1000, 24).unwrap();
        it.done(0).unwrap();
        assert_eq!(ended, [0]);
    }

    #[test]
    fn data_outside_of_a_part_or_without_end_are_refused() {
        for (cookie, offset, length) in [
            (0, 4095, 1),
            (0, 4096 + 1024, 1),
            (1 << 32, 4096, 1),
            (2 << 32, 4096, 1),
            (0, 4096, 0),
        ] {
            let (mut asked, mut ended) = (table(Command::Read, 2000), Vec::new());
            let refused = answers(&mut asked, &mut ended).data(cookie, offset, length);
            assert!(refused.is_err(), "{cookie:x} {offset} {length}");
        }
        let (mut asked, mut ended) = (table(Command::Read, 2000), Vec::new());
        let mut it = answers(&mut asked, &mut ended);
        let again = (0..10).try_for_each(|_| it.data(0, 4096, 1024));
        assert!(again.is_err(), "the same bytes again and again");
        let (mut asked, mut ended) = (table(Command::Write, 10), Vec::new());
        let mut it = answers(&mut asked, &mut ended);
        assert!((0..=MAX_MESSAGES).try_for_each(|_| it.error(0, nbd::EIO, "")).is_err());
    }

    #[test]
    fn a_part_is_answered_once_and_an_incomplete_answer_is_refused() {
        let (mut asked, mut ended) = (table(Command::Read, 1000), Vec::new());
        let mut it = answers(&mut asked, &mut ended);
        it.data(0, 4096, 999).unwrap();
        assert!(it.done(0).is_err());
        assert!(it.done(0).is_err());
        assert!(ended.is_empty());
    }
}
