//! Group H: files, which grow.

use std::fs;
use std::os::unix::fs::FileExt;

use nowait::{Allocate, BlockDevice, BlockingFile, ByteRange, Flags, Op, OpenOptions};

use crate::deny::{Deny, denied};
use crate::files::{FileApi, on_files, on_files_with_all_on, open};
use crate::rig::{
    ALL, Api, BLOCK, Content, Image, KIB, MIB, POISON, REAL, Random, Rig, buffered, cases,
    dirty_pages, on_apis, pattern,
};

rules![
    c19_a_read_of_a_file_that_fails_is_made_again_up_to_the_present_end,
    c26_an_append_goes_to_the_end_and_tells_where_it_went,
    c26_a_file_opened_to_append_takes_every_write_at_its_end,
    c26_a_write_with_no_append_goes_to_its_position,
    c36_a_nowait_write_that_would_extend_a_file_is_eagain_or_whole,
    c57_a_write_at_the_end_or_beyond_it_extends_the_file,
    c57_a_write_across_the_end_is_whole,
    c57_a_disk_does_not_become_a_file,
    c58_the_size_is_exact_after_every_write,
    c58_a_file_that_ends_anywhere_near_the_border_of_a_block_is_exact,
    c58_no_other_byte_is_written_than_those_of_the_request,
    c59_what_others_append_or_cut_off_is_seen_by_the_next_request,
    c60_a_size_that_is_set_cuts_off_or_adds_zeros,
    c61_allocating_changes_no_byte,
    c62_discarding_and_zeroing_keep_the_size,
    c63_a_durable_write_that_extends_leaves_nothing_in_the_cache,
    c63_a_failed_sync_of_all_fails_every_later_one,
    c64_parts_of_a_page_that_two_handles_write_are_all_kept,
    c65_a_file_is_made_truncated_or_refused_as_its_options_say,
    c65_a_file_without_a_name_is_given_one,
];

fn content(api: &mut dyn FileApi) -> Vec<u8> {
    fs::read(&api.image().path).unwrap()
}

fn c26_an_append_goes_to_the_end_and_tells_where_it_went() {
    on_files(0, Content::Hole, |api| {
        let mut expected = Vec::new();
        for len in [1, 4095, BLOCK, 3, 64 * KIB, BLOCK - 3, 2 * BLOCK, 300_001] {
            let bytes = pattern(expected.len() as u64 + 7, len);
            let done = api.append(&bytes, Flags::NONE);
            assert_eq!(done, Ok(expected.len() as u64), "{len} {}", api.label());
            expected.extend(bytes);
            assert_eq!(api.size(), expected.len() as u64, "{}", api.label());
        }
        assert_eq!(api.append(&[], Flags::NONE), Ok(expected.len() as u64), "{}", api.label());
        assert!(api.read(0, MIB) == Ok(expected.clone()), "{}", api.label());
        assert!(content(api) == expected, "{}", api.label());
    });
}

fn c26_a_file_opened_to_append_takes_every_write_at_its_end() {
    for case in cases(&ALL) {
        let image = Image::new(10, Content::Data);
        let options = OpenOptions::new().append(true).direct(case.options.direct);
        let disk = BlockDevice::open_file(&image.path, options).unwrap();
        let Some(mut rig) = Rig::on(&case, image, disk.into()) else { continue };
        let mut expected = pattern(0, 10);
        for (pos, len) in [(0, BLOCK), (5, 3), (1 << 40, BLOCK - 13), (0, 2 * BLOCK), (BLOCK, 1)] {
            let bytes = pattern(pos + 3, len);
            let done = Api::write(&mut rig, pos, &bytes, Flags::NONE);
            assert_eq!(done, Ok(len), "{}", rig.case.label);
            expected.extend(bytes);
        }
        assert!(fs::read(&rig.image.path).unwrap() == expected, "{}", rig.case.label);
    }
}

