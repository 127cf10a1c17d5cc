//! A request that is sent in parts, and what a server has answered of it.
//!
//! Invariant: a reply is taken only if it is to a part that is not answered yet, and its data only within that part; an
//! error of any method ends the connection.

use crate::client::reply_parser::{BROKEN, Outcome};
use crate::constants::{CMD_BLOCK_STATUS, CMD_READ};
use crate::extents::Extents;

/// The error of a reply to a part that is not expected.
pub const UNASKED: &str = "the server answered a request that was never made";

/// The most messages about one request: a server that sends holes and data by turns has a reason for
/// many, but not without end.
/// Beyond it: the connection ends. A storage connects again, a copy fails.
pub const MAX_MESSAGES: u32 = 1 << 20;

/// A request to a server, in one part or several. The cookie of a part has the index of its request and its number.
#[derive(Clone, Debug)]
pub struct SplitRequest {
    /// `CMD_*`.
    command: u16,
    /// The first byte, and how many.
    offset: u64,
    length: u64,
    /// The parts of a read have this many bytes, but the last one.
    part_bytes: u64,
    /// The parts that were answered.
    answered: Vec<bool>,
    left: usize,
    /// Bytes of a read that have come.
    received: u64,
    /// Whether extents have come.
    has_status: bool,
    messages: u32,
}

impl SplitRequest {
    /// A request of `length` bytes from byte `offset` of the export on, of which nothing is answered, in `parts` parts. Those
    /// of a read have `part_bytes` bytes each, but the last one.
    #[must_use]
    pub fn new(command: u16, offset: u64, length: u64, (parts, part_bytes): (usize, u64)) -> Self {
        let (answered, left) = (vec![false; parts], parts);
        let (received, has_status, messages) = (0, false, 0);
        Self { command, offset, length, part_bytes, answered, left, received, has_status, messages }
    }

    /// The cookie of part number `part` of the request with this `index`; both have 32 bits.
    #[must_use]
    pub fn cookie(index: usize, part: usize) -> u64 {
        (part as u64) << 32 | index as u64
    }

    /// The index of the request in `cookie`.
    #[must_use]
    pub fn index_of(cookie: u64) -> usize {
        cookie as u32 as usize
    }

    /// `CMD_*`.
    #[must_use]
    pub fn command(&self) -> u16 {
        self.command
    }

