//! What happens to files, written down, so that a power cut can be played at any moment of it.
//!
//! Invariant: after a cut a file has everything up to its last sync, and of what came later any part:
//! whole sectors, in any order. Knows: nothing. Known by: host, the tests of cuts.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a disk writes whole or not at all.
const SECTOR_BYTES: usize = 512;

/// Something done to a file.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Write(u64, Vec<u8>),
    Hole(u64, u64),
    Size(u64),
    Sync,
}

thread_local! {
    static STEPS: RefCell<Option<Vec<(PathBuf, Step)>>> = const { RefCell::new(None) };
}

/// Writes `step` down, if this thread records.
pub(crate) fn note(path: &Path, step: Step) {
    STEPS.with_borrow_mut(|steps| {
        if let Some(steps) = steps {
            steps.push((path.to_owned(), step));
        }
    });
}

/// What `run` does on this thread.
pub(crate) fn record(run: impl FnOnce()) -> Vec<(PathBuf, Step)> {
    STEPS.set(Some(Vec::new()));
    run();
    STEPS.take().unwrap_or_default()
}

/// How much of what was not synced yet is on the disk when the power is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unsynced {
    /// Nothing.
    Lost,
    /// Everything: a kill, not a power cut.
    There,
    /// This step, by its number, and nothing else.
    Only(usize),
    /// Everything but this step.
    AllBut(usize),
    /// Sectors and steps by chance.
    Torn(u64),
}

/// The `files` as they are when the power is cut after `steps`.
pub(crate) fn cut(
    files: &BTreeMap<PathBuf, Vec<u8>>,
    steps: &[(PathBuf, Step)],
    unsynced: Unsynced,
) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut chance = match unsynced {
        Unsynced::Torn(seed) => seed,
        _ => 0,
    };
    let mut comes = |number: usize| match unsynced {
        Unsynced::Lost => false,
        Unsynced::There => true,
        Unsynced::Only(only) => number == only,
        Unsynced::AllBut(lost) => number != lost,
        Unsynced::Torn(_) => {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            chance >> 63 == 1
        }
    };
    let mut after = files.clone();
    for (path, file) in &mut after {
        let own = || steps.iter().enumerate().filter(|(_, (name, _))| name == path);
        let synced = own().rfind(|(_, (_, step))| matches!(step, Step::Sync));
        let synced = synced.map_or(0, |(number, _)| number);
        for (number, (_, step)) in own() {
            let durable = number < synced;
            match step {
                Step::Write(pos, bytes) => {
                    for (n, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                        if durable || comes(number) {
                            put(file, *pos as usize + n * SECTOR_BYTES, sector);
                        }
                    }
                }
                Step::Hole(pos, len) if durable || comes(number) => {
                    let end = file.len().min((pos + len) as usize);
                    file[end.min(*pos as usize)..end].fill(0);
                }
                Step::Size(size) if durable || comes(number) => file.resize(*size as usize, 0),
                Step::Hole(..) | Step::Size(_) | Step::Sync => {}
            }
        }
    }
    after
}

fn put(file: &mut Vec<u8>, pos: usize, bytes: &[u8]) {
    file.resize(file.len().max(pos + bytes.len()), 0);
    file[pos..pos + bytes.len()].copy_from_slice(bytes);
}
