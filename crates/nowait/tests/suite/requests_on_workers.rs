//! Requests that workers serve, on an image under the test's control: their order between clients,
//! and panics of the image.

use std::sync::Arc;

use nowait::{
    BlockDevice, BlockingFile, ByteRange, Config, Engine, Flags, Op, Request, SingleDisk,
    WorkerPool,
};
use nowait_testkit::engines::TestQueue;
use nowait_testkit::worker_only_image::WorkerOnlyImage;
use nowait_testkit::{Scratch, TestQueueKind, WaitForRequests};

const SIZE: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// The position at which every operation but flush panics.
const BAD: u64 = 5 * BLOCK;

struct Scene {
    _scratch: Scratch,
    image: WorkerOnlyImage,
    disk: Arc<BlockDevice<WorkerOnlyImage>>,
    engine: SingleDisk<TestQueue, WorkerOnlyImage>,
}

fn scene(workers: u32) -> Scene {
    let (scratch, image) = (Scratch::new(), WorkerOnlyImage::that_panic_at(BAD));
    let disk = image.device(&scratch.join("file"), SIZE);
    let config = Config { slots: 64, ..Config::default() };
    let engine = TestQueueKind::Threads.engine(&disk, workers, config).unwrap();
    Scene { _scratch: scratch, image, disk, engine }
}

impl Scene {
    fn submit(&mut self, op: Op, pos: u64, tag: u64) {
        let io = Request { op, flags: Flags::NONE, range: ByteRange::new(pos, BLOCK) };
        match op {
            Op::Read | Op::Write => {
                let buf = self.engine.buffer(io.range).unwrap();
                self.engine.submit(io, buf, tag).map_err(|rejected| rejected.error).unwrap();
            }
            _ => self.engine.submit_no_data(io, tag).map_err(|rejected| rejected.error).unwrap(),
        }
    }

    /// Waits for all requests. Returns tags and errnos, 0 for success, sorted.
    fn finish(&mut self) -> Vec<(u64, i32)> {
        let errno = |done: nowait::Completion| done.result().map_or_else(|e| e.errno(), |_| 0);
        let ended = self.engine.finish().into_iter().map(|done| (done.tag, errno(done)));
        let mut ended: Vec<_> = ended.collect();
        ended.sort_unstable();
        ended
    }
}

#[test]
fn a_request_whose_worker_panics_is_eio_and_the_worker_serves_the_next_ones() {
    let mut scene = scene(1);
    for op in [Op::Read, Op::Write, Op::Discard, Op::Zero, Op::Status] {
        for (tag, pos) in [BAD, BAD + BLOCK, BAD, 0].into_iter().enumerate() {
            scene.submit(op, pos, tag as u64);
        }
        assert_eq!(scene.finish(), [(0, libc::EIO), (1, 0), (2, libc::EIO), (3, 0)], "{op:?}");
    }
    scene.submit(Op::Flush, 0, 9);
    assert_eq!(scene.finish(), [(9, 0)]);
}

/// The range lock of an image's change is released when the change panics.
#[test]
fn a_range_that_a_panicking_request_has_locked_is_free_for_the_next_one() {
    let mut scene = scene(2);
    scene.submit(Op::Zero, BAD, 0);
    assert_eq!(scene.finish(), [(0, libc::EIO)]);
    let file = BlockingFile::new(scene.disk.clone());
    file.write_at(&[1; 100], BAD + 100, Flags::NONE).unwrap();
    file.zero(ByteRange::new(BAD + 1, 100), Flags::NONE).unwrap();
}

#[test]
fn workers_take_one_request_of_each_client_before_the_next_of_any() {
    let mut scene = scene(1);
    let pos = |client: u64, n: u64| (client * 32 + n) * BLOCK;
    for (client, count) in [(1, 20), (2, 3), (3, 1)] {
        (0..count).for_each(|n| scene.submit(Op::Read, pos(client, n), client << 32 | n));
    }
    assert!(scene.finish().iter().all(|(_, errno)| *errno == 0));
    let read = scene.image.reads();
    let index = |client, n| read.iter().position(|at| *at == pos(client, n)).unwrap();
    // The worker may have begun with some of the first client's requests before the others came.
    let first = index(2, 0);
    assert_eq!((index(3, 0), index(2, 1)), (first + 1, first + 3), "{read:?}");
    let of_first: Vec<_> = read.iter().filter(|at| **at < pos(2, 0)).collect();
    assert!(of_first.len() == 20 && of_first.is_sorted());
}

