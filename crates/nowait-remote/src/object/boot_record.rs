//! The order in which blocks are first read, in a file: written while a machine boots, and read to
//! fetch the blocks in that order for another one.
//!
//! Invariant: a line of a record is the number of a block and the URL of its object; other lines are
//! passed over. A record that cannot be written is logged once and costs nothing else.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nowait_image::{create_message, open_message};

use crate::policy::PrefetchOrder;

/// The longest record of a boot, in bytes.
/// Beyond it: the record is not read.
const MAX_BYTES: u64 = 64 << 20;

/// A file that takes the records of all objects of a server.
#[derive(Clone, Debug)]
pub struct BootRecord(Arc<Mutex<Option<File>>>);

impl BootRecord {
    /// Makes the file at `path`, or empties it.
    ///
    /// # Errors
    /// A message of one line.
    pub fn create(path: &Path) -> Result<Self, String> {
        let file = File::create(path).map_err(|error| cannot("write", path, &error))?;
        Ok(Self(Arc::new(Mutex::new(Some(file)))))
    }

    fn append(&self, lines: &str) {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Err(error)) = file.as_mut().map(|file| file.write_all(lines.as_bytes())) {
            tracing::warn!("the record cannot be written: {error}");
            *file = None;
        }
    }
}

/// The record of one object.
pub(super) struct ObjectRecord {
    record: BootRecord,
    place: String,
    seen: HashSet<u64>,
    lines: String,
}

impl ObjectRecord {
    pub(super) fn new(record: BootRecord, place: &str) -> Self {
        Self { record, place: place.to_owned(), seen: HashSet::new(), lines: String::new() }
    }

    /// `block` is read.
    pub(super) fn note(&mut self, block: u64) {
        if self.seen.insert(block) {
            // Writing to a String cannot fail.
            let _ = writeln!(self.lines, "{block} {}", self.place);
        }
    }

    /// Writes what was noted since the last call.
    pub(super) fn write(&mut self) {
        if !self.lines.is_empty() {
            self.record.append(&self.lines);
            self.lines.clear();
        }
    }
}

/// The order of the object at `place` in the record at `path`; blocks beyond `end` are left out.
///
/// # Errors
/// A message of one line: the record cannot be read, or is too long.
pub(super) fn order_of(path: &Path, place: &str, end: u64) -> Result<PrefetchOrder, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| cannot("read", path, &error))?;
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    read.map_err(|error| cannot("read", path, &error))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(format!("the record {} is longer than {MAX_BYTES} bytes", path.display()));
    }
    Ok(order_in(&text, place, end))
}

/// Like [`order_of`], for the text of a record.
pub(super) fn order_in(text: &str, place: &str, end: u64) -> PrefetchOrder {
    PrefetchOrder::new(text.lines().filter_map(|line| {
        let (block, of) = line.split_once(' ')?;
        block.parse().ok().filter(|&block| of == place && block < end)
    }))
}

fn cannot(what: &str, path: &Path, error: &std::io::Error) -> String {
    let doing = format!("{what} the record");
    let why = match what {
        "write" => create_message(&doing, error),
        _ => open_message(path, &doing, error),
    };
    format!("{}: {why}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_each_block_once_in_the_order_of_the_reads_and_each_object_its_own() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("boot");
        let record = BootRecord::create(&path).unwrap();
        let mut objects =
            ["s3://b/a b", "s3://b/a"].map(|it| ObjectRecord::new(record.clone(), it));
        for block in [7, 3, 7, 900, 4] {
            objects.iter_mut().for_each(|object| object.note(block));
            objects.iter_mut().for_each(ObjectRecord::write);
            objects[1].note(1);
        }
        assert_eq!(order_of(&path, "s3://b/a b", 100).unwrap().blocks(), [7, 3, 4]);
        assert_eq!(order_of(&path, "s3://b/a", 1000).unwrap().blocks(), [7, 1, 3, 900, 4]);
        std::fs::write(&path, "no record\n-1 s3://b/a\n99999999999999999999 s3://b/a\n").unwrap();
        assert!(order_of(&path, "s3://b/a", 100).unwrap().blocks().is_empty());
        assert!(
            order_of(&scratch.path().join("none"), "a", 1)
                .unwrap_err()
                .contains("there is no such file")
        );
    }
}
