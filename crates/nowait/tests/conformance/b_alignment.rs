//! Group B: alignment, and requests that are not aligned.

use std::thread;

use nowait::{
    Alignment, BlockDevice, BlockingFile, ByteRange, Config, Direct, Flags, IoSegment, Op,
    OpenOptions, Request,
};
use rustix::fs::{AtFlags, StatxFlags};

use crate::queue::Pushed;
use nowait_testkit::{TestQueueKind, required, skip};

use crate::rig::{
    ALL, Api, BLOCK, Case, Content, Image, KIB, MIB, Memory, REAL, Random, Rig, cases, io, islands,
    on_apis, on_engines, pattern, range_in, read, write,
};

rules![
    c11_every_transfer_meets_the_alignment,
    c12_an_unaligned_request_is_served,
    c12_strict_refuses_an_unaligned_request_and_no_other,
    c12_strict_serves_an_aligned_read_across_the_end,
    c12_strict_lets_a_request_without_bytes_succeed,
    c13_neighbours_in_a_block_lose_no_bytes,
    c13_neighbours_on_two_threads_lose_no_bytes,
    c14_a_hole_is_read_without_io,
    c15_the_alignment_is_the_one_that_statx_reports,
    c16_1024_touching_segments_are_one_transfer,
];

/// Not a whole number of blocks.
const SIZE: u64 = MIB + 777;

fn meets(align: Alignment, pushed: &Pushed) -> bool {
    let block = if pushed.transfer.write { align.offset } else { align.read_offset };
    let is_aligned = |value: u64| value.is_multiple_of(u64::from(block));
    is_aligned(pushed.transfer.pos)
        && is_aligned(u64::from(pushed.transfer.len))
        && pushed.memory.iter().all(|segment| {
            is_aligned(segment.len as u64)
                && (segment.base as usize).is_multiple_of(align.memory as usize)
        })
}

fn c11_every_transfer_meets_the_alignment() {
    on_engines(&ALL, SIZE, Content::Data, |rig| {
        let mut random = Random::from_seed(0x11);
        let mut memory = Memory::new(128 * KIB);
        for _ in 0..100 {
            let range = range_in(SIZE, &mut random);
            let op = if random.below(2) == 0 { Op::Read } else { Op::Write };
            let request = Request { op, flags: Flags::NONE, range };
            // Two segments, or the engine's own buffer.
            let cut = random.below(range.len + 1) as usize;
            let gap = [0, 1, 512, 4096][random.below(4) as usize];
            let list = [
                memory.segment(gap..gap + cut),
                memory.segment(2 * gap + cut..2 * gap + range.len as usize),
            ];
            let done = match random.below(2) {
                0 => rig.run_segments(request, &list),
                _ => rig.run(request, &[]),
            };
            assert_eq!(done, Ok(range.len), "{request:?}, {}", rig.case.label);
            for pushed in rig.script.take_pushed() {
                let ok = meets(rig.disk.alignment(), &pushed);
                assert!(ok, "{:?} for {request:?}, {}", pushed.transfer, rig.case.label);
            }
        }
    });
}

fn c12_an_unaligned_request_is_served() {
    on_apis(SIZE, Content::Data, |api| {
        let mut expected = pattern(0, SIZE);
        for (pos, len) in [(1, 1), (511, 2), (4095, 4098), (100, 300_000), (SIZE - 9, 9)] {
            let bytes = vec![0xc5; len as usize];
            assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(len), "{}", api.label());
            expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
            let around = ByteRange::new(pos.saturating_sub(3), len + 5);
            let end = around.end().min(SIZE);
            let got = api.read(around.pos, end - around.pos).expect("a read");
            assert!(got == expected[around.pos as usize..end as usize], "{}", api.label());
        }
        assert!(api.image().bytes(0, SIZE) == expected, "{}", api.label());
    });
}

/// Runs `test` on an engine with `strict` set, for each queue and switch, where direct I/O needs an
/// alignment.
fn on_strict(test: impl Fn(&mut Rig)) {
    for case in cases(&REAL) {
        let config = Config { strict: true, ..case.config };
        let case = Case { config, ..case };
        let Some(mut rig) = Rig::new(&case, Image::new(SIZE, Content::Data)) else { continue };
        if rig.disk.alignment().memory > 1 && rig.disk.alignment().offset > 1 {
            test(&mut rig);
        }
    }
}

