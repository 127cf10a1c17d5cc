//! The files of an image that another process has open and hands over, with their locks and claims.
//!
//! Invariant: an image that is opened with them is the one that the other process has open, and at
//! no moment is it without a lock.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::image_file::{FileId, ImageFile};

/// The open file descriptions of one image ([`crate::Image::held_files`] in the other process). A
/// lock belongs to a description and not to a process, so it is held as long as one of both has it.
#[derive(Clone, Debug, Default)]
pub struct HandedOver(Option<Arc<Mutex<Vec<OwnedFd>>>>);

impl HandedOver {
    /// The descriptions behind `files`: every file of the image is among them.
    #[must_use]
    pub fn new(files: Vec<OwnedFd>) -> Self {
        Self(Some(Arc::new(Mutex::new(files))))
    }

    /// Whether the image is handed over at all.
    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Takes the descriptions of `file`, first the one that is locked; `None` if there is none.
    pub(crate) fn take(&self, file: &ImageFile) -> Option<Vec<OwnedFd>> {
        let identity = file.identity().ok()?;
        let mut files = self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |fd: &OwnedFd| FileId::of(fd.as_fd()).is_ok_and(|id| id == identity);
        let (found, rest) = files.drain(..).partition(is_it);
        *files = rest;
        Some(found).filter(|found: &Vec<OwnedFd>| !found.is_empty())
    }
}