    /// The number of parts.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.answered.len()
    }

    /// The first byte and the bytes of a part that there is.
    #[must_use]
    pub fn part(&self, number: usize) -> Option<(u64, u64)> {
        let start = (number as u64).checked_mul(self.part_bytes)?;
        let left = self.length.checked_sub(start).filter(|&left| left > 0)?;
        Some((self.offset + start, left.min(self.part_bytes)))
    }

    /// Takes a message to the part of `cookie`. The methods below do that, too.
    ///
    /// # Errors
    /// The part was never asked for or is answered, or the messages are without end.
    pub fn message(&mut self, cookie: u64) -> Outcome<()> {
        if self.answered.get((cookie >> 32) as usize) != Some(&false) {
            return Err(UNASKED.into());
        }
        self.messages += 1;
        match self.messages > MAX_MESSAGES || self.received > self.length {
            true => Err(BROKEN.into()),
            false => Ok(()),
        }
    }

    /// Takes a simple reply without error. Returns the range of the data behind it, if it has some.
    ///
    /// # Errors
    /// Like [`Self::message`]; the command is answered otherwise.
    pub fn simple(&mut self, cookie: u64) -> Outcome<Option<(u64, u64)>> {
        self.message(cookie)?;
        match self.command {
            CMD_READ => {
                let (offset, length) = self.part((cookie >> 32) as usize).ok_or(BROKEN)?;
                self.received += length;
                Ok(Some((offset, length)))
            }
            CMD_BLOCK_STATUS => Err(BROKEN.into()),
            _ => Ok(None),
        }
    }

    /// Takes `length` bytes of a read, data or zeros, at byte `offset` of the export.
    ///
    /// # Errors
    /// Like [`Self::message`]; they are not bytes of that part, or not of a read.
    pub fn content(&mut self, cookie: u64, offset: u64, length: u64) -> Outcome<()> {
        self.message(cookie)?;
        let (start, bytes) = self.part((cookie >> 32) as usize).ok_or(BROKEN)?;
        let end = offset.checked_add(length).filter(|&end| end <= start + bytes);
        if self.command != CMD_READ || length == 0 || offset < start || end.is_none() {
            return Err(BROKEN.into());
        }
        self.received += length;
        Ok(())
    }

    /// Takes block status. Returns the extents within the range, each with its flags; the last one is cut at its end.
    ///
    /// # Errors
    /// Like [`Self::message`]; an extent has no bytes, or status was not asked for.
    pub fn status(&mut self, cookie: u64, extents: Extents<'_>) -> Outcome<Vec<(u64, u64)>> {
        self.of_status(cookie)?;
        let (mut left, mut taken) = (self.length, Vec::new());
        for (len, flags) in extents {
            if len == 0 {
                return Err(BROKEN.into());
            }
            let len = len.min(left);
            if len > 0 {
                taken.push((len, flags));
            }
            left -= len;
        }
        self.has_status = !taken.is_empty();
        Ok(taken)
    }

    /// Takes block status of a context that was not asked for.
    ///
    /// # Errors
    /// Like [`Self::status`].
    pub fn of_status(&mut self, cookie: u64) -> Outcome<()> {
        self.message(cookie)?;
        if self.command == CMD_BLOCK_STATUS { Ok(()) } else { Err(BROKEN.into()) }
    }

    /// The part of `cookie` is answered. Returns whether all of them are. With `has_failed`, the answers need not be all
    /// that was asked for.
    ///
    /// # Errors
    /// Like [`Self::message`]; bytes or extents are missing.
    pub fn done(&mut self, cookie: u64, has_failed: bool) -> Outcome<bool> {
        self.message(cookie)?;
        if let Some(answered) = self.answered.get_mut((cookie >> 32) as usize) {
            *answered = true;
        }
        self.left -= 1;
        if self.left > 0 {
            return Ok(false);
        }
        let is_whole = match self.command {
            CMD_READ => self.received == self.length,
            CMD_BLOCK_STATUS => self.has_status,
            _ => true,
        };
        match is_whole || has_failed {
            true => Ok(true),
            false => Err("the server answered a request only in part".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::constants::CMD_WRITE;

    fn request(command: u16, length: u64) -> SplitRequest {
        SplitRequest::new(command, 4096, length, (length.div_ceil(1024) as usize, 1024))
    }

    #[test]
    fn a_read_ends_when_each_part_was_answered_with_its_bytes() {
        let (mut it, second) = (request(CMD_READ, 2000), SplitRequest::cookie(0, 1));
        assert_eq!(it.simple(second), Ok(Some((4096 + 1024, 976))));
        assert_eq!(it.done(second, false), Ok(false));
        it.content(0, 4096, 1000).unwrap();
        it.content(0, 4096 + 1000, 24).unwrap();
        assert_eq!(it.done(0, false), Ok(true));
    }

    #[test]
    fn data_outside_of_a_part_or_without_end_are_refused() {
        for (cookie, offset, length) in [
            (0, 4095, 1),
            (0, 4096 + 1024, 1),
            (0, u64::MAX, 8),
            (1 << 32, 4096, 1),
            (2 << 32, 4096, 1),
            (0, 4096, 0),
        ] {
            let refused = request(CMD_READ, 2000).content(cookie, offset, length);
            assert!(refused.is_err(), "{cookie:x} {offset} {length}");
        }
        let mut it = request(CMD_READ, 2000);
        let again = (0..10).try_for_each(|_| it.content(0, 4096, 1024));
        assert!(again.is_err(), "the same bytes again and again");
        let mut it = request(CMD_WRITE, 10);
        assert!((0..MAX_MESSAGES).try_for_each(|_| it.message(0)).is_ok());
        assert!(it.message(0).is_err());
    }

    #[test]
    fn a_part_is_answered_once_and_an_incomplete_answer_is_refused() {
        let mut it = request(CMD_READ, 1000);
        it.content(0, 4096, 999).unwrap();
        assert!(it.clone().done(0, true).is_ok());
        assert!(it.done(0, false).is_err());
        assert!(it.done(0, false).is_err());
        let (mut it, second) = (request(CMD_WRITE, 2000), SplitRequest::cookie(0, 1));
        assert_eq!(it.done(second, false), Ok(false));
        assert!(it.done(second, false).is_err());
        assert_eq!(it.done(0, false), Ok(true));
    }
}
