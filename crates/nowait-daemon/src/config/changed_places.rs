//! The directories in which a confined server may change files.
//!
//! Invariant: what a program reads that takes over from a confined server is in none of them.

use std::path::{Path, PathBuf};

use crate::config::ServeConfig;

impl ServeConfig {
    /// Whether the server, if it is confined, could change the file at `place`, put another one there, or change what it
    /// leads to.
    pub(crate) fn may_change(&self, place: &Path) -> bool {
        let cache = self.cache.iter().map(|cache| &cache.directory);
        let changed = self.allow_dir.iter().chain(&self.bitmap_dir).chain(cache);
        let changed: Vec<&PathBuf> = changed.collect();
        self.sandbox.mode().is_some() && is_below(place, &changed)
    }
}

/// Whether `place`, or what it leads to, is in one of `directories`.
pub(crate) fn is_below(place: &Path, directories: &[&PathBuf]) -> bool {
    let parent = place.parent().filter(|parent| !parent.as_os_str().is_empty());
    let real = [place.canonicalize(), parent.unwrap_or(Path::new(".")).canonicalize()];
    let directories = directories.iter().filter_map(|directory| directory.canonicalize().ok());
    let directories: Vec<_> = directories.collect();
    let is_in = |real: &PathBuf| directories.iter().any(|directory| real.starts_with(directory));
    real.iter().flatten().any(is_in)
}
