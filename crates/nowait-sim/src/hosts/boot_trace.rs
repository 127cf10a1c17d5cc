//! The reads of a boot: parts that follow each other, in each of them processes whose reads follow each
//! other.
//!
//! Invariant: the parameters and the seed decide the reads. Each read has a second place, where some
//! boots find it instead, so that the record of one boot is not quite that of the next.

use nowait::sim::Random;
use nowait_remote::{BLOCK_BYTES, PrefetchOrder};

use super::boot_read::Read;
use super::parameters::{BootParameters, BootReads};
use super::{recorded_boot, synthetic_boot};

/// The most processes of a phase that read at the same time.
pub(super) const MAX_LANES: usize = 10;

/// The blocks that hold `len` bytes at `pos`.
pub(super) fn blocks_of(pos: u64, len: u64) -> std::ops::Range<u64> {
    pos / BLOCK_BYTES..(pos + len).div_ceil(BLOCK_BYTES)
}

/// The reads of a boot: those of each process in each phase.
#[derive(Debug)]
pub(super) struct BootTrace {
    /// The reads of each process in each phase: one begins when all reads of the one before have completed.
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
        let think = boot.think_seconds;
        let (phases, image_bytes) = match boot.reads {
            BootReads::Recorded => (recorded_boot::phases(think, seed), recorded_boot::IMAGE_BYTES),
            BootReads::Synthetic { image_bytes, read_bytes } => {
                (synthetic_boot::phases([image_bytes, read_bytes], think, seed), image_bytes)
            }
        };
        let blocks = image_bytes.div_ceil(BLOCK_BYTES);
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::boot_read::PAGE;
    use super::super::parameters::Parameters;
    use super::super::timeline::Time;
    use super::*;

    fn boots() -> [BootParameters; 2] {
        let recorded = Parameters::default().boot;
        let reads = BootReads::Synthetic { image_bytes: 2 << 30, read_bytes: 200 << 20 };
        [recorded, BootParameters { reads, ..recorded }]
    }

    /// The time of a boot whose reads take none.
    fn time(trace: &BootTrace) -> Time {
        let lane = |lane: &Vec<Read>| lane.iter().map(|read| read.think).sum::<Time>();
        trace.phases.iter().filter_map(|lanes| lanes.iter().map(lane).max()).sum()
    }

    #[test]
    fn a_boot_reads_what_it_is_told_to_within_the_image_and_takes_the_time_given() {
        let [recorded, synthetic] = boots().map(|boot| BootTrace::new(&boot, 3));
        for (trace, read_bytes) in [(recorded, 46 << 20), (synthetic, 200 << 20)] {
            let reads = || trace.phases.iter().flatten().flatten();
            let bytes: u64 = reads().map(|read| read.len).sum();
            assert!((read_bytes..read_bytes * 11 / 10).contains(&bytes), "{bytes}");
            assert!(trace.blocks_read(0).iter().all(|&block| block < trace.blocks()));
            assert!(reads().all(|read| (PAGE..=2 << 20).contains(&read.len)));
            assert!(trace.phases.iter().all(|lanes| (1..=MAX_LANES).contains(&lanes.len())));
            assert!(time(&trace).abs_diff(10_000_000_000) < 10_000_000, "{}", time(&trace));
        }
    }

    #[test]
    fn boots_of_two_machines_read_mostly_but_not_only_the_same_blocks() {
        for trace in boots().map(|boot| BootTrace::new(&boot, 3)) {
            let one: HashSet<_> = trace.blocks_read(7).into_iter().collect();
            let record: HashSet<_> = trace.record().blocks().iter().copied().collect();
            let both = one.intersection(&record).count();
            assert!(both < one.len() && both > one.len() * 8 / 10, "{both} of {}", one.len());
        }
    }
}