fn c26_a_write_with_no_append_goes_to_its_position() {
    for case in cases(&REAL) {
        let image = Image::new(3 * BLOCK, Content::Data);
        let options = OpenOptions::new().append(true).direct(case.options.direct);
        let disk = BlockDevice::open_file(&image.path, options).unwrap();
        let Some(mut rig) = Rig::on(&case, image, disk.into()) else { continue };
        let mut expected = pattern(0, 3 * BLOCK);
        for (pos, len) in [(0, BLOCK), (BLOCK + 5, 3), (BLOCK, 2 * BLOCK), (4 * BLOCK, BLOCK + 1)] {
            let bytes = pattern(pos + 3, len);
            let done = Api::write(&mut rig, pos, &bytes, Flags::NO_APPEND);
            assert_eq!(done, Ok(len), "{}", rig.case.label);
            expected.resize(expected.len().max((pos + len) as usize), 0);
            expected[pos as usize..(pos + len) as usize].copy_from_slice(&bytes);
            assert!(fs::read(&rig.image.path).unwrap() == expected, "{pos} {}", rig.case.label);
        }
        let zeroed = Api::bare(&mut rig, Op::Zero, Flags::NONE, ByteRange::new(5, BLOCK));
        assert_eq!(zeroed, Ok(()), "{}", rig.case.label);
        expected[5..5 + BLOCK as usize].fill(0);
        assert!(fs::read(&rig.image.path).unwrap() == expected, "{}", rig.case.label);
    }
}

/// The kernel fails a direct read that finds space reserved behind the end.
fn c19_a_read_of_a_file_that_fails_is_made_again_up_to_the_present_end() {
    for case in cases(&REAL) {
        let image = Image::new(64 * KIB, Content::Data);
        let disk = open(&image, &case);
        let Some(mut rig) = Rig::on(&case, image, disk) else { continue };
        // The size that the handle has seen is out of date.
        buffered(&rig.image.path).set_len(10_000).unwrap();
        for errno in [libc::EIO, libc::EPERM] {
            rig.script.on_reap(move |_, _| -errno);
            for (pos, len) in [(0, 32 * KIB), (8192, 8192), (5, 20_000)] {
                let read = Api::read(&mut rig, pos, len);
                let has_failed = !rig.script.take_pushed().is_empty() && errno != libc::EIO;
                let expected =
                    if has_failed { Err(errno) } else { Ok(pattern(pos, (10_000 - pos).min(len))) };
                assert!(read == expected, "{errno} {pos} {len} {}", rig.case.label);
            }
        }
    }
}

fn c36_a_nowait_write_that_would_extend_a_file_is_eagain_or_whole() {
    for case in cases(&REAL) {
        let image = Image::new(0, Content::Hole);
        let disk = open(&image, &case);
        let Some(mut rig) = Rig::on(&case, image, disk) else { continue };
        for len in [BLOCK, 100, 16 * KIB] {
            let size = rig.disk.size();
            // A file system may extend a file without waiting, or refuse because it has no such writes.
            let expected = match Api::write(&mut rig, size, &pattern(0, len), Flags::NOWAIT) {
                Err(libc::EAGAIN | libc::EOPNOTSUPP) => size,
                done => size + done.unwrap(),
            };
            assert_eq!(rig.disk.size(), expected, "{len} {}", rig.case.label);
            assert!(expected == size || expected == size + len, "{len} {}", rig.case.label);
        }
    }
}

fn c57_a_write_at_the_end_or_beyond_it_extends_the_file() {
    for size in [0, 1, BLOCK, 10_000] {
        on_files(size, Content::Data, |api| {
            let mut expected = pattern(0, size);
            for (beyond, len) in [(0, 1), (0, BLOCK), (7, 100), (3 * BLOCK, BLOCK), (1, 64 * KIB)] {
                let pos = expected.len() as u64 + beyond;
                let bytes = pattern(pos + 5, len);
                assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(len), "{pos} {}", api.label());
                expected.resize(pos as usize, 0);
                expected.extend(bytes);
                assert!(content(api) == expected, "{pos} {len} {}", api.label());
                assert!(api.read(0, MIB) == Ok(expected.clone()), "{}", api.label());
                // Aligned, so that it is one transfer where the queue takes it.
                let pos = (expected.len() as u64).next_multiple_of(BLOCK) + 2 * BLOCK;
                let bytes = pattern(pos + 9, BLOCK);
                assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(BLOCK), "{}", api.label());
                expected.resize(pos as usize, 0);
                expected.extend(bytes);
                assert!(api.read(0, MIB) == Ok(expected.clone()), "{}", api.label());
                assert_eq!(api.read(expected.len() as u64, 9), Ok(vec![]), "{}", api.label());
            }
        });
    }
}

