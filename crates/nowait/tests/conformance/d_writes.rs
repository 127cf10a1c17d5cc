//! Group D: writes.

use std::cell::Cell;
use std::fs;

use nowait::{ByteRange, Flags, IoSegment, Op};

use crate::deny::{Deny, denied};
use crate::queue::Pushed;
use crate::rig::{
    ALL, BLOCK, Content, KIB, MIB, Memory, REAL, Random, Rig, dirty_pages, io, on_apis, on_engines,
    pattern, write,
};

rules![
    c22_of_several_errors_the_first_one_seen_is_reported,
    c23_no_write_changes_the_size,
    c24_a_block_written_in_part_is_zeros_around_it,
    c25_a_write_at_the_end_is_enospc_and_one_across_it_is_cut,
    c25_a_disk_of_0_bytes_takes_no_write_and_reads_0_bytes,
    c28_a_dsync_write_leaves_nothing_in_the_cache,
    c28_a_dsync_write_is_synced_by_its_transfer_or_by_a_call,
    c28_a_dsync_write_whose_sync_fails_is_an_error,
    c30_a_sync_write_leaves_nothing_in_the_cache_and_is_an_error_if_its_sync_fails,
    c29_one_flush_covers_a_dsync_write_in_fragments,
    c31_a_buffered_handle_reads_no_stale_data,
];

/// Two segments of `len` bytes together, of lengths that no device takes, so that they go by
/// bounced fragments.
fn in_fragments(memory: &mut Memory, len: u64) -> [IoSegment; 2] {
    [memory.segment(0..5), memory.segment(4101..4096 + len as usize)]
}

fn c22_of_several_errors_the_first_one_seen_is_reported() {
    const SIZE: u64 = 4 * MIB;
    on_engines(&ALL, SIZE, Content::Data, |rig| {
        // The first and the last transfers succeed, the others fail in different ways.
        let errors = [0, -libc::EIO, -libc::ENOSPC, -libc::EIO];
        let mut memory = Memory::new(SIZE + BLOCK);
        for op in [Op::Read, Op::Write] {
            let seen = Cell::new(0);
            rig.script.on_reap(move |_, outcome| {
                let number = seen.replace(seen.get() + 1);
                errors.get(number).filter(|error| **error < 0).copied().unwrap_or(outcome)
            });
            let list = in_fragments(&mut memory, SIZE);
            let done = rig.run_segments(io(op, Flags::NONE, 0, SIZE), &list);
            let pushed = rig.script.take_pushed().len();
            let expected = if pushed > 1 { Err(libc::EIO) } else { Ok(SIZE) };
            assert_eq!(done, expected, "{}", rig.case.label);
            let by_queue = rig.case.config.nowait_first && rig.disk.is_direct();
            assert_eq!(pushed > 1, by_queue, "{}", rig.case.label);
        }
    });
}

fn c23_no_write_changes_the_size() {
    for size in [64 * KIB, 64 * KIB + 512, 64 * KIB + 7] {
        for content in [Content::Hole, Content::Data] {
            on_apis(size, content, |api| {
                let mut random = Random::from_seed(0x23);
                for _ in 0..10 {
                    let pos = size - 1 - random.below(3 * BLOCK);
                    let len = 1 + random.below(4 * BLOCK);
                    let bytes = pattern(pos + 1, len);
                    let done = api.write(pos, &bytes, Flags::NONE);
                    assert_eq!(done, Ok(len.min(size - pos)), "{}", api.label());
                    let kept = api.image().bytes(pos, len.min(size - pos));
                    assert!(kept == bytes[..kept.len()], "{}", api.label());
                }
                let flags = Flags::NO_UNMAP;
                let tail = ByteRange::new(size - 9, 9 * BLOCK);
                let _ = api.bare(Op::Zero, flags, tail);
                let _ = api.bare(Op::Discard, Flags::NONE, tail);
                let now = fs::metadata(&api.image().path).unwrap().len();
                assert_eq!(now, size, "{}", api.label());
            });
        }
    }
}

