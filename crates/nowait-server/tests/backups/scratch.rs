//! Scratch that is full, that fails, and that is freed.

use nowait_server::{BackupEnd, BackupRefusal, BackupSpec};
use nowait_testkit::nbd::Command;

use crate::scene::{BLOCK, Kind, Scene, all_of};

const EIO: Result<Vec<u8>, u32> = Err(libc::EIO as u32);

#[test]
fn c78_scratch_that_is_full_ends_the_backup_at_any_step_and_no_write_fails() {
    const BLOCKS: u64 = 6;
    for kind in Kind::ALL {
        let scene = Scene::of(&[kind]);
        let mut writer = scene.connect("0");
        for room in 1..=BLOCKS {
            let old = [room as u8; (BLOCKS * BLOCK) as usize];
            writer.write(0, &old).expect("a write");
            let was = all_of(&mut writer);
            let spec = BackupSpec { scratch_bytes: room * BLOCK, ..scene.spec("0") };
            scene.begin(spec).expect("a backup");
            let mut backup = scene.connect("0.backup");
            for block in 0..BLOCKS {
                writer.write(block * BLOCK + 1, &[99; 600]).expect("a write");
                let read = backup.read(0, was.len() as u32);
                if block < room {
                    assert!(read.expect("a read") == was, "{kind:?} {room} {block}");
                } else {
                    assert_eq!(read, EIO);
                }
            }
            let (status, is_full) = (scene.status(), room < BLOCKS);
            assert_eq!(status.scratch_bytes, room * BLOCK);
            assert_eq!(status.failure.is_some(), is_full);
            let full = format!("its scratch is full, {} bytes", room * BLOCK);
            let committed = scene.end("0", BackupEnd::Commit);
            if is_full {
                assert_eq!(status.failure.as_ref(), Some(&full));
                assert_eq!(committed.expect_err("it has failed").why, BackupRefusal::Failed(full));
                scene.end("0", BackupEnd::Abort).expect("its end");
            } else {
                committed.expect("its end");
            }
            for block in 0..BLOCKS {
                assert_eq!(writer.read(block * BLOCK + 1, 600), Ok(vec![99; 600]));
            }
        }
    }
}

#[test]
fn c78_a_write_that_needs_more_than_is_left_of_scratch_ends_the_backup() {
    let scene = Scene::of(&[Kind::Raw]);
    let mut writer = scene.connect("0");
    writer.write(0, &vec![1; 20 * BLOCK as usize]).expect("a write");
    scene.begin(BackupSpec { scratch_bytes: 19 * BLOCK, ..scene.spec("0") }).expect("a backup");
    writer.call(&Command::Trim { offset: 0, len: 20 * BLOCK as u32 }).expect("a discard");
    assert!(scene.status().failure.is_some());
    assert_eq!(scene.connect("0.backup").read(0, 512), EIO);
}

#[test]
fn c78_a_discard_of_a_backup_frees_scratch_and_what_it_freed_is_not_copied() {
    let scene = Scene::of(&[Kind::Sparse]);
    let mut writer = scene.connect("0");
    writer.write(0, &vec![1; 8 * BLOCK as usize]).expect("a write");
    // Two blocks have room at a time.
    let spec = BackupSpec { scratch_bytes: 2 * BLOCK, discards: true, ..scene.spec("0") };
    scene.begin(spec).expect("a backup");
    let mut backup = scene.connect("0.backup");
    let discard = |offset, len: u64| Command::Trim { offset, len: len as u32 };
    for block in 0..6 {
        writer.write(block * BLOCK, &[2; 512]).expect("a write");
        let read = backup.read(block * BLOCK, BLOCK as u32);
        assert_eq!(read, Ok(vec![1; BLOCK as usize]));
        assert_eq!(scene.status().scratch_bytes, BLOCK);
        // A part of a block frees nothing.
        backup.call(&discard(block * BLOCK + 1, BLOCK - 1)).expect("a discard");
        assert_eq!(scene.status().scratch_bytes, BLOCK);
        backup.call(&discard(block * BLOCK, BLOCK)).expect("a discard");
        assert_eq!(scene.status().scratch_bytes, 0);
        assert_eq!(backup.read(block * BLOCK, 1), EIO);
    }
    backup.call(&discard(6 * BLOCK, BLOCK)).expect("a discard before the write");
    writer.write(6 * BLOCK, &[2; 512]).expect("a write");
    assert_eq!(scene.status().copied_bytes, 6 * BLOCK);
    assert_eq!(backup.read(6 * BLOCK, 1), EIO);
    assert_eq!(backup.read(7 * BLOCK, 1), Ok(vec![1]));
    for change in [
        Command::Write { offset: 0, data: vec![1; 512], fua: false },
        Command::Zero { offset: 0, len: 512, keep: false },
    ] {
        assert_eq!(backup.call(&change), Err(libc::EPERM as u32), "{change:?}");
    }
    assert_eq!(scene.status().failure, None);
    scene.end("0", BackupEnd::Commit).expect("its end");
    assert_eq!(writer.read(6 * BLOCK, 512), Ok(vec![2; 512]));
}
