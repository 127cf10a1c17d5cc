//! Chains of random disks in a place that fails, or dies, at any step.
//!
//! Invariant: what a restored point is compared with is a copy that the test has kept.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use nowait::ByteRange;
use nowait_copy::{Error, SourceDisk, TargetDisk};
use nowait_testkit::Random;

use crate::block::MIN_BLOCK_BYTES;
use crate::directory::Directory;
use crate::place::{FileName, NewFile, Place, Put, StoredFile};
use crate::{Access, Chain, Contents, Keep, NewPoint, PointDisk, prune, verify};

pub(crate) const BLOCK: usize = MIN_BLOCK_BYTES as usize;
/// A disk whose last block is not whole.
pub(crate) const DISK: usize = 20 * BLOCK + 1000;

/// A place whose process dies before a given change of it.
#[derive(Debug)]
struct MortalPlace {
    directory: Directory,
    /// Changes that are made before the death.
    left: Arc<AtomicI64>,
}

const DEAD: &str = "dead";

fn step(left: &AtomicI64) -> Result<(), String> {
    if left.fetch_sub(1, SeqCst) > 0 { Ok(()) } else { Err(DEAD.into()) }
}

impl Place for MortalPlace {
    fn list(&self) -> Result<Vec<(FileName, u64)>, String> {
        self.directory.list()
    }

    fn open(&self, name: FileName) -> Result<Box<dyn StoredFile>, String> {
        self.directory.open(name)
    }

    fn create(&self, name: FileName, most: u64) -> Result<Box<dyn NewFile>, String> {
        step(&self.left)?;
        let file = Some(self.directory.create(name, most)?);
        Ok(Box::new(MortalFile { file, left: self.left.clone() }))
    }

    fn put(&self, name: FileName, bytes: &[u8], put: Put) -> Result<(), String> {
        step(&self.left)?;
        self.directory.put(name, bytes, put)
    }

    fn remove(&self, name: FileName) -> Result<(), String> {
        step(&self.left)?;
        self.directory.remove(name)
    }

    fn file_bytes(&self, _: u64) -> u64 {
        3 * MIN_BLOCK_BYTES
    }
}

/// A file that a dead process leaves as it is.
#[derive(Debug)]
struct MortalFile {
    file: Option<Box<dyn NewFile>>,
    left: Arc<AtomicI64>,
}

impl NewFile for MortalFile {
    fn append(&mut self, bytes: &[u8]) -> Result<(), String> {
        step(&self.left)?;
        self.file.as_mut().unwrap().append(bytes)
    }

    fn complete(&mut self) -> Result<(), String> {
        step(&self.left)?;
        self.file.as_mut().unwrap().complete()
    }

    fn keep(mut self: Box<Self>) {
        if let Some(file) = self.file.take() {
            file.keep();
        }
    }
}

impl Drop for MortalFile {
    fn drop(&mut self) {
        if self.left.load(SeqCst) < 0
            && let Some(file) = self.file.take()
        {
            file.keep();
        }
    }
}

/// The chain in `path`, of a process that dies after `steps`.
pub(crate) fn mortal(path: &Path, access: Access, steps: i64) -> Chain {
    let left = Arc::new(AtomicI64::new(steps));
    let directory = Directory::open(path, access).unwrap();
    Chain::in_place(Arc::new(MortalPlace { directory, left }), "chain".into()).unwrap()
}

/// Backs up `disk` as a copy does; the blocks that differ from `last` only, if there is one.
pub(crate) fn back_up(chain: Chain, disk: &[u8], last: Option<&[u8]>) -> Result<u32, String> {
    let contents = match last {
        Some(_) => Contents::Bitmap("b".into()),
        None => Contents::Differences,
    };
    back_up_as(chain, contents, disk, last)
}

pub(crate) fn back_up_as(
    chain: Chain,
    contents: Contents,
    disk: &[u8],
    last: Option<&[u8]>,
) -> Result<u32, String> {
    let point = NewPoint::new(chain, contents).map_err(|error| error.to_string())?;
    point.begin(disk.len() as u64)?;
    let mut padded = disk.to_vec();
    padded.resize(disk.len().next_multiple_of(BLOCK), 0);
    for (index, block) in padded.chunks(BLOCK).enumerate() {
        let pos = index * BLOCK;
        let is_zero = block.iter().all(|byte| *byte == 0);
        let same = |last: &[u8]| {
            last.get(pos..(pos + BLOCK).min(last.len())).is_some_and(|old| block.starts_with(old))
        };
        match last {
            Some(last) if same(last) => {}
            Some(_) if is_zero => point.zero(ByteRange::new(pos as u64, BLOCK as u64))?,
            None if is_zero => {}
            _ => point.write(pos as u64, block)?,
        }
    }
    point.finish()?;
    Ok(point.made().unwrap().number)
}

