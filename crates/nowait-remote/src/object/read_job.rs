//! A read of an object, and where its bytes go.
//!
//! Invariant: a read completes once, with all of its bytes or with an error; one that is dropped ends with
//! `EIO`.

use std::sync::mpsc::Sender;

use nowait::{ByteRange, PendingTransfer};

/// The result of a read: its bytes, or a positive errno.
pub(super) type Answer = Result<Vec<u8>, i32>;

/// The origin of a read, which learns of its end.
pub(super) enum Origin {
    Transfer(PendingTransfer),
    Call(Sender<Answer>),
}

/// A read.
pub(super) struct ReadJob {
    pub(super) range: ByteRange,
    data: Vec<u8>,
    /// Blocks that have not come yet.
    left: usize,
    failed: bool,
    origin: Origin,
}

impl ReadJob {
    pub(super) fn of_transfer(transfer: PendingTransfer) -> Self {
        Self::new(transfer.range(), Origin::Transfer(transfer))
    }

    pub(super) const fn new(range: ByteRange, origin: Origin) -> Self {
        Self { range, data: Vec::new(), left: 0, failed: false, origin }
    }

    /// Whether it is a write, which no object takes.
    pub(super) fn is_write(&self) -> bool {
        matches!(&self.origin, Origin::Transfer(transfer) if transfer.is_write())
    }

    /// Makes room for the bytes of `blocks` blocks.
    pub(super) fn begin(&mut self, blocks: usize) {
        self.data = vec![0; self.range.len as usize];
        self.left = blocks;
    }

    /// Takes what it wants of the block with `data` at `pos`, or notes that it did not come. Returns
    /// whether that was the last one.
    pub(super) fn give(&mut self, pos: u64, data: Option<&[u8]>) -> bool {
        self.left -= 1;
        let Some(data) = data else {
            self.failed = true;
            return self.left == 0;
        };
        let start = pos.max(self.range.pos);
        let end = (pos + data.len() as u64).min(self.range.end());
        let to = (start - self.range.pos) as usize..(end - self.range.pos) as usize;
        let from = (start - pos) as usize..(end - pos) as usize;
        if let (Some(to), Some(from)) = (self.data.get_mut(to), data.get(from)) {
            to.copy_from_slice(from);
        }
        self.left == 0
    }

    /// Ends the read when all of its blocks have come, or have not.
    pub(super) fn end(self) {
        if self.failed {
            return self.fail(libc::EIO);
        }
        match self.origin {
            Origin::Transfer(transfer) => transfer.complete(&self.data),
            // Who called may be gone.
            Origin::Call(caller) => drop(caller.send(Ok(self.data))),
        }
    }

    /// Ends the read with a positive `errno`.
    pub(super) fn fail(self, errno: i32) {
        match self.origin {
            Origin::Transfer(transfer) => transfer.fail(errno),
            Origin::Call(caller) => drop(caller.send(Err(errno))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_read_has_its_part_of_each_block() {
        let (sender, answer) = channel();
        let mut job = ReadJob::new(ByteRange::new(3, 4), Origin::Call(sender));
        job.begin(2);
        assert!(!job.give(5, Some(&[5, 6, 7, 8, 9])));
        assert!(job.give(0, Some(&[0, 1, 2, 3, 4])));
        job.end();
        assert_eq!(answer.recv().unwrap(), Ok(vec![3, 4, 5, 6]));
    }

    #[test]
    fn a_read_with_a_block_that_did_not_come_fails() {
        let (sender, answer) = channel();
        let mut job = ReadJob::new(ByteRange::new(0, 10), Origin::Call(sender));
        job.begin(2);
        assert!(!job.give(0, None));
        assert!(job.give(5, Some(&[1; 5])));
        job.end();
        assert_eq!(answer.recv().unwrap(), Err(libc::EIO));
    }
}