fn c57_a_write_across_the_end_is_whole() {
    for size in [BLOCK, 10_000, 64 * KIB + 512] {
        on_files(size, Content::Data, |api| {
            for (before, len) in [(1, 2), (100, BLOCK), (BLOCK, 3 * BLOCK), (60, 200 * KIB)] {
                let mut expected = content(api);
                let pos = expected.len() as u64 - before;
                let bytes = pattern(pos + len, len);
                assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(len), "{}", api.label());
                expected.truncate(pos as usize);
                expected.extend(bytes);
                assert!(content(api) == expected, "{before} {len} {}", api.label());
            }
            let pos = api.size() - 60;
            let two: [&[u8]; 2] = [&[8; 50], &[9; 100]];
            assert_eq!(api.write_vectored(pos, &two), Ok(150), "{}", api.label());
            assert_eq!(api.size(), pos + 150, "{}", api.label());
            assert_eq!(
                api.read(pos, 200),
                Ok([vec![8; 50], vec![9; 100]].concat()),
                "{}",
                api.label()
            );
        });
    }
}

fn c57_a_disk_does_not_become_a_file() {
    let image = Image::new(BLOCK, Content::Data);
    let disk = BlockDevice::open(&image.path, OpenOptions::default()).unwrap();
    let disk = BlockingFile::new(disk.into());
    let errno = |done: Result<(), nowait::Error>| done.map_err(|error| error.errno());
    let appended = disk.append(b"x", Flags::NONE).map_err(|error| error.errno());
    assert_eq!(appended, Err(libc::EINVAL));
    assert_eq!(errno(disk.set_len(0)), Err(libc::EINVAL));
    let range = ByteRange::new(0, 2 * BLOCK);
    assert_eq!(errno(disk.allocate(range, Allocate::Extend)), Err(libc::EINVAL));
    assert_eq!(errno(disk.lock(nowait::FileLock::Shared)), Err(libc::EOPNOTSUPP));
    assert_eq!(errno(disk.sync_all()), Ok(()));
    assert_eq!(image.bytes(0, BLOCK), pattern(0, BLOCK));
    on_apis(0, Content::Hole, |api| {
        assert_eq!(api.write(0, &[1], Flags::NONE), Err(libc::ENOSPC), "{}", api.label());
    });
}

fn c58_the_size_is_exact_after_every_write() {
    on_files(0, Content::Hole, |api| {
        let (mut random, mut expected) = (Random::from_seed(0x58), Vec::new());
        for _ in 0..60 {
            let unit = [1, 512, BLOCK][random.below(3) as usize];
            let pos = random.below(200 * KIB) / unit * unit;
            let len = (1 + random.below(20 * KIB) / unit) * unit;
            let bytes = random.bytes(len as usize);
            let len = bytes.len();
            assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(len as u64), "{}", api.label());
            expected.resize(expected.len().max(pos as usize + len), 0);
            expected[pos as usize..][..len].copy_from_slice(&bytes);
            let on_disk = fs::metadata(&api.image().path).unwrap().len();
            assert_eq!((api.size(), on_disk), (expected.len() as u64, on_disk), "{}", api.label());
        }
        assert!(content(api) == expected, "{}", api.label());
    });
}

