//! A log of the changes of files, from which a power cut at any moment can be replayed.
//!
//! Invariant: after a cut a file has all changes up to its last sync, and of the later ones any
//! part: whole sectors, in any order.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nowait::FileStorage;
use nowait_testkit::Random;

use crate::tests::observed_storage::{Change, ObservedStorage, Observer};

/// The bytes that a disk writes atomically.
const SECTOR_BYTES: usize = 512;

thread_local! {
    static STEPS: RefCell<Option<Vec<(PathBuf, Change)>>> = const { RefCell::new(None) };
}

/// Logs the changes of the file with this name, if the thread that makes them records.
pub(crate) struct WriteLog(PathBuf);

impl Observer for WriteLog {
    fn begin(&self, change: Change) -> usize {
        STEPS.with_borrow_mut(|steps| steps.as_mut().map(|all| all.push((self.0.clone(), change))));
        0
    }
}

/// `storage`, whose changes are logged under the name `path`.
pub(crate) fn logged(path: &Path, storage: FileStorage) -> ObservedStorage<WriteLog> {
    ObservedStorage { inner: storage, observer: WriteLog(path.to_owned()) }
}

/// The steps of `run` on this thread.
pub(crate) fn record(run: impl FnOnce()) -> Vec<(PathBuf, Change)> {
    STEPS.set(Some(Vec::new()));
    run();
    STEPS.take().unwrap_or_default()
}

/// The number of steps so far of what this thread records.
pub(crate) fn logged_steps() -> usize {
    STEPS.with_borrow(|steps| steps.as_ref().map_or(0, Vec::len))
}

/// The unsynced writes that are on the disk after a power cut.
#[derive(Clone, Copy, Debug)]
pub(crate) enum UnsyncedWrites {
    /// None.
    Lost,
    /// All: a kill, not a power cut.
    There,
    /// Only the step with this number.
    Only(usize),
    /// All but the step with this number.
    AllBut(usize),
    /// Sectors and steps by chance.
    Torn(u64),
}

/// The `files` after a power cut behind `steps`.
pub(crate) fn cut(
    files: &BTreeMap<PathBuf, Vec<u8>>,
    steps: &[(PathBuf, Change)],
    unsynced: UnsyncedWrites,
) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut random = Random::from_seed(match unsynced {
        UnsyncedWrites::Torn(seed) => seed,
        _ => 0,
    });
    let mut survives = |number: usize| match unsynced {
        UnsyncedWrites::Lost => false,
        UnsyncedWrites::There => true,
        UnsyncedWrites::Only(only) => number == only,
        UnsyncedWrites::AllBut(lost) => number != lost,
        UnsyncedWrites::Torn(_) => random.chance(50),
    };
    let mut after = files.clone();
    for (path, file) in &mut after {
        let own = || steps.iter().enumerate().filter(|(_, (name, _))| name == path);
        let synced = own().rfind(|(_, (_, step))| matches!(step, Change::Sync));
        let synced = synced.map_or(0, |(number, _)| number);
        for (number, (_, step)) in own() {
            let durable = number < synced;
            match step {
                Change::Write(pos, bytes) => {
                    for (n, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                        if durable || survives(number) {
                            put(file, *pos as usize + n * SECTOR_BYTES, sector);
                        }
                    }
                }
                Change::Clear(range) if durable || survives(number) => {
                    let end = file.len().min(range.end() as usize);
                    file[end.min(range.pos as usize)..end].fill(0);
                }
                Change::SetLen(size) if durable || survives(number) => {
                    file.resize(*size as usize, 0);
                }
                Change::Clear(_) | Change::SetLen(_) | Change::Sync => {}
            }
        }
    }
    after
}

fn put(file: &mut Vec<u8>, pos: usize, bytes: &[u8]) {
    file.resize(file.len().max(pos + bytes.len()), 0);
    file[pos..pos + bytes.len()].copy_from_slice(bytes);
}
