//! A record of all operations on the files of an image, and of the files' contents after a power
//! cut.
//!
//! Invariant: an operation on a file that completed before a sync of it began is durable once the sync
//! has completed; of all others any part may be durable, in sectors. Of two writes to one sector the
//! later one is never lost to the earlier.

use std::collections::HashMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use nowait::ByteRange;
use nowait_testkit::Random;

use crate::tests::observed_storage::Change;

const SECTOR: u64 = 512;

/// An operation or its end, in order. Files are numbered as they were passed to [`of`].
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A change of this file was begun.
    Begun(usize, Change),
    /// The operation that began as the event with this number has completed.
    Ended(usize),
    /// A note of the test about its position in the record.
    Mark(crate::qcow2_disk::tests::power_cut::Mark),
}

/// The record of some files.
#[derive(Clone, Default)]
pub(crate) struct Journal(Arc<Mutex<Vec<Event>>>);

type Files = Mutex<HashMap<(u64, u64), (Journal, usize)>>;

fn files() -> &'static Files {
    static FILES: OnceLock<Files> = OnceLock::new();
    FILES.get_or_init(Files::default)
}

/// Records the operations on the files behind `fds`, if they are opened for requests from now on.
pub(crate) fn of(fds: impl IntoIterator<Item = impl AsFd>) -> Journal {
    let journal = Journal::default();
    for (fd, number) in fds.into_iter().zip(0..) {
        let stat = rustix::fs::fstat(fd).unwrap();
        let file = (stat.st_dev, stat.st_ino);
        files().lock().unwrap().insert(file, (journal.clone(), number));
    }
    journal
}

/// The record of the file behind `fd` and the file's number in it, if it has one.
pub(crate) fn find(fd: impl AsFd) -> Option<(Journal, usize)> {
    let stat = rustix::fs::fstat(fd).unwrap();
    files().lock().unwrap().get(&(stat.st_dev, stat.st_ino)).cloned()
}

impl Journal {
    /// Appends an event; returns its number.
    pub(crate) fn push(&self, event: Event) -> usize {
        let mut events = self.0.lock().unwrap();
        events.push(event);
        events.len() - 1
    }

    /// Takes all events.
    pub(crate) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// A file's contents; zeros at the end may be missing in `bytes`.
#[derive(Clone)]
pub(crate) struct FileContents {
    bytes: Vec<u8>,
    len: u64,
}

impl FileContents {
    /// The contents of the file at `path`.
    pub(crate) fn of(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let len = bytes.len() as u64;
        Self { bytes, len }
    }

    /// Writes the contents over those of the file at `path`. An emptied file would be given other blocks by its file
    /// system each time, and have them written out when it is closed.
    pub(crate) fn write_to(&self, path: &Path) {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(self.bytes.len() as u64).unwrap();
        file.write_all_at(&self.bytes, 0).unwrap();
        file.set_len(self.len).unwrap();
    }

    fn put(&mut self, pos: u64, bytes: &[u8]) {
        let (start, end) = (pos as usize, pos as usize + bytes.len());
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[start..end].copy_from_slice(bytes);
        self.len = self.len.max(end as u64);
    }

    fn clear(&mut self, range: ByteRange) {
        let end = self.bytes.len().min(range.end() as usize);
        let start = end.min(range.pos as usize);
        self.bytes[start..end].fill(0);
    }

    fn set_len(&mut self, len: u64) {
        self.bytes.truncate(len as usize);
        self.len = len;
    }
}

/// Which of `events` are certainly durable.
fn durable(events: &[Event], files: usize) -> Vec<bool> {
    // The last sync of each file that has completed.
    let mut synced = vec![0; files];
    for event in events {
        if let &Event::Ended(begun) = event
            && let Event::Begun(file, Change::Sync) = events[begun]
        {
            synced[file] = begun.max(synced[file]);
        }
    }
    let mut durable = vec![false; events.len()];
    for (event, at) in events.iter().zip(0..) {
        if let &Event::Ended(begun) = event
            && let Event::Begun(file, _) = events[begun]
        {
            durable[begun] = at < synced[file];
        }
    }
    durable
}

/// The contents of files that held `before`, after a power cut behind the last of `events`.
pub(crate) fn cut(
    before: &[FileContents],
    events: &[Event],
    random: &mut Random,
) -> Vec<FileContents> {
    // Of the operations that need not be durable, at times none is, at times all are, mostly some.
    let percent = [0, 20, 50, 80, 100][random.below(5) as usize];
    let mut files = before.to_vec();
    for (event, is_durable) in events.iter().zip(durable(events, before.len())) {
        let mut survives = || is_durable || random.chance(percent);
        let Event::Begun(file, change) = event else { continue };
        let file = &mut files[*file];
        match change {
            Change::Write(pos, bytes) => {
                for (sector, at) in
                    bytes.chunks(SECTOR as usize).zip((*pos..).step_by(SECTOR as usize))
                {
                    if survives() {
                        file.put(at, sector);
                    }
                }
            }
            Change::Clear(range) => {
                for pos in (range.pos..range.end()).step_by(SECTOR as usize) {
                    if survives() {
                        file.clear(ByteRange::new(pos, SECTOR.min(range.end() - pos)));
                    }
                }
            }
            Change::SetLen(bytes) if survives() => file.set_len(*bytes),
            Change::SetLen(_) | Change::Sync => {}
        }
    }
    files
}
