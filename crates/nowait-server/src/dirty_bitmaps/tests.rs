//! Bits of bitmaps against a list of booleans, and their bounds.
//!
//! Invariant: a model has a boolean for each granule; where its size is not a multiple of one, the last is shorter.

use std::io::Seek;
use std::sync::atomic::AtomicBool;
use std::thread;

use nowait::{Flags, Op};
use nowait_testkit::Random;

use super::*;
use crate::dirty_bitmaps::dirty_bitmap::DirtyExtent;

const SIZE: u64 = (1 << 20) + 100;

fn spec(name: &str, granularity: u64) -> BitmapSpec {
    BitmapSpec { granularity, ..BitmapSpec::new(name.into()) }
}

fn io(op: Op, pos: u64, len: u64) -> Request {
    Request { op, flags: Flags::NONE, range: ByteRange::new(pos, len) }
}

fn named(all: &DirtyBitmaps, name: &str) -> Arc<DirtyBitmap> {
    all.named(name).unwrap()
}

/// Dirty bytes of the bitmaps with these names.
fn dirty(all: &DirtyBitmaps, names: &[&str], size: u64) -> Vec<u64> {
    names.iter().map(|name| named(all, name).dirty_bytes(size)).collect()
}

/// Which bytes of a disk of `size` bytes are dirty, by extents of at most `most` at a time.
fn bytes(bitmap: &DirtyBitmap, size: u64, block: u64, most: usize, words: u64) -> Vec<bool> {
    let mut all = Vec::new();
    while (all.len() as u64) < size {
        let at = all.len() as u64;
        let extents = bitmap.extents(ByteRange::new(at, size - at), block, most, words);
        assert!((1..=most).contains(&extents.len()), "at {at}: {extents:?}");
        assert!(extents.windows(2).all(|pair| pair[0].is_dirty != pair[1].is_dirty));
        for DirtyExtent { len, is_dirty } in extents {
            assert!(len > 0);
            all.resize(all.len() + len as usize, is_dirty);
        }
    }
    all
}

#[test]
fn extents_and_counts_are_those_of_a_model() {
    let mut random = Random::from_seed(nowait_testkit::seed());
    for granularity in [512, 4096, 64 << 10, 2 << 20] {
        let (all, mut known) = (DirtyBitmaps::default(), EnabledBitmaps::default());
        all.add(&spec("a", granularity), SIZE, 1).unwrap();
        let mut model = vec![false; SIZE as usize];
        for _ in 0..12 {
            let pos = random.below(SIZE);
            let near = [1, 700, 100_000, SIZE][random.below(4) as usize];
            let len = random.below(near);
            let len = len.min(SIZE - pos);
            let op = [Op::Write, Op::Zero, Op::Discard, Op::Read][random.below(4) as usize];
            known.mark(&all, io(op, pos, len));
            if op.changes() && len > 0 {
                let from = pos / granularity * granularity;
                let to = (pos + len).next_multiple_of(granularity).min(SIZE);
                model[from as usize..to as usize].fill(true);
            }
            if random.chance(5) {
                all.clear("a").unwrap();
                model.fill(false);
            }
            let bitmap = named(&all, "a");
            assert_eq!(bytes(&bitmap, SIZE, 1, 4096, u64::MAX), model);
            assert_eq!(bytes(&bitmap, SIZE, 1, 1, 0), model, "one extent and few words at a time");
            let count = model.iter().filter(|dirty| **dirty).count() as u64;
            assert_eq!(dirty(&all, &["a"], SIZE), [count]);
            // A whole block is dirty if a part of it is.
            let blocks = bytes(&bitmap, 1 << 20, 4096, 7, 3);
            for (block, bytes) in blocks.chunks(4096).zip(model.chunks(4096)) {
                assert_eq!(block, [bytes.contains(&true); 4096]);
            }
        }
    }
}

