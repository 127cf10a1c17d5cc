//! Random requests against an array of bytes, on every queue and with each switch off.

use std::fs;
use std::sync::Arc;

use nowait::{BlockDevice, Config, Direct};
use nowait_testkit::model::Model;
use nowait_testkit::{Random, TestQueueKind, switches};

const SIZE: u64 = (4 << 20) + 1234;
const STEPS: u32 = 1500;

fn agrees_with_the_model(kind: TestQueueKind, direct: Direct, seed: u64) {
    for (label, config, disk) in switches(Config { slots: 64, ..Config::default() }) {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("disk.img");
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let disk = Arc::new(BlockDevice::open(&path, disk.direct(direct)).unwrap());
        let Some(mut engine) = kind.engine(&disk, 4, config) else { return };
        let bytes = vec![0; SIZE as usize];
        let mut model = Model::new(Random::from_seed(seed), bytes, label.to_owned());
        model.play(&mut engine, STEPS);
        let stats = engine.stats();
        assert_eq!(stats.failed, 0, "{label}");
        match label {
            "simple off" | "nowait first off" => assert_eq!(stats.simple, 0, "{label}"),
            _ => assert!(stats.simple > 0, "{label}: {stats:?}"),
        }
        drop(engine);
        assert!(fs::read(&path).unwrap() == model.bytes, "{label}: the image");
    }
}

#[test]
fn uring_direct_agrees_with_the_model_with_each_switch_off() {
    agrees_with_the_model(TestQueueKind::Uring, Direct::Auto, 0x1234_5678_9abc);
}

#[test]
fn uring_buffered_agrees_with_the_model_with_each_switch_off() {
    agrees_with_the_model(TestQueueKind::Uring, Direct::Off, 0xfeed_beef);
}

#[test]
fn threads_direct_agrees_with_the_model_with_each_switch_off() {
    agrees_with_the_model(TestQueueKind::Threads, Direct::Auto, 77);
}

#[test]
fn threads_buffered_agrees_with_the_model_with_each_switch_off() {
    agrees_with_the_model(TestQueueKind::Threads, Direct::Off, 99);
}
