//! Random requests to a served image through the engine, compared with an array of bytes.
//!
//! Invariant: requests in flight never overlap, so each has one correct result.

use std::fs;
use std::ops::Range as Bytes;
use std::sync::Arc;

use nowait::{
    AioThreadQueue, ByteRange, Config, Direct, Engine, Flags, IoQueue, Op, Rejected, Request,
    Uring, WorkerPool,
};
use nowait_image::qcow2_disk::{self, OpenImage, Qcow2Map, ServeOptions};
use nowait_image::{Chain, ChainOptions, Format};

use crate::images::{Images, have_qemu, output, qemu_img};
use crate::random::Random;
use crate::tool::{no_child_starts, tool};

const FIRST_SEED: u64 = 40_000;
/// Each takes QEMU's tools about half a second.
const CHAINS: u64 = 28;
const STEPS: u32 = 700;
const DEPTH: usize = 24;

type Disk = nowait::BlockDevice<Qcow2Map>;

fn config(seed: u64) -> (&'static str, Config) {
    let on = Config { slots: 64, ..Config::default() };
    match seed % 7 {
        0 => ("all on", on),
        1 => ("simple off", Config { simple: false, ..on }),
        2 => ("inline completion off", Config { inline_completion: false, ..on }),
        3 => ("vectored off", Config { vectored: false, ..on }),
        4 => ("pool off", Config { pool: false, ..on }),
        5 => ("nowait first off", Config { nowait_first: false, ..on }),
        _ => ("hint off", Config { hint: false, ..on }),
    }
}

fn open(images: &Images, direct: Direct, hint: bool) -> (Arc<Disk>, OpenImage) {
    let options = ChainOptions {
        writable: true,
        format: Some(Format::Qcow2),
        data_files: images.data_files(),
        ..ChainOptions::default()
    };
    let _alone = no_child_starts();
    let chain = Chain::open(&images.path(), &options).unwrap();
    let options = ServeOptions { writable: true, direct, hint };
    let (disk, open_image) = qcow2_disk::open(chain, options).unwrap();
    (Arc::new(disk), open_image)
}

/// The disk's bytes according to QEMU.
fn contents(images: &Images) -> Vec<u8> {
    let convert = ["convert", "-f", "qcow2", "-O", "raw", images.name(), "all.raw"];
    qemu_img(images.directory(), &convert);
    fs::read(images.directory().join("all.raw")).unwrap()
}

/// The files below the top one, and their contents.
fn backing_files(images: &Images) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(images.directory()).unwrap().map(|entry| entry.unwrap().path());
    let top = images.path();
    let data = top.with_extension("qcow2.data");
    let below = entries.filter(|path| {
        *path != top && *path != data && path.file_name().is_some_and(|name| name != "all.raw")
    });
    below.map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

/// A request in flight and its expected bytes.
struct Flight {
    range: ByteRange,
    expected: Option<Vec<u8>>,
}

struct Player {
    random: Random,
    model: Vec<u8>,
    label: String,
}

impl Player {
    fn range(&mut self) -> ByteRange {
        let size = self.model.len() as u64;
        let random = &mut self.random;
        let len = match random.below(8) {
            0 => 65536 * (1 + random.below(8)),
            1..4 => 4096 * (1 + random.below(16)),
            4..6 => 512 * (1 + random.below(64)),
            _ => 1 + random.below(70_000),
        };
        let pos = match random.below(6) {
            0 => random.below(size),
            1 => size.saturating_sub(random.below(9000) + 1),
            2 => random.below(size) / 65536 * 65536,
            // A small area, where clusters are written more than once.
            3 => random.below(size.min(200_000)) / 512 * 512,
            _ => random.below(size) / 4096 * 4096,
        };
        ByteRange::new(pos, len.min(size - pos))
    }