/// Sizes from 0 to 2 blocks: each of those near the border of a sector or a block, as they grow and as they are cut off.
fn c58_a_file_that_ends_anywhere_near_the_border_of_a_block_is_exact() {
    let near = |border: u64| border.saturating_sub(7)..border + 8;
    let mut sizes: Vec<u64> = (0..=2 * BLOCK).step_by(512).flat_map(near).collect();
    sizes.extend([1000, 3000, 5000, 7000]);
    on_files_with_all_on(0, |api| {
        for &size in &sizes {
            let label = format!("{size} {}", api.label());
            let mut expected = pattern(size, size);
            api.set_len(0).unwrap();
            assert_eq!(api.write(0, &expected, Flags::NONE), Ok(size), "{label}");
            assert_eq!(api.size(), size, "{label}");
            // One byte across the end and one behind it, then a whole block from the end on.
            let across = size.saturating_sub(1);
            assert_eq!(api.write(across, &[7; 2], Flags::NONE), Ok(2), "{label}");
            expected.resize(across as usize, 0);
            expected.extend([7; 2]);
            assert!(content(api) == expected, "{label}");
            let (end, from) = (size + BLOCK, size);
            let block = pattern(size + 3, BLOCK);
            assert_eq!(api.write(from, &block, Flags::DSYNC), Ok(BLOCK), "{label}");
            expected.truncate(size as usize);
            expected.extend(&block);
            assert_eq!(api.size(), end, "{label}");
            assert!(content(api) == expected, "{label}");
            for (pos, len) in [(0, end), (across, BLOCK), (end - 1, BLOCK), (end, 1), (0, MIB)] {
                let bytes = &expected[pos as usize..end.min(pos + len) as usize];
                assert!(api.read(pos, len).as_deref() == Ok(bytes), "{pos} {len} {label}");
            }
            api.set_len(size).unwrap();
            assert!(api.read(0, MIB).as_deref() == Ok(&expected[..size as usize]), "{label}");
            assert_eq!(api.read(size, 1), Ok(Vec::new()), "{label}");
        }
    });
}

/// A byte that another handle has written stays, wherever in the page it is.
fn c58_no_other_byte_is_written_than_those_of_the_request() {
    on_files(64 * KIB, Content::Data, |api| {
        let others = buffered(&api.image().path);
        let mut expected = pattern(0, 64 * KIB);
        for (round, (pos, len)) in
            [(1, 1), (4000, 200), (8191, 2 * BLOCK + 2)].into_iter().enumerate()
        {
            for beside in [pos - 1, pos + len] {
                others.write_all_at(&[round as u8 + 1], beside).unwrap();
                expected[beside as usize] = round as u8 + 1;
            }
            let bytes = vec![POISON; len as usize];
            assert_eq!(api.write(pos, &bytes, Flags::NONE), Ok(len), "{}", api.label());
            expected[pos as usize..][..len as usize].fill(POISON);
            assert!(api.read(0, MIB) == Ok(expected.clone()), "{}", api.label());
            assert!(content(api) == expected, "{}", api.label());
        }
    });
}

fn c59_what_others_append_or_cut_off_is_seen_by_the_next_request() {
    on_files(0, Content::Hole, |api| {
        let others = buffered(&api.image().path);
        let mut expected = Vec::new();
        for (size, byte) in
            [(100, 1), (64 * KIB, 2), (64 * KIB + 5, 3), (5000, 4), (0, 5), (8192, 6)]
        {
            others.set_len(size).unwrap();
            expected.resize(size as usize, 0);
            if size > 10 {
                others.write_all_at(&[byte; 10], size - 10).unwrap();
                expected[size as usize - 10..].fill(byte);
            }
            assert_eq!(api.size(), size, "{}", api.label());
            assert!(api.read(0, MIB) == Ok(expected.clone()), "{size} {}", api.label());
            assert_eq!(api.read(size, BLOCK), Ok(Vec::new()), "{size} {}", api.label());
            assert_eq!(api.append(&[byte], Flags::NONE), Ok(size), "{}", api.label());
            expected.push(byte);
        }
    });
}

fn c60_a_size_that_is_set_cuts_off_or_adds_zeros() {
    on_files(100 * KIB, Content::Data, |api| {
        let mut expected = pattern(0, 100 * KIB);
        for size in [99_999, 4097, 4096, 70_000, 1, 0, 20 * KIB] {
            assert_eq!(api.set_len(size), Ok(()), "{}", api.label());
            expected.resize(size as usize, 0);
            assert_eq!(api.size(), size, "{}", api.label());
            assert!(api.read(0, MIB) == Ok(expected.clone()), "{size} {}", api.label());
        }
        assert_eq!(api.set_len(1 << 63), Err(libc::EINVAL), "{}", api.label());
        assert_eq!(api.size(), 20 * KIB, "{}", api.label());
    });
}

