//! Group G: flush, discard, zero, status, and writes that overlap.

use std::sync::Arc;

use nowait::{BlockDevice, BlockingFile, ByteRange, Flags, Op, OpenOptions};

use nowait_testkit::skip;

use crate::deny::{Deny, denied};
use crate::rig::{
    Api, BLOCK, Content, ISLAND, Image, KIB, MIB, REAL, Random, Rig, cases, dirty_pages, islands,
    on_apis, on_engines, pattern, write,
};

rules![
    c49_a_flush_covers_writes_completed_on_another_engine,
    c51_after_one_failed_flush_all_fail_until_the_device_is_reopened,
    c52_a_discarded_range_reads_as_zeros_and_loses_its_storage,
    c52_a_zeroed_range_reads_as_zeros,
    c52_a_range_zeroed_with_no_unmap_keeps_its_storage,
    c52_an_operation_that_the_file_system_lacks_is_eopnotsupp,
    c52_zeroes_are_written_where_the_file_system_has_none,
    c52_status_tells_holes_from_data,
    c54_no_block_holds_a_mixture_of_overlapping_writes,
];

const NOWHERE: ByteRange = ByteRange::new(0, 0);

fn c49_a_flush_covers_writes_completed_on_another_engine() {
    const SIZE: u64 = MIB + 777;
    for case in cases(&REAL) {
        let image = Image::new(SIZE, Content::Data);
        let path = image.path.clone();
        let Some(mut writer) = Rig::new(&case, image) else { continue };
        let other = Image::new(BLOCK, Content::Hole);
        let Some(mut flusher) = Rig::on(&case, other, writer.disk.clone()) else { continue };
        let file = BlockingFile::new(writer.disk.clone());
        for round in 0..4 {
            // The last bytes go through the page cache even with direct I/O.
            for (pos, len) in [(round * BLOCK, BLOCK), (MIB + 100 * round, 99)] {
                let bytes = pattern(pos + round + 1, len);
                assert_eq!(writer.write(pos, &bytes, Flags::NONE), Ok(len), "{}", case.label);
            }
            let flushed = match round % 2 {
                0 => flusher.bare(Op::Flush, Flags::NONE, NOWHERE),
                _ => file.flush().map_err(|error| error.errno()),
            };
            assert_eq!(flushed, Ok(()), "{}", case.label);
            let dirty = dirty_pages(&path, ByteRange::new(0, SIZE));
            assert_eq!(dirty.unwrap_or(0), 0, "{round} {}", case.label);
        }
    }
}

fn c51_after_one_failed_flush_all_fail_until_the_device_is_reopened() {
    for case in cases(&REAL) {
        let image = Image::new(MIB, Content::Data);
        let options = OpenOptions::new().direct(case.options.direct);
        let disk = Arc::new(BlockDevice::open(&image.path, options).unwrap());
        let (file, shared) = (BlockingFile::new(disk.clone()), disk.clone());
        let failed = denied(Deny::all(libc::SYS_fdatasync, libc::ENOSPC), || {
            let Some(mut rig) = Rig::on(&case, Image::new(BLOCK, Content::Hole), shared) else {
                return Err(libc::ENOSPC);
            };
            rig.bare(Op::Flush, Flags::NONE, NOWHERE)
        });
        let Some(failed) = failed else { return };
        assert_eq!(failed, Err(libc::ENOSPC), "the errno as it was seen: {}", case.label);
        let Some(mut rig) = Rig::on(&case, image, disk) else { continue };
        for _ in 0..3 {
            let flushed = rig.bare(Op::Flush, Flags::NONE, NOWHERE);
            assert_eq!(flushed, Err(libc::EIO), "{}", case.label);
            assert_eq!(file.flush().unwrap_err().errno(), libc::EIO, "{}", case.label);
        }
        assert_eq!(rig.write(0, &[1; 4096], Flags::NONE), Ok(BLOCK), "{}", case.label);
        if rig.disk.is_direct() {
            let synced = rig.write(1, &[1; 3], Flags::DSYNC);
            assert_eq!(synced, Err(libc::EIO), "{}", case.label);
        }
        let reopened = BlockingFile::open(&rig.image.path, options).unwrap();
        assert_eq!(reopened.flush(), Ok(()), "{}", case.label);
    }
}

/// Ranges of an image of 1 MiB: all of it, aligned, unaligned, inside one block.
const RANGES: [(u64, u64); 4] =
    [(0, MIB), (64 * KIB, 128 * KIB), (4095, 300_002), (5 * BLOCK + 1, 9)];

fn c52_a_discarded_range_reads_as_zeros_and_loses_its_storage() {
    for (pos, len) in RANGES {
        on_apis(MIB, Content::Data, |api| {
            match api.bare(Op::Discard, Flags::NONE, ByteRange::new(pos, len)) {
                Err(libc::EOPNOTSUPP) => {
                    skip(&format!("no holes here: {}", api.label()));
                    return;
                }
                done => assert_eq!(done, Ok(()), "{}", api.label()),
            }
            let mut expected = pattern(0, MIB);
            expected[pos as usize..(pos + len) as usize].fill(0);
            assert!(api.read(0, MIB) == Ok(expected.clone()), "{}", api.label());
            assert!(api.image().bytes(0, MIB) == expected, "{}", api.label());
            let last_block_end = (pos + len) / BLOCK * BLOCK;
            let freed = last_block_end.saturating_sub(pos.next_multiple_of(BLOCK));
            assert!(api.image().allocated() <= MIB - freed + BLOCK, "{}", api.label());
        });
    }
}

