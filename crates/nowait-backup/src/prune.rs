//! Removal of older points: what later ones need of them becomes theirs.
//!
//! Invariant: a point that stays can be restored after every step. First its manifest is replaced by one that does not
//! need what goes, then manifests go, the youngest first, then files that no manifest names.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use nowait_copy::Error;

use crate::chain::Chain;
use crate::data_files::DataFiles;
use crate::data_writer::DataWriter;
use crate::manifest::{Header, Manifest};
use crate::place::{FileName, Put};
use crate::table::Table;

const SECONDS_PER_DAY: u64 = 24 * 60 * 60;
const DAYS_PER_WEEK: u64 = 7;
/// Days from the Monday before 1970 to its first day, a Thursday.
const FIRST_WEEKDAY: u64 = 3;
/// Files of a point that stay as they are; with more, the smaller ones that are not half full are joined.
const FILES_PER_POINT: usize = 64;

/// The points that stay; one that any of the rules keeps, and always the last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// This many of the last ones.
    pub last: usize,
    /// The last one of each of this many days (UTC) that have one.
    pub daily: usize,
    /// The last one of each of this many weeks (from Monday, UTC) that have one.
    pub weekly: usize,
}

/// The result of a removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// The points that were removed.
    pub removed: Vec<u32>,
    /// The points that stay.
    pub kept: Vec<u32>,
    /// Bytes that the chain took before and takes now.
    pub bytes: (u64, u64),
}

/// Removes the points of `chain` that `keep` does not name. When `cancel` is set, it stops after a step; every point that
/// stays can be restored then, and the next removal goes on.
///
/// # Errors
/// A manifest is damaged, or a file cannot be read, written or removed; [`Error::Interrupted`].
pub fn prune(mut chain: Chain, keep: Keep, cancel: &AtomicBool) -> Result<Pruned, Error> {
    let damaged =
        chain.points.iter().find_map(|(number, point)| Some((*number, point.as_ref().err()?)));
    if let Some((number, why)) = damaged {
        let what = format!("the manifest of point {number} is damaged: {why} (nothing is removed)");
        return Err(chain.error(what));
    }
    let kept = kept(&chain, keep);
    let failed = |what: String| Error::at(&chain.name, what);
    let before = bytes(&chain).map_err(failed)?;
    detach(&chain, &kept, cancel)?;
    let removed: Vec<u32> =
        chain.points.keys().copied().filter(|number| !kept.contains(number)).collect();
    for number in removed.iter().rev() {
        chain.place.remove(FileName::Point(*number)).map_err(failed)?;
    }
    chain = Chain::in_place(chain.place, chain.name)?;
    chain.remove_remains(&BTreeSet::new()).map_err(|what| chain.error(what))?;
    let bytes = (before, bytes(&chain).map_err(|what| chain.error(what))?);
    Ok(Pruned { removed, kept: kept.into_iter().collect(), bytes })
}

/// The points that `keep` keeps.
fn kept(chain: &Chain, keep: Keep) -> BTreeSet<u32> {
    let points: Vec<(u32, u64)> = chain
        .points
        .values()
        .flatten()
        .rev()
        .map(|point| (point.info.number, point.info.seconds / SECONDS_PER_DAY))
        .collect();
    let mut kept: BTreeSet<u32> =
        points.iter().take(keep.last.max(1)).map(|point| point.0).collect();
    let week = |day: u64| (day + FIRST_WEEKDAY) / DAYS_PER_WEEK;
    for (count, unit) in [(keep.daily, (|day| day) as fn(u64) -> u64), (keep.weekly, week)] {
        let mut periods = BTreeSet::new();
        for &(number, day) in &points {
            if periods.len() < count && periods.insert(unit(day)) {
                kept.insert(number);
            }
        }
    }
    kept
}

