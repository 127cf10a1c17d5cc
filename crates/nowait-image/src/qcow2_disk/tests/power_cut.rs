//! A power cut at every step of a recorded run, which loses part of the data that was not synced.
//!
//! Invariant: the contents of a sector tell the write that they are from. A sector belongs to one
//! thread, which waits for each of its requests, so the oldest and the newest write that it may
//! hold are known.

use std::collections::HashMap;
use std::io::Read;
use std::ops::Range as Bounds;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, thread};

use nowait::{BlockMap, ByteRange, Direct, Flags, ImageFormat, WriteCursor};

use crate::formats::qcow2::bitmaps::Bitmap;
use crate::formats::qcow2::stored_bits::StoredBits;
use crate::offline::bitmap_changes::{self, NewBitmap};
use crate::offline::check;
use crate::qcow2_disk::tests::journal;
use crate::qcow2_disk::tests::journal::{Event, FileContents, Journal};
use crate::qcow2_disk::{ServeOptions, open_map};
use crate::{Chain, ChainOptions, ChainReader, Format};
use nowait_testkit::Random;
use nowait_testkit::{Finished, require_tool, tool};

const SECTOR: u64 = 512;
/// A thread owns whole blocks, so that no two threads write to one.
const BLOCK: u64 = 4096;
const BLOCK_SECTORS: u64 = BLOCK / SECTOR;
const THREADS: u64 = 3;
/// Power cuts of each run that qemu-img checks, too.
const SAMPLES: usize = 6;
const LEAKS: i32 = 3;

/// A change of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Bytes,
    Zeros,
    /// The sectors may hold the old bytes or zeros, for good.
    Discard,
}

/// A thread's note about its requests.
#[derive(Clone, Debug)]
pub(crate) enum Mark {
    /// A change of these sectors is about to be sent; every change has a number.
    Sent {
        sectors: Bounds<u64>,
        number: u32,
        change: Change,
    },
    /// The change with this number was answered.
    Answered(u32),
    FlushSent,
    /// The flush that was sent as the event with this number was answered.
    Flushed(usize),
}

/// The image at the start. Its disk has the same contents in all cases.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// Empty, over a raw file.
    Overlay,
    /// All in compressed clusters.
    Compressed,
}

/// The distribution of the disk's blocks to the threads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shares {
    /// Each thread owns a part of the disk.
    Parts,
    /// The blocks are dealt out in rotation, so that all threads write to the same clusters.
    Interleaved,
}

struct Scene {
    /// Options of qemu-img.
    options: &'static str,
    start: Start,
    shares: Shares,
    disk: u64,
    /// Steps of each thread.
    steps: u32,
    /// Bytes of a granule of the dirty bitmap, if the image has one.
    granularity: Option<u64>,
}

/// The bytes that the write `number` puts into a sector; 0 is the content at the start.
fn stamp(sector: u64, number: u32) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(first_word(sector, number)..) {
        *place = word.to_le_bytes();
    }
    bytes
}

/// The number in the first eight bytes of [`stamp`], by which most of the others are told from it.
fn first_word(sector: u64, number: u32) -> u64 {
    (u64::from(number) << 32 | sector) * 64 + 1
}

/// Whether a sector holds what the write `number` has put into it.
fn is_stamp(found: &[u8], sector: u64, number: u32) -> bool {
    found.starts_with(&first_word(sector, number).to_le_bytes()) && found == stamp(sector, number)
}

/// One thread's requests.
struct Player<'a> {
    image: &'a dyn ImageFormat,
    journal: &'a Journal,
    numbers: &'a AtomicU32,
    random: Random,
    scene: &'a Scene,
    thread: u64,
}

