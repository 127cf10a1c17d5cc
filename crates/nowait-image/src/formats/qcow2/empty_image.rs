//! Writes an empty qcow2 image, with optional preallocation.
//!
//! Invariant: every cluster of a new image has a refcount of 1, and its data clusters follow each other.

use std::io;

use crate::formats::decompress::Compression;
use crate::formats::driver::{CreateTerms, Preallocation};
use crate::formats::layer::BackingName;
use crate::formats::qcow2::encode::encode;
use crate::formats::qcow2::entries::with_copied;
use crate::formats::qcow2::header::{Header, MIN_EXTENDED_CLUSTER_BITS};
use crate::formats::qcow2::layout;
use crate::formats::qcow2::layout::{RefcountLayout, write_numbers};
use crate::formats::qcow2::subclusters::words_of_whole;
use crate::image_file::ImageFile;

/// Checks that `terms` go together.
///
/// # Errors
/// The reason why not.
pub(crate) fn check_terms(terms: CreateTerms) -> Result<(), String> {
    let bits = layout::cluster_bits(terms.cluster_bytes)?;
    if terms.features.extended_l2 && bits < MIN_EXTENDED_CLUSTER_BITS {
        return Err(
            "extended L2 entries need clusters of at least 16K (give a larger --cluster-size)"
                .into(),
        );
    }
    match terms.has_backing && terms.preallocation != Preallocation::Off {
        true => {
            Err("what is preallocated would hide the backing file (leave out --preallocation)"
                .into())
        }
        false => Ok(()),
    }
}

/// Writes an empty image of a disk of `size` bytes on `backing` to `file`. The outer error is a refusal.
pub(crate) fn write(
    file: &ImageFile,
    size: u64,
    backing: Option<BackingName>,
    terms: CreateTerms,
) -> Result<io::Result<()>, String> {
    let bits = layout::cluster_bits(terms.cluster_bytes)?;
    let header = Header { backing, ..Header::empty(size, bits) };
    let compression = terms.features.compression.unwrap_or(Compression::Deflate);
    let header = header.with_compression(compression);
    let header = if terms.features.extended_l2 { header.with_extended_l2() } else { header };
    let layout = ImageLayout::new(header, terms.preallocation)?;
    Ok(layout.write(file, terms.preallocation))
}

/// Writes an image with `header`, whose disk is its data file as it is, to `file`. The outer error is a refusal.
pub(crate) fn write_over_data_file(
    file: &ImageFile,
    header: Header,
) -> Result<io::Result<()>, String> {
    let layout = ImageLayout::new(header, Preallocation::Metadata)?;
    Ok(layout.write(file, Preallocation::Metadata))
}

/// The layout of a new image, in this order: the header, the refcount table, its blocks, the L1
/// table, L2 tables, data.
struct ImageLayout {
    header: Header,
    /// Refcount blocks.
    blocks: u64,
    /// L2 tables and data clusters that are preallocated; those in a data file are mapped to their own positions.
    l2_tables: u64,
    data: u64,
    /// All clusters of the image.
    clusters: u64,
}

impl ImageLayout {
    /// The layout of an image with `header`, which gets the positions of its tables.
    fn new(mut header: Header, preallocation: Preallocation) -> Result<Self, String> {
        let cluster = header.cluster_bytes();
        let l1_entries = header.size.div_ceil(header.l2_reach());
        let (l2_tables, data) = match preallocation {
            Preallocation::Off => (0, 0),
            _ => (l1_entries, header.size.div_ceil(cluster)),
        };
        layout::check_l1(&header)?;
        if encode(&header).len() as u64 > cluster {
            let what = "the name of its backing file does not fit into a cluster";
            return Err(format!("{what} (give a larger --cluster-size)"));
        }
        let inside = if header.has_data_file() { 0 } else { data };
        let rest = 1 + (l1_entries * 8).div_ceil(cluster) + l2_tables + inside;
        let RefcountLayout { table, blocks, clusters } = RefcountLayout::of(&header, rest)?;
        header.refcount_table_pos = cluster;
        header.refcount_table_clusters = table as u32;
        header.l1_entries = l1_entries as u32;
        header.l1_pos = (1 + table + blocks) * cluster;
        Ok(Self { header, blocks, l2_tables, data, clusters })
    }

    fn write(&self, file: &ImageFile, preallocation: Preallocation) -> io::Result<()> {
        let header = &self.header;
        let cluster = header.cluster_bytes();
        let end = self.clusters * cluster;
        if preallocation == Preallocation::Falloc {
            file.reserve(end)?;
        } else {
            file.set_len(end)?;
        }
        file.write_at(0, &encode(header))?;
        let block_pos =
            header.refcount_table_pos + u64::from(header.refcount_table_clusters) * cluster;
        write_numbers(file, header.refcount_table_pos, self.blocks, |index| {
            (block_pos + index * cluster).to_be_bytes()
        })?;
        write_numbers(file, block_pos, self.clusters, |_| 1u16.to_be_bytes())?;
        let l2_pos = header.l1_pos + (u64::from(header.l1_entries) * 8).next_multiple_of(cluster);
        write_numbers(file, header.l1_pos, self.l2_tables, |index| {
            with_copied(l2_pos + index * cluster).to_be_bytes()
        })?;
        let first_pos = l2_pos + self.l2_tables * cluster;
        let data_pos = if header.has_data_file() { 0 } else { first_pos };
        let words = header.entry_words() as u64;
        write_numbers(file, l2_pos, self.data * words, |word| {
            let entry = with_copied(data_pos + word / words * cluster);
            let [first, second] = words_of_whole(entry, header);
            (if word % words == 0 { first } else { second }).to_be_bytes()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_counts_all_of_its_clusters_and_its_header_is_parsed_back() {
        for bits in 9..=21 {
            for size in [0, 512, 1 << 20, (64 << 20) + 512] {
                for preallocation in [Preallocation::Off, Preallocation::Metadata] {
                    let layout =
                        ImageLayout::new(Header::empty(size, bits), preallocation).unwrap();
                    let ImageLayout { header, blocks, l2_tables, data, clusters } = layout;
                    assert_eq!(Header::parse(&encode(&header)).unwrap(), header);
                    let l1 = (u64::from(header.l1_entries) * 8).div_ceil(1 << bits);
                    let table = u64::from(header.refcount_table_clusters);
                    assert_eq!(clusters, 1 + table + blocks + l1 + l2_tables + data);
                    assert!(blocks * header.block_entries() >= clusters);
                    assert!(header.refcount_table_entries() >= blocks);
                }
            }
        }
    }
}
