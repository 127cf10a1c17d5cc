//! Transfers of storages that make them themselves, beside those of a queue of the kernel: they go to the
//! storage and return through a list of completions, whose descriptor the queue of the kernel watches.
//!
//! Invariant: a transfer is in the queue of the kernel or in its storage, never in both.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::queue::pending_transfer::{AsyncTransfers, PendingTransfer};
use crate::queue::queue_files::NumberedFiles;
use crate::threads::completion_list::CompletionList;
use crate::types::error::Error;
use crate::types::token::{self, REMOTE_FILE, Token};
use crate::types::transfer::{Outcome, Transfer};

/// A file of a device that has a storage with transfers of its own.
pub(crate) enum RemoteFile {
    /// The number of the file in the queue of the kernel.
    Kernel(u32),
    /// The storage, and the transfers that were pushed and have not begun.
    Transfers(Arc<dyn AsyncTransfers>, Vec<PendingTransfer>),
}

/// The files of all such devices, and their completions.
pub(crate) struct RemoteFiles {
    files: NumberedFiles<RemoteFile>,
    /// The numbers of storages with pushed transfers.
    pushed: Vec<u32>,
    completions: Arc<CompletionList>,
}

impl RemoteFiles {
    /// No files; for tokens below `slots`.
    ///
    /// # Errors
    /// The errno of pipe2(2).
    pub(crate) fn new(slots: u32) -> Result<Self, Error> {
        let completions = Arc::new(CompletionList::new(slots)?);
        Ok(Self { files: NumberedFiles::new(), pushed: Vec::new(), completions })
    }

    /// Readable when a transfer has completed.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.completions.fd()
    }

    /// Attaches the files of one device. Returns the number of the first.
    pub(crate) fn attach(&mut self, files: Vec<RemoteFile>) -> u32 {
        let first = self.files.find_free(files.len());
        (first..).zip(files).for_each(|(number, file)| self.files.put(number, file));
        first | REMOTE_FILE
    }

    /// Detaches the file with this number. Returns the number that it had in the queue of the kernel.
    pub(crate) fn detach(&mut self, number: u32) -> Option<u32> {
        match self.files.take(number & !REMOTE_FILE)? {
            RemoteFile::Kernel(number) => Some(number),
            RemoteFile::Transfers(..) => None,
        }
    }

    /// The number of a file in the queue of the kernel, which refuses one that is not attached.
    pub(crate) fn kernel_number(&self, number: u32) -> Option<u32> {
        match self.files.get(number & !REMOTE_FILE) {
            Some(RemoteFile::Kernel(number)) => Some(*number),
            Some(RemoteFile::Transfers(..)) => None,
            None => Some(u32::MAX),
        }
    }

    /// Pushes a transfer, unless it is one for the queue of the kernel: then it is returned.
    ///
    /// # Safety
    /// As for [`IoQueue::push`](crate::IoQueue::push).
    pub(crate) unsafe fn push(&mut self, transfer: &Transfer, token: Token) -> Option<Transfer> {
        let number = transfer.file & !REMOTE_FILE;
        match self.files.get_mut(number) {
            Some(RemoteFile::Transfers(_, pushed)) => {
                let completions = self.completions.clone();
                if pushed.is_empty() {
                    self.pushed.push(number);
                }
                // SAFETY: as promised by the caller.
                pushed.push(unsafe {
                    PendingTransfer::new(*transfer, token::slot_of(token), completions)
                });
                None
            }
            Some(RemoteFile::Kernel(file)) => Some(Transfer { file: *file, ..*transfer }),
            None => Some(Transfer { file: u32::MAX, ..*transfer }),
        }
    }

    /// Ends a pushed transfer that has not begun, with `ECANCELED`; false if there is none under `token`.
    pub(crate) fn cancel(&mut self, token: Token) -> bool {
        for (at, &number) in self.pushed.iter().enumerate() {
            if let Some(RemoteFile::Transfers(_, pushed)) = self.files.get_mut(number)
                && let Some(n) = pushed.iter().position(|it| it.slot() == token::slot_of(token))
            {
                pushed.remove(n).fail(libc::ECANCELED);
                if pushed.is_empty() {
                    self.pushed.remove(at);
                }
                return true;
            }
        }
        false
    }

    /// Begins the pushed transfers.
    pub(crate) fn begin(&mut self) {
        for number in self.pushed.drain(..) {
            if let Some(RemoteFile::Transfers(transfers, pushed)) = self.files.get_mut(number) {
                transfers.begin(pushed);
            }
        }
    }

    pub(crate) fn has_completions(&self) -> bool {
        self.completions.is_not_empty()
    }

    /// Clears the descriptor; to be called before [`RemoteFiles::drain`].
    pub(crate) fn clear_wake(&self) {
        self.completions.clear_wake();
    }

    /// Passes all completions to `sink`; returns their number.
    pub(crate) fn drain(&self, mut sink: impl FnMut(Token, Outcome)) -> usize {
        self.completions.take(|slot, outcome| sink(token::of_slot(slot), outcome as Outcome))
    }
}