fn c61_allocating_changes_no_byte() {
    on_files(10_000, Content::Data, |api| {
        let mut expected = pattern(0, 10_000);
        let range = ByteRange::new(5000, MIB);
        match api.allocate(range, Allocate::KeepSize) {
            Err(libc::EOPNOTSUPP) => {
                nowait_testkit::skip("no fallocate(2)");
                return;
            }
            done => assert_eq!(done, Ok(()), "{}", api.label()),
        }
        assert!(api.image().allocated() >= MIB, "{}", api.label());
        assert!(api.size() == 10_000 && content(api) == expected, "{}", api.label());
        assert_eq!(api.allocate(range, Allocate::Extend), Ok(()), "{}", api.label());
        expected.resize(range.end() as usize, 0);
        assert!(content(api) == expected, "{}", api.label());
        assert_eq!(api.allocate(ByteRange::new(7 * MIB, 0), Allocate::Extend), Ok(()));
        let far = ByteRange::new(u64::MAX, 2);
        assert_eq!(api.allocate(far, Allocate::Extend), Err(libc::EINVAL), "{}", api.label());
        assert_eq!(api.write(MIB, &[7; 4096], Flags::NONE), Ok(4096), "{}", api.label());
        expected[MIB as usize..][..4096].fill(7);
        assert!(api.read(0, 2 * MIB) == Ok(expected), "{}", api.label());
    });
}

fn c62_discarding_and_zeroing_keep_the_size() {
    let size = 64 * KIB + 77;
    on_files(size, Content::Data, |api| {
        let mut expected = pattern(0, size);
        for (pos, len) in [(0, BLOCK), (5001, 9000), (size - 50, 10 * BLOCK), (size, BLOCK)] {
            for (op, flags) in [(Op::Discard, Flags::NONE), (Op::Zero, Flags::NO_UNMAP)] {
                let pos = pos + if op == Op::Zero && pos < size - 50 { 20 * KIB } else { 0 };
                let done = api.bare(op, flags, ByteRange::new(pos, len));
                if done == Err(libc::EOPNOTSUPP) {
                    nowait_testkit::skip("no holes can be punched");
                    return;
                }
                assert_eq!(done, Ok(()), "{op:?} {pos} {}", api.label());
                let end = (pos + len).min(size) as usize;
                expected[pos as usize..end].fill(0);
                assert!(api.read(0, MIB) == Ok(expected.clone()), "{op:?} {pos} {}", api.label());
                assert!(content(api) == expected, "{}", api.label());
            }
        }
    });
}

fn c63_a_durable_write_that_extends_leaves_nothing_in_the_cache() {
    on_files(0, Content::Hole, |api| {
        for (len, append) in [(BLOCK, false), (100, false), (3 * BLOCK + 5, true), (9, true)] {
            let (pos, bytes) = (api.size(), pattern(3, len));
            match append {
                true => assert_eq!(api.append(&bytes, Flags::DSYNC), Ok(pos), "{}", api.label()),
                false => {
                    assert_eq!(api.write(pos, &bytes, Flags::DSYNC), Ok(len), "{}", api.label());
                }
            }
            let dirty = dirty_pages(&api.image().path, ByteRange::new(0, MIB));
            assert_eq!(dirty.unwrap_or(0), 0, "{}", api.label());
        }
        let pos = api.size();
        assert_eq!(api.write(pos, &[1; 77], Flags::NONE), Ok(77), "{}", api.label());
        assert_eq!(api.sync_all(), Ok(()), "{}", api.label());
        let dirty = dirty_pages(&api.image().path, ByteRange::new(0, MIB));
        assert_eq!(dirty.unwrap_or(0), 0, "{}", api.label());
    });
}

