//! Reads of 4 KiB at random, by each API: what a request costs where the disk is fast, and the disk where it is slow.
//!
//! `request_rates FILE DEPTH REQUESTS API…` prints requests a second for each API, in turn: `blocking` (at depth 1 only),
//! `local` (`LocalAsyncFile`), `tokio` (the same, driven by tokio), `async` (`AsyncFile`, tasks of one thread) and `threads`
//! (`AsyncFile`, tasks of two).

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use nowait::{AsyncFile, BlockingFile, Error, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions};
use tokio::runtime::Builder;
use tokio::task::LocalSet;

type Failure = Box<dyn std::error::Error>;

const BLOCK: u64 = 4096;

/// Positions that repeat from run to run.
fn position(size: u64, task: u64, request: u64) -> u64 {
    let mixed = (request << 16 | task).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    mixed % (size / BLOCK) * BLOCK
}

/// Reads `requests` blocks one after the other, of a file of either type.
macro_rules! read_all {
    ($file:expr, $task:expr, $requests:expr) => {{
        let mut buffer = IoBuffer::zeroed(BLOCK as usize)?;
        let size = $file.size();
        for request in 0..$requests {
            let read;
            (read, buffer) = $file.read_at(buffer, position(size, $task, request)).await;
            read?;
        }
        Ok::<(), Error>(())
    }};
}

async fn local(path: &Path, depth: u64, each: u64, on_tokio: bool) -> Result<(), Failure> {
    let file = LocalAsyncFile::open(path, OpenOptions::new().read_only(true))?;
    if on_tokio {
        tokio::task::spawn_local(file.tokio_driver());
    }
    let task = |task| {
        let file = file.clone();
        async move { read_all!(file, task, each) }
    };
    let tasks: Vec<_> = (0..depth).map(|n| tokio::task::spawn_local(task(n))).collect();
    for task in tasks {
        task.await??;
    }
    Ok(())
}

async fn any_thread(path: &Path, depth: u64, each: u64) -> Result<(), Failure> {
    let file = AsyncFile::open(path, OpenOptions::new().read_only(true))?;
    let task = |task| {
        let file = file.clone();
        async move { read_all!(file, task, each) }
    };
    let tasks: Vec<_> = (0..depth).map(|n| tokio::spawn(task(n))).collect();
    for task in tasks {
        task.await??;
    }
    Ok(())
}

fn run(path: &Path, depth: u64, each: u64, api: &str) -> Result<(), Failure> {
    match api {
        "blocking" => {
            let file = BlockingFile::open(path, OpenOptions::new().read_only(true))?;
            let mut buffer = IoBuffer::zeroed(BLOCK as usize)?;
            for request in 0..each * depth {
                file.read_at(&mut buffer, position(file.size(), 0, request))?;
            }
            Ok(())
        }
        "local" => {
            LocalDriver::new()?.block_on(LocalSet::new().run_until(local(path, depth, each, false)))
        }
        "tokio" => {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(LocalSet::new().run_until(local(path, depth, each, true)))
        }
        "async" => {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(any_thread(path, depth, each))
        }
        "threads" => {
            let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            runtime.block_on(any_thread(path, depth, each))
        }
        _ => Err(format!("no such API: {api}").into()),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, depth, requests, apis @ ..] = args.as_slice() else {
        eprintln!("usage: request_rates FILE DEPTH REQUESTS API…");
        return ExitCode::from(2);
    };
    let (Ok(depth @ 1..), Ok(requests)) = (depth.parse::<u64>(), requests.parse::<u64>()) else {
        eprintln!("request_rates: DEPTH and REQUESTS are numbers from 1 on");
        return ExitCode::from(2);
    };
    for api in apis {
        let began = Instant::now();
        let each = requests.div_ceil(depth);
        if let Err(error) = run(Path::new(path), depth, each, api) {
            eprintln!("request_rates: {api}: {error}");
            return ExitCode::FAILURE;
        }
        println!("{api} {:.0}", (each * depth) as f64 / began.elapsed().as_secs_f64());
    }
    ExitCode::SUCCESS
}
