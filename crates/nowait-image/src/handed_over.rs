//! The files of an image that is open elsewhere, with their locks and claims: in another process that
//! hands over, or in this one, which reopens the image.
//!
//! Invariant: an image that is opened with them is the one that is open, or has it as its backing
//! image; at no moment is it without a lock.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::image_file::{FileId, ImageFile};

/// The open file descriptions of one image ([`crate::Image::held_files`]). A lock belongs to a
/// description, so it is held as long as one of the two has it.
#[derive(Clone, Debug, Default)]
pub struct HandedOver(Option<Files>);

#[derive(Clone, Debug)]
struct Files {
    files: Arc<Mutex<Vec<OwnedFd>>>,
    /// The image has no other files.
    all: bool,
}

impl HandedOver {
    /// The descriptions behind `files`: every file of the image is among them.
    #[must_use]
    pub fn new(files: Vec<OwnedFd>) -> Self {
        Self(Some(Files { files: Arc::new(Mutex::new(files)), all: true }))
    }

    /// Locks for the images below a new one, whose own files are opened and locked as always.
    #[must_use]
    pub fn below(files: Vec<OwnedFd>) -> Self {
        Self(Some(Files { files: Arc::new(Mutex::new(files)), all: false }))
    }

    /// Whether the image is handed over at all.
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Whether a file of the image may be none of these.
    pub(crate) fn allows_others(&self) -> bool {
        self.0.as_ref().is_none_or(|files| !files.all)
    }

    /// Takes the descriptions of `file`, first the one that is locked; `None` if there is none.
    pub(crate) fn take(&self, file: &ImageFile) -> Option<Vec<OwnedFd>> {
        let identity = file.identity().ok()?;
        let mut files = self.0.as_ref()?.files.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |fd: &OwnedFd| FileId::of(fd.as_fd()).is_ok_and(|id| id == identity);
        let (found, rest) = files.drain(..).partition(is_it);
        *files = rest;
        Some(found).filter(|found: &Vec<OwnedFd>| !found.is_empty())
    }
}
