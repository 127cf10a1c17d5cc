//! The files that a queue reaches, under numbers for [`Transfer::file`](crate::Transfer::file).
//!
//! Invariant: the files of one device have successive numbers; a number belongs to one file until it is
//! removed.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::queue::pending_transfer::AsyncTransfers;
use crate::types::error::{Error, Operation};

/// A file or another storage, as a queue reaches it.
#[derive(Clone)]
pub enum QueueFile<'a> {
    /// The kernel reads and writes the file.
    Descriptor {
        /// The open file. A queue that needs it later keeps a duplicate.
        file: BorrowedFd<'a>,
        /// The file uses the page cache, so a call for cached data never waits for a device.
        cached: bool,
    },
    /// The storage makes the transfers itself.
    Transfers(Arc<dyn AsyncTransfers>),
    /// A file of a simulated device, a `SimDevice`, which has this number there.
    #[cfg(feature = "sim")]
    Simulated(Arc<dyn std::any::Any + Send + Sync>, u16),
    /// Only calls that may wait reach the storage; a queue of the kernel refuses it.
    Unreachable,
}

impl<'a> QueueFile<'a> {
    /// The descriptor, and whether the file uses the page cache.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: there is none.
    pub(crate) fn descriptor(&self) -> Result<(BorrowedFd<'a>, bool), Error> {
        match self {
            Self::Descriptor { file, cached } => Ok((*file, *cached)),
            _ => Err(Error::new(libc::EOPNOTSUPP, Operation::SetUp)),
        }
    }
}

/// Files by number.
pub(crate) struct NumberedFiles<T> {
    files: Vec<Option<T>>,
    /// No number below this one is free.
    lowest_free: usize,
}

impl<T> NumberedFiles<T> {
    pub(crate) const fn new() -> Self {
        Self { files: Vec::new(), lowest_free: 0 }
    }

    /// The first of `count` successive free numbers, the lowest ones.
    pub(crate) fn find_free(&self, count: usize) -> u32 {
        let mut first = self.lowest_free;
        for (number, file) in self.files.iter().enumerate().skip(first) {
            if file.is_some() {
                first = number + 1;
            } else if number + 1 - first == count {
                break;
            }
        }
        first as u32
    }

    /// Puts `file` under a free `number`.
    pub(crate) fn put(&mut self, number: u32, file: T) {
        let number = number as usize;
        if self.files.len() <= number {
            self.files.resize_with(number + 1, || None);
        }
        self.files[number] = Some(file);
        while self.files.get(self.lowest_free).is_some_and(Option::is_some) {
            self.lowest_free += 1;
        }
    }

    /// Takes the file out; its number is free.
    pub(crate) fn take(&mut self, number: u32) -> Option<T> {
        let file = self.files.get_mut(number as usize)?.take();
        if file.is_some() {
            self.lowest_free = self.lowest_free.min(number as usize);
        }
        file
    }

    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        self.files.get(number as usize)?.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.files.get_mut(number as usize)?.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts `count` files, which are their numbers, under successive numbers.
    fn add(files: &mut NumberedFiles<u32>, count: u32) -> u32 {
        let first = files.find_free(count as usize);
        (first..first + count).for_each(|number| files.put(number, number));
        first
    }

    #[test]
    fn the_files_of_a_device_have_successive_numbers_and_free_ones_are_used_again() {
        let mut files = NumberedFiles::new();
        assert_eq!([3, 1, 2].map(|count| add(&mut files, count)), [0, 3, 4]);
        assert_eq!((files.take(1), files.take(2), files.take(2)), (Some(1), Some(2), None));
        assert_eq!((files.get(1), files.get(3), files.get(6)), (None, Some(&3), None));
        // Three do not fit between 0 and 3, two do.
        assert_eq!([3, 2, 1].map(|count| add(&mut files, count)), [6, 1, 9]);
        assert_eq!(files.take(0), Some(0));
        assert_eq!(add(&mut files, 1), 0);
    }
}
