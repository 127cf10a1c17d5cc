//! Group C: reads.

use std::cell::Cell;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use nowait::{BlockingFile, Config, Flags, OpenOptions};

use crate::deny::{Deny, denied};
use crate::rig::{
    Api, BLOCK, Content, ISLAND, Image, KIB, MIB, Memory, POISON, REAL, Random, buffered, islands,
    on_apis, on_engines, pattern, range_in, read,
};

rules![
    c17_a_read_at_the_end_or_beyond_it_is_0,
    c17_a_read_across_the_end_stops_at_the_end,
    c18_holes_and_unwritten_extents_are_zeros,
    c18_memory_beyond_the_count_keeps_its_contents,
    c19_a_short_transfer_is_continued,
    c19_an_error_after_good_bytes_is_returned_by_the_next_call,
    c20_a_direct_read_sees_dirty_cached_data,
    c21_each_byte_is_transferred_once,
    c21_trying_again_leaves_no_old_bytes_beside_new_ones,
];

/// Sizes that are whole blocks, whole sectors, or neither.
const SIZES: [u64; 5] = [64 * KIB, 64 * KIB + 512, 64 * KIB + 1, 10_000, 100];

fn c17_a_read_at_the_end_or_beyond_it_is_0() {
    for size in SIZES {
        on_apis(size, Content::Data, |api| {
            for pos in [size, size + 1, size.next_multiple_of(BLOCK), size + MIB, 1 << 60] {
                for len in [1, 512, BLOCK, 3 * BLOCK + 1] {
                    assert_eq!(api.read(pos, len), Ok(Vec::new()), "{}", api.label());
                }
            }
        });
    }
}

fn c17_a_read_across_the_end_stops_at_the_end() {
    for size in SIZES {
        on_apis(size, Content::Data, |api| {
            for pos in [0, size - 1, size - 99, (size - 1) / BLOCK * BLOCK, (size - 1) / 512 * 512]
            {
                for len in [100, BLOCK, 2 * BLOCK, 100 * KIB] {
                    let expected = pattern(pos, len.min(size - pos));
                    assert!(api.read(pos, len) == Ok(expected), "{pos} {len} {}", api.label());
                }
            }
        });
    }
}

fn c18_holes_and_unwritten_extents_are_zeros() {
    const SIZE: u64 = 20 * ISLAND + 3333;
    on_apis(SIZE, Content::Islands, |api| {
        let mut random = Random::from_seed(0x18);
        assert!(api.read(0, SIZE) == Ok(islands(0, SIZE)), "{}", api.label());
        for _ in 0..30 {
            let range = range_in(SIZE, &mut random);
            let got = api.read(range.pos, range.len);
            assert!(got == Ok(islands(range.pos, range.len)), "{range:?} {}", api.label());
        }
    });
}

fn c18_memory_beyond_the_count_keeps_its_contents() {
    const SIZE: u64 = 10_000;
    for content in [Content::Data, Content::Hole] {
        on_apis(SIZE, content, |api| {
            for pos in [0, 8192, 9000, 9999, 10_000, 12_288] {
                let mut memory = Memory::new(8 * BLOCK);
                let (first, second) = memory.split_at_mut(4 * 4096);
                let done = api.read_vectored(pos, &mut [first]).expect("a read") as usize;
                assert_eq!(done as u64, SIZE.saturating_sub(pos), "{}", api.label());
                assert!(first[done..].iter().all(|&byte| byte == POISON), "{}", api.label());
                let (first, middle) = first.split_at_mut(100);
                first.fill(POISON);
                middle.fill(POISON);
                let two = &mut [&mut *second, &mut *first];
                assert_eq!(api.read_vectored(pos, two), Ok(done as u64), "{}", api.label());
                let beyond = second.iter().chain(&*first).skip(done);
                assert!(beyond.chain(&*middle).all(|&byte| byte == POISON), "{}", api.label());
            }
        });
    }
}

fn c19_a_short_transfer_is_continued() {
    on_engines(&REAL, MIB, Content::Data, |rig| {
        // Nothing, part of a block, some blocks, all but one byte.
        for short in [0, 100, 4096, 65536, 131_071] {
            let cut = move |_: &_, outcome: i32| outcome.min(short);
            rig.script.on_reap(cut);
            let len = 128 * KIB;
            assert!(rig.read(4096, len) == Ok(pattern(4096, len)), "{short} {}", rig.case.label);
            let bytes = pattern(777 + short as u64, len);
            let written = Api::write(rig, 262_144, &bytes, Flags::NONE);
            assert_eq!(written, Ok(len), "{short} {}", rig.case.label);
            assert!(rig.image.bytes(262_144, len) == bytes, "{short} {}", rig.case.label);
            let mut memory = Memory::new(2 * BLOCK + 9);
            let list = [memory.segment(4096..8201), memory.segment(0..4000)];
            assert_eq!(rig.run_segments(read(50, 8105), &list), Ok(8105), "{}", rig.case.label);
            let got = [&memory[4096..8201], &memory[..4000]].concat();
            assert!(got == pattern(50, 8105), "{short} {}", rig.case.label);
        }
    });
}

