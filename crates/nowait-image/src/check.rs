//! Whether the metadata of a qcow2 image holds together: every cluster counted as often as it is
//! used. What `qemu-img check` does.
//!
//! Invariant: nothing is changed here. A leak is a cluster counted too often, which only takes
//! space; a corruption is anything that can lead to wrong data.
//! Knows: entry, error, header, host, refcounts, references, tables, walk. Known by: repair, the
//! command.

use std::collections::BTreeSet;
use std::io;

use crate::chain::{Chain, Content};
use crate::entry::{Cluster, L1Entry};
use crate::error::ImageError;
use crate::header::Header;
use crate::host::HostFile;
use crate::refcounts::{self, Refcounts};
use crate::references::{References, STRETCH};
use crate::tables::read_table;
use crate::walk::{self, Progress, Seen};

/// What a check found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Clusters and pointers that are wrong.
    pub corruptions: u64,
    /// Clusters that nothing uses but that count as in use.
    pub leaks: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those of them that have data of their own.
    pub allocated_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Those of them that do not follow the one before in the file.
    pub fragmented_clusters: u64,
    /// Where the last cluster in use ends in the file, in bytes.
    pub image_end: u64,
}

/// A count in the image that is not the number of references.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) cluster: u64,
    pub(crate) references: u64,
}

/// All that is wrong in a way that can be put right.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) too_low: Vec<Wrong>,
    pub(crate) too_high: Vec<Wrong>,
    /// Positions of entries in the file whose flag "copied" is wrong, and what they are to be.
    pub(crate) flags: Vec<(u64, u64)>,
    /// Whether every pointer that was met could be followed.
    pub(crate) pointers_make_sense: bool,
    /// Positions of refcount blocks that are something else, too: what is written to them destroys
    /// that.
    pub(crate) shared_blocks: BTreeSet<u64>,
}

/// Findings that are kept to be repaired at most; the rest is found by the next round.
pub(crate) const MAX_FINDINGS: usize = 1 << 20;

/// Checks the top image of `chain`, which must be qcow2. `progress` is told how much of how much
/// is done, from time to time.
///
/// # Errors
/// That it is not qcow2; or what the system said when it was read.
pub fn check(chain: &Chain, progress: &mut dyn FnMut(u64, u64)) -> Result<Report, ImageError> {
    let file = &chain.top().file;
    let Content::Qcow2 { header, .. } = &chain.top().content else {
        return Err(ImageError::refused(
            file.path(),
            "raw images have nothing that could be checked",
        ));
    };
    let (report, _) = find(file, header, progress)
        .map_err(|error| ImageError::os(file.path(), "read", &error))?;
    Ok(report)
}

pub(crate) fn find(
    file: &HostFile,
    header: &Header,
    progress: Progress<'_>,
) -> io::Result<(Report, Findings)> {
    let mut references = References::new(file.size()?, header.cluster_bits);
    let seen = walk::count(file, header, &mut references, progress)?;
    let Seen { corruptions, allocated, compressed, fragmented, shared_blocks } = seen;
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
            pointers_make_sense: corruptions == 0,
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
    references: &'a References,
    refcounts: Refcounts<'a>,
    report: &'a mut Report,
    findings: Findings,
}

impl Compare<'_> {
    /// Compares each count with the references, where there is either.
    fn counts(&mut self) -> io::Result<()> {
        let entries = self.header.block_entries();
        for index in 0..self.refcounts.table().len() as u64 {
            if self.refcounts.table().get(index as usize).is_some_and(|&entry| entry != 0) {
                self.block(index, entries)?;
            }
        }
        // What is used but in no block.
        let stretches: Vec<u64> = self.references.used().collect();
        for stretch in stretches {
            for cluster in stretch * STRETCH..(stretch + 1) * STRETCH {
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
            let next = (cluster / STRETCH + 1) * STRETCH;
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
            list.push(Wrong { cluster, references });
        }
    }

    /// Compares the flag "copied" of each active entry with the count of what it points to: it
    /// promises that nobody else points there.
    fn flags(&mut self, file: &HostFile) -> io::Result<()> {
        let l1 = read_table(file, self.header.l1_pos, u64::from(self.header.l1_entries))?;
        for (index, entry) in l1.into_iter().enumerate() {
            let Ok(L1Entry::Table { pos, copied }) = L1Entry::parse(entry, self.header) else {
                continue;
            };
            self.flag(self.header.l1_pos + index as u64 * 8, entry, pos, copied)?;
            // Twice in use and no snapshots: its entries are reported where they are first seen.
            let inside = pos >> self.header.cluster_bits < self.references.clusters();
            if self.header.has_data_file() || !inside {
                continue;
            }
            let table = read_table(file, pos, self.header.l2_entries())?;
            for (index, entry) in table.into_iter().enumerate() {
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
        const COPIED: u64 = 1 << 63;
        let alone = self.refcounts.of(pos >> self.header.cluster_bits)? == 1;
        if alone != copied {
            self.report.corruptions += 1;
            if self.findings.flags.len() < MAX_FINDINGS {
                self.findings.flags.push((at, entry ^ COPIED));
            }
        }
        Ok(())
    }
}
