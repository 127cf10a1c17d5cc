//! Backups that are interrupted, and what the next one takes of them.
//!
//! Invariant: what is restored is the disk as the last backup has read it.

use std::path::{Path, PathBuf};

use nowait_copy::TargetDisk;
use nowait_testkit::Random;

use crate::block::MIN_BLOCK_BYTES;
use crate::tests::{BLOCK, DISK, back_up, back_up_as, mortal, names, no_cancel, restored};
use crate::{Access, Chain, Contents, Keep, NewPoint, prune, verify};

/// A chain whose data files have three blocks that cannot be compressed.
fn with_small_files(path: &Path) -> Chain {
    mortal(path, Access::Add, i64::MAX)
}

#[test]
fn a_backup_goes_on_from_the_files_that_one_before_has_completed_as_far_as_the_disk_is_the_same() {
    let mut first = vec![0; DISK];
    fastrand::Rng::with_seed(11).fill(&mut first);
    // A file of three blocks is made by 5 steps: its begin, three blocks, its end; one more puts its index.
    for (steps, changed, reused) in [
        (4, None, 0),
        (5, None, 0),
        (6, None, 3),
        (12, None, 6),
        (12, Some(0), 5),
        (12, Some(5), 5),
        (12, Some(6), 6),
        (36, Some(20), 18),
    ] {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("chain");
        let mut disk = first.clone();
        assert!(back_up(mortal(&path, Access::Add, steps), &disk, None).is_err());
        // A kill in the middle of an index leaves one that is not complete.
        std::fs::write(path.join("index-000000000000000a.partial"), "partial").unwrap();
        if let Some(block) = changed {
            disk[block * BLOCK] ^= 1;
        }
        let point = NewPoint::new(with_small_files(&path), Contents::Differences).unwrap();
        write_all(&point, &disk);
        let resumed = point.resumed_bytes();
        assert_eq!(resumed, reused * MIN_BLOCK_BYTES, "{steps} steps, {changed:?}");
        drop(point);
        assert!(restored(&path, 1).unwrap() == disk);
        // Neither an index nor a file that is of no use is left.
        let manifest = Chain::open(&path, Access::List, None).unwrap().manifest(1).unwrap();
        assert_eq!(names(&path).len(), 2 + manifest.header.files.len());
    }
}

#[test]
fn a_backup_that_is_interrupted_again_and_again_ends_and_has_the_last_content() {
    let mut random = Random::from_seed(12);
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("chain");
    let mut disk = random.bytes(DISK);
    let mut rounds = 0;
    while back_up(mortal(&path, Access::Add, 15), &disk, None).is_err() {
        disk[random.below(DISK as u64) as usize] ^= 1;
        rounds += 1;
        assert!(rounds < 100, "it does not go on");
    }
    assert!(rounds > 2 && restored(&path, 1).unwrap() == disk);
    // A disk of another size, a prune and damage: nothing is taken, and nothing is left.
    for round in 0..3 {
        assert!(back_up_as(mortal(&path, Access::Add, 8), Contents::Whole, &disk, None).is_err());
        let indexes = || {
            names(&path).into_iter().filter(|it| it.to_string_lossy().contains("index-")).collect()
        };
        let left: Vec<PathBuf> = indexes();
        assert_eq!(left.len(), 1);
        match round {
            0 => disk.truncate(DISK - BLOCK),
            1 => {
                let chain = Chain::open(&path, Access::Remove, None).unwrap();
                prune(chain, Keep { last: 1, ..Keep::default() }, &no_cancel()).unwrap();
                assert!(indexes().is_empty());
            }
            _ => std::fs::write(&left[0], "damaged").unwrap(),
        }
        let point = NewPoint::new(with_small_files(&path), Contents::Whole).unwrap();
        write_all(&point, &disk);
        assert_eq!(point.resumed_bytes(), 0);
        let number = point.made().unwrap().number;
        drop(point);
        assert!(indexes().is_empty() && restored(&path, number).unwrap() == disk);
    }
    let chain = Chain::open(&path, Access::Read, None).unwrap();
    let health = verify(&chain, None, &no_cancel(), &mut |_, _| {}).unwrap();
    assert!(health.iter().all(|it| it.is_sound()));
}

/// Writes all of `disk` to `point`, and finishes it.
fn write_all(point: &NewPoint, disk: &[u8]) {
    point.begin(disk.len() as u64).unwrap();
    let mut padded = disk.to_vec();
    padded.resize(disk.len().next_multiple_of(BLOCK), 0);
    point.write(0, &padded).unwrap();
    point.finish().unwrap();
}
