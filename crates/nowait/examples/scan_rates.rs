//! How fast a file is scanned by small reads, in bytes a second and as ratios: with read-ahead and without,
//! beside reads through the page cache, which is cold, and beside direct reads of 4 MiB, one after the other, as
//! dd(1) makes them.
//!
//! `scan_rates FILE MIBYTES [ROUNDS]` makes FILE, and removes it. Each figure is the median of the rounds, which take
//! turns, so that other load meets all of them.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use nowait::{BlockingFile, IoBuffer, LocalAsyncFile, LocalDriver, OpenOptions};

type Failure = Box<dyn std::error::Error>;

const MIB: u64 = 1 << 20;
const LARGE: usize = 4 << 20;

fn make(path: &Path, size: u64) -> Result<(), Failure> {
    let mut file = File::create(path)?;
    let block: Vec<u8> = (0..MIB).map(|n| (n % 251) as u8).collect();
    for _ in 0..size / MIB {
        file.write_all(&block)?;
    }
    Ok(file.sync_all()?)
}

/// Drops the file's pages from the page cache.
fn make_cold(path: &Path) -> Result<(), Failure> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

/// Bytes a second of a scan by `read`, of all of a cold file, by reads of `len` bytes.
fn rate(
    path: &Path,
    size: u64,
    len: usize,
    read: &mut dyn FnMut(&mut IoBuffer, u64) -> Result<usize, Failure>,
) -> Result<f64, Failure> {
    make_cold(path)?;
    let mut buffer = IoBuffer::zeroed(len)?;
    let begin = Instant::now();
    let mut pos = 0;
    while pos < size {
        let done = read(&mut buffer, pos)?;
        if done == 0 {
            return Err("the file ends early".into());
        }
        pos += done as u64;
    }
    Ok(size as f64 / begin.elapsed().as_secs_f64())
}

fn blocking(path: &Path, size: u64, len: usize, ahead: bool) -> Result<f64, Failure> {
    let file = BlockingFile::open(path, OpenOptions::new().read_only(true).read_ahead(ahead))?;
    rate(path, size, len, &mut |buffer, pos| Ok(file.read_at(buffer, pos)?))
}

fn local(path: &Path, size: u64, len: usize) -> Result<f64, Failure> {
    let file = LocalAsyncFile::open(path, OpenOptions::new().read_only(true).read_ahead(true))?;
    let driver = LocalDriver::new()?;
    rate(path, size, len, &mut |buffer, pos| {
        let (done, back) = driver.block_on(file.read_at(std::mem::take(buffer), pos));
        *buffer = back;
        Ok(done?)
    })
}

fn buffered(path: &Path, size: u64, len: usize) -> Result<f64, Failure> {
    let file = File::open(path)?;
    rate(path, size, len, &mut |buffer, pos| Ok(file.read_at(buffer, pos)?))
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn measure(path: &Path, size: u64, rounds: usize) -> Result<(), Failure> {
    make(path, size)?;
    let mut large = Vec::new();
    let mut all = [8 << 10, 64 << 10].map(|len: usize| (len, [const { Vec::new() }; 4]));
    for _ in 0..rounds {
        large.push(blocking(path, size, LARGE, false)?);
        for (len, [page_cache, ahead, asynchronous, without]) in &mut all {
            page_cache.push(buffered(path, size, *len)?);
            ahead.push(blocking(path, size, *len, true)?);
            asynchronous.push(local(path, size, *len)?);
            without.push(blocking(path, size.min(64 * MIB), *len, false)?);
        }
    }
    let large = median(large);
    println!("direct reads of 4 MiB: {:.0} MB/s", large / 1e6);
    for (len, rates) in all {
        let [page_cache, ahead, asynchronous, without] = rates.map(median);
        println!(
            "reads of {} KiB: read ahead {:.0} MB/s; that is {:.2} of the page cache, {:.2} of 4 MiB \
             reads, {:.2} of no read-ahead; LocalAsyncFile {:.2} of the page cache",
            len >> 10,
            ahead / 1e6,
            ahead / page_cache,
            ahead / large,
            ahead / without,
            asynchronous / page_cache,
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let parsed = match args.as_slice() {
        [path, size] => size.parse().ok().map(|size: u64| (path, size, 3)),
        [path, size, rounds] => {
            size.parse().ok().zip(rounds.parse().ok()).map(|it| (path, it.0, it.1))
        }
        _ => None,
    };
    let Some((path, size, rounds)) = parsed.filter(|(_, size, rounds)| *size > 0 && *rounds > 0)
    else {
        eprintln!("usage: scan_rates FILE MIBYTES [ROUNDS]");
        return ExitCode::from(2);
    };
    let path = Path::new(path);
    let done = measure(path, size * MIB, rounds);
    let _ = std::fs::remove_file(path);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scan_rates: {error}");
            ExitCode::FAILURE
        }
    }
}
