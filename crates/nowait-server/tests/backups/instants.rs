//! A backup is its disk at an instant; several that begin together have one instant.

use std::sync::atomic::{AtomicBool, Ordering};

use nowait_server::{BackupEnd, BackupRefusal, ExportError};
use nowait_testkit::nbd::{Client, Command};
use nowait_testkit::{Random, seed};

use crate::scene::{BLOCK, Kind, PAUSE, SIZE, Scene, all_of, change_all, while_written};

/// Reads ranges of a backup at random and compares them with the copy `was`.
fn compare(backup: &mut Client, was: &[u8], random: &mut Random, reads: u32) {
    for _ in 0..reads {
        let offset = random.below(SIZE);
        let len = (random.below(5 * BLOCK) + 1).min(SIZE - offset);
        let read = backup.read(offset, len as u32).expect("a read of the backup");
        assert!(read == was[offset as usize..][..len as usize], "{len} bytes at {offset}");
    }
}

#[test]
fn c78_a_backup_is_the_disk_at_its_instant_whatever_is_written_meanwhile() {
    let seed = seed();
    for kind in Kind::ALL {
        let scene = Scene::of(&[kind]);
        let mut random = Random::from_seed(seed);
        let mut writer = scene.connect("0");
        for round in 0..3 {
            change_all(&mut writer, &mut random, 40, 8);
            let was = all_of(&mut writer);
            scene.begin(scene.spec("0")).expect("a backup");
            let mut backup = scene.connect("0.backup");
            while_written(&scene, "0", (3, seed + 10 * round), || {
                compare(&mut backup, &was, &mut random, 60);
                assert!(all_of(&mut backup) == was, "{kind:?} {round}");
            });
            assert!(all_of(&mut backup) == was, "{kind:?} {round}, after the writers");
            let status = scene.status();
            assert!(status.copied_bytes > 0 && status.failure.is_none());
            assert_eq!(status.copied_bytes, status.scratch_bytes);
            let end = [BackupEnd::Commit, BackupEnd::Abort][round as usize % 2];
            scene.end("0", end).expect("the end");
            backup
                .send(&Command::Flush)
                .and_then(|_| backup.receive())
                .expect_err("a closed connection");
            assert!(scene.exports.find("0.backup").is_none());
            // The writers' connections have gone through two pauses.
            writer.write(0, &[round as u8; 512]).expect("a write");
            assert_eq!(writer.read(0, 512), Ok(vec![round as u8; 512]));
        }
    }
}