/// Replaces the manifests of points that stay and stand on points that do not.
fn detach(chain: &Chain, kept: &BTreeSet<u32>, cancel: &AtomicBool) -> Result<(), Error> {
    // The point before that stays, and the blocks of those after it that go.
    let (mut base, mut going): (Option<u32>, Option<Table>) = (None, None);
    let mut previous = None;
    for (&number, point) in &chain.points {
        let Ok(point) = point else { continue };
        match point.header.parent {
            None => (base, going) = (None, None),
            Some(_) if !point.header.stands_on(previous) => {
                return Err(chain.error(format!("point {number} stands on one that is missing")));
            }
            Some(_) => {}
        }
        previous = Some(&point.header);
        let stays = kept.contains(&number);
        if stays && going.is_none() {
            base = Some(number);
            continue;
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let below = going.take().unwrap_or_default();
        let table = chain.manifest(number).and_then(|manifest| below.covered_by(manifest));
        let table = table.map_err(|what| chain.error(what))?;
        if stays {
            let recipients = chain.place.encrypts_for();
            let header = Header { parent: base, recipients, ..point.header.clone() };
            replace(chain, header, table, cancel)?;
            base = Some(number);
        } else {
            going = Some(table);
        }
    }
    Ok(())
}

/// Replaces the manifest of a point by one with all blocks of `table`.
fn replace(
    chain: &Chain,
    mut header: Header,
    mut table: Table,
    cancel: &AtomicBool,
) -> Result<(), Error> {
    if header.parent.is_none() {
        table = table.without_zeros();
    }
    table.drop_unused_files();
    let joined = join(chain, &mut table, chain.place.file_bytes(header.size), cancel)?;
    table.drop_unused_files();
    header.files = table.files;
    let (name, manifest) =
        (FileName::Point(header.number), Manifest { header, entries: table.entries });
    // A manifest that could not be read would take a point away.
    let put = manifest.encode().and_then(|bytes| {
        Manifest::decode(&bytes).and_then(|_| chain.place.put(name, &bytes, Put::Replaces))
    });
    // A failed replacement may have taken place; the next run removes what no manifest names.
    if let Some(mut files) = joined {
        files.keep();
    }
    put.map_err(|what| chain.error(what))
}

/// Moves the blocks of files that are used by less than a half, or are too many, into new files of `file_bytes`.
fn join(
    chain: &Chain,
    table: &mut Table,
    file_bytes: u64,
    cancel: &AtomicBool,
) -> Result<Option<DataWriter>, Error> {
    let failed = |what: String| chain.error(what);
    let used = table.used();
    let mut by_use: Vec<(u64, usize)> = used.iter().copied().zip(0..).collect();
    by_use.sort_unstable_by(|a, b| b.cmp(a));
    let large: BTreeSet<usize> =
        by_use.iter().take(FILES_PER_POINT).map(|(_, index)| *index).collect();
    let moves: Vec<bool> = (0..)
        .zip(table.files.iter().zip(&used))
        .map(|(index, (file, used))| {
            let is_small = used * 2 < file_bytes && !large.contains(&index);
            used * 2 < file.bytes || is_small
        })
        .collect();
    if !moves.contains(&true) {
        return Ok(None);
    }
    let mut writer = DataWriter::new(chain.place.clone(), file_bytes);
    let (new, files) = (table.files.len() as u32, DataFiles::new(chain.place.clone()));
    for entry in table.entries.iter_mut().filter(|entry| !entry.is_zero()) {
        if !moves.get(entry.file as usize).is_some_and(|moves| *moves) {
            continue;
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        // Its checksum goes with it: a damaged block is found as one when it is read.
        let stored = files.stored(&table.files, entry).map_err(failed)?;
        let (file, position) = writer.append(&stored).map_err(failed)?;
        (entry.file, entry.position) = (new + file, position);
    }
    table.files.extend_from_slice(writer.complete().map_err(failed)?);
    Ok(Some(writer))
}

/// Bytes of all files of the chain.
fn bytes(chain: &Chain) -> Result<u64, String> {
    Ok(chain.place.list()?.iter().map(|(_, bytes)| bytes).sum())
}
