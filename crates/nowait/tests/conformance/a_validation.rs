//! Group A: the checks before a request is submitted.
#![allow(unsafe_code)]

use nowait::{BlockDevice, ByteRange, Flags, IoSegment, Op, OpenOptions, Rejected};
use std::sync::Arc;

use nowait_testkit::TestQueueKind;

use crate::rig::{
    ALL, Api, BLOCK, Content, Image, MIB, Memory, Rig, cases, io, on_apis, on_engines,
    on_read_only_apis, on_vectored_apis, pattern, read, write,
};

rules![
    c01_a_position_that_is_negative_to_the_kernel_is_einval,
    c02_every_change_of_a_read_only_device_is_erofs,
    c02_a_read_only_device_is_erofs_whatever_else_is_wrong,
    c03_no_segments_succeed_with_0,
    c04_1024_segments_are_served_and_1025_are_einval,
    c05_a_length_that_is_negative_as_ssize_t_is_einval,
    c06_a_request_moves_at_most_0x7fff_f000_bytes,
    c06_the_sum_of_the_segments_does_not_wrap,
    c07_empty_segments_have_no_effect,
    c08_a_range_beyond_i64_max_is_einval,
    c10_a_refused_request_has_had_no_effect,
];

fn c01_a_position_that_is_negative_to_the_kernel_is_einval() {
    on_apis(MIB, Content::Data, |api| {
        for pos in [1 << 63, u64::MAX - 4095, u64::MAX] {
            for len in [1, 4096] {
                assert_eq!(api.read(pos, len), Err(libc::EINVAL), "{pos} {}", api.label());
                let bytes = pattern(0, len);
                let written = api.write(pos, &bytes, Flags::NONE);
                assert_eq!(written, Err(libc::EINVAL), "{pos} {}", api.label());
            }
            let range = ByteRange::new(pos, 4096);
            let discarded = api.bare(Op::Discard, Flags::NONE, range);
            assert_eq!(discarded, Err(libc::EINVAL), "{pos} {}", api.label());
        }
        // The greatest one that is not negative.
        let last = i64::MAX.cast_unsigned();
        assert_eq!(api.write(last, &[1], Flags::NONE), Err(libc::EINVAL), "{}", api.label());
        assert_eq!(api.read(last - 1, 1), Ok(vec![]), "{}", api.label());
        assert!(api.image().bytes(0, MIB) == pattern(0, MIB), "{}", api.label());
    });
}

fn c02_every_change_of_a_read_only_device_is_erofs() {
    on_read_only_apis(MIB, |api| {
        let all = ByteRange::new(0, MIB);
        let erofs = Err(libc::EROFS);
        assert_eq!(api.write(0, &[7; 4096], Flags::NONE), erofs.map(|()| 0), "{}", api.label());
        assert_eq!(api.write(9, &[7; 9], Flags::DSYNC), erofs.map(|()| 0), "{}", api.label());
        assert_eq!(api.bare(Op::Discard, Flags::NONE, all), erofs, "{}", api.label());
        assert_eq!(api.bare(Op::Zero, Flags::NO_UNMAP, all), erofs, "{}", api.label());
        assert_eq!(api.bare(Op::Flush, Flags::NONE, all), Ok(()), "{}", api.label());
        assert_eq!(api.read(5, 9000), Ok(pattern(5, 9000)), "{}", api.label());
        assert!(api.image().bytes(0, MIB) == pattern(0, MIB), "{}", api.label());
    });
}

fn c02_a_read_only_device_is_erofs_whatever_else_is_wrong() {
    on_read_only_apis(MIB, |api| {
        let one: &[u8] = &[1];
        assert_eq!(api.write_vectored(0, &[one; 1025]), Err(libc::EROFS), "{}", api.label());
        assert_eq!(api.write(MIB, one, Flags::NONE), Err(libc::EROFS), "{}", api.label());
    });
}

fn c03_no_segments_succeed_with_0() {
    on_apis(MIB, Content::Data, |api| {
        for pos in [0, 1, MIB, MIB + 7] {
            assert_eq!(api.read_vectored(pos, &mut []), Ok(0), "{}", api.label());
            assert_eq!(api.write_vectored(pos, &[]), Ok(0), "{}", api.label());
        }
        assert!(api.image().bytes(0, MIB) == pattern(0, MIB), "{}", api.label());
    });
    on_engines(&ALL, MIB, Content::Data, |rig| {
        assert_eq!(rig.read_vectored(0, &mut []), Ok(0), "{}", rig.case.label);
        assert!(rig.script.take_pushed().is_empty(), "{}", rig.case.label);
    });
}

