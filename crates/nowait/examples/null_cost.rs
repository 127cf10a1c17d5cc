//! The cost of the engine alone: requests of 4 KiB on a queue that does no I/O.
//!
//! `null_cost REQUESTS simple|general`: run it under `valgrind --tool=callgrind` with two counts
//! and divide the difference of the instructions by the difference of the counts. The quotient is
//! the cost of one request, submission and completion.
#![allow(unsafe_code)]

use std::process::ExitCode;
use std::sync::Arc;

use nowait::{
    BlockDevice, ByteRange, Config, Engine, Flags, IoSegment, LinearMap, Null, Op, OpenOptions,
    Request, WorkerPool,
};

const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 4096;
/// Requests that are submitted before each poll, as a server does under load.
const BATCH: usize = 32;

/// The memory of one request.
#[repr(align(4096))]
struct Page([u8; BLOCK as usize]);

/// The sums of the completions' bytes and tags.
#[derive(Default, PartialEq, Eq)]
struct Done {
    bytes: u64,
    tags: u64,
}

fn read(
    engine: &mut Engine<Null, LinearMap>,
    pages: &mut [Page],
    requests: u64,
) -> Result<Done, nowait::Error> {
    let mut done = Done::default();
    let mut n = 0;
    while n < requests {
        let count = pages.len().min((requests - n) as usize);
        for page in &mut pages[..count] {
            let range = ByteRange::new(n * BLOCK % SIZE, BLOCK);
            let io = Request { op: Op::Read, flags: Flags::NONE, range };
            let segment = IoSegment { base: page.0.as_mut_ptr(), len: page.0.len() };
            // SAFETY: the page is borrowed for longer than this function runs, which returns early
            // only when the program ends. Each page is used by one request at a time: all requests
            // of a batch have ended before the next batch begins.
            unsafe { engine.submit_user_memory(io, &[segment], n) }.map_err(|it| it.error)?;
            n += 1;
        }
        engine.poll()?;
        while let Some(completion) = engine.next() {
            done.bytes += completion.result()?;
            done.tags += completion.tag;
        }
    }
    Ok(done)
}

fn run(requests: u64, simple: bool) -> Result<u64, Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("null.img");
    std::fs::File::create(&path)?.set_len(SIZE)?;
    let disk = Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default())?);
    let config = Config { simple, ..Config::default() };
    let workers = WorkerPool::new(&disk, 1);
    // Declared before the engine, so that they are dropped after it.
    let mut pages: Vec<Page> = (0..BATCH).map(|_| Page([0; BLOCK as usize])).collect();
    let mut engine = Engine::new(disk, workers, Null::new()?, config)?;
    let done = read(&mut engine, &mut pages, requests)?;
    let tags = requests * requests.saturating_sub(1) / 2;
    if done != (Done { bytes: requests * BLOCK, tags }) {
        return Err("the completions do not match the requests".into());
    }
    let stats = engine.stats();
    let path = if simple { stats.simple } else { stats.general };
    if path != requests {
        return Err(format!("took another path: {stats:?}").into());
    }
    if stats.pool.hit + stats.pool.allocated != requests {
        return Err(format!("a request took more than one slot: {stats:?}").into());
    }
    Ok(done.bytes)
}
fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (requests, simple) = match args.as_slice() {
        [count, path] if path == "simple" || path == "general" => (count.parse(), path == "simple"),
        _ => {
            eprintln!("usage: null_cost REQUESTS simple|general");
            return ExitCode::from(2);
        }
    };
    let Ok(requests) = requests else {
        eprintln!("null_cost: REQUESTS is not a number");
        return ExitCode::from(2);
    };
    match run(requests, simple) {
        Ok(bytes) => {
            println!("{bytes} bytes in {requests} requests");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("null_cost: {error}");
            ExitCode::FAILURE
        }
    }
}
