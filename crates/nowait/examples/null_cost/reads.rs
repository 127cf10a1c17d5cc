//! A program that counts the instructions of reads, `DEPTH` at a time.

use std::process::ExitCode;

use nowait::{BlockDevice, Op, OpenOptions};

use crate::requests::{Failure, SIZE, run};

fn read<const DEPTH: usize>(requests: u64, simple: bool) -> Result<u64, Failure> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("null.img");
    std::fs::File::create(&path)?.set_len(SIZE)?;
    run::<_, DEPTH>(
        BlockDevice::open_mapped(&path, OpenOptions::default())?,
        Op::Read,
        simple,
        requests,
    )
}

/// The program.
#[inline(always)]
pub(crate) fn reads<const DEPTH: usize>() -> ExitCode {
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
    match read::<DEPTH>(requests, simple) {
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
