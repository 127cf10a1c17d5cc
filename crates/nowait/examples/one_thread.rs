//! Counts the blocks of an image that are zeros, with tasks on one thread: `nowait::LocalAsyncFile`
//! beside other tasks of a current-thread runtime.
//!
//! `one_thread IMAGE`: each task takes the next part that no task has taken; another task prints
//! the progress twice a second.

use std::cell::Cell;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use nowait::{Error, IoBuffer, LocalAsyncFile, OpenOptions};
use tokio::task::{LocalSet, spawn_local};

/// Bytes of a part and of a block, and the number of tasks.
const STEP_BYTES: u64 = 64 << 10;
const BLOCK_BYTES: usize = 4096;
const TASKS: usize = 32;

struct Count {
    file: LocalAsyncFile,
    /// First byte of the next part.
    next: Cell<u64>,
    zeros: Cell<usize>,
}

/// Counts in parts until no part is left.
async fn count(count: Rc<Count>) -> Result<(), Error> {
    let mut buffer = IoBuffer::zeroed(STEP_BYTES as usize)?;
    while count.next.get() < count.file.size() {
        let pos = count.next.replace(count.next.get() + STEP_BYTES);
        let read;
        (read, buffer) = count.file.read_at(buffer, pos).await;
        let blocks = buffer[..read?].chunks(BLOCK_BYTES);
        let zeros = blocks.filter(|block| block.iter().all(|&byte| byte == 0)).count();
        count.zeros.set(count.zeros.get() + zeros);
    }
    Ok(())
}

async fn print_progress(count: Rc<Count>) {
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        eprintln!("{} MiB", count.next.get() >> 20);
    }
}

pub(crate) async fn run(path: &Path) -> Result<usize, Error> {
    let options = OpenOptions::new().read_only(true);
    let file = LocalAsyncFile::open(path, options)?;
    spawn_local(file.tokio_driver());
    let all = Rc::new(Count { file, next: Cell::new(0), zeros: Cell::new(0) });
    let progress = spawn_local(print_progress(all.clone()));
    let tasks: Vec<_> = (0..TASKS).map(|_| spawn_local(count(all.clone()))).collect();
    for task in tasks {
        // A task that panics prints a message on stderr; its part counts as not read.
        task.await.unwrap_or(Err(Error::new(libc::EIO, nowait::Operation::Read)))?;
    }
    progress.abort();
    Ok(all.zeros.get())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let [image] = args.as_slice() else {
        eprintln!("usage: one_thread IMAGE");
        return ExitCode::from(2);
    };
    match LocalSet::new().run_until(run(Path::new(image))).await {
        Ok(zeros) => {
            println!("{zeros} blocks of {BLOCK_BYTES} bytes are zeros");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("one_thread: {error}");
            ExitCode::from(2)
        }
    }
}