pub(crate) fn restored(path: &Path, number: u32) -> Result<Vec<u8>, Error> {
    let disk = PointDisk::open(Chain::open(path, Access::Read, None)?, Some(number))?;
    let mut bytes = vec![0xee; disk.size() as usize];
    disk.read(0, &mut bytes).map_err(|what| Error::at(&"read", what))?;
    let extents = disk.extents(ByteRange::new(0, disk.size()));
    let mut pos = 0;
    for extent in extents {
        let part = &bytes[pos..pos + extent.len as usize];
        assert!(!extent.hole || part.iter().all(|byte| *byte == 0));
        pos += extent.len as usize;
    }
    assert_eq!(pos, bytes.len());
    Ok(bytes)
}

fn change(disk: &mut [u8], random: &mut Random) {
    for _ in 0..4 {
        let len = 1 + random.below(2 * BLOCK as u64) as usize;
        let pos = random.below((disk.len() - len) as u64) as usize;
        let part = &mut disk[pos..pos + len];
        match random.below(3) {
            0 => part.fill(0),
            1 => part.fill(7),
            _ => part.copy_from_slice(&random.bytes(len)),
        }
    }
}

/// Points of a disk by their numbers, as they have to be restored.
type Points = BTreeMap<u32, Vec<u8>>;

fn add_points(path: &Path, count: usize, points: &mut Points, random: &mut Random) {
    for _ in 0..count {
        let last = points.last_key_value().map(|(_, disk)| disk.clone());
        let mut disk = last.clone().unwrap_or_else(|| vec![0; DISK]);
        change(&mut disk, random);
        let by_bitmap = last.filter(|_| random.chance(50));
        let chain = Chain::open(path, Access::Add, None).unwrap();
        let number = back_up(chain, &disk, by_bitmap.as_deref()).unwrap();
        assert!(points.insert(number, disk).is_none());
    }
}

fn assert_points(path: &Path, points: &Points) {
    for (number, disk) in points {
        assert!(restored(path, *number).unwrap() == *disk, "point {number}");
    }
}