fn c24_a_block_written_in_part_is_zeros_around_it() {
    const SIZE: u64 = 256 * KIB + 100;
    on_apis(SIZE, Content::Hole, |api| {
        let mut expected = vec![0; SIZE as usize];
        for (pos, len) in [(5000, 100), (70_000, 9000), (131_071, 2), (SIZE - 50, 49)] {
            let bytes = pattern(pos, len);
            assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(len), "{}", api.label());
            expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
        }
        assert!(api.read(0, SIZE) == Ok(expected.clone()), "{}", api.label());
        assert!(api.image().bytes(0, SIZE) == expected, "{}", api.label());
    });
}

fn c25_a_write_at_the_end_is_enospc_and_one_across_it_is_cut() {
    for size in [64 * KIB, 10_000] {
        on_apis(size, Content::Data, |api| {
            for pos in [size, size + 1, size.next_multiple_of(BLOCK), size + MIB] {
                for len in [1, 4096] {
                    let done = api.write(pos, &vec![1; len], Flags::NONE);
                    assert_eq!(done, Err(libc::ENOSPC), "{}", api.label());
                }
                let past_end = ByteRange::new(pos, 4096);
                for op in [Op::Zero, Op::Discard] {
                    let done = api.bare(op, Flags::NONE, past_end);
                    assert_eq!(done, Err(libc::ENOSPC), "{}", api.label());
                }
            }
            let two: [&[u8]; 2] = [&[8; 50], &[9; 100]];
            assert_eq!(api.write_vectored(size - 60, &two), Ok(60), "{}", api.label());
            let expected = [pattern(0, size - 60), vec![8; 50], vec![9; 10]].concat();
            assert!(api.image().bytes(0, size) == expected, "{}", api.label());
            assert_eq!(fs::metadata(&api.image().path).unwrap().len(), size, "{}", api.label());
        });
    }
}

fn c25_a_disk_of_0_bytes_takes_no_write_and_reads_0_bytes() {
    on_apis(0, Content::Hole, |api| {
        for pos in [0, 512, 1 << 40] {
            let enospc = Err(libc::ENOSPC);
            assert_eq!(api.read(pos, BLOCK), Ok(Vec::new()), "{}", api.label());
            assert_eq!(api.write(pos, &[7; 512], Flags::NONE), enospc, "{}", api.label());
            assert_eq!(api.write(pos, &[7; 5], Flags::DSYNC), enospc, "{}", api.label());
            for op in [Op::Zero, Op::Discard] {
                let done = api.bare(op, Flags::NONE, ByteRange::new(pos, BLOCK));
                assert_eq!(done, Err(libc::ENOSPC), "{op:?} {}", api.label());
            }
        }
        assert_eq!(api.read(0, 0), Ok(Vec::new()), "{}", api.label());
        assert_eq!(api.write(0, &[], Flags::NONE), Ok(0), "{}", api.label());
        assert_eq!(
            api.bare(Op::Flush, Flags::NONE, ByteRange::new(0, 0)),
            Ok(()),
            "{}",
            api.label()
        );
        let len = fs::metadata(&api.image().path).expect("the file").len();
        assert_eq!(len, 0, "{}", api.label());
    });
}

fn c28_a_dsync_write_leaves_nothing_in_the_cache() {
    on_apis(MIB + 777, Content::Data, |api| {
        for (pos, len) in [(0, BLOCK), (4096, 96 * KIB), (70_001, 9), (MIB + 70, 500)] {
            let bytes = pattern(pos + 7, len);
            assert_eq!(api.write(pos, &bytes, Flags::DSYNC), Ok(len), "{}", api.label());
            let range = ByteRange::new(pos, len);
            let dirty = dirty_pages(&api.image().path, range);
            assert_eq!(dirty.unwrap_or(0), 0, "{range:?} {}", api.label());
        }
    });
}

/// With direct I/O no page of the cache would show that a sync was left out.
fn c28_a_dsync_write_is_synced_by_its_transfer_or_by_a_call() {
    denied(Deny::all(libc::SYS_fdatasync, libc::EIO), || {
        on_engines(&ALL, MIB, Content::Data, |rig| {
            for len in [BLOCK, 64 * KIB] {
                let dsync = io(Op::Write, Flags::DSYNC, 0, len);
                let done = rig.run(dsync, &pattern(1, len));
                let pushed = rig.script.take_pushed();
                let synced = |it: &Pushed| it.transfer.rw_flags & libc::RWF_DSYNC != 0;
                // The call fails here, so that a write without an error was synced otherwise.
                let by_transfer = pushed.len() == 1 && synced(&pushed[0]);
                let expected = if by_transfer { Ok(len) } else { Err(libc::EIO) };
                assert_eq!(done, expected, "{} transfers, {}", pushed.len(), rig.case.label);
                assert!(by_transfer || !rig.is_plain(), "{}", rig.case.label);
            }
        });
    });
}

