//! More files on one ring than its table has places: the ones beyond it are reached by descriptors.

use std::sync::Arc;

use nowait::{
    BlockDevice, ByteRange, Config, DeviceHandle, Engine, Flags, LinearMap, Op, OpenOptions,
    Request, Uring, WorkerPool,
};
use nowait_testkit::{WaitForRequests, required};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const BLOCK: u64 = 4096;
/// Places of the table: the limit on descriptors at the ring's creation bounds it.
const TABLE: u64 = 64;
const FILES: u64 = 200;

fn limit_descriptors(count: u64) {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum }).unwrap();
}

/// A file whose bytes tell its number, attached to `engine`.
fn attach(
    engine: &mut Engine<Uring, LinearMap>,
    directory: &std::path::Path,
    number: u64,
) -> DeviceHandle<LinearMap> {
    let path = directory.join(number.to_string());
    std::fs::write(&path, vec![number as u8; BLOCK as usize]).unwrap();
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let disk = BlockDevice::open_mapped(&path, OpenOptions::default()).unwrap();
    engine.attach(Arc::new(disk)).unwrap()
}

/// Reads each file, and compares what was read.
fn read_all(engine: &mut Engine<Uring, LinearMap>, files: &[(u64, DeviceHandle<LinearMap>)]) {
    let range = ByteRange::new(0, BLOCK);
    for (number, handle) in files {
        let buf = engine.buffer(handle, range).unwrap();
        let io = Request { op: Op::Read, flags: Flags::NONE, range };
        assert!(engine.submit(handle, io, buf, *number).is_ok());
    }
    let completions = engine.finish();
    assert_eq!(completions.len(), files.len());
    for done in completions {
        assert_eq!(done.result(), Ok(BLOCK), "file {}", done.tag);
        assert!(done.buf.unwrap()[..BLOCK as usize].iter().all(|&byte| byte == done.tag as u8));
    }
}

#[test]
fn files_beyond_the_table_of_a_ring_are_read_as_those_in_it() {
    let Rlimit { current, .. } = getrlimit(Resource::Nofile);
    limit_descriptors(TABLE);
    let ring = required("io_uring", Uring::new());
    limit_descriptors(current.map_or(4096, |limit| limit.max(1024)));
    let Some(ring) = ring else { return };
    let mut engine = Engine::new(ring, WorkerPool::new(2), Config::default()).unwrap();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut files: Vec<_> =
        (0..FILES).map(|number| (number, attach(&mut engine, directory.path(), number))).collect();
    read_all(&mut engine, &files);
    // Places become free on both sides of the end of the table, and are used again.
    let gone: Vec<_> = files.drain(TABLE as usize - 10..TABLE as usize + 10).collect();
    gone.iter().for_each(|(_, handle)| engine.detach(handle).unwrap());
    read_all(&mut engine, &files);
    for number in FILES..FILES + 20 {
        files.push((number, attach(&mut engine, directory.path(), number)));
    }
    read_all(&mut engine, &files);
}