pub(crate) fn names(path: &Path) -> Vec<PathBuf> {
    let mut names: Vec<_> =
        std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

pub(crate) fn no_cancel() -> AtomicBool {
    AtomicBool::new(false)
}

#[test]
fn each_point_of_a_random_chain_is_restored_also_after_points_were_removed() {
    for seed in 0..6 {
        let mut random = Random::from_seed(seed);
        let (directory, mut points) = (tempfile::tempdir().unwrap(), Points::new());
        let path = directory.path();
        for _ in 0..4 {
            let count = 1 + random.below(4) as usize;
            add_points(path, count, &mut points, &mut random);
            assert_points(path, &points);
            let last = 1 + random.below(3) as usize;
            let chain = Chain::open(path, Access::Remove, None).unwrap();
            let pruned = prune(chain, Keep { last, ..Keep::default() }, &no_cancel()).unwrap();
            let gone = points.len().saturating_sub(last);
            points = points.into_iter().skip(gone).collect();
            assert_eq!(pruned.kept, points.keys().copied().collect::<Vec<_>>());
            assert_eq!(pruned.removed.len(), gone);
            assert_points(path, &points);
        }
        let chain = Chain::open(path, Access::Read, None).unwrap();
        let health = verify(&chain, None, &no_cancel(), &mut |_, _| {}).unwrap();
        assert!(health.len() == points.len() && health.iter().all(|it| it.is_sound()));
        assert!(chain.points().iter().all(|(_, info)| info.is_ok()));
    }
}

#[test]
fn a_removal_that_dies_at_any_step_leaves_every_point_that_is_there_whole() {
    let mut random = Random::from_seed(1);
    let (origin, mut points) = (tempfile::tempdir().unwrap(), Points::new());
    add_points(origin.path(), 5, &mut points, &mut random);
    for steps in 0.. {
        let copy = tempfile::tempdir().unwrap();
        for file in names(origin.path()) {
            std::fs::copy(&file, copy.path().join(file.file_name().unwrap())).unwrap();
        }
        let path = copy.path();
        let keep = Keep { last: 2, ..Keep::default() };
        let result = prune(mortal(path, Access::Remove, steps), keep, &no_cancel());
        let is_dead = result.is_err_and(|error| error.to_string().contains(DEAD));
        let there = Chain::open(path, Access::List, None).unwrap().points();
        let there: Points =
            there.iter().map(|(number, _)| (*number, points[number].clone())).collect();
        assert!(there.contains_key(&4) && there.contains_key(&5), "step {steps}");
        assert_points(path, &there);
        // The next run removes the rest.
        prune(Chain::open(path, Access::Remove, None).unwrap(), keep, &no_cancel()).unwrap();
        let left = points.iter().skip(3).map(|(number, disk)| (*number, disk.clone()));
        assert_points(path, &left.collect());
        assert_eq!(Chain::open(path, Access::List, None).unwrap().points().len(), 2);
        if !is_dead {
            assert!(steps > 10, "{steps} steps");
            break;
        }
    }
}

#[test]
fn a_backup_that_dies_at_any_step_leaves_no_point_and_the_next_one_is_whole() {
    let mut random = Random::from_seed(2);
    let (origin, mut points) = (tempfile::tempdir().unwrap(), Points::new());
    add_points(origin.path(), 2, &mut points, &mut random);
    let mut disk = points[&2].clone();
    change(&mut disk, &mut random);
    let mut changed = points.clone();
    changed.insert(3, disk.clone());
    let files = names(origin.path()).len();
    for steps in 0.. {
        let result = back_up(mortal(origin.path(), Access::Add, steps), &disk, None);
        match result {
            Err(why) => {
                assert_eq!(why, DEAD);
                let there = Chain::open(origin.path(), Access::List, None).unwrap();
                assert_eq!(there.last(), Some(2));
                assert_points(origin.path(), &points);
            }
            Ok(number) => {
                assert!(number == 3 && steps > 3, "{steps} steps");
                assert_points(origin.path(), &changed);
                // Nothing of those that have died.
                let data = Chain::open(origin.path(), Access::List, None).unwrap();
                let data = data.manifest(3).unwrap().header.files.len();
                assert_eq!(names(origin.path()).len(), files + 1 + data);
                break;
            }
        }
    }
}

#[test]
fn damage_anywhere_is_found_and_named_and_spoils_only_what_needs_it() {
    let mut random = Random::from_seed(3);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let mut first = vec![0; DISK];
    first[..2 * BLOCK].copy_from_slice(&random.bytes(2 * BLOCK));
    let mut second = first.clone();
    second[BLOCK..BLOCK + 10].fill(9);
    for (disk, last) in [(&first, None), (&second, Some(&first[..])), (&second, None)] {
        back_up(Chain::open(path, Access::Add, None).unwrap(), disk, last).unwrap();
    }
    // The third point has no blocks of its own.
    let data: Vec<_> =
        names(path).into_iter().filter(|it| it.to_string_lossy().contains("data-")).collect();
    assert_eq!(data.len(), 2);
    let health = || {
        let chain = Chain::open(path, Access::Read, None).unwrap();
        verify(&chain, None, &no_cancel(), &mut |_, _| {}).unwrap()
    };
    assert!(health().iter().all(|it| it.is_sound()));
    let older = data.iter().max_by_key(|it| it.metadata().unwrap().len()).unwrap();
    let whole = std::fs::read(older).unwrap();
    let entries = Chain::open(path, Access::List, None).unwrap().manifest(1).unwrap().entries;
    let places = entries.iter().flat_map(|entry| {
        let (begin, end) = (entry.position as usize, entry.position as usize + entry.len as usize);
        [
            (entry.block as usize, begin + 4),
            (entry.block as usize, (begin + end) / 2),
            (entry.block as usize, end - 1),
        ]
    });
    for (block, at) in places {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(older, damaged).unwrap();
        let sound: Vec<bool> = health().iter().map(|it| it.is_sound()).collect();
        // The second point has a block of its own in place of the second one.
        assert_eq!(sound, if block == 0 { [false; 3] } else { [false, true, true] });
        let found = health()[0].damage.clone();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].range, ByteRange::new((block * BLOCK) as u64, BLOCK as u64));
        let refused = restored(path, 1).unwrap_err().to_string();
        let range = format!("bytes {} to {}", block * BLOCK, (block + 1) * BLOCK - 1);
        assert!(refused.contains(&range), "{refused}");
    }
    std::fs::write(older, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(health().iter().filter(|it| it.is_sound()).count(), 2);
    assert!(restored(path, 3).unwrap_err().to_string().contains("too short"));
    std::fs::write(older, &whole).unwrap();
    let manifest = path.join("point-000002");
    let mut bytes = std::fs::read(&manifest).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&manifest, &bytes).unwrap();
    let sound: Vec<bool> = health().iter().map(|it| it.is_sound()).collect();
    assert_eq!(sound, [true, false, false]);
    assert!(restored(path, 1).is_ok() && restored(path, 2).is_err() && restored(path, 3).is_err());
    let chain = Chain::open(path, Access::Remove, None).unwrap();
    let refused = prune(chain, Keep::default(), &no_cancel()).unwrap_err().to_string();
    assert!(refused.contains("point 2 is damaged"), "{refused}");
    // With a bitmap there is nothing to stand on; without one all of the disk is there again.
    let chain = || Chain::open(path, Access::Add, None).unwrap();
    assert!(back_up(chain(), &second, Some(&second)).unwrap_err().contains("--bitmap"));
    assert_eq!(back_up(chain(), &second, None), Ok(4));
    assert!(restored(path, 4).unwrap() == second);
}

