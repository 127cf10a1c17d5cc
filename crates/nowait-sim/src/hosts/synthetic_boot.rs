//! A boot that is drawn: files, most of them small, that a few processes read one after the other.
//!
//! Invariant: the parameters and the seed decide the reads.

use nowait::sim::Random;

use super::boot_read::{PAGE, Read};
use super::timeline::seconds;

/// The most processes of a phase.
const MOST_LANES: u64 = 6;
/// Parts of a boot.
pub(super) const PHASES: usize = 12;

/// The reads of each process in each phase: `read_bytes` of an image of `image_bytes`, in a boot that
/// takes `think_seconds` if reads take no time.
pub(super) fn phases(
    [image_bytes, read_bytes]: [u64; 2],
    think_seconds: f64,
    seed: u64,
) -> Vec<Vec<Vec<Read>>> {
    let mut random = Random::part(seed, 1);
    let mut phases = Vec::new();
    for _ in 0..PHASES {
        let lanes = 1 + random.below(MOST_LANES) as usize;
        let bytes = read_bytes / (PHASES * lanes) as u64;
        let lane = |_| lane_of(image_bytes, bytes, think_seconds, &mut random);
        phases.push((0..lanes).map(lane).collect());
    }
    phases
}

/// Reads of one process: `bytes` in files, each from its beginning to its end.
fn lane_of(image_bytes: u64, bytes: u64, think_seconds: f64, random: &mut Random) -> Vec<Read> {
    let mut reads = Vec::new();
    let mut left = bytes;
    while left > 0 {
        // From 4 KiB to 8 MiB, most of them small.
        let doubling = random.below(11).min(random.below(11));
        let file = (PAGE << doubling) + PAGE * random.below(1 << doubling);
        let file = file.min(left.next_multiple_of(PAGE)).min(image_bytes);
        let places = [0; 2].map(|_| {
            let pages = (image_bytes - file) / PAGE;
            PAGE * random.below(pages + 1)
        });
        let mut done = 0;
        // The guest reads ahead: 16 KiB, then twice as much, up to 256 KiB.
        let mut len = 4 * PAGE;
        while done < file {
            let now = len.min(file - done);
            reads.push(Read { places: places.map(|pos| pos + done), len: now, think: 0 });
            done += now;
            len = (len * 2).min(256 << 10);
        }
        left = left.saturating_sub(file);
    }
    let mut weights: Vec<_> = reads.iter().map(|_| 1 + random.below(1000)).collect();
    let all: u64 = weights.iter().sum();
    let time = think_seconds / PHASES as f64;
    for (read, weight) in reads.iter_mut().zip(&mut weights) {
        read.think = seconds(time * *weight as f64 / all.max(1) as f64);
    }
    reads
}
