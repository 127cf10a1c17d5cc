//! Bitmaps that are frozen for a backup: its end decides what becomes of their bits.

use std::collections::BTreeSet;

use nowait_server::{BackupEnd, BackupRefusal, BackupSpec, BitmapError, BitmapSpec};
use nowait_testkit::nbd::Command;
use nowait_testkit::{Random, seed};

use crate::scene::{BLOCK, Kind, SIZE, Scene, all_of};

fn frozen(scene: &Scene) -> BackupSpec {
    BackupSpec { bitmap: Some("b".into()), ..scene.spec("0") }
}

/// Bytes that are dirty in the bitmap of an export.
fn dirty(scene: &Scene, export: &str) -> u64 {
    let all = scene.exports.bitmaps(scene.id(export)).expect("the export");
    all.iter().find(|bitmap| bitmap.spec.name == "b").expect("the bitmap").dirty_bytes
}

#[test]
fn c80_commit_forgets_what_was_noted_before_the_instant_and_abort_does_not() {
    let mut random = Random::from_seed(seed());
    let scene = Scene::of(&[Kind::Sparse]);
    scene.exports.add_bitmap(scene.id("0"), &BitmapSpec::new("b".into())).expect("a bitmap");
    let mut writer = scene.connect("0");
    let mut noted = BTreeSet::new();
    let mut write = |random: &mut Random, noted: &mut BTreeSet<u64>| {
        for _ in 0..random.below(12) {
            let block = random.below(SIZE / BLOCK);
            let change = match random.chance(50) {
                true => Command::Write { offset: block * BLOCK, data: vec![7; 512], fua: false },
                false => Command::Trim { offset: block * BLOCK, len: BLOCK as u32 },
            };
            writer.call(&change).expect("a change");
            noted.insert(block);
        }
    };
    for round in 0..40 {
        write(&mut random, &mut noted);
        let before = noted.len() as u64 * BLOCK;
        assert_eq!(dirty(&scene, "0"), before);
        let old = std::mem::take(&mut noted);
        scene.begin(frozen(&scene)).expect("a backup");
        assert_eq!((dirty(&scene, "0"), dirty(&scene, "0.backup")), (0, before));
        write(&mut random, &mut noted);
        let after = noted.len() as u64 * BLOCK;
        assert_eq!((dirty(&scene, "0"), dirty(&scene, "0.backup")), (after, before));
        // A client that leaves decides nothing.
        drop(scene.connect("0.backup"));
        let end = [BackupEnd::Commit, BackupEnd::Abort][round % 2];
        if end == BackupEnd::Abort {
            noted.extend(old);
        }
        scene.end("0", end).expect("its end");
        assert_eq!(dirty(&scene, "0"), noted.len() as u64 * BLOCK, "{round} {end:?}");
    }
}

#[test]
fn c80_a_bitmap_of_a_backup_stays_until_its_end() {
    let scene = Scene::of(&[Kind::Raw]);
    let (id, exports) = (scene.id("0"), &scene.exports);
    let missing = scene.begin(frozen(&scene)).expect_err("no bitmap");
    assert_eq!(missing.why, BackupRefusal::Bitmap(BitmapError::NoBitmap));
    let unnamed = BackupSpec { only_dirty: true, ..scene.spec("0") };
    assert_eq!(scene.begin(unnamed).expect_err("no name").why, BackupRefusal::NoBitmapNamed);
    for name in ["b", "other"] {
        exports.add_bitmap(id, &BitmapSpec::new(name.into())).expect("a bitmap");
    }
    scene.begin(frozen(&scene)).expect("a backup");
    assert_eq!(exports.remove_bitmap(id, "b"), Err(BitmapError::InBackup));
    assert_eq!(exports.clear_bitmap(id, "b"), Err(BitmapError::InBackup));
    let backup = scene.id("0.backup");
    assert_eq!(exports.clear_bitmap(backup, "b"), Err(BitmapError::InBackup));
    assert_eq!(exports.enable_bitmap(backup, "b", true), Err(BitmapError::InBackup));
    assert_eq!(exports.merge_bitmaps(backup, "b", &["b".into()]), Err(BitmapError::InBackup));
    let new = BitmapSpec::new("new".into());
    assert_eq!(exports.add_bitmap(backup, &new), Err(BitmapError::InBackup));
    exports.clear_bitmap(id, "other").expect("another one");
    exports.remove_bitmap(id, "other").expect("another one");
    scene.end("0", BackupEnd::Abort).expect("its end");
    exports.clear_bitmap(id, "b").expect("it is free");
    exports.remove_bitmap(id, "b").expect("it is free");
}

#[test]
fn c80_the_end_of_a_server_aborts_its_backups() {
    let mut scene = Scene::of(&[Kind::Raw]);
    scene.exports.add_bitmap(scene.id("0"), &BitmapSpec::new("b".into())).expect("a bitmap");
    let mut writer = scene.connect("0");
    writer.write(0, &[1; 512]).expect("a write");
    scene.begin(frozen(&scene)).expect("a backup");
    writer.write(3 * BLOCK, &[1; 512]).expect("a write");
    assert_eq!(dirty(&scene, "0"), BLOCK);
    drop(writer);
    scene.stop();
    assert_eq!(dirty(&scene, "0"), 2 * BLOCK);
    assert!(scene.exports.backups().is_empty());
}

#[test]
fn c80_of_what_is_dirty_only_the_rest_is_neither_copied_nor_served() {
    let scene = Scene::of(&[Kind::Raw]);
    let mut writer = scene.connect("0");
    writer.write(0, &vec![1; 10 * BLOCK as usize]).expect("a write");
    scene.exports.add_bitmap(scene.id("0"), &BitmapSpec::new("b".into())).expect("a bitmap");
    writer.write(2 * BLOCK, &vec![2; 2 * BLOCK as usize]).expect("a write");
    let was = all_of(&mut writer);
    scene.begin(BackupSpec { only_dirty: true, ..frozen(&scene) }).expect("a backup");
    writer.write(BLOCK, &vec![3; 4 * BLOCK as usize]).expect("a write");
    assert_eq!(scene.status().copied_bytes, 2 * BLOCK);
    let mut backup = scene.connect("0.backup");
    let read = backup.read(2 * BLOCK, 2 * BLOCK as u32).expect("a read");
    assert!(read == was[2 * BLOCK as usize..][..2 * BLOCK as usize]);
    for (offset, len) in [(2 * BLOCK - 1, 1), (2 * BLOCK - 1, 2), (4 * BLOCK, 1), (9 * BLOCK, 1)] {
        assert_eq!(backup.read(offset, len), Err(libc::EPERM as u32), "{offset}");
    }
}