fn c19_an_error_after_good_bytes_is_returned_by_the_next_call() {
    const BAD: u64 = 512 * KIB;
    let eio = |call| Deny { call, from: BAD as u32, errno: libc::EIO };
    let image = Image::new(MIB, Content::Data);
    let file = BlockingFile::open(&image.path, OpenOptions::default()).unwrap();
    denied(eio(libc::SYS_preadv2), || {
        let mut memory = Memory::new(MIB);
        // Unaligned memory goes through a bounce buffer, in several calls.
        let done = file.read_at(&mut memory[1..], 0).expect("the good bytes");
        assert!(done > 0 && done as u64 <= BAD, "{done}");
        assert!(memory[1..=done] == pattern(0, done as u64));
        let next = file.read_at(&mut memory[1..], BAD).unwrap_err();
        assert_eq!(next.errno(), libc::EIO);
    });
    denied(eio(libc::SYS_pwritev2), || {
        let bytes = vec![0x77; MIB as usize];
        let done = file.write_at(&bytes[1..], 0, Flags::NONE).expect("the good bytes");
        assert!(done > 0 && done as u64 <= BAD, "{done}");
        let next = file.write_at(&bytes[1..], BAD, Flags::NONE).unwrap_err();
        assert_eq!(next.errno(), libc::EIO);
        assert!(image.bytes(0, done as u64) == bytes[..done]);
        assert!(image.bytes(BAD, MIB - BAD) == pattern(BAD, MIB - BAD));
    });
}

fn c20_a_direct_read_sees_dirty_cached_data() {
    on_apis(MIB, Content::Data, |api| {
        let other = buffered(&api.image().path);
        for (pos, len) in [(0, BLOCK), (4096, 64 * KIB), (300_001, 77)] {
            let dirty = vec![0x42; len as usize];
            other.write_all_at(&dirty, pos).unwrap();
            assert!(api.read(pos, len) == Ok(dirty), "{}", api.label());
        }
    });
}

fn c21_each_byte_is_transferred_once() {
    const SIZE: u64 = 12 * ISLAND;
    on_engines(&REAL, SIZE, Content::Islands, |rig| {
        let mut memory = Memory::new(SIZE + BLOCK);
        let list = [memory.segment(0..8192), memory.segment(12_288..SIZE as usize + 4096)];
        assert_eq!(rig.run_segments(read(0, SIZE), &list), Ok(SIZE), "{}", rig.case.label);
        let got = [&memory[..8192], &memory[12_288..]].concat();
        assert!(got == islands(0, SIZE), "{}", rig.case.label);
        let mut times = vec![0; (SIZE / BLOCK) as usize];
        for pushed in rig.script.take_pushed() {
            let (pos, len) = (pushed.transfer.pos, u64::from(pushed.transfer.len));
            assert!(pos.is_multiple_of(BLOCK) && len.is_multiple_of(BLOCK), "{pos} {len}");
            let blocks = (pos / BLOCK) as usize..((pos + len) / BLOCK) as usize;
            times[blocks].iter_mut().for_each(|times| *times += 1);
        }
        let Config { nowait_first, .. } = rig.case.config;
        for (block, times) in (0..).zip(times) {
            let is_data = (block * BLOCK / ISLAND).is_multiple_of(3);
            let fewest = u32::from(nowait_first && is_data);
            assert!((fewest..=1).contains(&times), "block {block}: {times}, {}", rig.case.label);
        }
    });
}

fn c21_trying_again_leaves_no_old_bytes_beside_new_ones() {
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let mut memory = Memory::new(64 * BLOCK);
        let list = [memory.segment(0..8192), memory.segment(16_384..65_536)];
        let other = buffered(&rig.image.path);
        let changed = Rc::new(Cell::new(false));
        let seen = changed.clone();
        rig.script.on_reap(move |_, outcome| {
            // The first transfer is short, and its bytes are overwritten before the next try.
            if seen.replace(true) {
                return outcome;
            }
            other.write_all_at(&vec![0x99; 57_344], 0).unwrap();
            outcome.min(4096)
        });
        assert_eq!(rig.run_segments(read(0, 57_344), &list), Ok(57_344), "{}", rig.case.label);
        let got = [&memory[..8192], &memory[16_384..65_536]].concat();
        let expected = if changed.get() { vec![0x99; 57_344] } else { pattern(0, 57_344) };
        assert!(got == expected, "{}", rig.case.label);
        assert_eq!(changed.get(), rig.case.config.nowait_first, "{}", rig.case.label);
    });
}
