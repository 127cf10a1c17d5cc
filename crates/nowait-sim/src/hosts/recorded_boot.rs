//! The boot of a real machine, as it was recorded: Debian 12 with systemd, which read a qcow2 image up to
//! its login prompt in QEMU without KVM; each read took 20 ms, so that those side by side wait for
//! nothing but themselves.
//!
//! Invariant: the reads are those of `recorded_boot.txt`, their times are scaled.
//!
//! The text has a word for each part of the boot, in it the processes between `|`, and of each its reads
//! between `,`: the time since the one before in 100 microseconds, the pages of 4 KiB from the end of the
//! read before in the text, and behind `:` the pages that it reads, if more than one.

use nowait::sim::Random;

use super::boot_read::{PAGE, Read};
use super::timeline::seconds;

const TEXT: &str = include_str!("recorded_boot.txt");
/// Bytes of the image.
pub(super) const IMAGE_BYTES: u64 = 1_062_010_880;

/// The reads of each process in each phase, of a boot that takes `think_seconds` if reads take no
/// time.
pub(super) fn phases(think_seconds: f64, seed: u64) -> Vec<Vec<Vec<Read>>> {
    let mut random = Random::part(seed, 1);
    let mut page = 0;
    let mut read = |text: &str| {
        let (think, at, pages) = numbers(text)?;
        let first = page + at;
        page = first + pages;
        let len = pages as u64 * PAGE;
        let elsewhere = PAGE * random.below((IMAGE_BYTES - len) / PAGE + 1);
        Some(Read { places: [first as u64 * PAGE, elsewhere], len, think })
    };
    let mut lane = |text: &str| text.split(',').filter_map(&mut read).collect::<Vec<_>>();
    let phase = |text: &str| text.split('|').map(&mut lane).collect::<Vec<_>>();
    let mut phases: Vec<_> = TEXT.split_whitespace().map(phase).collect();
    let time = |lane: &Vec<Read>| lane.iter().map(|read| read.think).sum::<u64>();
    let all: u64 = phases.iter().filter_map(|lanes| lanes.iter().map(time).max()).sum();
    let scale = seconds(think_seconds) as f64 / all.max(1) as f64;
    for read in phases.iter_mut().flatten().flatten() {
        read.think = (read.think as f64 * scale) as u64;
    }
    phases
}

/// The time before a read, its distance from the one before, and its pages.
fn numbers(text: &str) -> Option<(u64, i64, i64)> {
    let (time, place) = text.split_at(text.find(['+', '-'])?);
    let (at, pages) = place.split_once(':').unwrap_or((place, "1"));
    Some((time.parse().ok()?, at.parse().ok()?, pages.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_read_of_the_record_is_one_of_the_boot() {
        let phases = phases(10.0, 1);
        let words = TEXT.split([' ', '\n', '|', ',']).filter(|word| !word.is_empty()).count();
        assert_eq!(phases.iter().flatten().flatten().count(), words);
        assert_eq!(phases.len(), 785);
        let places = phases.iter().flatten().flatten().flat_map(|read| read.places);
        assert!(places.max() < Some(IMAGE_BYTES));
    }
}