fn c28_a_dsync_write_whose_sync_fails_is_an_error() {
    denied(Deny::all(libc::SYS_fdatasync, libc::EIO), || {
        on_apis(MIB, Content::Data, |api| {
            // Through the page cache every request is aligned, and the transfer itself syncs.
            if api.is_direct() {
                let done = api.write(4095, &[1; 4098], Flags::DSYNC);
                assert_eq!(done, Err(libc::EIO), "{}", api.label());
                let done = api.bare(Op::Zero, Flags::DSYNC, ByteRange::new(0, 512));
                assert_eq!(done, Err(libc::EIO), "{}", api.label());
            }
        });
    });
}

fn c30_a_sync_write_leaves_nothing_in_the_cache_and_is_an_error_if_its_sync_fails() {
    on_apis(MIB + 777, Content::Data, |api| {
        for (pos, len) in [(0, BLOCK), (4096, 96 * KIB), (70_001, 9), (MIB + 70, 500)] {
            let bytes = pattern(pos + 7, len);
            assert_eq!(api.write(pos, &bytes, Flags::SYNC), Ok(len), "{}", api.label());
            let range = ByteRange::new(pos, len);
            let dirty = dirty_pages(&api.image().path, range);
            assert_eq!(dirty.unwrap_or(0), 0, "{range:?} {}", api.label());
            assert_eq!(api.read(pos, len), Ok(bytes), "{}", api.label());
        }
    });
    denied(Deny::all(libc::SYS_fdatasync, libc::EIO), || {
        on_apis(MIB, Content::Data, |api| {
            // Through the page cache every request is aligned, and the transfer itself may sync.
            if api.is_direct() {
                let done = api.write(4095, &[1; 4098], Flags::SYNC);
                assert_eq!(done, Err(libc::EIO), "{}", api.label());
            }
        });
    });
}

fn c29_one_flush_covers_a_dsync_write_in_fragments() {
    let dsync = io(Op::Write, Flags::DSYNC, 0, MIB);
    let run = |rig: &mut Rig| {
        let mut memory = Memory::with(&pattern(9, MIB + 4096));
        let list = in_fragments(&mut memory, MIB);
        let done = rig.run_segments(dsync, &list);
        (done, [&memory[..5], &memory[4101..]].concat())
    };
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let (done, bytes) = run(rig);
        assert_eq!(done, Ok(MIB), "{}", rig.case.label);
        assert!(rig.image.bytes(0, MIB) == bytes, "{}", rig.case.label);
        let pushed = rig.script.take_pushed();
        let synced = |flags: i32| flags & libc::RWF_DSYNC != 0;
        let apart = pushed.iter().any(|p| synced(p.transfer.rw_flags));
        assert!(!apart || pushed.len() == 1, "{}", rig.case.label);
        assert!(pushed.len() > 1 || !rig.is_plain(), "{}", rig.case.label);
    });
    denied(Deny::all(libc::SYS_fdatasync, libc::EIO), || {
        on_engines(&REAL, MIB, Content::Data, |rig| {
            // Through the page cache it may be one transfer, which itself syncs.
            if rig.disk.is_direct() {
                assert_eq!(run(rig).0, Err(libc::EIO), "{}", rig.case.label);
            }
            let plain = rig.run(write(0, BLOCK), &[1; 4096]);
            assert_eq!(plain, Ok(BLOCK), "{}", rig.case.label);
        });
    });
}

fn c31_a_buffered_handle_reads_no_stale_data() {
    on_apis(MIB, Content::Data, |api| {
        let mut expected = pattern(0, MIB);
        for (pos, len) in [(0, BLOCK), (8192, 128 * KIB), (300_001, 77)] {
            // All of it is in the page cache now.
            assert!(fs::read(&api.image().path).unwrap() == expected, "{}", api.label());
            let bytes = pattern(pos + 3, len);
            assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(len), "{}", api.label());
            expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
        }
        assert!(fs::read(&api.image().path).unwrap() == expected, "{}", api.label());
    });
}