fn c12_strict_refuses_an_unaligned_request_and_no_other() {
    on_strict(|rig| {
        let align = rig.disk.alignment();
        let (write_unit, read_unit) = (u64::from(align.offset), u64::from(align.read_offset));
        for (pos, len) in [(1, read_unit), (0, 1), (read_unit, read_unit + 1)] {
            assert_eq!(rig.run(read(pos, len), &[]), Err(libc::EINVAL), "{}", rig.case.label);
        }
        for (pos, len) in [(1, write_unit), (0, 1), (write_unit, write_unit + 1)] {
            assert_eq!(rig.run(write(pos, len), &[]), Err(libc::EINVAL), "{}", rig.case.label);
        }
        let mut memory = Memory::new(2 * BLOCK);
        let off = [memory.segment(1..1 + 4096)];
        assert_eq!(rig.run_segments(read(0, BLOCK), &off), Err(libc::EINVAL));
        assert!(rig.script.take_pushed().is_empty(), "{}", rig.case.label);

        assert_eq!(rig.run(read(read_unit, BLOCK), &[]), Ok(BLOCK), "{}", rig.case.label);
        assert_eq!(rig.run(write(write_unit, BLOCK), &[]), Ok(BLOCK), "{}", rig.case.label);
        let two = [memory.segment(4096..8192), memory.segment(0..4096)];
        assert_eq!(rig.run_segments(read(0, 2 * BLOCK), &two), Ok(2 * BLOCK));
    });
}

fn c12_strict_serves_an_aligned_read_across_the_end() {
    on_strict(|rig| {
        let got = rig.read(MIB, BLOCK);
        assert_eq!(got.as_ref().err(), None, "{}", rig.case.label);
        assert!(got == Ok(pattern(MIB, SIZE - MIB)), "{}", rig.case.label);
    });
}

fn c12_strict_lets_a_request_without_bytes_succeed() {
    on_strict(|rig| {
        assert_eq!(rig.run_segments(read(1, 0), &[]), Ok(0), "{}", rig.case.label);
        assert_eq!(rig.run(write(1, 0), &[]), Ok(0), "{}", rig.case.label);
    });
}

fn c13_neighbours_in_a_block_lose_no_bytes() {
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let mut expected = pattern(0, MIB);
        // Writes of 100 bytes to every block but each fourth, which is written by one write.
        for block in 0..8 {
            let pos = block * BLOCK;
            let steps = if block % 4 == 3 { vec![(pos, BLOCK)] } else { hundreds(pos) };
            for (pos, len) in steps {
                let bytes: Vec<u8> = (0..len).map(|n| (pos + n) as u8 ^ 0x3c).collect();
                expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
                assert!(rig.submit(write(pos, len), &bytes).is_ok(), "{}", rig.case.label);
                if pos % 700 == 0 {
                    rig.engine.poll().unwrap();
                }
            }
        }
        let count = rig.finish().iter().filter(|done| done.result().is_ok()).count();
        assert_eq!(count, 6 * 40 + 2, "{}", rig.case.label);
        assert!(rig.image.bytes(0, MIB) == expected, "{}", rig.case.label);
    });
}

/// 40 adjacent ranges of 100 bytes in the block at `pos`.
fn hundreds(pos: u64) -> Vec<(u64, u64)> {
    (0..40).map(|n| (pos + n * 100, 100)).collect()
}

fn c13_neighbours_on_two_threads_lose_no_bytes() {
    const ROUNDS: u8 = 30;
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let file = BlockingFile::new(rig.disk.clone());
        thread::scope(|scope| {
            let other = scope.spawn(move || {
                for round in 0..ROUNDS {
                    let bytes = [round; 1000];
                    assert_eq!(file.write_at(&bytes, 2000, Flags::NONE), Ok(1000));
                }
            });
            for round in 0..ROUNDS {
                assert!(rig.submit(write(1000, 1000), &[round; 1000]).is_ok());
                assert!(rig.submit(write(3000, 2000), &[round; 2000]).is_ok());
                assert!(rig.finish().iter().all(|done| done.result().is_ok()));
            }
            other.join().unwrap();
        });
        let last = vec![ROUNDS - 1; 4000];
        let expected = [pattern(0, 1000), last, pattern(5000, 5000)].concat();
        assert!(rig.image.bytes(0, 10_000) == expected, "{}", rig.case.label);
    });
}

