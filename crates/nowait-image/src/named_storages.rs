//! The storages that a user has given for images to stand on.
//!
//! Invariant: a header reaches a storage only by the name that it was given by.

use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;

use nowait::Storage;

/// Storages that images may stand on, by the names that headers have for them.
#[derive(Clone, Default)]
pub struct NamedStorages {
    all: Vec<(String, Arc<dyn Storage>)>,
    is_location: Option<fn(&str) -> bool>,
}

impl NamedStorages {
    /// None yet; a user can give those for whose names `is_location` is true.
    #[must_use]
    pub fn given_by_user(is_location: fn(&str) -> bool) -> Self {
        Self { all: Vec::new(), is_location: Some(is_location) }
    }

    /// Whether a user can give a storage of this name: a refusal then tells how.
    pub(crate) fn can_be_given(&self, name: &str) -> bool {
        self.is_location.is_some_and(|is_location| is_location(name))
    }

    /// Adds `storage`, which headers call `name`.
    pub fn add(&mut self, name: String, storage: Arc<dyn Storage>) {
        self.all.push((name, storage));
    }

    /// The storage that is called `name`, exactly.
    pub fn get(&self, name: impl AsRef<OsStr>) -> Option<&Arc<dyn Storage>> {
        let name = name.as_ref();
        self.all.iter().find(|(known, _)| OsStr::new(known) == name).map(|(_, storage)| storage)
    }

    /// The names of all.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.all.iter().map(|(name, _)| &**name)
    }
}

impl fmt::Debug for NamedStorages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.all.iter().map(|(name, _)| name)).finish()
    }
}
