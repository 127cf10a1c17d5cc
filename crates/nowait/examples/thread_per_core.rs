//! A runtime of one's own: a thread for each processor, each with an executor, a ring and a part of the work, as
//! thread-per-core runtimes have it. `LocalDriver` is what an executor of one thread sleeps in.
//!
//! `thread_per_core FILE`: counts the blocks of the file that are zeros.

use std::path::Path;
use std::process::ExitCode;

use async_executor::LocalExecutor;
use nowait::{Error, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions};

const BLOCK: u64 = 4096;
/// Tasks of each thread.
const TASKS: u64 = 8;

/// The zero blocks among every `step`th one from `first` on.
async fn count(file: LocalAsyncFile, first: u64, step: u64) -> Result<u64, Error> {
    let mut buffer = IoBuffer::zeroed(BLOCK as usize)?;
    let (mut zeros, mut block) = (0, first);
    while block * BLOCK < file.size() {
        let read;
        (read, buffer) = file.read_at(buffer, block * BLOCK).await;
        zeros += u64::from(buffer[..read?].iter().all(|&byte| byte == 0));
        block += step;
    }
    Ok(zeros)
}

/// The part of thread `thread` of `threads`.
fn run_thread(path: &Path, thread: u64, threads: u64) -> Result<u64, Error> {
    let executor = LocalExecutor::new();
    LocalDriver::new()?.block_on(executor.run(async {
        let file = LocalAsyncFile::open(path, OpenOptions::new().read_only(true))?;
        let parts = (0..TASKS).map(|task| task * threads + thread);
        let tasks: Vec<_> = parts
            .map(|first| executor.spawn(count(file.clone(), first, TASKS * threads)))
            .collect();
        let mut zeros = 0;
        for task in tasks {
            zeros += task.await?;
        }
        Ok(zeros)
    }))
}

/// The blocks of the file that are zeros.
pub(crate) fn run(path: &Path) -> Result<u64, Error> {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || run_thread(path, thread, threads)))
            .collect();
        let panicked = Err(Error::new(libc::EIO, nowait::Operation::Read));
        started.into_iter().map(|thread| thread.join().unwrap_or(panicked)).sum()
    })
}

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: thread_per_core FILE");
        return ExitCode::from(2);
    };
    match run(Path::new(&path)) {
        Ok(zeros) => {
            println!("{zeros} blocks of {BLOCK} bytes are zeros");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("thread_per_core: {error}");
            ExitCode::FAILURE
        }
    }
}