impl Player<'_> {
    fn mark(&self, mark: Mark) -> usize {
        self.journal.push(Event::Mark(mark))
    }

    fn flush(&self) {
        let sent = self.mark(Mark::FlushSent);
        self.image.flush().unwrap();
        self.mark(Mark::Flushed(sent));
    }

    /// Some of the sectors that belong to this thread.
    fn sectors(&mut self) -> Bounds<u64> {
        let random = &mut self.random;
        let blocks = self.scene.disk / BLOCK;
        let border = |thread: u64| blocks * thread / THREADS * BLOCK_SECTORS;
        let own = match self.scene.shares {
            Shares::Parts => border(self.thread)..border(self.thread + 1),
            Shares::Interleaved => {
                let block = random.below(blocks / THREADS) * THREADS + self.thread;
                block * BLOCK_SECTORS..(block + 1) * BLOCK_SECTORS
            }
        };
        let room = own.end - own.start;
        let max = [4, 24, 130][random.below(3) as usize].min(room);
        let len = 1 + random.below(max);
        let start = own.start + random.below(room - len + 1);
        let at_a_block = start / BLOCK_SECTORS * BLOCK_SECTORS;
        let start = if random.chance(40) { at_a_block.max(own.start) } else { start };
        start..start + len
    }

    fn step(&mut self) {
        if self.random.chance(6) {
            return self.flush();
        }
        let sectors = self.sectors();
        let change = match self.random.below(10) {
            0 | 1 => Change::Zeros,
            2 => Change::Discard,
            _ => Change::Bytes,
        };
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        self.mark(Mark::Sent { sectors: sectors.clone(), number, change });
        self.change(sectors, number, change);
        self.mark(Mark::Answered(number));
        if self.random.chance(8) {
            // The engine flushes for FUA, too.
            self.flush();
        }
    }

    fn change(&mut self, sectors: Bounds<u64>, number: u32, change: Change) {
        let pos = sectors.start * SECTOR;
        let range = ByteRange::new(pos, sectors.end * SECTOR - pos);
        let keep = if self.random.chance(30) { Flags::NO_UNMAP } else { Flags::NONE };
        let bytes = match change {
            Change::Discard => return self.image.discard(range).unwrap(),
            Change::Zeros => match self.image.zero(range, keep) {
                Err(error) if error.errno() == libc::EOPNOTSUPP => vec![0; range.len as usize],
                done => return done.unwrap(),
            },
            Change::Bytes => sectors.flat_map(|sector| stamp(sector, number)).collect(),
        };
        self.image.write(pos, WriteCursor::from(&bytes[..])).unwrap();
    }
}

/// The changes that a sector's contents may be from.
#[derive(Clone, Default)]
struct Sector {
    /// Changes of the sector, in order.
    sent: Vec<(u32, Change)>,
    /// How many of these are certainly durable.
    durable: usize,
}

/// The state of the sectors after the last of `events`.
fn expected(disk: u64, events: &[Event]) -> Vec<Sector> {
    let mut sectors = vec![Sector::default(); (disk / SECTOR) as usize];
    // Sectors of each change, and how many changes each sector had with it.
    let mut sent: HashMap<u32, Vec<(u64, usize)>> = HashMap::new();
    let mut flushed = 0;
    for event in events {
        match event {
            Event::Mark(Mark::Sent { sectors: changed, number, change }) => {
                let count = |at: u64| {
                    let sent = &mut sectors[at as usize].sent;
                    sent.push((*number, *change));
                    (at, sent.len())
                };
                let counted = changed.clone().map(count).collect();
                let lasts = *change != Change::Discard;
                sent.insert(*number, if lasts { counted } else { Vec::new() });
            }
            &Event::Mark(Mark::Flushed(flush)) if flush > flushed => {
                for event in &events[flushed..flush] {
                    let Event::Mark(Mark::Answered(number)) = event else { continue };
                    for &(at, count) in &sent[number] {
                        let durable = &mut sectors[at as usize].durable;
                        *durable = count.max(*durable);
                    }
                }
                flushed = flush;
            }
            _ => {}
        }
    }
    sectors
}

fn chain(path: &Path, writable: bool) -> Chain {
    let data = path.with_file_name("data");
    let data_files = if data.exists() { vec![data] } else { Vec::new() };
    let format = Some(Format::Qcow2);
    let options = ChainOptions { format, writable, data_files, ..ChainOptions::default() };
    Chain::open(path, &options).unwrap()
}

/// Checks that the bitmap of the image of `chain` is there and has each sector that is not as at the start.
fn check_bitmap(chain: &Chain, bytes: &[u8], granularity: u64, label: &str) {
    let header = chain.top().header().unwrap();
    let all = Bitmap::with_entries(&chain.top().file, header).unwrap();
    let [(entry, bitmap)] = &all[..] else { panic!("{label}: {all:?}") };
    assert!(bitmap.is_usable() && bitmap.granularity == granularity, "{label}: {bitmap:?}");
    let mut bits = Vec::new();
    StoredBits::new(&chain.top().file, header, entry).read_to_end(&mut bits).unwrap();
    for (found, at) in bytes.chunks_exact(SECTOR as usize).zip(0..) {
        let granule = (at * SECTOR / granularity) as usize;
        let is_dirty = bits[granule / 8] & 1 << (granule % 8) != 0;
        assert!(is_dirty || is_stamp(found, at, 0), "{label}: sector {at} is clean");
    }
}