fn c63_a_failed_sync_of_all_fails_every_later_one() {
    for case in cases(&REAL[..1]) {
        let image = Image::new(BLOCK, Content::Data);
        let disk = open(&image, &case);
        let shared = disk.clone();
        let failed = denied(Deny::all(libc::SYS_fsync, libc::EIO), move || shared.sync_all());
        let Some(failed) = failed else { return };
        assert_eq!(failed.map_err(|error| error.errno()), Err(libc::EIO));
        let errno = |done: Result<(), nowait::Error>| done.map_err(|error| error.errno());
        assert_eq!(errno(disk.sync_all()), Err(libc::EIO));
        assert_eq!(errno(BlockingFile::new(disk).flush()), Err(libc::EIO));
    }
}

fn c64_parts_of_a_page_that_two_handles_write_are_all_kept() {
    for case in cases(&REAL[..1]) {
        let image = Image::new(0, Content::Hole);
        let handles = [(); 2].map(|()| BlockingFile::new(open(&image, &case)));
        std::thread::scope(|scope| {
            for (n, handle) in handles.iter().enumerate() {
                scope.spawn(move || {
                    // The handles take turns in parts of 100 bytes, so that each page has both.
                    for part in 0..300u64 {
                        let pos = (2 * part + n as u64) * 100;
                        let byte = n as u8 + 1;
                        assert_eq!(handle.write_at(&[byte; 100], pos, Flags::NONE), Ok(100));
                    }
                });
            }
        });
        let bytes = image.bytes(0, 60_000);
        let expected = |at: usize| if (at / 100).is_multiple_of(2) { 1 } else { 2 };
        assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)), "{}", case.label);
    }
}

fn c65_a_file_is_made_truncated_or_refused_as_its_options_say() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, new) = (dir.path().join("file"), OpenOptions::new);
    let open = |options| BlockingFile::open(&path, options).map_err(|error| error.errno());
    assert_eq!(open(new()).err(), Some(libc::ENOENT));
    assert_eq!(open(new().read_only(true).create(true)).err(), Some(libc::EINVAL));
    let made = open(new().create_new(true).mode(0o640)).unwrap();
    assert_eq!(made.append(b"abc", Flags::NONE), Ok(0));
    assert_eq!(made.metadata().unwrap().permissions().mode() & 0o707, 0o600);
    assert_eq!(open(new().create_new(true)).err(), Some(libc::EEXIST));
    assert_eq!(open(new().create(true)).unwrap().size(), 3, "it is kept");
    assert_eq!(open(new().truncate(true).cache_holes(true)).err(), Some(libc::EINVAL));
    assert_eq!(fs::read(&path).unwrap(), b"abc", "an open that fails changes nothing");
    assert_eq!(open(new().truncate(true)).unwrap().size(), 0);
    let directory = BlockingFile::open(dir.path(), new().create(true).truncate(true));
    assert_eq!(directory.err().map(|error| error.errno()), Some(libc::EISDIR));
    let disk = BlockDevice::open(&path, new().create(true));
    assert_eq!(disk.err().map(|error| error.errno()), Some(libc::EINVAL));
    let read_only = open(new().read_only(true)).unwrap();
    for done in [read_only.set_len(1), read_only.append(b"x", Flags::NONE).map(|_| ())] {
        assert_eq!(done.map_err(|error| error.errno()), Err(libc::EROFS));
    }
}

fn c65_a_file_without_a_name_is_given_one() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = match BlockingFile::open(dir.path(), OpenOptions::new().unnamed(true)) {
        Err(error) if [libc::EOPNOTSUPP, libc::EISDIR].contains(&error.errno()) => {
            nowait_testkit::skip("no O_TMPFILE on this file system");
            return;
        }
        opened => opened.unwrap(),
    };
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let bytes = pattern(0, 3 * BLOCK + 1);
    assert_eq!(file.write_at(&bytes, 0, Flags::DSYNC), Ok(bytes.len()));
    let (name, taken) = (dir.path().join("name"), dir.path().join("taken"));
    fs::write(&taken, b"x").unwrap();
    assert_eq!(file.link(&taken).map_err(|error| error.errno()), Err(libc::EEXIST));
    file.link(&name).unwrap();
    nowait::sync_directory(dir.path()).unwrap();
    drop(file);
    assert!(fs::read(&name).unwrap() == bytes && fs::read(&taken).unwrap() == b"x");
}
