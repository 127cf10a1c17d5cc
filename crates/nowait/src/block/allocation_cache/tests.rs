//! Tests of the allocation cache.

use super::*;
use crate::block::block_map::{Intent, WouldBlock};

const MIB: u64 = 1 << 20;

fn read(map: &AllocationCache, pos: u64, len: u64) -> (u64, bool) {
    let extent = map.map_extent(ByteRange::new(pos, len), Intent::Read).unwrap();
    (extent.len, extent.hole)
}

fn used_leaves(map: &AllocationCache) -> usize {
    map.leaves.iter().filter(|leaf| leaf.words.get().is_some()).count()
}

#[test]
fn c38_a_hole_goes_to_the_workers_until_it_is_written() {
    let map = AllocationCache::new(MIB, true);
    let range = ByteRange::new(8192, 4096);
    assert!(map.map_extent(range, Intent::Write).is_ok(), "unknown is tried");
    map.mark_hole(ByteRange::new(0, MIB));
    assert_eq!(map.map_extent(range, Intent::Write), Err(WouldBlock));
    map.mark_allocated(range);
    assert!(map.map_extent(range, Intent::Write).is_ok());
    assert_eq!(map.map_extent(ByteRange::new(8192, 8192), Intent::Write), Err(WouldBlock));
}

#[test]
fn c14_a_read_is_split_where_a_hole_begins_and_ends() {
    let map = AllocationCache::new(MIB, true);
    map.mark_allocated(ByteRange::new(0, 65536));
    map.mark_hole(ByteRange::new(65536, 65536));
    map.mark_allocated(ByteRange::new(131_072, 1));
    assert_eq!(read(&map, 4096, MIB - 4096), (61_440, false));
    assert_eq!(read(&map, 65536, MIB - 65536), (65536, true));
    assert_eq!(read(&map, 131_072, 4096), (4096, false));
}

#[test]
fn a_granule_cut_by_the_end_of_a_device_that_may_grow_is_never_a_hole() {
    let map = AllocationCache::new(MIB + 512, true).without_end();
    map.mark_hole(ByteRange::new(0, MIB + 512));
    assert_eq!(read(&map, 0, MIB + 512), (MIB, true));
    assert_eq!(read(&map, MIB, 512), (512, false));
    map.invalidate(ByteRange::new(0, u64::MAX));
    assert_eq!(read(&map, 0, MIB), (MIB, false));
}

#[test]
fn invalidating_unknown_granules_allocates_no_memory() {
    let map = AllocationCache::new(1 << 40, true);
    map.mark_hole(ByteRange::new(0, MIB));
    map.invalidate(ByteRange::new(0, u64::MAX));
    assert_eq!(used_leaves(&map), 1);
}

#[test]
fn a_hole_at_the_end_of_the_device_ends_there_for_a_range_of_any_length() {
    // One size within a leaf of the cache, and one that ends with a leaf.
    let size = (2 * GRANULES_PER_LEAF) << MIN_GRANULE_SHIFT;
    for size in [MIB, size] {
        let map = AllocationCache::new(size, true);
        map.mark_hole(ByteRange::new(0, size));
        for len in [size + 1, 1 << 62, u64::MAX] {
            let (end, hole) = read(&map, 0, len);
            assert!(hole && end >= size && end < size + (64 << 20), "{size} {len}: {end}");
            let behind = 1 << 40;
            assert_eq!(read(&map, behind, len), (len, false));
            assert!(!map.is_mapped(ByteRange::new(0, len)));
            assert!(!map.cached_extents(ByteRange::new(behind, len), 8, &mut Vec::new()));
        }
    }
}

#[test]
fn c18_a_hole_never_covers_a_write_made_since_its_invalidation() {
    let map = AllocationCache::new(MIB, true);
    let all = ByteRange::new(0, MIB);
    map.mark_hole(all);
    map.invalidate(all);
    map.mark_allocated(ByteRange::new(40_000, 10));
    map.mark_hole(all);
    assert_eq!(read(&map, 36_864, 4096), (4096, false));
    assert_eq!(read(&map, 0, 36_864), (36_864, true));
}

#[test]
fn c18_a_partly_punched_granule_is_not_a_hole() {
    let map = AllocationCache::new(MIB, true);
    map.mark_hole(ByteRange::new(100, 8192));
    assert_eq!(read(&map, 0, 4096), (4096, false));
    assert_eq!(read(&map, 4096, 4096), (4096, true));
    assert_eq!(read(&map, 8192, 4096), (4096, false));
}

#[test]
fn the_last_partial_granule_can_be_a_hole() {
    let map = AllocationCache::new(10_000, true);
    map.mark_hole(ByteRange::new(8192, 10_000 - 8192));
    assert_eq!(read(&map, 8192, 1808), (1808, true));
}