/// Checks the image at `path` as a power cut after the last of `events` left it.
fn check_image(path: &Path, scene: &Scene, events: &[Event], label: &str) {
    let disk = scene.disk;
    let chain = chain(path, false);
    let report = check::check(&chain, &mut |_, _| {}).unwrap();
    assert_eq!(report.corruptions, 0, "{label}: {report:?}");
    let mut bytes = vec![0; disk as usize];
    ChainReader::new(chain.layers()).unwrap().read_at(0, &mut bytes).unwrap();
    if let Some(granularity) = scene.granularity {
        check_bitmap(&chain, &bytes, granularity, label);
    }
    let found = bytes.chunks_exact(SECTOR as usize);
    for ((found, sector), at) in found.zip(expected(disk, events)).zip(0..) {
        let first = (sector.durable == 0).then_some((0, Change::Bytes));
        let later = &sector.sent[sector.durable.saturating_sub(1)..];
        let is_from = |&(number, change): &(u32, Change)| match change {
            Change::Bytes => is_stamp(found, at, number),
            Change::Zeros | Change::Discard => found == [0; SECTOR as usize],
        };
        let from = first.iter().chain(later).find(|change| is_from(change));
        assert!(from.is_some(), "{label}: sector {at} is from none of {first:?} {later:?}");
    }
}

/// Makes the image `top`; returns the paths of the files that will be written to.
fn make(scene: &Scene, directory: &Path) -> Vec<PathBuf> {
    let base: Vec<u8> = (0..scene.disk / SECTOR).flat_map(|sector| stamp(sector, 0)).collect();
    fs::write(directory.join("base"), base).unwrap();
    let mut qemu = tool("qemu-img");
    qemu.current_dir(directory);
    match scene.start {
        Start::Overlay => qemu.args(["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw"]),
        Start::Compressed => qemu.args(["convert", "-c", "-f", "raw", "-O", "qcow2"]),
    };
    qemu.args(["-o", scene.options]);
    match scene.start {
        Start::Overlay => qemu.arg("top").succeeds(),
        Start::Compressed => qemu.args(["base", "top"]).succeeds(),
    };
    if let Some(granularity) = scene.granularity {
        let new = NewBitmap { name: "changes".into(), granularity, enabled: true };
        bitmap_changes::add(&chain(&directory.join("top"), true), &new, None).unwrap();
    }
    let files = ["top", "data"].map(|name| directory.join(name));
    files.into_iter().filter(|path| path.exists()).collect()
}

fn record(scene: &Scene, path: &Path, random: &mut Random) -> Vec<Event> {
    let chain = chain(path, true);
    let options = ServeOptions { writable: true, direct: Direct::Auto, cache_holes: true };
    let top = chain.top();
    let data = top.header().unwrap().has_data_file().then(|| top.data_file().fd().unwrap());
    let journal = journal::of(std::iter::once(top.file.fd().unwrap()).chain(data));
    let (map, store) = open_map(&chain, options).unwrap();
    let numbers = AtomicU32::new(1);
    let image = map.image().unwrap();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (journal, numbers) = (&journal, &numbers);
            let random = Random::from_seed(random.word());
            let mut player = Player { image, journal, numbers, random, scene, thread };
            scope.spawn(move || (0..scene.steps).for_each(|_| player.step()));
        }
    });
    let sent = journal.push(Event::Mark(Mark::FlushSent));
    image.flush().unwrap();
    journal.push(Event::Mark(Mark::Flushed(sent)));
    store.free_deferred(top.header().unwrap().cluster_bytes()).unwrap();
    if let Some(bitmaps) = &map.0.bitmaps {
        bitmaps.release().unwrap();
    }
    journal.take()
}

