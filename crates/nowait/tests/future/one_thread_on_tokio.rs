//! The async API of one thread, by tokio's reactor.

use std::time::Duration;

use nowait::{IoBuffer, LocalAsyncFile};
use nowait_testkit::TestQueueKind;
use tokio::runtime::Runtime;
use tokio::task::{LocalSet, spawn_local};

use crate::device_share::Share;
use crate::one_thread::start;
use crate::{SIZE, TASKS, image, open, wait_for_the_end};

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
                assert_eq!(file.read_at(buffer, n * 4096).await.0, Ok(4096));
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
    let _ = file.read_at(IoBuffer::zeroed(4096).unwrap(), pos).await;
}

/// One driver serves all files of an engine; when it is dropped, another one takes over.
#[test]
fn one_of_several_drivers_serves_all_files_until_the_last_one_is_closed() {
    for kind in TestQueueKind::REAL {
        let ((_dir, path), (_other_dir, other_path)) = (image(SIZE), image(SIZE));
        let Some((file, disk)) = start(&path, kind) else { continue };
        let other = file.another(open(&other_path).0).unwrap();
        LocalSet::new().block_on(&runtime(), async {
            let drivers: Vec<_> =
                [&file, &file, &other, &other].map(|file| spawn_local(file.tokio_driver())).into();
            let both = async || {
                for file in [&file, &other] {
                    assert_eq!(file.read_at(IoBuffer::zeroed(4096).unwrap(), 0).await.0, Ok(4096));
                }
            };
            both().await;
            for driver in &drivers[..3] {
                assert!(!driver.is_finished());
                driver.abort();
                both().await;
            }
            drop(file);
            assert_eq!(other.read_at(IoBuffer::zeroed(4096).unwrap(), 0).await.0, Ok(4096));
            assert!(!drivers[3].is_finished());
            drop(other);
            let mut ends = Vec::new();
            for driver in drivers {
                ends.push(driver.await);
            }
            assert!(ends.pop().unwrap().unwrap().is_ok());
            assert!(ends.into_iter().all(|end| end.unwrap_err().is_cancelled()));
        });
        wait_for_the_end(&disk);
    }
}

#[test]
fn a_driver_that_waits_for_another_one_ends_with_the_last_file() {
    let (_dir, path) = image(SIZE);
    LocalSet::new().block_on(&runtime(), async {
        let file = LocalAsyncFile::open(&path, nowait::OpenOptions::default()).unwrap();
        let drivers = [(); 3].map(|()| spawn_local(file.tokio_driver()));
        read(file.clone(), 0).await;
        drop(file);
        for driver in drivers {
            driver.await.unwrap().unwrap();
        }
    });
}