#[test]
fn a_point_on_one_of_another_disk_is_unusable_and_is_not_pruned() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for byte in [1, 2] {
        back_up(Chain::open(path, Access::Add, None).unwrap(), &vec![byte; 2 * BLOCK], None)
            .unwrap();
    }
    let chain = Chain::open(path, Access::Add, None).unwrap();
    let mut manifest = chain.manifest(2).unwrap();
    manifest.header.size -= 1;
    chain.place.put(FileName::Point(2), &manifest.encode().unwrap(), Put::Replaces).unwrap();
    drop(chain);
    let chain = Chain::open(path, Access::List, None).unwrap();
    let health = verify(&chain, None, &no_cancel(), &mut |_, _| {}).unwrap();
    assert!(health[0].is_sound() && health[1].unusable.as_ref().unwrap().contains("another disk"));
    assert!(restored(path, 2).unwrap_err().to_string().contains("another disk"));
    let keep = Keep { last: 1, ..Keep::default() };
    assert!(prune(Chain::open(path, Access::Remove, None).unwrap(), keep, &no_cancel()).is_err());
    assert_eq!(restored(path, 1).unwrap(), vec![1; 2 * BLOCK]);
}

#[test]
fn a_disk_of_another_size_begins_again_or_is_refused_with_a_bitmap() {
    let directory = tempfile::tempdir().unwrap();
    let chain = || Chain::open(directory.path(), Access::Add, None).unwrap();
    let (small, large) = (vec![1; BLOCK], vec![1; BLOCK + 1]);
    back_up(chain(), &small, None).unwrap();
    let refused = back_up(chain(), &large, Some(&small)).unwrap_err();
    assert!(refused.contains("65537") && refused.contains("--bitmap"), "{refused}");
    assert_eq!(back_up(chain(), &large, None), Ok(2));
    assert_eq!(back_up(chain(), &[], None), Ok(3));
    let points = chain().points();
    assert!(points.iter().all(|(_, info)| info.as_ref().unwrap().parent.is_none()));
    assert!(restored(directory.path(), 2).unwrap() == large);
    assert!(restored(directory.path(), 3).unwrap().is_empty());
}

#[test]
fn points_are_kept_by_number_by_day_and_by_week() {
    for (last, daily, weekly, expected) in [
        (4, 1, 0, &[2, 3, 4, 5][..]),
        (1, 9, 0, &[1, 3, 4, 5]),
        (1, 3, 0, &[3, 4, 5]),
        (0, 0, 3, &[4, 5]),
        (2, 0, 1, &[4, 5]),
        (0, 0, 0, &[5]),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        // Hours from a Monday on: that day, two points of the Tuesday, the Sunday, the next Monday.
        for (number, hours) in [(1, 0), (2, 24), (3, 47), (4, 24 * 7 - 1), (5, 24 * 7)] {
            back_up(Chain::open(path, Access::Add, None).unwrap(), &[number; 10], None).unwrap();
            let chain = Chain::open(path, Access::Add, None).unwrap();
            let mut manifest = chain.manifest(number.into()).unwrap();
            manifest.header.seconds = (20_003 * 24 + hours) * 3600;
            let bytes = manifest.encode().unwrap();
            chain.place.put(FileName::Point(number.into()), &bytes, Put::Replaces).unwrap();
        }
        let chain = Chain::open(path, Access::Remove, None).unwrap();
        let times = chain.points();
        assert_eq!(times[0].1.as_ref().unwrap().time(), "2024-10-07T00:00:00Z");
        let pruned = prune(chain, Keep { last, daily, weekly }, &no_cancel()).unwrap();
        assert_eq!(pruned.kept, expected, "{last} {daily} {weekly}");
        for number in expected {
            assert_eq!(restored(path, *number).unwrap(), [*number as u8; 10]);
        }
    }
}

