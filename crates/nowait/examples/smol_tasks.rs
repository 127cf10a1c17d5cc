//! Tasks of smol, here of the crates that it consists of, and a timer beside them: `LocalAsyncFile` on one thread, as a
//! task on its reactor or with the whole executor run by `LocalDriver`; and `AsyncFile` on any of its threads.
//!
//! `smol_tasks FILE`: counts the bytes of the file three times.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use async_executor::{Executor, LocalExecutor};
use async_io::{Async, Timer};
use nowait::{AsyncFile, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions};

const STEP: usize = 64 << 10;

/// Reads to the end of a file, whatever its type.
macro_rules! count {
    ($file:expr) => {{
        let (mut buffer, mut pos, mut read) = (IoBuffer::zeroed(STEP)?, 0, Ok(1));
        while read? > 0 {
            (read, buffer) = $file.read_at(buffer, pos).await;
            pos += read? as u64;
        }
        pos
    }};
}

/// The bytes of the file, as tasks of each executor count them.
pub(crate) fn run(path: &Path) -> std::io::Result<[u64; 3]> {
    let options = OpenOptions::new().read_only(true);
    // The reactor of smol waits for the ring.
    let local = LocalExecutor::new();
    let as_task = async_io::block_on(local.run(async {
        let file = LocalAsyncFile::open(path, options)?;
        let ring = Async::new_nonblocking(file.driver_fd()?)?;
        local.spawn(file.driver(move |context| ring.poll_readable(context))).detach();
        Timer::after(Duration::from_millis(1)).await;
        std::io::Result::Ok(count!(file))
    }))?;
    // The ring waits for the tasks.
    let local = LocalExecutor::new();
    let around = LocalDriver::new()?.block_on(local.run(async {
        let file = LocalAsyncFile::open(path, options)?;
        Timer::after(Duration::from_millis(1)).await;
        std::io::Result::Ok(count!(file))
    }))?;
    // Threads of smol, and one of the library.
    let executor = Executor::new();
    let any_thread = async_io::block_on(executor.run(async {
        let file = AsyncFile::open(path, options)?;
        executor.spawn(async move { std::io::Result::Ok(count!(file)) }).await
    }))?;
    Ok([as_task, around, any_thread])
}

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: smol_tasks FILE");
        return ExitCode::from(2);
    };
    match run(Path::new(&path)) {
        Ok(counts) => {
            println!("{counts:?} bytes");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("smol_tasks: {error}");
            ExitCode::FAILURE
        }
    }
}