fn c14_a_hole_is_read_without_io() {
    on_engines(&ALL, MIB, Content::Hole, |rig| {
        let config = rig.case.config;
        if rig.case.kind == TestQueueKind::Null && !rig.case.options.cache_holes {
            // The hole is not known, so data would have to be moved, and this queue moves none.
            return;
        }
        for (pos, len) in [(0, MIB), (1, 5), (4095, 4098), (MIB - 1, 1)] {
            assert!(rig.read(pos, len) == Ok(vec![0; len as usize]), "{}", rig.case.label);
        }
        if rig.case.options.cache_holes && config.nowait_first {
            assert!(rig.script.take_pushed().is_empty(), "{}", rig.case.label);
            assert_eq!(rig.stats().zero_filled, MIB + 5 + 4098 + 1, "{}", rig.case.label);
        }
    });
    on_engines(&REAL, MIB, Content::Islands, |rig| {
        assert!(rig.read(9, MIB - 10) == Ok(islands(9, MIB - 10)), "{}", rig.case.label);
    });
}

fn c15_the_alignment_is_the_one_that_statx_reports() {
    let image = Image::new(MIB, Content::Data);
    let open = |direct| {
        let options = OpenOptions::new().direct(direct);
        BlockDevice::open(&image.path, options)
    };
    assert_eq!(open(Direct::Off).unwrap().alignment(), Alignment::NONE);
    let Some(disk) = required("direct I/O", open(Direct::On)) else { return };
    let reads = StatxFlags::from_bits_retain(libc::STATX_DIO_READ_ALIGN);
    let wanted = StatxFlags::DIOALIGN | reads;
    let stat = rustix::fs::statx(disk.fd().unwrap(), "", AtFlags::EMPTY_PATH, wanted).unwrap();
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        skip("no STATX_DIOALIGN on this file system");
        return;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    let read_offset = match stat.stx_mask & reads.bits() != 0 && stat.stx_dio_read_offset_align > 0
    {
        true => stat.stx_dio_read_offset_align,
        false => offset,
    };
    // A read is widened alike in memory and on the device.
    let read_offset = read_offset.max(memory).min(offset);
    for disk in [disk, open(Direct::Auto).unwrap()] {
        assert_eq!(disk.alignment(), Alignment { memory, offset, read_offset });
    }
}

fn c16_1024_touching_segments_are_one_transfer() {
    const ALL_BYTES: u64 = 1024 * BLOCK;
    on_engines(&ALL, ALL_BYTES, Content::Data, |rig| {
        let mut memory = Memory::new(ALL_BYTES);
        let pages: Vec<IoSegment> =
            (0..1024).map(|n| memory.segment(n * 4096..(n + 1) * 4096)).collect();
        for op in [Op::Read, Op::Write] {
            let done = rig.run_segments(io(op, Flags::NONE, 0, ALL_BYTES), &pages);
            assert_eq!(done, Ok(ALL_BYTES), "{}", rig.case.label);
            let pushed = rig.script.take_pushed();
            let config = rig.case.config;
            match (config.nowait_first, config.vectored) {
                (true, true) => {
                    assert_eq!(pushed.len(), 1, "{}", rig.case.label);
                    assert_eq!(pushed[0].memory.len(), 1, "{}", rig.case.label);
                }
                (true, false) => assert_eq!(pushed.len(), 1024, "{}", rig.case.label),
                (false, _) => assert!(pushed.is_empty(), "{}", rig.case.label),
            }
        }
        if rig.case.kind != TestQueueKind::Null {
            assert!(rig.image.bytes(0, ALL_BYTES) == pattern(0, ALL_BYTES), "{}", rig.case.label);
        }
    });
}
