//! Limits on the work of one request.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nowait::{
    AioThreadQueue, BlockingFile, ByteRange, Config, Direct, ExtentStatus, Flags, Op, Request,
    SingleDisk, WorkerPool,
};

use crate::offline::create::{CreateOptions, create};
use crate::qcow2_disk::metadata::Metadata;
use crate::qcow2_disk::{ServeOptions, open};
use crate::{Chain, ChainOptions, Format};
use nowait_testkit::{Finished, require_tool, tool};

const SIZE: u64 = 64 << 20;
/// Number of overlays, with the smallest clusters. All but the lowest are empty.
const OVERLAYS: usize = 20;
/// Distance in bytes of the lowest overlay's clusters: one in each of its tables, so that each
/// table has to be read.
const STEP: u64 = 32 << 10;

fn write_some(image: &Path) {
    let chain =
        ChainOptions { format: Some(Format::Qcow2), writable: true, ..ChainOptions::default() };
    let options = ServeOptions { writable: true, direct: Direct::Off, cache_holes: true };
    let (disk, open_image) = open(Chain::open(image, &chain).unwrap(), options).unwrap();
    let file = BlockingFile::new(Arc::new(disk));
    for pos in (0..SIZE).step_by(STEP as usize) {
        file.write_at(&[7; 512], pos, Flags::NONE).unwrap();
    }
    drop(file);
    open_image.close().unwrap();
}

#[test]
fn a_block_status_request_ends_after_a_bounded_number_of_lookups_and_the_next_one_goes_on() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = tempfile::tempdir().unwrap();
    let base = scratch.path().join("0");
    fs::File::create(&base).unwrap().set_len(SIZE).unwrap();
    for n in 1..=OVERLAYS {
        let (below, top) = ((n - 1).to_string(), n.to_string());
        let format = if n == 1 { "raw" } else { "qcow2" };
        let options = ["-q", "-f", "qcow2", "-o", "cluster_size=512", "-b", &below, "-F", format];
        tool("qemu-img")
            .current_dir(scratch.path())
            .arg("create")
            .args(options)
            .arg(&top)
            .succeeds();
        if n == 1 {
            write_some(&scratch.path().join(top));
        }
    }
    let top = scratch.path().join(OVERLAYS.to_string());
    let chain = ChainOptions { format: Some(Format::Qcow2), ..ChainOptions::default() };
    let options = ServeOptions { writable: false, direct: Direct::Auto, cache_holes: true };
    let (disk, _open_image) = open(Chain::open(&top, &chain).unwrap(), options).unwrap();
    let disk = Arc::new(disk);
    let queue = AioThreadQueue::new(8).unwrap();
    let workers = WorkerPool::new(1);
    let mut engine = SingleDisk::new(disk, workers, queue, Config::default()).unwrap();
    let (mut pos, mut answers) = (0, 0);
    while pos < SIZE {
        let range = ByteRange::new(pos, SIZE - pos);
        let io = Request { op: Op::Status, flags: Flags::NONE, range };
        engine.submit_no_data(io, 0).map_err(|rejected| rejected.error).unwrap();
        while engine.in_flight() > 0 {
            engine.wait(None, &mut |_, _| {}).unwrap();
            while let Some(done) = engine.next() {
                done.result().unwrap();
            }
        }
        let spans = engine.take_extents(0);
        for ExtentStatus { len, hole, .. } in spans {
            assert_eq!(hole, pos % STEP != 0, "{pos}");
            pos += len;
        }
        answers += 1;
    }
    assert!(pos == SIZE && answers > 1, "{answers} answers");
}

#[test]
fn a_write_that_allocates_whole_clusters_is_looked_up_in_the_tables_once() {
    const CLUSTER: u64 = 64 << 10;
    let scratch = tempfile::tempdir().unwrap();
    let image = scratch.path().join("image");
    let options = CreateOptions::new(Format::Qcow2, Some(SIZE));
    create(&image, &options).unwrap();
    let chain =
        ChainOptions { format: Some(Format::Qcow2), writable: true, ..ChainOptions::default() };
    let options = ServeOptions { writable: true, direct: Direct::Off, cache_holes: true };
    let (disk, open_image) = open(Chain::open(&image, &chain).unwrap(), options).unwrap();
    let file = BlockingFile::new(Arc::new(disk));
    // The first write reads the tables, which takes lookups of its own.
    file.write_at(&[7; CLUSTER as usize], 0, Flags::NONE).unwrap();
    let lookups = || {
        let count = |metadata: &mut Metadata| Ok(metadata.lookups.load(Ordering::Relaxed));
        open_image.writeback.with(count).unwrap()
    };
    for pos in [4 * CLUSTER, 8 * CLUSTER] {
        let before = lookups();
        file.write_at(&[7; CLUSTER as usize], pos, Flags::NONE).unwrap();
        assert_eq!(lookups() - before, 1);
    }
    drop(file);
    open_image.close().unwrap();
}
