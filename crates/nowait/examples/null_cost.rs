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

fn run(requests: u64, simple: bool) -> Result<u64, Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("null.img");
    std::fs::File::create(&path)?.set_len(SIZE)?;
    let disk = Arc::new(Disk::open_mapped(&path, OpenOptions::default())?);
    let config = Config { simple, ..Config::default() };
    let workers = Workers::new(&disk, 1);
    let mut engine = Engine::new(disk, workers, Null::new()?, config)?;
    let mut buf = engine.buffer(Range::new(0, BLOCK));
    let mut done = 0;
    for n in 0..requests {
        let range = Range::new(n * BLOCK % SIZE, BLOCK);
        let io = Io { op: Op::Read, flags: Flags::NONE, range };
        let Some(memory) = buf.take() else { return Err("no buffer".into()) };
        engine.submit(io, memory, n).map_err(|rejected| rejected.error)?;
        engine.poll()?;
        while let Some(completion) = engine.next() {
            done += completion.result()?;
            buf = completion.buf;
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
