//! The cost of the engine alone: requests of 4 KiB on a queue that does nothing.
//!
//! `null_cost REQUESTS simple|generic`: run it under `valgrind --tool=callgrind` with two counts
//! and subtract; the difference divided by the difference of the counts is the cost of one
//! request, submit and completion.

use std::process::ExitCode;
use std::sync::Arc;

use nowait::{Config, Disk, Engine, Flags, Io, Null, Op, OpenOptions, Range, Workers};

const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 4096;
/// Requests that are submitted before the queue is looked at, as a server does under load.
const BATCH: usize = 32;

fn run(requests: u64, simple: bool) -> Result<u64, Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("null.img");
    std::fs::File::create(&path)?.set_len(SIZE)?;
    let disk = Arc::new(Disk::open_mapped(&path, OpenOptions::default())?);
    let config = Config { simple, ..Config::default() };
    let workers = Workers::new(&disk, 1);
    let mut engine = Engine::new(disk, workers, Null::new()?, config)?;
    let mut bufs = Vec::new();
    for _ in 0..BATCH {
        bufs.push(engine.buffer(Range::new(0, BLOCK)).ok_or("no buffer")?);
    }
    let (mut done, mut n) = (0, 0);
    while n < requests {
        while n < requests
            && let Some(buf) = bufs.pop()
        {
            let range = Range::new(n * BLOCK % SIZE, BLOCK);
            let io = Io { op: Op::Read, flags: Flags::NONE, range };
            engine.submit(io, buf, n).map_err(|rejected| rejected.error)?;
            n += 1;
        }
        engine.poll()?;
        while let Some(completion) = engine.next() {
            done += completion.result()?;
            bufs.extend(completion.buf);
        }
    }
    let stats = engine.stats();
    let path = if simple { stats.simple } else { stats.generic };
    if path != requests {
        return Err(format!("took another path: {stats:?}").into());
    }
    Ok(done)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (requests, simple) = match args.as_slice() {
        [count, path] if path == "simple" || path == "generic" => (count.parse(), path == "simple"),
        _ => {
            eprintln!("usage: null_cost REQUESTS simple|generic");
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