    fn submit<Q: IoQueue>(
        &mut self,
        engine: &mut Engine<Q, Qcow2Map>,
        range: ByteRange,
        tag: u64,
    ) -> Result<Flight, Rejected> {
        let bytes_of_range: Bytes<usize> = range.pos as usize..range.end() as usize;
        let flags = if self.random.chance(10) { Flags::DSYNC } else { Flags::NONE };
        let mut expected = None;
        let io = |op, flags| Request { op, flags, range };
        match self.random.below(20) {
            0..8 => {
                let mut buf = engine.buffer(range).unwrap();
                let start = engine.buffer_offset(range.pos);
                let bytes = self.random.bytes(bytes_of_range.len());
                buf[start..start + bytes.len()].copy_from_slice(&bytes);
                self.model[bytes_of_range].copy_from_slice(&bytes);
                engine.submit(io(Op::Write, flags), buf, tag)?;
            }
            8..16 => {
                let mut buf = engine.buffer(range).unwrap();
                buf.fill(0xee);
                expected = Some(self.model[bytes_of_range].to_vec());
                engine.submit(io(Op::Read, Flags::NONE), buf, tag)?;
            }
            16..18 => {
                self.model[bytes_of_range].fill(0);
                let keep = self.random.chance(50);
                let flags = if keep { flags.with(Flags::NO_UNMAP) } else { flags };
                engine.submit_no_data(io(Op::Zero, flags), tag)?;
            }
            18 => engine.submit_no_data(io(Op::Flush, Flags::NONE), tag)?,
            _ => engine.submit_no_data(io(Op::Status, Flags::NONE), tag)?,
        }
        Ok(Flight { range, expected })
    }

    fn play<Q: IoQueue>(&mut self, engine: &mut Engine<Q, Qcow2Map>) {
        let mut flights: Vec<Option<Flight>> = (0..DEPTH).map(|_| None).collect();
        for _ in 0..STEPS {
            let full = flights.iter().all(Option::is_some);
            if full || engine.in_flight() > 0 && self.random.chance(25) {
                engine.wait(None, &mut |_, _| {}).unwrap();
                self.drain(engine, &mut flights);
            }
            let Some(tag) = flights.iter().position(Option::is_none) else { continue };
            let range = self.range();
            let overlaps =
                |flight: &Flight| flight.range.pos < range.end() && range.pos < flight.range.end();
            if !flights.iter().flatten().any(overlaps) {
                let flight = self.submit(engine, range, tag as u64);
                flights[tag] = Some(flight.map_err(|rejected| rejected.error).unwrap());
            }
        }
        while engine.in_flight() > 0 {
            engine.wait(None, &mut |_, _| {}).unwrap();
            self.drain(engine, &mut flights);
        }
        self.discard_some(engine);
    }

    fn drain<Q: IoQueue>(&self, engine: &mut Engine<Q, Qcow2Map>, flights: &mut [Option<Flight>]) {
        let label = &self.label;
        while let Some(completion) = engine.next() {
            let flight = flights[completion.tag as usize].take().expect("completed once");
            let (op, range) = (completion.io.op, flight.range);
            let done = completion.result().unwrap_or_else(|e| panic!("{label}: {e}"));
            if op != Op::Flush {
                assert_eq!(done, range.len, "{label}: {:?}", completion.io);
            }
            if op == Op::Status {
                self.check_status(range, &engine.take_extents(completion.tag));
            }
            let Some(expected) = flight.expected else { continue };
            let start = engine.buffer_offset(range.pos);
            let buf = completion.buf.expect("a read gives its buffer back");
            let got = &buf[start..start + expected.len()];
            let differs = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{label}: first wrong byte of {range:?}");
        }
    }

    /// A reported hole has to be zeros in the model: overlapping writes are not in flight.
    fn check_status(&self, range: ByteRange, spans: &[nowait::ExtentStatus]) {
        let mut pos = range.pos as usize;
        for span in spans {
            let end = pos + span.len as usize;
            let zeros = self.model[pos..end].iter().all(|&byte| byte == 0);
            assert!(!span.hole || zeros, "{}: hole at {pos}, {} bytes", self.label, span.len);
            pos = end;
        }
        assert_eq!(pos as u64, range.end(), "{}: all of the range is told", self.label);
    }

