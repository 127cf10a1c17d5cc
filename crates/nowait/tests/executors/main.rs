//! The examples for executors, each run on its own one, and files as streams.

#[path = "../../examples/asynchronous.rs"]
#[expect(dead_code, reason = "the test calls what its `main` calls")]
mod asynchronous;
#[path = "../../examples/block_on.rs"]
#[expect(dead_code, reason = "as above")]
mod block_on;
#[path = "../../examples/one_thread.rs"]
#[expect(dead_code, reason = "as above")]
mod one_thread;
#[path = "../../examples/smol_tasks.rs"]
#[expect(dead_code, reason = "as above")]
mod smol_tasks;
mod stream_model;
#[path = "../../examples/streams.rs"]
#[expect(dead_code, reason = "as above")]
mod streams;
#[path = "../../examples/thread_per_core.rs"]
#[expect(dead_code, reason = "as above")]
mod thread_per_core;

use std::path::PathBuf;

/// A file of 100 blocks and a part of one, every third of which is zeros.
fn file() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("file");
    let bytes: Vec<u8> = (0..100 * 4096 + 100).map(|at| u8::from(at / 4096 % 3 != 0)).collect();
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

#[test]
fn tasks_of_tokio_on_several_threads_compare_files() {
    let (dir, path) = file();
    let other = dir.path().join("other");
    std::fs::copy(&path, &other).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    let compare = || runtime.block_on(asynchronous::first_difference(&path, &other));
    assert_eq!(compare(), Ok(None));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[77_777] ^= 1;
    std::fs::write(&other, bytes).unwrap();
    assert_eq!(compare(), Ok(Some(77_777)));
}

#[test]
fn tasks_of_tokio_on_one_thread_count_zeros() {
    let (_dir, path) = file();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let tasks = tokio::task::LocalSet::new();
    // The last block, of 100 bytes, is not zeros.
    assert_eq!(tasks.block_on(&runtime, one_thread::run(&path)), Ok(34));
}

#[test]
fn tasks_of_smol_read_by_its_reactor_by_the_driver_and_on_any_thread() {
    let (_dir, path) = file();
    assert_eq!(smol_tasks::run(&path).unwrap(), [100 * 4096 + 100; 3]);
}

#[test]
fn a_thread_for_each_processor_counts_its_part() {
    let (_dir, path) = file();
    assert_eq!(thread_per_core::run(&path), Ok(34));
}

#[test]
fn a_program_without_a_runtime_writes_and_reads() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    assert_eq!(block_on::run(&dir.path().join("new")), Ok(7));
}

#[test]
fn a_stream_is_copied_by_tokio() {
    let (dir, path) = file();
    let copy = dir.path().join("copy");
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    assert_eq!(runtime.block_on(streams::run(&path, &copy)).unwrap(), 100 * 4096 + 100);
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&copy).unwrap());
}

/// A driver whose reactor fails ends with that error, and the next driver goes on.
#[test]
fn a_driver_on_any_reactor_ends_with_the_error_of_the_reactor() {
    use async_io::Async;
    use nowait::{IoBuffer, LocalAsyncFile, OpenOptions};
    use std::task::Poll;

    let (_dir, path) = file();
    let executor = async_executor::LocalExecutor::new();
    async_io::block_on(executor.run(async {
        let file = LocalAsyncFile::open(&path, OpenOptions::new().read_only(true)).unwrap();
        let no_descriptor = || std::io::Error::from_raw_os_error(libc::EMFILE);
        let broken = executor.spawn(file.driver(move |_| Poll::Ready(Err(no_descriptor()))));
        let ring = Async::new_nonblocking(file.driver_fd().unwrap()).unwrap();
        let good = executor.spawn(file.driver(move |context| ring.poll_readable(context)));
        for n in 0..100 {
            assert_eq!(file.read_at(IoBuffer::zeroed(4096).unwrap(), n * 4096).await.0, Ok(4096));
        }
        drop(file);
        // A file that answers each request while it is submitted never asks the reactor.
        let end = broken.await;
        assert!(end.is_ok() || end.is_err_and(|error| error.errno() == libc::EMFILE));
        good.await.unwrap();
    }));
}