fn c52_a_zeroed_range_reads_as_zeros() {
    for flags in [Flags::NONE, Flags::NO_UNMAP, Flags::DSYNC] {
        for (pos, len) in RANGES {
            on_apis(MIB, Content::Data, |api| {
                let zeroed = api.bare(Op::Zero, flags, ByteRange::new(pos, len));
                assert_eq!(zeroed, Ok(()), "{}", api.label());
                let mut expected = pattern(0, MIB);
                expected[pos as usize..(pos + len) as usize].fill(0);
                assert!(api.read(0, MIB) == Ok(expected.clone()), "{}", api.label());
                // A later write to the range is seen.
                let bytes = pattern(3, 20);
                let at = pos + len / 2;
                let fits = bytes.len().min((MIB - at) as usize);
                let written = api.write(at, &bytes[..fits], Flags::NONE);
                assert_eq!(written, Ok(fits as u64), "{}", api.label());
                expected[at as usize..at as usize + fits].copy_from_slice(&bytes[..fits]);
                assert!(api.read(0, MIB) == Ok(expected), "{}", api.label());
            });
        }
    }
}

fn c52_a_range_zeroed_with_no_unmap_keeps_its_storage() {
    on_apis(MIB, Content::Data, |api| {
        let before = api.image().allocated();
        let range = ByteRange::new(64 * KIB, 512 * KIB);
        assert_eq!(api.bare(Op::Zero, Flags::NO_UNMAP, range), Ok(()), "{}", api.label());
        assert!(api.image().bytes(range.pos, range.len).iter().all(|&byte| byte == 0));
        assert!(api.image().allocated() >= before, "{}", api.label());
    });
}

fn c52_an_operation_that_the_file_system_lacks_is_eopnotsupp() {
    denied(Deny::all(libc::SYS_fallocate, libc::EOPNOTSUPP), || {
        on_apis(MIB, Content::Data, |api| {
            let range = ByteRange::new(5000, 100_000);
            for (op, flags) in [(Op::Discard, Flags::NONE), (Op::Zero, Flags::FAST_ZERO)] {
                let done = api.bare(op, flags, range);
                assert_eq!(done, Err(libc::EOPNOTSUPP), "{op:?} {}", api.label());
                assert!(api.read(0, MIB) == Ok(pattern(0, MIB)), "{op:?} {}", api.label());
            }
        });
    });
}

fn c52_zeroes_are_written_where_the_file_system_has_none() {
    denied(Deny::all(libc::SYS_fallocate, libc::EOPNOTSUPP), || {
        on_apis(MIB + 99, Content::Data, |api| {
            let mut expected = pattern(0, MIB + 99);
            for (pos, len) in [(5000, 600_000), (8192, 4096), (MIB - 5, 50)] {
                for flags in [Flags::NONE, Flags::NO_UNMAP] {
                    let zeroed = api.bare(Op::Zero, flags, ByteRange::new(pos, len));
                    assert_eq!(zeroed, Ok(()), "{}", api.label());
                }
                expected[pos as usize..(pos + len) as usize].fill(0);
                assert!(api.read(0, MIB + 99) == Ok(expected.clone()), "{}", api.label());
            }
            assert!(api.image().bytes(0, MIB + 99) == expected, "{}", api.label());
        });
    });
}

fn c52_status_tells_holes_from_data() {
    const SIZE: u64 = 9 * ISLAND;
    on_engines(&REAL, SIZE, Content::Islands, |rig| {
        for (pos, len) in [(0, SIZE), (100, 5 * ISLAND), (ISLAND + 7, 9)] {
            let range = ByteRange::new(pos, len);
            let tag = 0x5a;
            let request = nowait::Request { op: Op::Status, flags: Flags::NONE, range };
            assert!(rig.engine.submit_no_data(request, tag).is_ok(), "{}", rig.case.label);
            assert_eq!(rig.only().result(), Ok(len), "{}", rig.case.label);
            let mut at = pos;
            for extent in rig.engine.take_extents(tag) {
                let zeros = islands(at, extent.len).iter().all(|&byte| byte == 0);
                // Data may hold zeros, a hole never holds data.
                assert!(zeros || !extent.hole, "{at} {extent:?} {}", rig.case.label);
                at += extent.len;
            }
            assert_eq!(at, pos + len, "{}", rig.case.label);
        }
        assert!(rig.engine.take_extents(0x5a).is_empty(), "taken once: {}", rig.case.label);
    });
}

fn c54_no_block_holds_a_mixture_of_overlapping_writes() {
    const ROUNDS: u64 = 4;
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let mut random = Random::from_seed(0x54);
        let unit = u64::from(rig.disk.alignment().offset).max(512);
        for _ in 0..ROUNDS {
            for n in 0..24u8 {
                let pos = random.below(16) * unit;
                let len = (1 + random.below(16)) * unit;
                let bytes = vec![n + 1; len as usize];
                assert!(rig.submit(write(pos, len), &bytes).is_ok(), "{}", rig.case.label);
                if n % 8 == 7 {
                    rig.engine.poll().unwrap();
                }
            }
            assert!(rig.finish().iter().all(|done| done.result().is_ok()), "{}", rig.case.label);
            let bytes = rig.image.bytes(0, 32 * unit);
            for (n, block) in bytes.chunks(unit as usize).enumerate() {
                let mixed = block.iter().any(|byte| *byte != block[0]);
                let untouched = *block == pattern(n as u64 * unit, unit);
                assert!(!mixed || untouched, "unit {n}, {}", rig.case.label);
            }
        }
    });
}