fn c04_1024_segments_are_served_and_1025_are_einval() {
    on_vectored_apis(MIB, Content::Data, |api| {
        let mut memory = Memory::new(1025 * 7);
        let mut bufs: Vec<&mut [u8]> = memory.chunks_mut(7).collect();
        assert_eq!(api.read_vectored(3, &mut bufs), Err(libc::EINVAL), "{}", api.label());
        assert_eq!(api.read_vectored(3, &mut bufs[..1024]), Ok(7168), "{}", api.label());
        assert!(memory[..7168] == pattern(3, 7168), "{}", api.label());

        let bytes = pattern(900, 1025 * 7);
        let bufs: Vec<&[u8]> = bytes.chunks(7).collect();
        assert_eq!(api.write_vectored(50, &bufs), Err(libc::EINVAL), "{}", api.label());
        assert_eq!(
            api.write_vectored(50, &[&bytes[..0]; 1025]),
            Err(libc::EINVAL),
            "{}",
            api.label()
        );
        assert!(api.image().bytes(0, MIB) == pattern(0, MIB), "{}", api.label());
        assert_eq!(api.write_vectored(50, &bufs[..1024]), Ok(7168), "{}", api.label());
        assert!(api.image().bytes(50, 7168) == bytes[..7168], "{}", api.label());
    });
}

fn c05_a_length_that_is_negative_as_ssize_t_is_einval() {
    on_engines(&ALL, MIB, Content::Data, |rig| {
        let mut memory = Memory::new(BLOCK);
        let good = memory.segment(0..4096);
        for len in [isize::MAX as usize + 1, usize::MAX] {
            let list = [good, IoSegment { base: std::ptr::null_mut(), len }];
            assert_eq!(rig.run_segments(read(0, 8192), &list), Err(libc::EINVAL));
        }
        assert!(rig.script.take_pushed().is_empty(), "{}", rig.case.label);
    });
}

/// Address space that no test accesses.
struct Reserved(*mut u8);

impl Reserved {
    const BYTES: usize = 1 << 32;

    fn new() -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping changes no existing one.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), Self::BYTES, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self(base.cast())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and is unmapped once.
        unsafe { libc::munmap(self.0.cast(), Self::BYTES) };
    }
}

fn c06_a_request_moves_at_most_0x7fff_f000_bytes() {
    const LIMIT: u64 = 0x7fff_f000;
    let reserved = Reserved::new();
    let half = Reserved::BYTES / 2;
    let two = [
        IoSegment { base: reserved.0, len: half },
        // Not adjacent to the first.
        IoSegment { base: reserved.0.wrapping_add(half + 4096), len: half - 4096 },
    ];
    let one = [IoSegment { base: reserved.0, len: Reserved::BYTES }];
    // Only a queue that does no I/O needs no 2 GiB of memory for it, and only with `nowait_first`
    // do the requests go to the queue.
    for case in cases(&[TestQueueKind::Null]).iter().filter(|case| case.config.nowait_first) {
        let image = Image::new(8 << 30, Content::Hole);
        let disk = Arc::new(BlockDevice::open(&image.path, OpenOptions::default()).unwrap());
        let Some(mut rig) = Rig::on(case, image, disk) else { continue };
        for list in [&two[..], &one[..]] {
            for op in [Op::Read, Op::Write] {
                let all = io(op, Flags::NONE, 4096, Reserved::BYTES as u64);
                assert_eq!(rig.run_segments(all, list), Ok(LIMIT), "{}", case.label);
                let moved = rig.script.take_pushed();
                let sum: u64 = moved.iter().map(|pushed| u64::from(pushed.transfer.len)).sum();
                assert_eq!(sum, LIMIT, "{}", case.label);
            }
        }
    }
}

fn c06_the_sum_of_the_segments_does_not_wrap() {
    let many = Memory::new(64 * MIB);
    on_vectored_apis(MIB, Content::Data, |api| {
        // 4 GiB together: 0 as 32 bits.
        assert_eq!(api.write_vectored(0, &[&many[..]; 64]), Ok(MIB), "{}", api.label());
        assert!(api.image().bytes(0, MIB) == many[..MIB as usize], "{}", api.label());
    });
}

