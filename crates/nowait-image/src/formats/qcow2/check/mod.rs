//! Checks the metadata of a qcow2 image: each cluster's refcount must equal its number of
//! references. Equivalent to `qemu-img check`.
//!
//! Invariant: the check changes no file. A leak is a refcount that is too high, which only takes
//! space; a corruption is any other error that can lead to wrong data.

pub(crate) mod recount;
pub(crate) mod metadata_scan;
pub(crate) mod refcount_repair;

use std::collections::BTreeSet;
use std::io;

use crate::error::ImageError;
use crate::formats::driver::{Progress, Report};
use crate::formats::layer::Layer;
use crate::formats::qcow2::content::header_of;
use crate::formats::qcow2::entries::{COPIED, Cluster, L1Entry};
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::lookup::read_table;
use crate::formats::qcow2::refcounts;
use crate::formats::qcow2::refcounts::Refcounts;
use crate::image_file::ImageFile;
use metadata_scan::ScanTotals;
use recount::{GROUP_CLUSTERS, RecountedClusters};

/// A refcount in the image that is not the number of references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RefcountMismatch {
    pub(crate) cluster: u64,
    pub(crate) references: u64,
}

/// All repairable errors.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) too_low: Vec<RefcountMismatch>,
    pub(crate) too_high: Vec<RefcountMismatch>,
    /// Positions of entries in the file whose flag "copied" is wrong, and the correct entries.
    pub(crate) flags: Vec<(u64, u64)>,
    /// Whether every pointer could be followed.
    pub(crate) all_pointers_valid: bool,
    /// Positions of refcount blocks that have another use, too, which a write to them would
    /// destroy.
    pub(crate) shared_blocks: BTreeSet<u64>,
}

/// The most findings of a kind that one round of a repair keeps.
/// Beyond it: the next round finds the rest; all are counted.
pub(crate) const MAX_FINDINGS: usize = 1 << 20;

/// Checks the image of `layer`, which is qcow2.
///
/// # Errors
/// The errno of a failed read.
pub(crate) fn check(layer: &Layer, progress: Progress<'_>) -> Result<Report, ImageError> {
    let header = header_of(layer)?;
    if header.is_snapshot {
        let why =
            "all of an image is checked, and no snapshot alone (leave out the @ and its name)";
        return Err(ImageError::refused(layer.file.path(), why));
    }
    let found = find(&layer.file, header, progress);
    let (report, _) = found.map_err(|error| ImageError::os(layer.file.path(), "read", &error))?;
    Ok(report)
}

pub(crate) fn find(
    file: &ImageFile,
    header: &Header,
    progress: Progress<'_>,
) -> io::Result<(Report, Findings)> {
    let mut references = RecountedClusters::new(file.size()?, header.cluster_bits);
    let totals = metadata_scan::count(file, header, &mut references, progress)?;
    let ScanTotals { corruptions, allocated, compressed, fragmented, shared_blocks } = totals;
    let mut report = Report {
        corruptions,
        total_clusters: header.size.div_ceil(header.cluster_bytes()),
        allocated_clusters: allocated,
        compressed_clusters: compressed,
        fragmented_clusters: fragmented,
        ..Report::default()
    };
    let mut compare = Compare {
        header,
        references: &references,
        refcounts: Refcounts::read(file, header)?,
        report: &mut report,
        findings: Findings {
            all_pointers_valid: corruptions == 0,
            shared_blocks,
            ..Findings::default()
        },
    };
    compare.counts()?;
    compare.flags(file)?;
    let findings = compare.findings;
    Ok((report, findings))
}

struct Compare<'a> {
    header: &'a Header,
    references: &'a RecountedClusters,
    refcounts: Refcounts<'a>,
    report: &'a mut Report,
    findings: Findings,
}

