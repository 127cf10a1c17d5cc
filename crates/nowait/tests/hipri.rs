//! `HIPRI` is a hint: on a device without polled queues its requests are served all the same.

use std::sync::Arc;

use nowait::{
    AioThreadQueue, BlockDevice, ByteRange, Config, Engine, Flags, IoQueue, LinearMap, Op,
    OpenOptions, Request, Uring, WorkerPool,
};

const SIZE: usize = 64 << 10;

fn serves_hipri<Q: IoQueue>(
    make: impl Fn(&BlockDevice<LinearMap>, u32) -> Result<Q, nowait::Error>,
) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, [7; SIZE]).unwrap();
    let disk = Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default()).unwrap());
    for simple in [true, false] {
        let config = Config { simple, slots: 64, ..Config::default() };
        let queue = match make(&disk, config.slots) {
            Ok(queue) => queue,
            Err(error) => return println!("skipped: {error}"),
        };
        let workers = WorkerPool::new(&disk, 1);
        let mut engine = Engine::new(disk.clone(), workers, queue, config).unwrap();
        let range = ByteRange::new(4096, 8192);
        let buf = engine.buffer(range).unwrap();
        let io = Request { op: Op::Read, flags: Flags::HIPRI, range };
        assert!(engine.submit(io, buf, 1).is_ok());
        let completion = loop {
            match engine.next() {
                Some(completion) => break completion,
                None => engine.wait(None, &mut |_, _| {}).unwrap(),
            }
        };
        assert_eq!(completion.result().unwrap(), 8192);
        assert!(completion.buf.unwrap()[..8192].iter().all(|&byte| byte == 7));
    }
}

#[test]
fn c48_hipri_is_served_with_or_without_a_polled_device_by_uring() {
    serves_hipri(|disk, _| Uring::new(disk.fd()?));
}

#[test]
fn c48_hipri_is_served_with_or_without_a_polled_device_by_threads() {
    serves_hipri(|disk, slots| AioThreadQueue::new(disk.fd()?, slots, false));
}