    /// C52: discarded bytes are the old ones or zeros, and do not change afterwards.
    fn discard_some<Q: IoQueue>(&mut self, engine: &mut Engine<Q, Qcow2Map>) {
        for _ in 0..20 {
            let range = self.range();
            let io = |op| Request { op, flags: Flags::NONE, range };
            engine.submit_no_data(io(Op::Discard), 0).map_err(|r| r.error).unwrap();
            run_to_end(engine).1.unwrap();
            let buf = engine.buffer(range).unwrap();
            engine.submit(io(Op::Read), buf, 0).map_err(|r| r.error).unwrap();
            let (buf, result) = run_to_end(engine);
            assert_eq!(result.unwrap(), range.len);
            let start = engine.buffer_offset(range.pos);
            let buf = buf.expect("a read gives its buffer back");
            let model = &mut self.model[range.pos as usize..range.end() as usize];
            let got = &buf[start..start + model.len()];
            let stray = got.iter().zip(&*model).position(|(now, old)| now != old && *now != 0);
            assert_eq!(stray, None, "{}: neither old nor zero, {range:?}", self.label);
            model.copy_from_slice(got);
        }
    }
}

type Ended = (Option<nowait::PooledBuffer>, Result<u64, nowait::Error>);

fn run_to_end<Q: IoQueue>(engine: &mut Engine<Q, Qcow2Map>) -> Ended {
    loop {
        if let Some(completion) = engine.next() {
            let result = completion.result();
            return (completion.buf, result);
        }
        engine.wait(None, &mut |_, _| {}).unwrap();
    }
}

fn play(player: &mut Player, disk: &Arc<Disk>, config: Config, ring: bool) {
    let workers = WorkerPool::new(disk, 4);
    let queue = if ring { Uring::for_files(&disk.files().unwrap()).ok() } else { None };
    match queue {
        Some(queue) => {
            player.play(&mut Engine::new(disk.clone(), workers, queue, config).unwrap());
        }
        None => {
            let cached = !disk.is_direct();
            let queue =
                AioThreadQueue::for_files(&disk.files().unwrap(), config.slots, cached).unwrap();
            player.play(&mut Engine::new(disk.clone(), workers, queue, config).unwrap());
        }
    }
}

fn is_consistent(images: &Images) -> bool {
    let mut command = tool("qemu-img");
    command.current_dir(images.directory()).args(["check", "-q", "-f", "qcow2", images.name()]);
    output(&mut command).0 == Some(0)
}

/// Checks with QEMU's tools that the image is consistent and has the model's bytes, and that no
/// file below it was changed.
fn verify(images: &Images, model: &[u8], below: &[(std::path::PathBuf, Vec<u8>)], label: &str) {
    qemu_img(images.directory(), &["check", "-q", "-f", "qcow2", images.name()]);
    assert!(contents(images) == model, "{label}");
    for (path, bytes) in below {
        assert!(fs::read(path).unwrap() == *bytes, "{label}: {} was changed", path.display());
    }
}

#[test]
fn chains_of_all_kinds_agree_with_the_model_with_each_switch_off() {
    if !have_qemu() {
        return;
    }
    let mut played = 0;
    for seed in FIRST_SEED..FIRST_SEED + CHAINS {
        let images = Images::seeded(seed);
        let (name, config) = config(seed);
        let direct = if seed % 3 == 0 { Direct::Off } else { Direct::Auto };
        let label = format!("seed {seed}, {name}, {direct:?}");
        println!("{label}");
        if !is_consistent(&images) {
            // QEMU 7.2 lets compressed clusters overlap others, and its check then reports that.
            continue;
        }
        let model = contents(&images);
        let below = backing_files(&images);
        let (disk, open_image) = open(&images, direct, config.hint);
        let mut player = Player { random: Random::from_seed(seed), model, label };
        play(&mut player, &disk, config, seed % 2 == 0);
        drop(disk);
        open_image.close().unwrap();
        verify(&images, &player.model, &below, &player.label);
        played += 1;
    }
    assert!(played > CHAINS / 2, "{played} were sound");
}