#[test]
fn changes_are_in_the_bitmaps_that_are_enabled_when_they_end() {
    let (all, mut known) = (DirtyBitmaps::default(), EnabledBitmaps::default());
    known.mark(&all, io(Op::Write, 0, 1));
    for name in ["a", "b"] {
        all.add(&spec(name, 512), SIZE, 1).unwrap();
    }
    all.set_enabled("b", false).unwrap();
    known.mark(&all, io(Op::Write, 0, 513));
    assert_eq!(dirty(&all, &["a", "b"], SIZE), [1024, 0]);
    all.set_enabled("b", true).unwrap();
    all.set_enabled("a", false).unwrap();
    known.mark(&all, io(Op::Discard, 4096, 1));
    assert_eq!(dirty(&all, &["a", "b"], SIZE), [1024, 512]);
    all.clear("a").unwrap();
    assert_eq!(dirty(&all, &["a", "b"], SIZE), [0, 512]);
    all.remove("b").unwrap();
    known.mark(&all, io(Op::Write, 0, 1));
    assert!(!all.is_on() && all.get(BitmapId(2)).is_none());
    for failed in [all.clear("b"), all.remove("b"), all.set_enabled("b", true)] {
        assert_eq!(failed, Err(BitmapError::NoBitmap));
    }
    all.add(&spec("b", 512), SIZE, 1).unwrap();
    assert!(all.get(BitmapId(2)).is_none(), "another one of the same name is another one");
}

#[test]
fn a_merge_adds_what_is_dirty_whatever_the_granularities_are() {
    let mut random = Random::from_seed(nowait_testkit::seed());
    for (from, to) in [(512, 4096), (4096, 512), (1024, 1024), (2 << 20, 512)] {
        let (all, mut known) = (DirtyBitmaps::default(), EnabledBitmaps::default());
        for (name, granularity) in [("from", from), ("other", from), ("to", to)] {
            all.add(&BitmapSpec { enabled: false, ..spec(name, granularity) }, SIZE, 1).unwrap();
        }
        for name in ["from", "other", "to"] {
            all.set_enabled(name, true).unwrap();
            for _ in 0..20 {
                let pos = random.below(SIZE);
                known.mark(&all, io(Op::Write, pos, random.below(5000).min(SIZE - pos)));
            }
            all.set_enabled(name, false).unwrap();
        }
        let of = |name| bytes(&named(&all, name), SIZE, 1, 4096, u64::MAX);
        let (before, target) = ([of("from"), of("other")], of("to"));
        let sources = ["from".to_owned(), "other".to_owned()];
        let missing = all.merge("to", &[sources[0].clone(), "none".into()], SIZE);
        assert_eq!((missing, of("to") == target), (Err(BitmapError::NoBitmap), true));
        all.merge("to", &sources, SIZE).unwrap();
        assert_eq!([of("from"), of("other")], before);
        for (granule, after) in of("to").chunks(to as usize).enumerate() {
            let range = granule * to as usize..granule * to as usize + after.len();
            let is_dirty = [&target, &before[0], &before[1]]
                .iter()
                .any(|it| it[range.clone()].contains(&true));
            assert_eq!(after, vec![is_dirty; after.len()]);
        }
    }
}

#[test]
fn an_export_has_32_bitmaps_and_256_mib_of_bits_and_no_more() {
    let all = DirtyBitmaps::default();
    for number in 0..MAX_BITMAPS {
        all.add(&spec(&number.to_string(), 512), 0, 1).unwrap();
    }
    assert_eq!(all.add(&spec("one more", 512), 0, 1), Err(BitmapError::TooMany));
    all.remove("0").unwrap();
    all.add(&spec("another", 512), 0, 1).unwrap();

    let all = DirtyBitmaps::default();
    let most = MAX_BIT_BYTES * 8 * 512;
    assert_eq!(all.add(&spec("a", 512), most + 1, 1), Err(BitmapError::TooLarge(512)));
    assert_eq!(
        all.add(&spec("a", 512), u64::MAX >> 1, 1).map_err(|e| e.to_string().len() > 60),
        Err(true)
    );
    all.add(&spec("a", 512), most / 2, 1).unwrap();
    all.add(&spec("b", 512), most / 2, 1).unwrap();
    assert_eq!(all.add(&spec("c", 64 << 20), 1, 1), Err(BitmapError::TooLarge(512)));
    all.remove("a").unwrap();
    all.add(&spec("c", 64 << 20), 1, 1).unwrap();
}

