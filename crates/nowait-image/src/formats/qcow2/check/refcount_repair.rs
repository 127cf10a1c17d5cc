//! Repairs the findings of a check: refcounts, flags, and the marks "dirty" and "corrupt".
//!
//! Invariant: a power cut at any point leaves the image no worse than it was. Refcounts that are
//! too low are raised before any pointer relies on them; a refcount is lowered only when no
//! corruption is left, because a pointer that cannot be read may still mean the cluster.

use std::collections::BTreeSet;
use std::io;

use crate::error::ImageError;
use crate::formats::driver::{Progress, Repaired};
use crate::formats::layer::Layer;
use crate::formats::qcow2::check::{Findings, MAX_FINDINGS, RefcountMismatch, find};
use crate::formats::qcow2::content::header_of;
use crate::formats::qcow2::entries::refcount_block;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::refcounts;
use crate::image_file::ImageFile;

/// The most rounds of a repair, each of which finds what was beyond [`MAX_FINDINGS`] in the one before.
/// Beyond it: the report has what is left; the next repair goes on.
const MAX_ROUNDS: usize = 64;

/// Repairs the image of `layer`, which is qcow2 and was opened for writing and with
/// [`crate::ChainOptions::damaged`].
///
/// Invalid pointers, and refcounts that have no refcount block of their own or do not fit it, stay
/// as they are and are in the report.
///
/// # Errors
/// The errno of a failed read or write.
pub(crate) fn repair(layer: &Layer, progress: Progress<'_>) -> Result<Repaired, ImageError> {
    let (file, header) = (&layer.file, header_of(layer)?);
    run(file, header, progress).map_err(|error| ImageError::os(file.path(), "repair", &error))
}

fn run(file: &ImageFile, header: &Header, progress: Progress<'_>) -> io::Result<Repaired> {
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
        let unmarked = header.incompatible & !(Header::DIRTY | Header::CORRUPT);
        file.write_at(Header::INCOMPATIBLE_AT as u64, &unmarked.to_be_bytes())?;
    }
    file.sync()?;
    Ok(Repaired {
        report,
        corruptions_fixed: first.corruptions.saturating_sub(report.corruptions),
        leaks_fixed: first.leaks.saturating_sub(report.leaks),
    })
}

/// One step of the repair. False when no step is possible.
fn improve(file: &ImageFile, header: &Header, findings: &Findings) -> io::Result<bool> {
    let changed = if !findings.too_low.is_empty() {
        set_counts(file, header, &findings.too_low, &findings.shared_blocks)?
    } else if !findings.flags.is_empty() {
        for &(at, entry) in &findings.flags {
            file.write_at(at, &entry.to_be_bytes())?;
        }
        true
    } else if findings.all_pointers_valid {
        set_counts(file, header, &findings.too_high, &findings.shared_blocks)?
    } else {
        false
    };
    file.sync()?;
    Ok(changed)
}

/// Sets refcounts to the number of references, except in refcount blocks that have another use,
/// too. False if no refcount could be set.
fn set_counts(
    file: &ImageFile,
    header: &Header,
    wrong: &[RefcountMismatch],
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
        let Some(&RefcountMismatch { cluster, .. }) = group.first() else { continue };
        let entry = table.get((cluster / entries) as usize).copied().unwrap_or_default();
        let Ok(Some(pos)) = refcount_block(entry, header) else { continue };
        if pos >= end || shared.contains(&pos) {
            continue;
        }
        let mut block = vec![0; header.cluster_bytes() as usize];
        file.read_at(pos, &mut block)?;
        for &RefcountMismatch { cluster, references } in
            group.iter().filter(|w| w.references <= highest)
        {
            refcounts::set(&mut block, cluster % entries, header.refcount_order, references);
            changed = true;
        }
        file.write_at(pos, &block)?;
    }
    Ok(changed)
}
