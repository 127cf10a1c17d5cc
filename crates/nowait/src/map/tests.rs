//! What the hint cache must never get wrong.

use super::*;

const MIB: u64 = 1 << 20;

fn read(map: &Extents, pos: u64, len: u64) -> (u64, bool) {
    let extent = map.begin(Range::new(pos, len), Intent::Read).unwrap();
    (extent.len, extent.hole)
}

#[test]
fn c38_a_hole_goes_to_the_workers_until_it_is_written() {
    let map = Extents::new(MIB, true);
    let range = Range::new(8192, 4096);
    assert!(map.begin(range, Intent::Write).is_ok(), "unknown is tried");
    map.hole(Range::new(0, MIB));
    assert_eq!(map.begin(range, Intent::Write), Err(WouldBlock));
    map.written(range);
    assert!(map.begin(range, Intent::Write).is_ok());
    assert_eq!(map.begin(Range::new(8192, 8192), Intent::Write), Err(WouldBlock));
}

#[test]
fn c14_a_read_is_split_where_a_hole_begins_and_ends() {
    let map = Extents::new(MIB, true);
    map.written(Range::new(0, 65536));
    map.hole(Range::new(65536, 65536));
    map.written(Range::new(131_072, 1));
    assert_eq!(read(&map, 4096, MIB - 4096), (61_440, false));
    assert_eq!(read(&map, 65536, MIB - 65536), (65536, true));
    assert_eq!(read(&map, 131_072, 4096), (4096, false));
}

#[test]
fn c18_a_hole_never_covers_what_was_written_since_it_was_forgotten() {
    let map = Extents::new(MIB, true);
    let all = Range::new(0, MIB);
    map.hole(all);
    map.forget(all);
    map.written(Range::new(40_000, 10));
    map.hole(all);
    assert_eq!(read(&map, 36_864, 4096), (4096, false));
    assert_eq!(read(&map, 0, 36_864), (36_864, true));
}

#[test]
fn c18_a_partly_punched_granule_is_not_a_hole() {
    let map = Extents::new(MIB, true);
    map.hole(Range::new(100, 8192));
    assert_eq!(read(&map, 0, 4096), (4096, false));
    assert_eq!(read(&map, 4096, 4096), (4096, true));
    assert_eq!(read(&map, 8192, 4096), (4096, false));
}

#[test]
fn the_last_partial_granule_can_be_a_hole() {
    let map = Extents::new(10_000, true);
    map.hole(Range::new(8192, 10_000 - 8192));
    assert_eq!(read(&map, 8192, 1808), (1808, true));
}

#[test]
fn what_is_not_known_is_not_reported() {
    let map = Extents::new(MIB, true);
    map.written(Range::new(0, 8192));
    let mut spans = Vec::new();
    assert!(map.known(Range::new(0, 8192), 9, &mut spans));
    assert_eq!(spans, [Span::on_top(8192, false)]);
    assert!(!map.known(Range::new(0, 8193), 9, &mut Vec::new()));
}

#[test]
fn no_more_is_looked_at_than_is_reported() {
    let map = Extents::new(64 * MIB, true);
    for n in 0..8 {
        map.hole(Range::new(n * 2 * MIB, MIB));
        map.written(Range::new(n * 2 * MIB + MIB, MIB));
    }
    let mut spans = Vec::new();
    assert!(map.known(Range::new(4096, 64 * MIB - 4096), 3, &mut spans));
    let told: Vec<_> = spans.iter().map(|span| (span.len, span.hole)).collect();
    assert_eq!(told, [(MIB - 4096, true), (MIB, false), (MIB, true)]);
    assert!(!map.known(Range::new(0, 64 * MIB), 17, &mut Vec::new()), "the rest is unknown");
}

#[test]
fn switched_off_nothing_is_learnt() {
    let map = Extents::new(MIB, false);
    map.hole(Range::new(0, MIB));
    assert_eq!(read(&map, 0, MIB), (MIB, false));
    assert!(!map.known(Range::new(0, 1), 9, &mut Vec::new()));
}

#[test]
fn a_device_of_16_tib_costs_no_more_than_its_chunk_table() {
    let map = Extents::new(16 << 40, true);
    assert!(map.chunks.len() <= 4097);
    map.hole(Range::new(8 << 40, 1 << 30));
    assert_eq!(read(&map, 8 << 40, 4096), (4096, true));
    assert_eq!(map.chunks.iter().filter(|chunk| chunk.get().is_some()).count(), 1);
}

#[test]
fn a_scan_finds_what_lseek_reports() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4 * MIB).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file.as_file(), &[7; 65536], MIB).unwrap();
    let storage = Storage::open(file.path(), crate::OpenOptions::default()).unwrap();
    let mut spans = Vec::new();
    storage.spans(Range::new(0, 4 * MIB), 100, &mut spans).unwrap();
    let map = Extents::new(4 * MIB, true);
    map.scan(&storage);
    let mut known = Vec::new();
    assert!(map.known(Range::new(0, 4 * MIB), 100, &mut known));
    assert_eq!(known, spans);
    assert_eq!(spans.iter().map(|span| span.len).sum::<u64>(), 4 * MIB);
    assert!(!map.begin(Range::new(MIB, 4096), Intent::Read).unwrap().hole);
}
