//! Cursors over the memory of a request, taken piece by piece from its beginning.
//!
//! Invariant: no byte is taken twice; no piece is empty.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

/// Memory to be filled by a read.
pub(crate) struct Scatter<'a>(VecDeque<&'a mut [u8]>);

impl<'a> Scatter<'a> {
    pub(crate) fn new(bufs: &'a mut [IoSliceMut<'_>]) -> Self {
        Self(bufs.iter_mut().map(|buf| &mut **buf).filter(|buf| !buf.is_empty()).collect())
    }

    /// The next `len` bytes, fewer only where no more are left.
    pub(crate) fn take(&mut self, len: u64) -> Vec<&'a mut [u8]> {
        let mut taken = Vec::new();
        let mut left = usize::try_from(len).unwrap_or(usize::MAX);
        while left > 0 {
            let Some(first) = self.0.pop_front() else { break };
            let (now, later) = first.split_at_mut(left.min(first.len()));
            left -= now.len();
            taken.push(now);
            if !later.is_empty() {
                self.0.push_front(later);
            }
        }
        taken
    }
}

/// Memory with the data of a write.
pub(crate) struct Gather<'a>(VecDeque<&'a [u8]>);

impl<'a> Gather<'a> {
    pub(crate) fn new(bufs: &'a [IoSlice<'_>]) -> Self {
        Self(bufs.iter().map(|buf| &**buf).filter(|buf| !buf.is_empty()).collect())
    }

    /// Bytes that are left.
    pub(crate) fn len(&self) -> u64 {
        self.0.iter().map(|part| part.len() as u64).sum()
    }

    /// The next `len` bytes, fewer only where no more are left.
    pub(crate) fn take(&mut self, len: u64) -> Vec<&'a [u8]> {
        let mut taken = Vec::new();
        let mut left = usize::try_from(len).unwrap_or(usize::MAX);
        while left > 0 {
            let Some(first) = self.0.pop_front() else { break };
            let (now, later) = first.split_at(left.min(first.len()));
            left -= now.len();
            taken.push(now);
            if !later.is_empty() {
                self.0.push_front(later);
            }
        }
        taken
    }
}

/// Copies the bytes of `from` to the parts `to`, as many as both have.
pub(crate) fn scatter(from: &[u8], to: &mut [&mut [u8]]) {
    let mut rest = from;
    for part in to {
        let len = part.len().min(rest.len());
        let (now, later) = rest.split_at(len);
        part[..len].copy_from_slice(now);
        rest = later;
    }
}

/// Copies the bytes of the parts `from` to `to`, as many as both have.
pub(crate) fn gather(from: &[&[u8]], to: &mut [u8]) {
    let mut rest = to;
    for part in from {
        let len = part.len().min(rest.len());
        let (now, later) = std::mem::take(&mut rest).split_at_mut(len);
        now.copy_from_slice(&part[..len]);
        rest = later;
    }
}