#[test]
fn unknown_granules_are_not_reported() {
    let map = AllocationCache::new(MIB, true);
    map.mark_allocated(ByteRange::new(0, 8192));
    let mut extents = Vec::new();
    assert!(map.cached_extents(ByteRange::new(0, 8192), 9, &mut extents));
    assert_eq!(extents, [ExtentStatus::top(8192, false)]);
    assert!(!map.cached_extents(ByteRange::new(0, 8193), 9, &mut Vec::new()));
}

#[test]
fn a_query_ends_at_its_limit_and_fails_at_an_unknown_granule() {
    let map = AllocationCache::new(64 * MIB, true);
    for n in 0..8 {
        map.mark_hole(ByteRange::new(n * 2 * MIB, MIB));
        map.mark_allocated(ByteRange::new(n * 2 * MIB + MIB, MIB));
    }
    let mut extents = Vec::new();
    assert!(map.cached_extents(ByteRange::new(4096, 64 * MIB - 4096), 3, &mut extents));
    let reported: Vec<_> = extents.iter().map(|extent| (extent.len, extent.hole)).collect();
    assert_eq!(reported, [(MIB - 4096, true), (MIB, false), (MIB, true)]);
    assert!(
        !map.cached_extents(ByteRange::new(0, 64 * MIB), 17, &mut Vec::new()),
        "the rest is unknown"
    );
}

#[test]
fn a_cache_that_is_switched_off_records_nothing() {
    let map = AllocationCache::new(MIB, false);
    map.mark_hole(ByteRange::new(0, MIB));
    assert_eq!(read(&map, 0, MIB), (MIB, false));
    assert!(!map.cached_extents(ByteRange::new(0, 1), 9, &mut Vec::new()));
}

#[test]
fn a_cache_for_16_tib_allocates_only_the_leaves_in_use() {
    let map = AllocationCache::new(16 << 40, true);
    assert!(map.leaves.len() <= 4097);
    map.mark_hole(ByteRange::new(8 << 40, 1 << 30));
    assert_eq!(read(&map, 8 << 40, 4096), (4096, true));
    assert_eq!(used_leaves(&map), 1);
}

#[test]
fn a_small_device_has_few_leaves_and_more_once_it_has_grown() {
    let map = AllocationCache::new(MIB, true);
    let far = 1 << 37;
    map.invalidate(ByteRange::new(0, u64::MAX));
    assert_eq!((map.leaves.len(), map.later_leaves.get().is_some()), (1, false));
    assert_eq!(read(&map, far, MIB), (MIB, false));
    map.size.store(1 << 38, Ordering::Relaxed);
    map.mark_hole(ByteRange::new(far, MIB));
    assert_eq!(read(&map, far, MIB), (MIB, true));
    assert_eq!(read(&map, far + MIB, MIB), (MIB, false));
    map.mark_hole(ByteRange::new(0, u64::MAX / 2));
    assert_eq!(read(&map, far + MIB, MIB), (MIB, true));
}

#[test]
fn a_scan_finds_what_lseek_reports() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4 * MIB).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file.as_file(), &[7; 65536], MIB).unwrap();
    let storage = crate::FileStorage::open(file.path(), crate::OpenOptions::default()).unwrap();
    let mut extents = Vec::new();
    let storage: &dyn Storage = &storage;
    storage.extents(ByteRange::new(0, 4 * MIB), 100, &mut extents).unwrap();
    let map = AllocationCache::new(4 * MIB, true);
    map.scan(storage);
    let mut cached = Vec::new();
    assert!(map.cached_extents(ByteRange::new(0, 4 * MIB), 100, &mut cached));
    assert_eq!(cached, extents);
    assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), 4 * MIB);
    assert!(!map.map_extent(ByteRange::new(MIB, 4096), Intent::Read).unwrap().hole);
}

/// The states of the same granules change on another thread between two looks of one query.
#[test]
fn a_query_is_answered_within_its_range_while_holes_are_written() {
    let map = AllocationCache::new(MIB, true);
    let asked = ByteRange::new(2048, 128 * 1024);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for _ in 0..2_000_000 {
                map.mark_allocated(asked);
                map.invalidate(asked);
                map.mark_hole(ByteRange::new(0, MIB));
            }
        });
        let mut extents = Vec::new();
        while !writer.is_finished() {
            let extent = map.map_extent(asked, Intent::Read).expect("a read never waits");
            assert!((1..=asked.len).contains(&extent.len), "{extent:?}");
            if map.cached_extents(asked, 100, &mut extents) {
                assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), asked.len);
            }
            extents.clear();
        }
    });
}

