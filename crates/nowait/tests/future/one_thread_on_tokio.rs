//! The async API of one thread, by tokio's reactor.

use std::time::Duration;

use nowait::{IoBuffer, LocalAsyncFile};
use nowait_testkit::TestQueueKind;
use tokio::runtime::Runtime;
use tokio::task::{LocalSet, spawn_local};

use crate::device_share::Share;
use crate::one_thread::start;
use crate::{SIZE, TASKS, image, wait_for_the_end};

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn tasks_agree_with_the_model_while_futures_are_dropped() {
    for kind in TestQueueKind::REAL {
        let (_dir, path) = image(SIZE);
        let Some((file, disk)) = start(&path, kind) else { continue };
        LocalSet::new().block_on(&runtime(), async {
            let driver = spawn_local(file.tokio_driver());
            let shares = (0..TASKS).map(|task| spawn_local(Share::new(file.clone(), task).run()));
            for share in shares.collect::<Vec<_>>() {
                share.await.unwrap();
            }
            drop(file);
            driver.await.unwrap().unwrap();
        });
        wait_for_the_end(&disk);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
    }
}

/// A read after the driver has gone to sleep, and beside a timer of the runtime.
#[test]
fn a_driver_that_sleeps_is_woken_by_the_next_request() {
    for kind in TestQueueKind::REAL {
        let (_dir, path) = image(SIZE);
        let Some((file, _)) = start(&path, kind) else { continue };
        LocalSet::new().block_on(&runtime(), async {
            spawn_local(file.tokio_driver());
            for n in 0..20 {
                tokio::time::sleep(Duration::from_millis(2)).await;
                let buffer = IoBuffer::zeroed(4096).unwrap();
                assert_eq!(file.read(n * 4096, buffer).await.0, Ok(4096));
                file.flush().await.unwrap();
            }
        });
    }
}

#[test]
fn c45_a_runtime_that_is_dropped_in_flight_leaves_its_requests_to_the_file() {
    for kind in TestQueueKind::REAL {
        let (_dir, path) = image(SIZE);
        let Some((file, disk)) = start(&path, kind) else { continue };
        for round in 0..20 {
            let tasks = LocalSet::new();
            tasks.spawn_local(file.tokio_driver());
            for n in 0..round {
                tasks.spawn_local(read(file.clone(), n * 4096));
            }
            tasks.block_on(&runtime(), tokio::task::yield_now());
        }
        drop(file);
        wait_for_the_end(&disk);
    }
}

async fn read(file: LocalAsyncFile, pos: u64) {
    let _ = file.read(pos, IoBuffer::zeroed(4096).unwrap()).await;
}
