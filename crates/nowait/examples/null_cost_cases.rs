//! The cost of the engine alone, as `null_cost`, for reads and writes of one program, with every byte
//! mapped or with extents from the allocation cache: the compiler knows neither the operation nor
//! the only caller.
//!
//! `null_cost_cases REQUESTS simple|general mapped|cache read|write`, run as `null_cost`.

#[path = "null_cost/requests.rs"]
mod requests;

use std::process::ExitCode;

use nowait::{BlockDevice, Op, OpenOptions};

use requests::{Failure, LOADED, SIZE, run};

fn on_file(case: Case, requests: u64) -> Result<u64, Failure> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("null.img");
    if !case.cache {
        std::fs::File::create(&path)?.set_len(SIZE)?;
        let disk = BlockDevice::open_mapped(&path, OpenOptions::default())?;
        return run::<_, LOADED>(disk, case.op, case.simple, requests);
    }
    // Written, so that it has no holes.
    std::fs::write(&path, vec![0; SIZE as usize])?;
    let disk = BlockDevice::open(&path, OpenOptions::new().cache_holes(true))?;
    disk.scan();
    run::<_, LOADED>(disk, case.op, case.simple, requests)
}

/// Counted cases.
#[derive(Clone, Copy)]
struct Case {
    simple: bool,
    cache: bool,
    op: Op,
}

impl Case {
    fn parse(words: &[String]) -> Option<Case> {
        let [path, map, op] = words else { return None };
        let one_of = |word: &str, [no, yes]: [&str; 2]| match word {
            _ if word == no => Some(false),
            _ if word == yes => Some(true),
            _ => None,
        };
        Some(Case {
            simple: one_of(path, ["general", "simple"])?,
            cache: one_of(map, ["mapped", "cache"])?,
            op: if one_of(op, ["read", "write"])? { Op::Write } else { Op::Read },
        })
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let parsed = args
        .split_first()
        .and_then(|(requests, case)| Some((requests.parse().ok()?, Case::parse(case)?)));
    let Some((requests, case)) = parsed else {
        eprintln!("usage: null_cost_cases REQUESTS simple|general mapped|cache read|write");
        return ExitCode::from(2);
    };
    match on_file(case, requests) {
        Ok(bytes) => {
            println!("{bytes} bytes in {requests} requests");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("null_cost_cases: {error}");
            ExitCode::FAILURE
        }
    }
}
