//! Tables of blocks: those of several points, one on the other, as one.
//!
//! Invariant: entries ascend by block, each at most once, and name a file of the table.

use crate::manifest::{DataFile, Entry, Header, MAX_FILES, Manifest};

/// The blocks of a point and of what it stands on, as far as that is included.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    pub(crate) files: Vec<DataFile>,
    pub(crate) entries: Vec<Entry>,
}

impl Table {
    /// This table with the blocks of `above` in place of its own.
    ///
    /// # Errors
    /// There would be too many files.
    pub(crate) fn covered_by(mut self, above: Manifest) -> Result<Self, String> {
        let Manifest { header: Header { files, .. }, entries } = above;
        let first = self.files.len() as u32;
        self.files.extend(files);
        if self.files.len() > MAX_FILES {
            return Err("its blocks are in too many files (prune the chain)".into());
        }
        let mut merged = Vec::with_capacity(self.entries.len().max(entries.len()));
        let mut below = self.entries.into_iter().peekable();
        for mut entry in entries {
            while let Some(older) = below.next_if(|older| older.block < entry.block) {
                merged.push(older);
            }
            below.next_if(|older| older.block == entry.block);
            if !entry.is_zero() {
                entry.file += first;
            }
            merged.push(entry);
        }
        merged.extend(below);
        Ok(Self { files: self.files, entries: merged })
    }

    /// The blocks of `parts`, of which each has blocks of its own, except that one of several with the same number is taken.
    /// Parts whose files would be too many are left out.
    pub(crate) fn of_parts(parts: impl IntoIterator<Item = Manifest>) -> Self {
        let mut table = Self::default();
        for Manifest { header, entries } in parts {
            let first = table.files.len() as u32;
            if table.files.len() + header.files.len() <= MAX_FILES {
                table.files.extend(header.files);
                let moved = |entry: Entry| Entry { file: entry.file + first, ..entry };
                table.entries.extend(entries.into_iter().map(moved));
            }
        }
        table.entries.sort_unstable_by_key(|entry| entry.block);
        table.entries.dedup_by_key(|entry| entry.block);
        table.without_zeros()
    }

    /// This table without blocks of zeros, which a whole point does not list.
    pub(crate) fn without_zeros(mut self) -> Self {
        self.entries.retain(|entry| !entry.is_zero());
        self
    }

    /// The entry of `block`.
    pub(crate) fn get(&self, block: u32) -> Option<&Entry> {
        let at = self.entries.binary_search_by_key(&block, |entry| entry.block).ok()?;
        self.entries.get(at)
    }

    /// Stored bytes of its blocks in each file.
    pub(crate) fn used(&self) -> Vec<u64> {
        let mut used = vec![0; self.files.len()];
        for entry in self.entries.iter().filter(|entry| !entry.is_zero()) {
            if let Some(bytes) = used.get_mut(entry.file as usize) {
                *bytes += u64::from(entry.len);
            }
        }
        used
    }

    /// Leaves out files that have none of its blocks.
    pub(crate) fn drop_unused_files(&mut self) {
        let used = self.used();
        let mut new = vec![0; self.files.len()];
        let mut files = Vec::new();
        for ((index, file), bytes) in new.iter_mut().zip(&self.files).zip(used) {
            *index = files.len() as u32;
            files.extend((bytes > 0).then_some(*file));
        }
        for entry in self.entries.iter_mut().filter(|entry| !entry.is_zero()) {
            entry.file = new.get(entry.file as usize).copied().unwrap_or_default();
        }
        self.files = files;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::tests::example;

    fn manifest(file: u64, entries: &[(u32, u32)]) -> Manifest {
        let mut manifest = example();
        manifest.header.files = vec![DataFile { id: file, bytes: 1000 }];
        let entry = |&(block, len)| match len {
            0 => Entry::zero(block),
            _ => Entry { sum: [1; 32], position: 0, block, file: 0, len },
        };
        manifest.entries = entries.iter().map(entry).collect();
        manifest
    }

    #[test]
    fn younger_blocks_cover_older_ones_and_files_without_blocks_go() {
        let table = Table::default().covered_by(manifest(1, &[(0, 5), (1, 5), (9, 5)])).unwrap();
        let table = table.covered_by(manifest(2, &[(1, 6), (3, 6)])).unwrap();
        let table = table.covered_by(manifest(3, &[(0, 0), (9, 7)])).unwrap();
        let seen: Vec<_> = table.entries.iter().map(|it| (it.block, it.file, it.len)).collect();
        assert_eq!(seen, [(0, 0, 0), (1, 1, 6), (3, 1, 6), (9, 2, 7)]);
        assert_eq!(table.used(), [0, 12, 7]);
        let mut table = table.without_zeros();
        table.drop_unused_files();
        assert_eq!(table.files.iter().map(|file| file.id).collect::<Vec<_>>(), [2, 3]);
        let seen: Vec<_> = table.entries.iter().map(|it| (it.block, it.file, it.len)).collect();
        assert_eq!(seen, [(1, 0, 6), (3, 0, 6), (9, 1, 7)]);
        assert_eq!(table.get(3).map(|it| it.len), Some(6));
        assert_eq!(table.get(4), None);
    }

    #[test]
    fn as_many_files_as_are_allowed_are_merged_and_no_more() {
        let files = vec![DataFile { id: 1, bytes: 1 }; MAX_FILES - 1];
        let below = Table { files, ..Table::default() };
        let full = below.covered_by(manifest(1, &[])).unwrap();
        assert!(full.covered_by(manifest(2, &[])).unwrap_err().contains("prune"));
    }
}