fn c07_empty_segments_have_no_effect() {
    on_apis(MIB, Content::Data, |api| {
        assert_eq!(api.read_vectored(0, &mut [&mut [], &mut []]), Ok(0), "{}", api.label());
        assert_eq!(api.write_vectored(MIB, &[&[], &[]]), Ok(0), "{}", api.label());
        assert_eq!(api.read(4096, 0), Ok(Vec::new()), "{}", api.label());
        let (mut first, mut second) = ([0; 10], Memory::new(BLOCK));
        let mut bufs: [&mut [u8]; 5] = [&mut [], &mut first, &mut [], &mut second, &mut []];
        assert_eq!(api.read_vectored(4000, &mut bufs), Ok(4106), "{}", api.label());
        assert_eq!(first[..], pattern(4000, 10), "{}", api.label());
        assert!(second[..] == pattern(4010, BLOCK), "{}", api.label());

        let bufs: [&[u8]; 5] = [&[], &[3; 4096], &[], &[5; 4096], &[]];
        assert_eq!(api.write_vectored(8192, &bufs), Ok(8192), "{}", api.label());
        let expected = [pattern(8191, 1), vec![3; 4096], vec![5; 4096], pattern(16384, 1)];
        assert!(api.image().bytes(8191, 8194) == expected.concat(), "{}", api.label());
    });
}

fn c08_a_range_beyond_i64_max_is_einval() {
    const LAST: u64 = i64::MAX as u64;
    on_apis(MIB, Content::Data, |api| {
        for (pos, len) in [(LAST, 1), (LAST - 511, 512), (LAST & !4095, 4096), (u64::MAX, 1)] {
            let bytes = vec![0; len as usize];
            assert_eq!(api.read(pos, len), Err(libc::EINVAL), "{pos}, {}", api.label());
            let written = api.write(pos, &bytes, Flags::NONE);
            assert_eq!(written, Err(libc::EINVAL), "{pos}, {}", api.label());
            let zeroed = api.bare(Op::Zero, Flags::NONE, ByteRange::new(pos, len));
            assert_eq!(zeroed, Err(libc::EINVAL), "{pos}, {}", api.label());
        }
        assert_eq!(api.read(LAST - 512, 512), Ok(Vec::new()), "{}", api.label());
    });
}

fn c10_a_refused_request_has_had_no_effect() {
    on_engines(&ALL, MIB, Content::Data, |rig| {
        let before = rig.stats();
        let mut memory = Memory::new(2 * BLOCK);
        let byte = memory.segment(0..1);
        for (pos, errno) in [(MIB, libc::ENOSPC), (i64::MAX as u64 - 1, libc::EINVAL)] {
            let Err(Rejected { error, buf }) = rig.submit(write(pos, 3), &[1, 2, 3]) else {
                panic!("{}: accepted", rig.case.label)
            };
            assert_eq!(error.errno(), errno, "{}", rig.case.label);
            let buf = buf.expect("the buffer");
            assert_eq!(buf[..], [1, 2, 3], "{}", rig.case.label);
        }
        for io in [read(0, 1025), io(Op::Flush, Flags::NONE, 0, 0), read(0, 4 * MIB)] {
            let buf = rig.engine.buffer(ByteRange::new(0, 1)).expect("a buffer");
            let list = [byte; 1025];
            let refused = match (io.op, io.range.len) {
                (Op::Read, 1025) => rig.submit_segments(io, &list).err(),
                // An operation without memory, and a buffer too small for its request.
                _ => rig.engine.submit(io, buf, 1).err(),
            };
            let refused = refused.expect("a refusal");
            assert_eq!(refused.error.errno(), libc::EINVAL, "{}", rig.case.label);
        }
        assert!(rig.engine.submit_no_data(read(0, 1), 1).is_err(), "{}", rig.case.label);
        assert_eq!(rig.stats(), before, "{}", rig.case.label);
        assert_eq!(rig.engine.in_flight(), 0, "{}", rig.case.label);
        assert!(rig.script.take_pushed().is_empty(), "{}", rig.case.label);
        assert!(rig.finish().is_empty(), "{}", rig.case.label);
        assert!(rig.image.bytes(0, MIB) == pattern(0, MIB), "{}", rig.case.label);
    });
}