#[test]
fn names_and_granularities_are_checked() {
    let all = DirtyBitmaps::default();
    let add = |name: &str, granularity| all.add(&spec(name, granularity), SIZE, 1);
    for bad in ["", "a\n", "\0", "\u{7f}", "\u{85}", &"x".repeat(1024)] {
        assert_eq!(add(bad, 512), Err(BitmapError::Name), "{bad:?}");
    }
    for good in ["a", "täglich / 1:2", &"x".repeat(1023)] {
        add(good, 512).unwrap();
        assert_eq!(add(good, 1024), Err(BitmapError::Exists));
    }
    for bad in [0, 1, 256, 513, 128 << 20, u64::MAX] {
        assert_eq!(add("b", bad), Err(BitmapError::Granularity), "{bad}");
    }
    add("b", 64 << 20).unwrap();
    let small = all.add(&spec("c", 512), SIZE, 4096);
    assert_eq!(small, Err(BitmapError::SmallGranularity(4096)));
    all.add(&spec("c", 4096), SIZE, 4096).unwrap();
}

#[test]
fn a_bitmap_grows_with_its_disk_and_what_is_new_is_clean() {
    let (all, mut known) = (DirtyBitmaps::default(), EnabledBitmaps::default());
    all.add(&spec("a", 512), SIZE, 1).unwrap();
    known.mark(&all, io(Op::Write, SIZE - 1, 1));
    for doubling in 1..30 {
        let size = SIZE << doubling.min(12) | doubling << 30;
        if doubling % 2 == 0 {
            all.cover(size).unwrap();
        }
        assert_eq!(
            named(&all, "a")
                .extents(ByteRange::new(SIZE + 512, size - SIZE - 512), 1, 9, 1 << 40)
                .len()
                % 2,
            1
        );
        known.mark(&all, io(Op::Write, size - 1, 1));
        let last = named(&all, "a").extents(ByteRange::new(size - 1, 1), 1, 9, 9);
        assert_eq!(last, [DirtyExtent { len: 1, is_dirty: true }]);
    }
    all.truncate(SIZE);
    assert_eq!(named(&all, "a").dirty_bytes(SIZE << 8), 512, "what has gone comes back clean");
}

#[test]
fn what_finds_no_memory_for_its_bits_is_dirty_as_a_whole() {
    let (all, mut known) = (DirtyBitmaps::default(), EnabledBitmaps::default());
    all.add(&spec("a", 512), SIZE, 1).unwrap();
    let large = 1 << 50;
    assert!(matches!(all.cover(large), Err(BitmapError::TooLarge(_))));
    assert_eq!(dirty(&all, &["a"], large), [0]);
    known.mark(&all, io(Op::Write, large - 1, 1));
    let covered = named(&all, "a").bytes() * 8 * 512;
    assert_eq!(dirty(&all, &["a"], large), [large - covered]);
    let extents = named(&all, "a").extents(ByteRange::new(0, large), 1, 9, 1 << 20);
    let [clean, rest] = [(covered, false), (large - covered, true)];
    assert_eq!(extents, [clean, rest].map(|(len, is_dirty)| DirtyExtent { len, is_dirty }));
    all.add(&spec("b", 64 << 20), large, 1).unwrap();
    all.merge("b", &["a".into()], large).unwrap();
    assert!(dirty(&all, &["b"], large)[0] >= large - covered);
    all.clear("a").unwrap();
    assert_eq!(dirty(&all, &["a"], large), [0]);
}

#[test]
fn a_saved_bitmap_is_restored_and_one_that_is_not_whole_is_dirty() {
    let mut random = Random::from_seed(nowait_testkit::seed());
    for size in [1, SIZE, 1 << 30, 100 << 30] {
        let (all, mut known) = (DirtyBitmaps::default(), EnabledBitmaps::default());
        all.add(&spec("a", 4096), SIZE.min(size), 1).unwrap();
        all.cover(size / 2).unwrap();
        for _ in 0..10 {
            let pos = random.below(size.min(64 << 30));
            known.mark(&all, io(Op::Write, pos, 1));
        }
        let count = dirty(&all, &["a"], size);
        let mut file = tempfile::tempfile().unwrap();
        all.save("a", size, &file).unwrap();
        file.rewind().unwrap();
        let other = DirtyBitmaps::default();
        let disabled = BitmapSpec { enabled: false, ..spec("a", 4096) };
        other.restore(&disabled, Some(&mut file), size).unwrap();
        assert_eq!(dirty(&other, &["a"], size), count);
        assert!(!other.is_on());
        let extents =
            |all: &DirtyBitmaps| named(all, "a").extents(ByteRange::new(0, size), 1, 99, 1 << 40);
        assert_eq!(extents(&other), extents(&all));
        // Cut off, or not sent at all.
        file.set_len(file.metadata().unwrap().len() - 512).unwrap();
        file.rewind().unwrap();
        let contents: [Option<&mut dyn Read>; 2] = [Some(&mut file), None];
        for content in contents {
            let other = DirtyBitmaps::default();
            let restored = other.restore(&spec("a", 4096), content, size);
            assert!(matches!(restored, Err(RestoreError::AllDirty(_))), "{restored:?}");
            assert_eq!(dirty(&other, &["a"], size), [size]);
            assert!(other.is_on());
        }
    }
    let other = DirtyBitmaps::default();
    let restored = other.restore(&spec("a", 512), None, 1 << 60);
    assert!(matches!(restored, Err(RestoreError::AllDirty(_))), "{restored:?}");
    assert_eq!(dirty(&other, &["a"], 1 << 60), [1 << 60]);
    let lost = other.restore(&spec("a\n", 512), None, 4096);
    assert_eq!(lost, Err(RestoreError::NotAdded(BitmapError::Name)));
}

