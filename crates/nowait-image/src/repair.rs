//! Putting right what a check found: counts, flags, and the marks "dirty" and "corrupt".
//!
//! Invariant: a power cut at any point leaves the image no worse than it was. Counts that are too
//! low are raised before anything relies on them; a count is lowered only when nothing is corrupt
//! any more, because a pointer that cannot be read may still mean the cluster.
//! Knows: chain, check, error, header, host, refcounts. Known by: the command.

use std::collections::BTreeSet;
use std::io;

use crate::chain::{Chain, Content};
use crate::check::{Findings, MAX_FINDINGS, Report, Wrong, find};
use crate::entry::refcount_block;
use crate::error::ImageError;
use crate::header::Header;
use crate::host::HostFile;
use crate::refcounts;
use crate::tables::read_table;
use crate::walk::Progress;

/// Rounds at most: each finds what was beyond the bound of the one before.
const MAX_ROUNDS: usize = 64;
const INCOMPATIBLE_AT: u64 = 72;
const MARKS: u64 = 0b11;

/// What a repair did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repaired {
    /// As it is now.
    pub report: Report,
    /// Corruptions that are gone.
    pub corruptions_fixed: u64,
    /// Leaks that are gone.
    pub leaks_fixed: u64,
}

/// Repairs the top image of `chain`, which was opened for writing and as perhaps damaged.
///
/// Pointers that make no sense, and counts for which the image has no room, or none of their own,
/// stay as they are and are in the report.
///
/// # Errors
/// That it is not qcow2; or what the system said when it was read or written.
pub fn repair(chain: &Chain, progress: &mut dyn FnMut(u64, u64)) -> Result<Repaired, ImageError> {
    let file = &chain.top().file;
    let Content::Qcow2 { header, .. } = &chain.top().content else {
        return Err(ImageError::refused(file.path(), "raw images have nothing to be repaired"));
    };
    run(file, header, progress).map_err(|error| ImageError::os(file.path(), "repair", &error))
}

fn run(file: &HostFile, header: &Header, progress: Progress<'_>) -> io::Result<Repaired> {
    let (first, mut findings) = find(file, header, progress)?;
    let mut report = first;
    for _ in 0..MAX_ROUNDS {
        if report.corruptions == 0 && report.leaks == 0 || !improve(file, header, &findings)? {
            break;
        }
        (report, findings) = find(file, header, progress)?;
    }
    if report.corruptions == 0 && (header.is_dirty() || header.is_corrupt()) {
        file.sync()?;
        let unmarked = header.incompatible & !MARKS;
        file.write_at(INCOMPATIBLE_AT, &unmarked.to_be_bytes())?;
    }
    file.sync()?;
    Ok(Repaired {
        report,
        corruptions_fixed: first.corruptions.saturating_sub(report.corruptions),
        leaks_fixed: first.leaks.saturating_sub(report.leaks),
    })
}

/// One step of the repair. False when there is nothing that it could do.
fn improve(file: &HostFile, header: &Header, findings: &Findings) -> io::Result<bool> {
    let changed = if !findings.too_low.is_empty() {
        set_counts(file, header, &findings.too_low, &findings.shared_blocks)?
    } else if !findings.flags.is_empty() {
        for &(at, entry) in &findings.flags {
            file.write_at(at, &entry.to_be_bytes())?;
        }
        true
    } else if findings.pointers_make_sense {
        set_counts(file, header, &findings.too_high, &findings.shared_blocks)?
    } else {
        false
    };
    file.sync()?;
    Ok(changed)
}

/// Sets counts to the number of references, but not in blocks that are something else, too. False
/// if that was possible for none of them.
fn set_counts(
    file: &HostFile,
    header: &Header,
    wrong: &[Wrong],
    shared: &BTreeSet<u64>,
) -> io::Result<bool> {
    debug_assert!(wrong.len() <= MAX_FINDINGS);
    let table = read_table(file, header.refcount_table_pos, header.refcount_table_entries())?;
    let end = file.size()?;
    let highest = match header.refcount_order {
        6 => u64::MAX,
        order => (1 << (1u32 << order)) - 1,
    };
    let entries = header.block_entries();
    let mut changed = false;
    for group in wrong.chunk_by(|a, b| a.cluster / entries == b.cluster / entries) {
        let Some(&Wrong { cluster, .. }) = group.first() else { continue };
        let entry = table.get((cluster / entries) as usize).copied().unwrap_or_default();
        let Ok(Some(pos)) = refcount_block(entry, header) else { continue };
        if pos >= end || shared.contains(&pos) {
            continue;
        }
        let mut block = vec![0; header.cluster_bytes() as usize];
        file.read_at(pos, &mut block)?;
        for &Wrong { cluster, references } in group.iter().filter(|w| w.references <= highest) {
            refcounts::set(&mut block, cluster % entries, header.refcount_order, references);
            changed = true;
        }
        file.write_at(pos, &block)?;
    }
    Ok(changed)
}