#[test]
fn c79_disks_whose_backups_begin_together_have_one_instant() {
    let scene = Scene::of(&[Kind::Sparse, Kind::Qcow2]);
    let number = |client: &mut Client| {
        let bytes = client.read(7 * BLOCK, 8).expect("a number");
        u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut first, mut second) = (scene.connect("0"), scene.connect("1"));
            for n in 1_u64.. {
                first.write(7 * BLOCK, &n.to_le_bytes()).expect("a write");
                second.write(7 * BLOCK, &n.to_le_bytes()).expect("a write");
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        for _ in 0..5 {
            let specs = vec![scene.spec("0"), scene.spec("1")];
            let begun = scene.exports.begin_backups(specs, PAUSE).expect("backups");
            assert_eq!(begun, [scene.id("0.backup"), scene.id("1.backup")]);
            let first = number(&mut scene.connect("0.backup"));
            let second = number(&mut scene.connect("1.backup"));
            assert!(first == second || first == second + 1, "{first} {second}");
            let ids = [scene.id("0"), scene.id("1")];
            scene.exports.end_backups(&ids, BackupEnd::Commit, PAUSE).expect("the end");
        }
        is_over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn c79_the_backups_of_256_disks_begin_and_end_together() {
    let scene = Scene::of(&[Kind::Raw; 256]);
    let names = (0..256).map(|n| n.to_string()).collect::<Vec<_>>();
    let written = ["0", "1", "255"];
    for name in written {
        scene.connect(name).write(SIZE - 512, &[1; 512]).expect("a write");
    }
    let specs = names.iter().map(|name| scene.spec(name)).collect();
    assert_eq!(scene.exports.begin_backups(specs, PAUSE).expect("backups").len(), 256);
    for name in written {
        scene.connect(name).write(SIZE - 512, &[2; 512]).expect("a write");
        let mut backup = scene.connect(&format!("{name}.backup"));
        assert_eq!(backup.read(SIZE - 512, 512), Ok(vec![1; 512]), "{name}");
    }
    let ids = names.iter().map(|name| scene.id(name)).collect::<Vec<_>>();
    scene.exports.end_backups(&ids, BackupEnd::Commit, PAUSE).expect("the end");
    assert!(scene.exports.backups().is_empty());
    assert_eq!(scene.exports.list().len(), 256);
}

#[test]
fn c79_where_one_backup_cannot_begin_none_does() {
    let scene = Scene::of(&[Kind::Raw, Kind::Raw]);
    let refused = |specs, export: &str, why: BackupRefusal| {
        let refused = scene.exports.begin_backups(specs, PAUSE).expect_err("a refusal");
        assert_eq!((refused.export, refused.why), (scene.id(export), why));
        assert!(scene.exports.backups().is_empty());
        assert_eq!(scene.exports.list().len(), 2);
        scene.connect("0").write(0, &[1; 512]).expect("a write");
    };
    let named = |export: &str, name: &str| nowait_server::BackupSpec {
        name: name.into(),
        ..scene.spec(export)
    };
    let taken = || BackupRefusal::Export(ExportError::NameTaken);
    refused(vec![named("0", "x"), named("1", "x")], "1", taken());
    refused(vec![named("0", "x"), named("1", "0")], "1", taken());
    refused(vec![named("0", "x"), named("0", "y")], "0", BackupRefusal::HasBackup);
    let small = |bytes| nowait_server::BackupSpec { scratch_bytes: bytes, ..scene.spec("1") };
    refused(vec![scene.spec("0"), small(BLOCK - 1)], "1", BackupRefusal::SmallScratch);
    scene.exports.begin_backups(vec![scene.spec("0"), small(BLOCK)], PAUSE).expect("backups");
}

#[test]
fn c78_a_disk_with_a_backup_is_not_removed_resized_paused_or_backed_up_again() {
    let scene = Scene::of(&[Kind::Raw, Kind::Raw]);
    scene.begin(scene.spec("1")).expect("a backup");
    let (id, backup, exports) = (scene.id("1"), scene.id("1.backup"), &scene.exports);
    let has = Err(ExportError::HasBackup { backup: "1.backup".into() });
    assert_eq!(exports.remove(id, PAUSE), has);
    assert_eq!(exports.remove_unused(id, PAUSE), has);
    assert_eq!(exports.remove_by_force(id, PAUSE), has);
    assert_eq!(exports.grow(id, SIZE + 512), has);
    assert_eq!(exports.pause_export(id, PAUSE).map(drop), has);
    assert_eq!(exports.pause(PAUSE).map(drop), has);
    let is = Err(ExportError::IsBackup { of: "1".into() });
    assert_eq!(exports.remove_by_force(backup, PAUSE), is);
    assert_eq!(scene.begin(scene.spec("1")).expect_err("it has one").why, BackupRefusal::HasBackup);
    assert_eq!(
        scene.begin(scene.spec("1.backup")).expect_err("it is one").why,
        BackupRefusal::IsBackup
    );
    assert_eq!(scene.end("0", BackupEnd::Abort).expect_err("none").why, BackupRefusal::NoBackup);
    scene.end("1", BackupEnd::Abort).expect("the end");
    assert_eq!(scene.end("1", BackupEnd::Abort).expect_err("none").why, BackupRefusal::NoBackup);
    exports.grow(id, SIZE + 512).expect("a larger disk");
    exports.remove(id, PAUSE).expect("its removal");
}

#[test]
fn c78_a_backup_is_read_only_and_tells_what_was_a_hole() {
    let scene = Scene::of(&[Kind::Raw]);
    let mut writer = scene.connect("0");
    writer.write(3 * BLOCK, &[3; BLOCK as usize]).expect("a write");
    scene.begin(scene.spec("0")).expect("a backup");
    let mut backup = scene.connect("0.backup");
    for change in [
        Command::Write { offset: 0, data: vec![1; 512], fua: false },
        Command::Zero { offset: 0, len: 512, keep: false },
        Command::Trim { offset: 0, len: 512 },
    ] {
        assert_eq!(backup.call(&change), Err(libc::EPERM as u32), "{change:?}");
    }
    assert_eq!(backup.call(&Command::Flush), Ok(vec![]));
    for block in 0..5 {
        writer.write(block * BLOCK + 512, &[9; 512]).expect("a write");
    }
    // Blocks of zeros take no scratch.
    assert_eq!(scene.status().copied_bytes, BLOCK);
    assert_eq!(backup.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(backup.read(3 * BLOCK, 1024), Ok(vec![3; 1024]));
    assert_eq!(writer.read(3 * BLOCK + 512, 512), Ok(vec![9; 512]));
}