/// How many of the 20 requests that workers take next are of the second of two disks with these weights,
/// of which two engines have many requests each.
fn turns_of_the_second(weights: [Option<u32>; 2]) -> usize {
    // Both disks have the image, which records the requests of both in one list.
    let (scratch, image) = (Scratch::new(), WorkerOnlyImage::default());
    let disks = ["first", "second"].map(|name| image.device(&scratch.join(name), SIZE));
    for (disk, weight) in disks.iter().zip(weights) {
        weight.into_iter().for_each(|weight| disk.set_weight(weight));
    }
    let workers = WorkerPool::new(1);
    let config = Config { slots: 256, ..Config::default() };
    let mut engines = [(); 2].map(|()| {
        let queue = TestQueueKind::Threads.queue(256).unwrap();
        Engine::new(queue, workers.clone(), config).unwrap()
    });
    let held = image.hold();
    for engine in &mut engines {
        for (disk, pos) in disks.iter().zip([0, BLOCK]) {
            let disk = engine.attach(disk.clone()).unwrap();
            for tag in 0..30 {
                let range = ByteRange::new(pos, BLOCK);
                let io = Request { op: Op::Read, flags: Flags::NONE, range };
                let buf = engine.buffer(&disk, range).unwrap();
                engine.submit(&disk, io, buf, tag).map_err(|rejected| rejected.error).unwrap();
            }
        }
        engine.poll().unwrap();
    }
    // These were taken before all were there.
    let begun = image.reads().len();
    drop(held);
    engines.iter_mut().for_each(|engine| assert_eq!(engine.finish().len(), 60));
    image.reads()[begun..begun + 20].iter().filter(|pos| **pos == BLOCK).count()
}

#[test]
fn disks_take_turns_on_the_workers_of_all_engines_by_their_weights() {
    for (weights, share) in [
        ([None, None], 10),
        ([Some(100), Some(400)], 16),
        ([None, Some(100)], 10),
        ([Some(40_000), Some(0)], 0), // taken as 10000 and 1
    ] {
        let turns = turns_of_the_second(weights);
        assert!(turns.abs_diff(share) <= 2, "{weights:?}: {turns}");
    }
}

#[test]
fn c40_disks_that_never_answer_take_no_worker_from_another_one_of_their_pool() {
    let scratch = Scratch::new();
    let images = [(); 9].map(|()| WorkerOnlyImage::default());
    let queue = TestQueueKind::Threads.queue(256).unwrap();
    let config = Config { slots: 256, ..Config::default() };
    let mut engine = Engine::new(queue, WorkerPool::new(4), config).unwrap();
    let disks = images.each_ref().map(|image| {
        let path = scratch.join(&format!("{:p}", std::ptr::from_ref(image)));
        engine.attach(image.device(&path, SIZE)).unwrap()
    });
    let ([hanging @ .., answering], [silent @ .., _]) = (&disks, &images);
    let held = silent.each_ref().map(WorkerOnlyImage::hold);
    let submit = |engine: &mut Engine<_, _>, disk, tag| {
        let range = ByteRange::new(BLOCK, BLOCK);
        let buf = engine.buffer(disk, range).unwrap();
        let io = Request { op: Op::Read, flags: Flags::NONE, range };
        engine.submit(disk, io, buf, tag).map_err(|rejected| rejected.error).unwrap();
    };
    for disk in hanging {
        (0..16).for_each(|tag| submit(&mut engine, disk, tag));
    }
    // More than one after the other: a worker that is added for each is not the last one.
    for tag in 100..120 {
        submit(&mut engine, answering, tag);
        while engine.in_flight_of(answering) > 0 {
            engine.wait_once();
            while let Some(done) = engine.next() {
                assert_eq!((done.tag, done.result()), (tag, Ok(BLOCK)));
            }
        }
    }
    assert_eq!(hanging.iter().map(|disk| engine.in_flight_of(disk)).sum::<usize>(), 8 * 16);
    drop(held);
    assert_eq!(engine.finish().len(), 8 * 16);
}
