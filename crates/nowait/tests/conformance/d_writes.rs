//! Group D: writes.

use std::cell::Cell;
use std::fs;

use nowait::{Flags, Op, Range, Segment};

use crate::deny::{Deny, denied};
use crate::rig::{
    ALL, BLOCK, Content, KIB, MIB, Memory, REAL, Random, Rig, dirty_pages, io, on_engines,
    on_faces, pattern, write,
};

rules![
    c22_of_several_errors_the_first_one_seen_is_reported,
    c23_no_write_changes_the_size,
    c24_a_block_written_in_part_is_zeros_around_it,
    c25_a_write_at_the_end_is_enospc_and_one_across_it_is_cut,
    c28_a_dsync_write_leaves_nothing_in_the_cache,
    c28_a_dsync_write_whose_sync_fails_is_an_error,
    c29_one_flush_covers_a_dsync_write_in_pieces,
    c31_a_buffered_handle_reads_no_stale_data,
];

/// Two segments of `len` bytes whose lengths no device takes, so that they go by bounced pieces.
fn in_pieces(memory: &mut Memory, len: u64) -> [Segment; 2] {
    [memory.segment(0..5), memory.segment(4101..4096 + len as usize)]
}

fn c22_of_several_errors_the_first_one_seen_is_reported() {
    const SIZE: u64 = 4 * MIB;
    on_engines(&ALL, SIZE, Content::Data, |rig| {
        // The first and the last transfers succeed, those between fail in different ways.
        let errors = [0, -libc::EIO, -libc::ENOSPC, -libc::EIO];
        let mut memory = Memory::new(SIZE + BLOCK);
        for op in [Op::Read, Op::Write] {
            let seen = Cell::new(0);
            rig.script.on_reap(move |_, outcome| {
                let number = seen.replace(seen.get() + 1);
                errors.get(number).filter(|error| **error < 0).copied().unwrap_or(outcome)
            });
            let list = in_pieces(&mut memory, SIZE);
            let done = rig.run_segments(io(op, Flags::NONE, 0, SIZE), &list);
            let placed = rig.script.take_placed().len();
            let expected = if placed > 1 { Err(libc::EIO) } else { Ok(SIZE) };
            assert_eq!(done, expected, "{}", rig.case.label);
            let by_queue = rig.case.config.nowait_first && rig.disk.is_direct();
            assert_eq!(placed > 1, by_queue, "{}", rig.case.label);
        }
    });
}

fn c23_no_write_changes_the_size() {
    for size in [64 * KIB, 64 * KIB + 512, 64 * KIB + 7] {
        for content in [Content::Hole, Content::Data] {
            on_faces(size, content, |face| {
                let mut random = Random(0x23);
                for _ in 0..10 {
                    let pos = size - 1 - random.below(3 * BLOCK);
                    let len = 1 + random.below(4 * BLOCK);
                    let bytes = pattern(pos + 1, len);
                    let done = face.write(pos, &bytes, Flags::NONE);
                    assert_eq!(done, Ok(len.min(size - pos)), "{}", face.label());
                    let kept = face.image().bytes(pos, len.min(size - pos));
                    assert!(kept == bytes[..kept.len()], "{}", face.label());
                }
                let flags = Flags::NO_UNMAP;
                let tail = Range::new(size - 9, 9 * BLOCK);
                let _ = face.bare(Op::Zero, flags, tail);
                let _ = face.bare(Op::Discard, Flags::NONE, tail);
                let now = fs::metadata(&face.image().path).unwrap().len();
                assert_eq!(now, size, "{}", face.label());
            });
        }
    }
}

fn c24_a_block_written_in_part_is_zeros_around_it() {
    const SIZE: u64 = 256 * KIB + 100;
    on_faces(SIZE, Content::Hole, |face| {
        let mut expected = vec![0; SIZE as usize];
        for (pos, len) in [(5000, 100), (70_000, 9000), (131_071, 2), (SIZE - 50, 49)] {
            let bytes = pattern(pos, len);
            assert_eq!(face.write(pos, &bytes, Flags::NONE), Ok(len), "{}", face.label());
            expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
        }
        assert!(face.read(0, SIZE) == Ok(expected.clone()), "{}", face.label());
        assert!(face.image().bytes(0, SIZE) == expected, "{}", face.label());
    });
}

