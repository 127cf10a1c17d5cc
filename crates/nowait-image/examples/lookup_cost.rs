//! What it costs to ask where bytes of a qcow2 image are, when that is known.
//!
//! `lookup_cost IMAGE LOOKUPS`: run it under `valgrind --tool=callgrind` with two numbers and
//! subtract; the difference divided by that of the numbers is the cost of one lookup.

use std::process::ExitCode;

use nowait::{Direct, Range};
use nowait_image::served::{ServeOptions, open};
use nowait_image::{Chain, ChainOptions};

const BLOCK: u64 = 4096;

fn run() -> Result<u64, Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let image = arguments.next().ok_or("no IMAGE")?;
    let lookups: u64 =
        arguments.next().and_then(|n| n.to_str()?.parse().ok()).ok_or("no LOOKUPS")?;
    let chain = Chain::open(image.as_ref(), &ChainOptions::default())?;
    let options = ServeOptions { writable: false, direct: Direct::Off, hint: true };
    let (disk, _keeper) = open(chain, options)?;
    let disk = std::sync::Arc::new(disk);
    let file = nowait::File::new(disk.clone());
    let (size, mut memory) = (disk.size(), [0; BLOCK as usize]);
    for pos in (0..size).step_by(1 << 20) {
        file.read_at(&mut memory, pos)?;
    }
    // All over the disk, so that no two in a row are neighbours.
    let step = ((size / BLOCK / 5 * 3) | 1) * BLOCK;
    let mut known = 0;
    let mut pos = 0;
    for _ in 0..lookups {
        let span = disk.known_span(Range::new(pos, BLOCK));
        known += u64::from(span.hole);
        pos = (pos + step) % size;
    }
    Ok(known)
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