impl Compare<'_> {
    /// Compares the refcount and the references of each cluster that has either.
    fn counts(&mut self) -> io::Result<()> {
        let entries = self.header.block_entries();
        for index in 0..self.refcounts.table().len() as u64 {
            if self.refcounts.table().get(index as usize).is_some_and(|&entry| entry != 0) {
                self.block(index, entries)?;
            }
        }
        // Clusters that are in use but have no refcount block.
        let groups: Vec<u64> = self.references.used().collect();
        for group in groups {
            for cluster in group * GROUP_CLUSTERS..(group + 1) * GROUP_CLUSTERS {
                let references = self.references.of(cluster);
                if references > 0 && self.refcounts.block(cluster / entries)?.is_none() {
                    self.compare(cluster, 0, references);
                }
            }
        }
        Ok(())
    }

    fn block(&mut self, index: u64, entries: u64) -> io::Result<()> {
        let Some(block) = self.refcounts.block(index)?.map(<[u8]>::to_vec) else { return Ok(()) };
        let order = self.header.refcount_order;
        let end = ((index + 1) * entries).min(self.references.clusters());
        let mut cluster = index * entries;
        while cluster < end {
            let next = (cluster / GROUP_CLUSTERS + 1) * GROUP_CLUSTERS;
            let counted = (cluster..next.min(end))
                .map(|cluster| (cluster, refcounts::get(&block, cluster % entries, order)));
            if self.references.is_unused(cluster) {
                for (cluster, count) in counted.filter(|&(_, count)| count > 0) {
                    self.compare(cluster, count, 0);
                }
            } else {
                for (cluster, count) in counted {
                    self.compare(cluster, count, self.references.of(cluster));
                }
            }
            cluster = next;
        }
        Ok(())
    }

    fn compare(&mut self, cluster: u64, count: u64, references: u64) {
        if count > 0 || references > 0 {
            let end = (cluster + 1) << self.header.cluster_bits;
            self.report.image_end = self.report.image_end.max(end);
        }
        let count = count.min(u64::from(u16::MAX));
        let list = match count.cmp(&references) {
            std::cmp::Ordering::Equal => return,
            std::cmp::Ordering::Less => {
                self.report.corruptions += 1;
                &mut self.findings.too_low
            }
            std::cmp::Ordering::Greater => {
                self.report.leaks += 1;
                &mut self.findings.too_high
            }
        };
        if list.len() < MAX_FINDINGS {
            list.push(RefcountMismatch { cluster, references });
        }
    }

    /// Compares the flag "copied" of each active entry with the refcount of its target: the flag
    /// promises that no other pointer refers to it.
    fn flags(&mut self, file: &ImageFile) -> io::Result<()> {
        let l1 = read_table(file, self.header.l1_pos, u64::from(self.header.l1_entries))?;
        for (index, entry) in l1.into_iter().enumerate() {
            let Ok(L1Entry::Table { pos, copied }) = L1Entry::parse(entry, self.header) else {
                continue;
            };
            self.flag(self.header.l1_pos + index as u64 * 8, entry, pos, copied)?;
            // A table that is in use twice without snapshots is reported by its refcount.
            let inside = pos >> self.header.cluster_bits < self.references.clusters();
            if self.header.has_data_file() || !inside {
                continue;
            }
            let words = self.header.entry_words();
            let table = read_table(file, pos, self.header.l2_entries() * words as u64)?;
            for (index, entry) in table.into_iter().enumerate().step_by(words) {
                let (host, copied) = match Cluster::parse(entry, self.header) {
                    Ok(Cluster::Data { host, copied }) => (host, copied),
                    Ok(Cluster::Zero { host: Some(host), copied }) => (host, copied),
                    _ => continue,
                };
                self.flag(pos + index as u64 * 8, entry, host, copied)?;
            }
        }
        Ok(())
    }

    fn flag(&mut self, at: u64, entry: u64, pos: u64, copied: bool) -> io::Result<()> {
        let is_exclusive = self.refcounts.of(pos >> self.header.cluster_bits)? == 1;
        if is_exclusive != copied {
            self.report.corruptions += 1;
            if self.findings.flags.len() < MAX_FINDINGS {
                self.findings.flags.push((at, entry ^ COPIED));
            }
        }
        Ok(())
    }
}