#[test]
fn what_is_allocated_ahead_reads_as_a_hole_and_takes_writes() {
    let map = AllocationCache::new(MIB, true).allocating_ahead(true);
    map.mark_hole(ByteRange::new(0, MIB));
    map.mark_allocated(ByteRange::new(0, 65536));
    let ahead = map.ahead().unwrap();
    assert!(ahead.begins_in_hole(ByteRange::new(65536, 4096)));
    assert_eq!((ahead.written_before(65536, MIB), ahead.written_before(69632, MIB)), (65536, 0));
    ahead.mark_ahead(ByteRange::new(32768, 98304));
    assert_eq!(ahead.ahead_bytes(), 65536, "only holes");
    let window = ByteRange::new(65536, 65536);
    assert_eq!(ahead.next_ahead(ByteRange::new(0, MIB)), Some(window));
    assert_eq!(map.map_extent(ByteRange::new(65536, MIB - 65536), Intent::Write), Err(WouldBlock));
    assert_eq!(read(&map, 65536, MIB - 65536), (MIB - 65536, true));
    let mut extents = Vec::new();
    assert!(map.cached_extents(ByteRange::new(0, MIB), 9, &mut extents));
    let top = ExtentStatus::top;
    assert_eq!(extents, [top(65536, false), top(MIB - 65536, true)]);

    let block = ByteRange::new(65536, 4096);
    assert!(map.map_extent(block, Intent::Write).is_ok() && map.is_mapped(block));
    assert_eq!(read(&map, 65536, 4096), (4096, false), "a write is on its way");
    map.invalidate(ByteRange::new(69632, 4096));
    assert_eq!(ahead.ahead_bytes(), 65536 - 8192);
    ahead.unmark_ahead(ByteRange::new(0, MIB));
    assert_eq!((ahead.ahead_bytes(), ahead.next_ahead(ByteRange::new(0, MIB))), (0, None));
    assert!(ahead.begins_in_hole(ByteRange::new(73728, 4096)));
    assert!(!ahead.begins_in_hole(ByteRange::new(69632, 4096)), "forgotten");
    ahead.forget_holes(ByteRange::new(73728, 4096));
    assert!(map.map_extent(ByteRange::new(73728, 4096), Intent::Write).is_ok());
}

#[test]
fn a_map_whose_cache_is_off_allocates_nothing_ahead() {
    assert!(AllocationCache::new(MIB, false).allocating_ahead(true).ahead().is_none());
    assert!(AllocationCache::new(MIB, true).allocating_ahead(false).ahead().is_none());
}

#[test]
fn what_a_scan_finds_needs_memory_only_where_it_differs_within_a_leaf() {
    let leaf = GRANULES_PER_LEAF << MIN_GRANULE_SHIFT;
    let map = AllocationCache::new(8 * leaf, true).allocating_ahead(true);
    map.note(ByteRange::new(0, 2 * leaf + 4096), true);
    map.note(ByteRange::new(2 * leaf + 4096, 3 * leaf), false);
    map.note(ByteRange::new(5 * leaf + 4096, 3 * leaf - 4096), true);
    assert_eq!(used_leaves(&map), 2);
    assert_eq!(read(&map, 0, 8 * leaf), (2 * leaf + 4096, true));
    assert_eq!(read(&map, 2 * leaf + 4096, 8 * leaf), (3 * leaf, false));
    assert_eq!(read(&map, 5 * leaf + 4096, 8 * leaf), (3 * leaf - 4096, true));
    assert!(map.is_mapped(ByteRange::new(2 * leaf + 4096, 3 * leaf)));
    // A write removes the mark of its granules only, and the others of its leaf stay what they were.
    let range = ByteRange::new(leaf + 8192, 4096);
    assert_eq!(map.map_extent(range, Intent::Write), Err(WouldBlock));
    map.map_extent_blocking(range, Intent::Write);
    assert_eq!(used_leaves(&map), 3);
    assert_eq!(read(&map, 0, 8 * leaf), (leaf + 8192, true));
    assert_eq!(read(&map, range.pos, 4096), (4096, false));
    assert_eq!(read(&map, range.end(), 8 * leaf), (leaf - 8192, true));
    // A part of mapped storage is freed, and the rest stays mapped.
    let freed = ByteRange::new(3 * leaf + 4096, 4096);
    map.invalidate(freed);
    map.mark_hole(freed);
    assert_eq!(read(&map, 3 * leaf + 4096, leaf), (4096, true));
    assert!(map.is_mapped(ByteRange::new(2 * leaf + 4096, leaf)));
    map.resize(8 * leaf);
    assert_eq!(read(&map, 0, 8 * leaf), (8 * leaf, false));
    assert!(!map.cached_extents(ByteRange::new(7 * leaf, 1), 9, &mut Vec::new()));
}

#[test]
fn a_scan_never_marks_more_than_the_device_or_what_is_known_already() {
    let leaf = GRANULES_PER_LEAF << MIN_GRANULE_SHIFT;
    let map = AllocationCache::new(2 * leaf - 512, true);
    map.mark_allocated(ByteRange::new(4096, 4096));
    map.note(ByteRange::new(0, 2 * leaf - 512), true);
    assert_eq!(read(&map, 0, 2 * leaf), (4096, true));
    assert_eq!(read(&map, 4096, 4096), (4096, false));
    assert_eq!(read(&map, 8192, 2 * leaf), (2 * leaf - 8192, true));
    assert_eq!(read(&map, 2 * leaf, 4096), (4096, false));
}
