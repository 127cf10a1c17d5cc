//! The files of a ring: registered under their numbers as far as the table reaches, with a descriptor
//! beyond it.
//!
//! Invariant: a number below the length of the table is registered for as long as its file is attached.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use io_uring::{IoUring, squeue, types};

use crate::queue::queue_files::NumberedFiles;
use crate::types::error::{Error, Operation};

/// The most registered files of a ring, whose entries take 8 bytes each in the kernel. The limit on descriptors may make
/// /// it less.
/// Beyond it: files are not registered.
const MAX_REGISTERED: u32 = 4096;

/// A file of the ring.
struct RingFile {
    /// `None`: it is registered.
    descriptor: Option<OwnedFd>,
    polling_refusal: Option<&'static str>,
}

/// The files of a ring.
pub(crate) struct RingFiles {
    /// The length of the table; 0 if the kernel has none.
    registered: u32,
    files: NumberedFiles<RingFile>,
}

impl RingFiles {
    /// No files, and an empty table in `ring`.
    pub(crate) fn new(ring: &IoUring) -> Self {
        Self { registered: register_table(ring), files: NumberedFiles::new() }
    }

    pub(crate) fn has_table(&self) -> bool {
        self.registered > 0
    }

    /// How an entry names a file. One that is not attached has the descriptor -1, which the kernel
    /// refuses, or an empty place of the table.
    #[inline]
    pub(crate) fn target(&self, file: u32) -> (types::Fd, squeue::Flags) {
        match file < self.registered {
            true => (types::Fd(file as RawFd), squeue::Flags::FIXED_FILE),
            false => (types::Fd(self.descriptor(file)), squeue::Flags::empty()),
        }
    }

    #[inline(never)]
    fn descriptor(&self, file: u32) -> RawFd {
        let attached = self.files.get(file).and_then(|file| file.descriptor.as_ref());
        attached.map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Like [`NumberedFiles::find_free`].
    pub(crate) fn find_free(&self, count: usize) -> u32 {
        self.files.find_free(count)
    }

    /// Attaches a file under a free `number`; `poll` does so in the ring that polls, or says why not.
    ///
    /// # Errors
    /// The errno of io_uring_register(2) or dup(2).
    pub(crate) fn attach(
        &mut self,
        ring: &IoUring,
        number: u32,
        file: BorrowedFd<'_>,
        poll: impl FnOnce() -> Result<(), &'static str>,
    ) -> Result<(), Error> {
        let failed = |error| Error::from_io(&error, Operation::SetUp);
        let descriptor = if number < self.registered {
            let files = [file.as_raw_fd()];
            ring.submitter().register_files_update(number, &files).map_err(failed)?;
            None
        } else {
            Some(file.try_clone_to_owned().map_err(failed)?)
        };
        self.files.put(number, RingFile { descriptor, polling_refusal: poll().err() });
        Ok(())
    }

    /// Forgets a file, of which no transfer is in flight.
    pub(crate) fn detach(&mut self, ring: &IoUring, number: u32) {
        if self.files.take(number).is_some_and(|file| file.descriptor.is_none()) {
            // The number is in the table, so the kernel has no reason to refuse.
            let _ = ring.submitter().register_files_update(number, &[-1]);
        }
    }

    /// Why transfers of a file cannot be polled for; `None` if they can.
    pub(crate) fn polling_refusal(&self, file: u32) -> Option<&'static str> {
        let attached = self.files.get(file);
        attached.map_or(Some("it is not attached"), |file| file.polling_refusal)
    }
}

/// Registers an empty table of files. Returns its length: 0 if the kernel refuses it.
pub(crate) fn register_table(ring: &IoUring) -> u32 {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let most = |limit| MAX_REGISTERED.min(u32::try_from(limit).unwrap_or(MAX_REGISTERED));
    let length = limit.map_or(MAX_REGISTERED, most);
    let submitter = ring.submitter();
    // Linux before 5.19 has no call for an empty table.
    let registered = submitter
        .register_files_sparse(length)
        .or_else(|_| submitter.register_files(&vec![-1; length as usize]));
    if registered.is_ok() { length } else { 0 }
}