/// Each thread writes one sector of every cluster.
const SECTOR: usize = 512;
const WRITERS: usize = 8;

#[test]
fn a_cluster_that_many_threads_write_to_at_once_is_allocated_once() {
    if !have_qemu() {
        return;
    }
    let images = Images::none("top.qcow2");
    let base = Random::from_seed(5).bytes(4 << 20);
    fs::write(images.directory().join("base"), &base).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", images.name()];
    qemu_img(images.directory(), &create);
    let (disk, open_image) = open(&images, Direct::Auto, true);
    let file = nowait::BlockingFile::new(disk.clone());
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let file = &file;
            scope.spawn(move || {
                // All threads begin at the same cluster.
                for cluster in (0..4 << 20).step_by(65536) {
                    let pos = cluster + writer * SECTOR;
                    file.write_at(&[writer as u8 + 1; SECTOR], pos as u64, Flags::NONE).unwrap();
                }
            });
        }
    });
    let mut model = base;
    for cluster in model.chunks_mut(65536) {
        for (writer, sector) in (1..).zip(cluster.chunks_mut(SECTOR).take(WRITERS)) {
            sector.fill(writer);
        }
    }
    drop((file, disk));
    open_image.close().unwrap();
    verify(&images, &model, &[], "many writers");
    // Header, refcount table and block, L1 table, L2 table, and 64 clusters of data.
    let bytes = fs::metadata(images.path()).unwrap().len();
    assert_eq!(bytes, (5 + 64) * 65536, "as many clusters as are needed");
}

#[test]
fn an_image_that_outgrows_its_refcount_table_gets_a_longer_one() {
    if !have_qemu() {
        return;
    }
    // With clusters of 512 bytes the first table counts up to 8 MiB of the file.
    let images = Images::qcow2("20M", "cluster_size=512", &[]);
    let (disk, open_image) = open(&images, Direct::Off, true);
    let file = nowait::BlockingFile::new(disk.clone());
    let model = Random::from_seed(6).bytes(20 << 20);
    for (piece, pos) in model.chunks(1 << 20).zip((0..).step_by(1 << 20)) {
        file.write_at(piece, pos, Flags::NONE).unwrap();
        if pos == 10 << 20 {
            file.flush().unwrap();
        }
    }
    drop((file, disk));
    open_image.close().unwrap();
    verify(&images, &model, &[], "a long file");
}

#[test]
fn an_image_that_cannot_be_served_is_refused_in_one_line_and_left_alone() {
    if !have_qemu() {
        return;
    }
    let images = Images::qcow2("8M", "", &["write 0 64k"]);
    qemu_img(images.directory(), &["bitmap", "--add", images.name(), "changes"]);
    let before = fs::read(images.path()).unwrap();
    let options =
        ChainOptions { writable: true, format: Some(Format::Qcow2), ..ChainOptions::default() };
    let error = Chain::open(&images.path(), &options).unwrap_err().to_string();
    assert!(error.contains("dirty bitmaps") && !error.contains('\n'), "{error}");
    // Reads are possible, because no bitmap has to be updated for them.
    let chain = Chain::open(&images.path(), &ChainOptions::default()).unwrap();
    let options = ServeOptions { writable: false, direct: Direct::Auto, hint: true };
    let (disk, open_image) = qcow2_disk::open(chain, options).unwrap();
    let file = nowait::BlockingFile::new(Arc::new(disk));
    let mut byte = [0];
    assert_eq!(file.read_at(&mut byte, 0).unwrap(), 1);
    let refused = file.write_at(&byte, 0, Flags::NONE).unwrap_err();
    assert_eq!(refused.errno(), libc::EROFS);
    drop(file);
    open_image.close().unwrap();
    assert!(fs::read(images.path()).unwrap() == before);
}