#[test]
fn a_removal_that_is_cancelled_says_so_and_removes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut points = Points::new();
    add_points(directory.path(), 3, &mut points, &mut Random::from_seed(6));
    let chain = Chain::open(directory.path(), Access::Remove, None).unwrap();
    let result = prune(chain, Keep { last: 1, ..Keep::default() }, &AtomicBool::new(true));
    assert_eq!(result, Err(Error::Interrupted));
    assert_points(directory.path(), &points);
}

#[test]
fn a_whole_point_stores_all_blocks_again_and_needs_no_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let disk = Random::from_seed(7).bytes(3 * BLOCK);
    let chain = || Chain::open(path, Access::Add, None).unwrap();
    for contents in [Contents::Differences, Contents::Differences, Contents::Whole] {
        back_up_as(chain(), contents, &disk, None).unwrap();
    }
    let points: Vec<_> = chain().points().into_iter().map(|(_, info)| info.unwrap()).collect();
    assert_eq!(points.iter().map(|point| point.parent).collect::<Vec<_>>(), [None, Some(1), None]);
    let data: Vec<_> = points.iter().map(|point| point.data_bytes).collect();
    assert_eq!(data, [3 * MIN_BLOCK_BYTES, 0, 3 * MIN_BLOCK_BYTES]);
    let damaged = names(path).into_iter().find(|it| it.ends_with("point-000001")).unwrap();
    std::fs::write(damaged, "").unwrap();
    assert!(restored(path, 2).is_err());
    assert!(restored(path, 3).unwrap() == disk);
}

#[test]
fn a_chain_has_one_writer_and_is_not_pruned_while_it_is_read() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("chain");
    let refusal = |access| Chain::open(&path, access, None).err().map(|error| error.to_string());
    for access in [Access::List, Access::Read, Access::Remove] {
        assert!(refusal(access).unwrap().contains("No such file"));
    }
    back_up(Chain::open(&path, Access::Add, None).unwrap(), &[1; 10], None).unwrap();
    let writer = Chain::open(&path, Access::Add, None).unwrap();
    assert!(refusal(Access::Add).unwrap().contains("another backup or prune"));
    assert!(refusal(Access::Remove).unwrap().contains("another backup or prune"));
    assert_eq!(refusal(Access::Read), None);
    drop(writer);
    let reader = Chain::open(&path, Access::Read, None).unwrap();
    assert!(refusal(Access::Remove).unwrap().contains("being read"));
    assert_eq!(refusal(Access::Add), None);
    drop(reader);
    let pruner = Chain::open(&path, Access::Remove, None).unwrap();
    assert!(refusal(Access::Read).unwrap().contains("being removed"));
    drop(pruner);
    assert_eq!(refusal(Access::Read), None);
    let other = scratch.path().join("other");
    std::fs::create_dir(&other).unwrap();
    assert!(
        Chain::open(&other, Access::Read, None).err().unwrap().to_string().contains("no backups")
    );
    std::fs::write(other.join("letter"), "precious").unwrap();
    let refused = Chain::open(&other, Access::Add, None).err().unwrap().to_string();
    assert!(refused.contains("other files"), "{refused}");
    assert_eq!(names(&other).len(), 1);
}

#[test]
fn a_block_is_stored_once_by_threads_beside_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let chain = Chain::open(directory.path(), Access::Add, None).unwrap();
    let point = NewPoint::new(chain, Contents::Whole).unwrap();
    let disk: Vec<u8> = Random::from_seed(5).bytes(64 * BLOCK);
    point.begin(disk.len() as u64).unwrap();
    let blocks = Mutex::new(disk.chunks(BLOCK).enumerate());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Some((index, block)) = { blocks.lock().unwrap().next() } {
                    point.write((index * BLOCK) as u64, block).unwrap();
                }
            });
        }
    });
    point.finish().unwrap();
    drop(point);
    assert!(restored(directory.path(), 1).unwrap() == disk);
}