fn c25_a_write_at_the_end_is_enospc_and_one_across_it_is_cut() {
    for size in [64 * KIB, 10_000] {
        on_faces(size, Content::Data, |face| {
            for pos in [size, size + 1, size.next_multiple_of(BLOCK), size + MIB] {
                for len in [1, 4096] {
                    let done = face.write(pos, &vec![1; len], Flags::NONE);
                    assert_eq!(done, Err(libc::ENOSPC), "{}", face.label());
                }
                let behind = Range::new(pos, 4096);
                for op in [Op::Zero, Op::Discard] {
                    let done = face.bare(op, Flags::NONE, behind);
                    assert_eq!(done, Err(libc::ENOSPC), "{}", face.label());
                }
            }
            let two: [&[u8]; 2] = [&[8; 50], &[9; 100]];
            assert_eq!(face.write_vectored(size - 60, &two), Ok(60), "{}", face.label());
            let expected = [pattern(0, size - 60), vec![8; 50], vec![9; 10]].concat();
            assert!(face.image().bytes(0, size) == expected, "{}", face.label());
            assert_eq!(fs::metadata(&face.image().path).unwrap().len(), size, "{}", face.label());
        });
    }
}

fn c28_a_dsync_write_leaves_nothing_in_the_cache() {
    on_faces(MIB + 777, Content::Data, |face| {
        for (pos, len) in [(0, BLOCK), (4096, 96 * KIB), (70_001, 9), (MIB + 70, 500)] {
            let bytes = pattern(pos + 7, len);
            assert_eq!(face.write(pos, &bytes, Flags::DSYNC), Ok(len), "{}", face.label());
            let range = Range::new(pos, len);
            let dirty = dirty_pages(&face.image().path, range);
            assert_eq!(dirty.unwrap_or(0), 0, "{range:?} {}", face.label());
        }
    });
}

fn c28_a_dsync_write_whose_sync_fails_is_an_error() {
    denied(Deny::all(libc::SYS_fdatasync, libc::EIO), || {
        on_faces(MIB, Content::Data, |face| {
            // By the page cache no request is unaligned, and the write syncs by itself.
            if face.is_direct() {
                let done = face.write(4095, &[1; 4098], Flags::DSYNC);
                assert_eq!(done, Err(libc::EIO), "{}", face.label());
                let done = face.bare(Op::Zero, Flags::DSYNC, Range::new(0, 512));
                assert_eq!(done, Err(libc::EIO), "{}", face.label());
            }
        });
    });
}

fn c29_one_flush_covers_a_dsync_write_in_pieces() {
    let dsync = io(Op::Write, Flags::DSYNC, 0, MIB);
    let run = |rig: &mut Rig| {
        let mut memory = Memory::with(&pattern(9, MIB + 4096));
        let list = in_pieces(&mut memory, MIB);
        let done = rig.run_segments(dsync, &list);
        (done, [&memory[..5], &memory[4101..]].concat())
    };
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let (done, bytes) = run(rig);
        assert_eq!(done, Ok(MIB), "{}", rig.case.label);
        assert!(rig.image.bytes(0, MIB) == bytes, "{}", rig.case.label);
        let placed = rig.script.take_placed();
        let synced = |flags: i32| flags & libc::RWF_DSYNC != 0;
        let apart = placed.iter().any(|p| synced(p.transfer.rw_flags));
        assert!(!apart || placed.len() == 1, "{}", rig.case.label);
        assert!(placed.len() > 1 || !rig.is_plain(), "{}", rig.case.label);
    });
    denied(Deny::all(libc::SYS_fdatasync, libc::EIO), || {
        on_engines(&REAL, MIB, Content::Data, |rig| {
            // Through the page cache it may be one transfer, which syncs by itself.
            if rig.disk.is_direct() {
                assert_eq!(run(rig).0, Err(libc::EIO), "{}", rig.case.label);
            }
            let plain = rig.run(write(0, BLOCK), &[1; 4096]);
            assert_eq!(plain, Ok(BLOCK), "{}", rig.case.label);
        });
    });
}

fn c31_a_buffered_handle_reads_no_stale_data() {
    on_faces(MIB, Content::Data, |face| {
        let mut expected = pattern(0, MIB);
        for (pos, len) in [(0, BLOCK), (8192, 128 * KIB), (300_001, 77)] {
            // All of it is in the page cache now.
            assert!(fs::read(&face.image().path).unwrap() == expected, "{}", face.label());
            let bytes = pattern(pos + 3, len);
            assert_eq!(face.write(pos, &bytes, Flags::NONE), Ok(len), "{}", face.label());
            expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
        }
        assert!(fs::read(&face.image().path).unwrap() == expected, "{}", face.label());
    });
}