fn play(scene: &Scene, seed: u64) {
    let scratch = tempfile::tempdir().unwrap();
    let files = make(scene, scratch.path());
    let before: Vec<_> = files.iter().map(|path| FileContents::of(path)).collect();
    let path = scratch.path().join("top");
    let mut random = Random::from_seed(seed);
    let events = record(scene, &path, &mut random);
    let ends: Vec<_> = (0..=events.len())
        // Answers change neither the files nor the set of durable changes.
        .filter(|&end| !matches!(events.get(end), Some(Event::Mark(Mark::Answered(_)))))
        .collect();
    for (&end, cut) in ends.iter().zip(0..) {
        let events = &events[..end];
        for (file, contents) in files.iter().zip(journal::cut(&before, events, &mut random)) {
            contents.write_to(file);
        }
        let label = format!("{}, after {end} events", scene.options);
        check_image(&path, scene, events, &label);
        if cut % (ends.len() / SAMPLES) == 0 {
            let mut check = tool("qemu-img");
            let check = check.current_dir(scratch.path()).args(["check", "-q", "top"]);
            let check = check.output().unwrap();
            let status = check.status.code();
            assert!(status == Some(0) || status == Some(LEAKS), "{label}: {check:?}");
        }
    }
}

/// Plays scenes with images that are made with `options`.
fn play_all(start: Start, shares: Shares, disk: u64, steps: u32, options: &[&'static str]) {
    play_with(None, start, shares, disk, steps, options);
}

/// Plays with a dirty bitmap.
fn play_with(
    granularity: Option<u64>,
    start: Start,
    shares: Shares,
    disk: u64,
    steps: u32,
    options: &[&'static str],
) {
    nowait_testkit::needs!(require_tool("qemu-img"));
    for (options, seed) in options.iter().zip(1..) {
        play(&Scene { options, start, shares, disk, steps, granularity }, seed);
    }
}

#[test]
fn a_power_cut_at_any_step_leaves_no_corruption_and_all_that_was_flushed() {
    let options = ["cluster_size=1024", "cluster_size=512,refcount_bits=1"];
    play_all(Start::Overlay, Shares::Parts, 384 << 10, 40, &options);
    play_all(Start::Overlay, Shares::Parts, 1 << 20, 60, &["cluster_size=16384"]);
    play_all(Start::Overlay, Shares::Parts, 384 << 10, 40, &["compat=0.10,cluster_size=2048"]);
}

#[test]
fn a_power_cut_leaves_no_corruption_where_several_threads_write_to_each_cluster() {
    let options = ["cluster_size=65536", "cluster_size=16384,lazy_refcounts=on"];
    play_all(Start::Overlay, Shares::Interleaved, 768 << 10, 60, &options);
}

#[test]
fn a_power_cut_leaves_no_corruption_where_compressed_clusters_are_overwritten() {
    play_all(Start::Compressed, Shares::Parts, 384 << 10, 40, &["cluster_size=4096"]);
    play_all(Start::Compressed, Shares::Interleaved, 768 << 10, 50, &["cluster_size=65536"]);
}

#[test]
fn a_power_cut_leaves_no_corruption_with_the_data_in_a_separate_file() {
    let options = ["data_file=data,cluster_size=4096"];
    play_all(Start::Overlay, Shares::Parts, 384 << 10, 50, &options);
    let options = ["data_file=data,cluster_size=65536"];
    play_all(Start::Overlay, Shares::Interleaved, 768 << 10, 50, &options);
}

#[test]
fn a_power_cut_leaves_no_corruption_where_subclusters_are_written() {
    let options = ["extended_l2=on,cluster_size=16384"];
    play_all(Start::Overlay, Shares::Parts, 768 << 10, 50, &options);
    let options = ["extended_l2=on,cluster_size=65536", "extended_l2=on,data_file=data"];
    play_all(Start::Overlay, Shares::Interleaved, 768 << 10, 50, &options);
    let options = ["extended_l2=on,compression_type=zstd"];
    play_all(Start::Compressed, Shares::Interleaved, 768 << 10, 50, &options);
}

#[test]
fn a_power_cut_leaves_each_change_in_the_bitmap_of_the_image() {
    let (overlay, compressed) = (Start::Overlay, Start::Compressed);
    let options = ["cluster_size=1024", "cluster_size=65536", "data_file=data,cluster_size=4096"];
    play_with(Some(512), overlay, Shares::Parts, 384 << 10, 40, &options);
    let options = ["cluster_size=512"];
    play_with(Some(64 << 10), compressed, Shares::Interleaved, 384 << 10, 40, &options);
}
