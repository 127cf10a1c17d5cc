//! Measures the cost of a write to an image, whose clusters or blocks are allocated.
//!
//! `write_cost IMAGE WRITES`: run it under `valgrind --tool=callgrind` with two numbers of writes; the
//! difference in instructions divided by the difference of the numbers is the cost of one write.

use std::process::ExitCode;

use nowait::{BlockingFile, Direct, Flags};
use nowait_image::ChainOptions;

const BLOCK: u64 = 4096;

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let image = arguments.next().ok_or("no IMAGE")?;
    let writes: u64 = arguments.next().and_then(|n| n.to_str()?.parse().ok()).ok_or("no WRITES")?;
    let options = ChainOptions {
        writable: true,
        direct: Direct::Off,
        cache_holes: true,
        ..ChainOptions::default()
    };
    let image = nowait_image::open(image.as_ref(), &options)?;
    let file = BlockingFile::new(image.device());
    let (size, memory) = (image.size(), [7; BLOCK as usize]);
    // The first write to each region stores its bits.
    for pos in (0..size).step_by(1 << 20) {
        file.write_at(&memory, pos, Flags::NONE)?;
    }
    // Positions all over the disk, so that consecutive writes are not adjacent.
    let step = ((size / BLOCK / 5 * 3) | 1) * BLOCK;
    let mut pos = 0;
    for _ in 0..writes {
        file.write_at(&memory, pos, Flags::NONE)?;
        pos = (pos + step) % size;
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
