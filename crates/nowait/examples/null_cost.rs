//! The cost of the engine alone: reads of 4 KiB on a queue that does no I/O, of a caller that makes
//! nothing but these, with every byte mapped.
//!
//! `null_cost REQUESTS simple|general`: run it under `valgrind --tool=callgrind` with two counts
//! and divide the difference of the instructions by the difference of the counts. The quotient is
//! the cost of one request, submission and completion.

#[path = "null_cost/requests.rs"]
mod requests;

use std::process::ExitCode;

use nowait::{BlockDevice, Op, OpenOptions};

use requests::{Failure, SIZE, run};

fn read(requests: u64, simple: bool) -> Result<u64, Failure> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("null.img");
    std::fs::File::create(&path)?.set_len(SIZE)?;
    run(BlockDevice::open_mapped(&path, OpenOptions::default())?, Op::Read, simple, requests)
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
    match read(requests, simple) {
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