/// A writer marks a granule after it has changed it; one who clears and then looks has either the mark or the change.
#[test]
fn no_change_is_lost_beside_a_clearing() {
    let all = DirtyBitmaps::default();
    all.add(&spec("a", 512), SIZE, 1).unwrap();
    let changed = AtomicU64::new(0);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut known = EnabledBitmaps::default();
            for change in 1..=20_000 {
                changed.store(change, Ordering::SeqCst);
                known.mark(&all, io(Op::Write, 0, 1));
            }
            is_over.store(true, Ordering::SeqCst);
        });
        let mut copied = 0;
        while !is_over.load(Ordering::SeqCst) {
            all.clear("a").unwrap();
            copied = changed.load(Ordering::SeqCst);
        }
        assert!(copied == 20_000 || dirty(&all, &["a"], SIZE) == [512]);
    });
}

#[test]
fn what_is_taken_of_a_tracker_is_what_was_changed_since_and_no_user_sees_it() {
    let mut random = Random::from_seed(nowait_testkit::seed());
    let (all, mut known) = (DirtyBitmaps::default(), EnabledBitmaps::default());
    let size = 9 << 20;
    known.mark(&all, io(Op::Write, 0, size));
    let tracker = all.add_tracker(size).unwrap();
    assert!(tracker.take(0, size, usize::MAX).is_empty(), "before it there was nothing");
    let granules = (size / TRACKER_GRANULARITY) as usize;
    for _ in 0..20 {
        let mut model = vec![false; granules];
        for _ in 0..random.below(9) {
            let (pos, len) = (random.below(size), 1 + random.below(3 * TRACKER_GRANULARITY));
            let len = len.min(size - pos);
            known.mark(&all, io([Op::Write, Op::Zero, Op::Discard][pos as usize % 3], pos, len));
            let last = (pos + len - 1) / TRACKER_GRANULARITY;
            model[(pos / TRACKER_GRANULARITY) as usize..=last as usize].fill(true);
        }
        let changed = model.iter().filter(|it| **it).count() as u64 * TRACKER_GRANULARITY;
        assert_eq!(tracker.dirty_bytes(size), changed);
        let mut taken = vec![false; granules];
        let mut from = 0;
        loop {
            let ranges = tracker.take(from, size, 2);
            let Some(last) = ranges.last() else { break };
            from = last.pos + last.len;
            for range in ranges {
                let first = (range.pos / TRACKER_GRANULARITY) as usize;
                taken[first..][..(range.len / TRACKER_GRANULARITY) as usize].fill(true);
            }
        }
        assert_eq!(taken, model);
        assert_eq!(tracker.dirty_bytes(size), 0);
    }
    assert!(all.names().is_empty() && all.specs().is_empty() && all.status(size).is_empty());
    all.remove_tracker(&tracker);
    known.mark(&all, io(Op::Write, 0, size));
    assert_eq!(tracker.dirty_bytes(size), 0, "its end is noticed");
}

#[test]
fn a_tracker_has_64k_granules_up_to_2_tib_and_larger_ones_beyond() {
    let limit = TRACKER_BITS * TRACKER_GRANULARITY;
    for (size, granularity) in [
        (0, TRACKER_GRANULARITY),
        (limit, TRACKER_GRANULARITY),
        (limit + 1, 2 * TRACKER_GRANULARITY),
        (1 << 62, 1 << 37),
    ] {
        assert_eq!(tracker_granularity(size), granularity, "{size}");
    }
}
