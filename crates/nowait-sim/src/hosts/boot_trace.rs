//! The reads of a boot: files, most of them small, that a few processes read one after the other.
//!
//! Invariant: the parameters and the seed decide the reads. Each read has a second place, where some
//! boots find it instead, so that the record of one boot is not quite that of the next.

use nowait::sim::Random;
use nowait_remote::{BLOCK_BYTES, PrefetchOrder};

use super::parameters::BootParameters;
use super::timeline::{Time, seconds};

/// Parts of a boot: one begins when all reads of the one before have ended.
const PHASES: usize = 12;
/// The most processes of a phase that read at the same time.
pub(super) const MAX_LANES: usize = 6;
const PAGE: u64 = 4096;

/// A read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Where it is in most boots, and in some others, in bytes.
    places: [u64; 2],
    /// Bytes.
    pub(super) len: u64,
    /// The time between the end of the read before it and this one.
    pub(super) think: Time,
}

/// The blocks that hold `len` bytes at `pos`.
pub(super) fn blocks_of(pos: u64, len: u64) -> std::ops::Range<u64> {
    pos / BLOCK_BYTES..(pos + len).div_ceil(BLOCK_BYTES)
}

/// The reads of a boot: those of each process in each phase.
#[derive(Debug)]
pub(super) struct BootTrace {
    phases: Vec<Vec<Vec<Read>>>,
    blocks: u64,
    seed: u64,
    variation: u16,
}

impl BootTrace {
    /// The machine whose boot was recorded: none of those that are simulated.
    pub(super) const RECORDED: u64 = u64::MAX;

    /// The boot of `seed`.
    pub(super) fn new(boot: &BootParameters, seed: u64) -> Self {
        let mut random = Random::part(seed, 1);
        let mut phases = Vec::new();
        for _ in 0..PHASES {
            let lanes = 1 + random.below(MAX_LANES as u64) as usize;
            let bytes = boot.read_bytes / (PHASES * lanes) as u64;
            let lane = |_| lane_of(boot, bytes, &mut random);
            phases.push((0..lanes).map(lane).collect());
        }
        let blocks = boot.image_bytes.div_ceil(BLOCK_BYTES);
        Self { phases, blocks, seed, variation: boot.variation }
    }

    /// Blocks of the image.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The reads of each process in phase `number`, or `None` behind the last phase.
    pub(super) fn phase(&self, number: usize) -> Option<&[Vec<Read>]> {
        self.phases.get(number).map(Vec::as_slice)
    }

    /// Where `machine` reads `read`, the `index`th of process `lane` in phase `phase`, in bytes.
    pub(super) fn place(&self, machine: u64, [phase, lane, index]: [usize; 3], read: &Read) -> u64 {
        let id = (phase as u64) << 48 | (lane as u64) << 40 | index as u64;
        let mut random = Random::part(self.seed ^ machine.wrapping_mul(0x2545_f491), id);
        read.places[usize::from(random.chance(self.variation))]
    }

    /// The blocks of `machine`'s boot, each as often as it is read, in the order of reads that all
    /// take the same time.
    pub(super) fn blocks_read(&self, machine: u64) -> Vec<u64> {
        let mut read_blocks = Vec::new();
        for (phase, lanes) in self.phases.iter().enumerate() {
            let longest = lanes.iter().map(Vec::len).max().unwrap_or(0);
            for index in 0..longest {
                for (lane, reads) in lanes.iter().enumerate() {
                    let Some(read) = reads.get(index) else { continue };
                    let place = self.place(machine, [phase, lane, index], read);
                    read_blocks.extend(blocks_of(place, read.len));
                }
            }
        }
        read_blocks
    }

    /// The record of an earlier boot.
    pub(super) fn record(&self) -> PrefetchOrder {
        PrefetchOrder::new(self.blocks_read(Self::RECORDED))
    }
}

/// What one process reads: `bytes` in files, each from its beginning to its end.
fn lane_of(boot: &BootParameters, bytes: u64, random: &mut Random) -> Vec<Read> {
    let mut reads = Vec::new();
    let mut left = bytes;
    while left > 0 {
        // From 4 KiB to 8 MiB, most of them small.
        let doubling = random.below(11).min(random.below(11));
        let file = (PAGE << doubling) + PAGE * random.below(1 << doubling);
        let file = file.min(left.next_multiple_of(PAGE)).min(boot.image_bytes);
        let places = [0; 2].map(|_| {
            let pages = (boot.image_bytes - file) / PAGE;
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
    let time = boot.think_seconds / PHASES as f64;
    for (read, weight) in reads.iter_mut().zip(&mut weights) {
        read.think = seconds(time * *weight as f64 / all.max(1) as f64);
    }
    reads
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::parameters::Parameters;
    use super::*;

    #[test]
    fn a_boot_reads_what_it_is_told_to_within_the_image_and_takes_the_time_given() {
        let boot = Parameters::default().boot;
        let trace = BootTrace::new(&boot, 3);
        let lanes = || trace.phases.iter().flatten();
        let bytes: u64 = lanes().flatten().map(|read| read.len).sum();
        assert!((boot.read_bytes..boot.read_bytes * 11 / 10).contains(&bytes), "{bytes}");
        assert!(trace.blocks_read(0).iter().all(|&block| block < trace.blocks()));
        assert!(lanes().flatten().all(|read| (PAGE..=256 << 10).contains(&read.len)));
        for lane in lanes() {
            let think: Time = lane.iter().map(|read| read.think).sum();
            assert!(think.abs_diff(seconds(10.0 / PHASES as f64)) < 1_000_000, "{think}");
        }
    }

    #[test]
    fn boots_of_two_machines_read_mostly_but_not_only_the_same_blocks() {
        let trace = BootTrace::new(&Parameters::default().boot, 3);
        let one: HashSet<_> = trace.blocks_read(7).into_iter().collect();
        let record: HashSet<_> = trace.record().blocks().iter().copied().collect();
        let both = one.intersection(&record).count();
        assert!(both < one.len() && both > one.len() * 8 / 10, "{both} of {}", one.len());
    }
}
