//! The clusters that are really in use in an image's file, whatever its refcounts are: a scan of
//! all its tables.
//!
//! Invariant: nothing is written. A pointer that was in the file before the scan, and still is, is
//! found, also while new pointers are written.

use std::collections::BTreeSet;
use std::io;

use crate::formats::qcow2::check::metadata_scan;
use crate::formats::qcow2::check::recount::RecountedClusters;
use crate::formats::qcow2::header::Header;
use crate::formats::qcow2::refcounts::Refcounts;
use crate::image_file::ImageFile;

/// How many pointers in the file refer to each cluster of the image in `host`.
pub(crate) fn references(host: &ImageFile) -> io::Result<RecountedClusters> {
    let header = header_of(host)?;
    let mut references = RecountedClusters::new(host.size()?, header.cluster_bits);
    metadata_scan::count(host, &header, &mut references, &mut |_, _| {})?;
    Ok(references)
}

/// The clusters that are in use and have a refcount of 0. A pointer reaches the file only after the
/// refcount of its cluster, so the refcounts are read after all pointers.
pub(crate) fn uncounted(host: &ImageFile) -> io::Result<BTreeSet<u64>> {
    let references = references(host)?;
    let header = header_of(host)?;
    let mut refcounts = Refcounts::read(host, &header)?;
    let mut uncounted = BTreeSet::new();
    for cluster in references.in_use() {
        if refcounts.of(cluster)? == 0 {
            uncounted.insert(cluster);
        }
    }
    Ok(uncounted)
}

fn header_of(host: &ImageFile) -> io::Result<Header> {
    Header::read(host).map_err(|error| io::Error::from_raw_os_error(error.errno()))
}
