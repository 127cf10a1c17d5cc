//! Measures the cost of a hit in the extent cache of a qcow2 image.
//!
//! `lookup_cost IMAGE LOOKUPS`: run it under `valgrind --tool=callgrind` with two numbers of
//! lookups; the difference in instructions divided by the difference of the numbers is the cost of
//! one lookup.

use std::process::ExitCode;

use nowait::{ByteRange, Direct};
use nowait_image::qcow2_disk::{ServeOptions, open};
use nowait_image::{Chain, ChainOptions};

const BLOCK: u64 = 4096;

fn run() -> Result<u64, Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let image = arguments.next().ok_or("no IMAGE")?;
    let lookups: u64 =
        arguments.next().and_then(|n| n.to_str()?.parse().ok()).ok_or("no LOOKUPS")?;
    let chain = Chain::open(image.as_ref(), &ChainOptions::default())?;
    let options = ServeOptions { writable: false, direct: Direct::Off, cache_holes: true };
    let (disk, _open_image) = open(chain, options)?;
    let disk = std::sync::Arc::new(disk);
    let file = nowait::BlockingFile::new(disk.clone());
    let (size, mut memory) = (disk.size(), [0; BLOCK as usize]);
    for pos in (0..size).step_by(1 << 20) {
        file.read_at(&mut memory, pos)?;
    }
    // Positions all over the disk, so that consecutive lookups are not adjacent.
    let step = ((size / BLOCK / 5 * 3) | 1) * BLOCK;
    let mut holes = 0;
    let mut pos = 0;
    for _ in 0..lookups {
        let extent = disk.cached_extent(ByteRange::new(pos, BLOCK));
        holes += u64::from(extent.hole);
        pos = (pos + step) % size;
    }
    Ok(holes)
}

fn main() -> ExitCode {
    match run() {
        Ok(holes) => {
            println!("{holes} of them in holes");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
