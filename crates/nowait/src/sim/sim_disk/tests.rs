//! Tests of the simulated disk.

use super::*;

fn write(media: &mut SimDisk, pos: u64, len: u64, byte: u8, durable: bool) -> u64 {
    let fill = |bytes: &mut Vec<u8>| bytes.extend(std::iter::repeat_n(byte, len as usize));
    let (done, n) = media.write(ByteRange::new(pos, len), durable, fill);
    assert_eq!(done, len);
    media.reported(n);
    n
}

/// The first byte of each of the first sectors after each of many power cuts.
fn cuts(make: impl Fn(&mut SimDisk), sectors: usize) -> Vec<Vec<u8>> {
    (0..200)
        .map(|seed| {
            let mut media = SimDisk::new(1 << 16, 512, 100);
            make(&mut media);
            media.cut(&mut Random::new(seed), 0);
            (0..sectors).map(|n| media.read(ByteRange::new(n as u64 * 512, 1))[0]).collect()
        })
        .collect()
}

#[test]
fn a_power_cut_keeps_any_subset_of_unflushed_writes_torn_at_the_unit() {
    let make = |media: &mut SimDisk| {
        write(media, 0, 1024, 1, false);
        write(media, 0, 1024, 2, false);
    };
    let mut seen = cuts(make, 2);
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 9, "each of two sectors is old, first or second: {seen:?}");
}

/// The size and the first byte of each block after each of many power cuts, without duplicates.
fn sizes(make: impl Fn(&mut SimDisk)) -> Vec<(u64, Vec<u8>)> {
    let mut seen: Vec<_> = (0..200)
        .map(|seed| {
            let mut media = SimDisk::new(8192, 512, 100);
            make(&mut media);
            media.cut(&mut Random::new(seed), 0);
            let first = |at| media.read(ByteRange::new(at * BLOCK_BYTES, 1))[0];
            (media.size(), (0..media.size() / BLOCK_BYTES).map(first).collect())
        })
        .collect();
    seen.sort();
    seen.dedup();
    seen
}

#[test]
fn growth_reads_as_zeros_and_is_durable_only_after_a_flush() {
    let grown = |media: &mut SimDisk| {
        write(media, 4096, 4096, 1, true);
        media.resize(4096);
        media.resize(12288);
    };
    let all = [(4096, vec![0]), (8192, vec![0, 1]), (12288, vec![0, 0, 0])];
    assert_eq!(sizes(grown), all);
    let flushed = |media: &mut SimDisk| {
        grown(media);
        media.flush();
        media.resize(4096);
    };
    assert_eq!(sizes(flushed), [all[0].clone(), all[2].clone()]);
}

#[test]
fn c28_a_durable_write_behind_the_old_end_makes_the_new_end_durable_too() {
    let make = |media: &mut SimDisk| {
        media.resize(12288);
        write(media, 8192, 4096, 1, true);
    };
    assert_eq!(sizes(make), [(12288, vec![0, 0, 1])]);
}

#[test]
fn bytes_behind_a_cut_end_do_not_return_when_the_device_grows_again() {
    let make = |media: &mut SimDisk| {
        write(media, 4096, 4096, 1, false);
        media.resize(4096);
        media.resize(8192);
        media.flush();
    };
    assert_eq!(sizes(make), [(8192, vec![0, 0])]);
}

#[test]
fn c49_a_write_reported_before_a_flush_survives_a_power_cut() {
    let make = |media: &mut SimDisk| {
        write(media, 0, 512, 1, false);
        media.flush();
        write(media, 512, 512, 2, false);
    };
    let seen = cuts(make, 2);
    assert!(seen.iter().all(|sectors| sectors[0] == 1 && [0, 2].contains(&sectors[1])));
}

#[test]
fn c28_a_durable_write_survives_and_no_earlier_write_overwrites_it() {
    let make = |media: &mut SimDisk| {
        write(media, 0, 1024, 1, false);
        write(media, 0, 512, 2, true);
    };
    let seen = cuts(make, 2);
    assert!(seen.iter().all(|sectors| sectors[0] == 2 && [0, 1].contains(&sectors[1])));
}

#[test]
fn c51_no_later_flush_restores_writes_that_a_failed_flush_dropped() {
    let make = |media: &mut SimDisk| {
        for n in 0..8 {
            write(media, n * 512, 512, 1, false);
        }
        media.lose(&mut Random::new(5));
        media.flush();
    };
    let seen = cuts(make, 8);
    assert!(seen[0].contains(&0) && seen[0].contains(&1) && seen.iter().all(|s| s == &seen[0]));
}

#[test]
fn garbage_is_reported_and_appears_only_where_a_write_was_not_durable() {
    for seed in 0..50 {
        let mut media = SimDisk::new(1 << 16, 512, 100);
        write(&mut media, 0, 4096, 1, true);
        write(&mut media, 1024, 1024, 2, false);
        let rotten = media.cut(&mut Random::new(seed), 30_000);
        assert!(rotten.iter().all(|range| range.pos >= 1024 && range.end() <= 2048));
        let is_rotten = |pos: u64| rotten.iter().any(|range| range.pos <= pos && pos < range.end());
        for pos in (0..4096).filter(|&pos| !is_rotten(pos)) {
            assert!([1, 2].contains(&media.read(ByteRange::new(pos, 1))[0]));
        }
    }
}

#[test]
fn storage_runs_out_is_deallocated_and_is_found_by_seeking() {
    let mut media = SimDisk::new(5 * 4096 + 100, 512, 2);
    write(&mut media, 4096, 512, 1, false);
    let (done, _) = media.write(ByteRange::new(8192, 8192), false, |to| to.resize(8192 + 4, 7));
    assert_eq!(done, 4096);
    assert!(media.zero(ByteRange::new(0, 4096), true).is_none());
    assert_eq!((media.seek(0, true), media.seek(5000, false)), (Some(4096), Some(12288)));
    assert_eq!((media.seek(12288, true), media.seek(20490, false)), (None, Some(20490)));
    media.zero(ByteRange::new(4096, 8192), false).unwrap();
    assert_eq!(media.seek(0, true), None);
    assert!(media.zero(ByteRange::new(0, 4096), true).is_some());
    assert!(!media.allocates(ByteRange::new(0, 1)) && media.allocates(ByteRange::new(4096, 1)));
}

#[test]
fn what_a_failed_flush_has_lost_is_read_until_the_cache_is_dropped() {
    let mut media = SimDisk::new(8192, 512, u64::MAX);
    let write = |media: &mut SimDisk, pos, byte: u8| {
        let range = ByteRange::new(pos, 4096);
        let (_, change) = media.write(range, false, |bytes| bytes.resize(bytes.len() + 4096, byte));
        media.reported(change);
    };
    write(&mut media, 0, 1);
    media.flush();
    write(&mut media, 0, 2);
    // Half of the changes are lost, by chance.
    let mut random = Random::new(1);
    while media.read(ByteRange::new(0, 1)) == [2] {
        media.lose(&mut random);
        media.forget_lost();
    }
    assert_eq!(media.read(ByteRange::new(0, 1)), [1]);
    write(&mut media, 4096, 3);
    media.forget_lost();
    assert_eq!(media.read(ByteRange::new(4095, 2)), [1, 3]);
}
