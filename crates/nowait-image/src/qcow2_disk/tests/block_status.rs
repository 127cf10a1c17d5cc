//! Block status of clusters that are written to during the scan.
//!
//! Invariant: bytes that were never zero are never reported as a hole.

use nowait::{ByteRange, Direct, ExtentStatus, ImageFormat, WriteCursor};
use std::fs;

use crate::offline::create::{CreateOptions, create};
use crate::qcow2_disk::status_scan::StatusScan;
use crate::qcow2_disk::{ServeOptions, open_all};
use crate::{Chain, ChainOptions, Format};

const CLUSTER: u64 = 65536;
const SIZE: u64 = 2 * CLUSTER;

#[test]
fn a_cluster_that_is_allocated_during_a_scan_is_not_reported_as_the_hole_that_the_file_had_there() {
    let scratch = tempfile::tempdir().unwrap();
    fs::write(scratch.path().join("base"), vec![5; SIZE as usize]).unwrap();
    let image = scratch.path().join("top");
    let options = CreateOptions {
        backing: Some("base".into()),
        backing_format: Some(Format::Raw),
        cluster_bytes: Some(CLUSTER),
        ..CreateOptions::new(Format::Qcow2, None)
    };
    create(&image, &options).unwrap();
    let options =
        ChainOptions { format: Some(Format::Qcow2), writable: true, ..ChainOptions::default() };
    let chain = Chain::open(&image, &options).unwrap();
    let options = ServeOptions { writable: true, direct: Direct::Off, cache_holes: true };
    let opened = open_all(chain, options).unwrap();
    let disk = &opened.map.0;
    let write = |cluster: u64| {
        disk.write(cluster * CLUSTER, WriteCursor::from(&[1; CLUSTER as usize][..])).unwrap();
    };
    let (mut scan, mut spans) = (StatusScan::new(&disk.images, SIZE), Vec::new());
    write(0);
    scan.scan(ByteRange::new(0, CLUSTER), 8, &mut spans).unwrap();
    write(1);
    scan.scan(ByteRange::new(CLUSTER, CLUSTER), 8, &mut spans).unwrap();
    assert_eq!(spans, [ExtentStatus::top(SIZE, false)]);
}
