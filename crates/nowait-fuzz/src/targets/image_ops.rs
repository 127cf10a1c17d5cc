//! A qcow2 image, byte for byte, that is changed: resized, committed to its backing file, or served
//! and written to. The operation and its parameters depend on a number derived from the bytes.
//!
//! Checked: an image with consistent metadata stays consistent and has the expected bytes
//! afterwards; a block status request for the whole disk ends soon; a rejected operation leaves the
//! image unchanged. For a damaged image only the absence of crashes is checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::sim::Random;
use nowait::{
    AioThreadQueue, BlockDevice, BlockingFile, ByteRange, Config, Direct, Error, Flags, Op,
    Request, SingleDisk, WorkerPool,
};
use nowait_image::check::check;
use nowait_image::commit::{Overlay, commit};
use nowait_image::qcow2_disk::{self, Qcow2Map, ServeOptions};
use nowait_image::resize::resize;
use nowait_image::{Chain, ChainOptions, ChainReader, Format, Locking};

use crate::split::seed_of;
use crate::target::{Check, Target};
use crate::targets::image;
use crate::targets::image::{BACKING, scratch};

/// The bytes of the disk that are compared, from its start.
const COMPARED_BYTES: u64 = 128 << 10;
/// The most bytes that a disk grows by.
const GROWTH_BYTES: u64 = 200 << 10;
/// The number of requests to a served image.
const REQUESTS: u32 = 10;
/// The length of the longest request.
const REQUEST_BYTES: u64 = 9000;

pub(crate) const TARGET: Target = Target {
    name: "changed",
    about: "qcow2 images that are resized, committed, served and written to",
    prepare,
    seeds,
    ..image::TARGET
};

/// The initial images of the target `image`.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/image");
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths.iter().flat_map(fs::read).collect()
}

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    Ok(Box::new(move |input| change(directory.path(), input)))
}

/// The state of an image.
#[derive(Debug)]
struct State {
    /// Whether its metadata is consistent.
    sound: bool,
    size: u64,
    /// The first bytes of the disk, if they can be read.
    bytes: Option<Vec<u8>>,
}

impl State {
    /// The state of the image at `path`; `None` if it is rejected.
    fn of(path: &Path) -> Option<Self> {
        let chain = open(path, false).ok()?;
        let sound = check(&chain, &mut |_, _| {}).is_ok_and(|report| report.corruptions == 0);
        let size = chain.top().size;
        let mut bytes = vec![0; size.min(COMPARED_BYTES) as usize];
        let read =
            ChainReader::new(chain.layers()).and_then(|reader| reader.read_at(0, &mut bytes));
        Some(Self { sound, size, bytes: read.is_ok().then_some(bytes) })
    }

    /// Whether every operation on it must succeed.
    fn is_good(&self) -> bool {
        self.sound && self.bytes.is_some()
    }
}

fn open(path: &Path, writable: bool) -> Result<Chain, String> {
    let options = ChainOptions {
        format: Some(Format::Qcow2),
        writable,
        backing_writable: writable,
        locking: Locking::Unlocked,
        ..ChainOptions::default()
    };
    Chain::open(path, &options).map_err(|error| error.to_string())
}

fn change(directory: &Path, input: &[u8]) -> Result<(), String> {
    let path = directory.join("image");
    let written = fs::write(directory.join(BACKING), image::backing_bytes());
    let written = written.and_then(|()| fs::write(&path, input));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    let Some(before) = State::of(&path) else { return Ok(()) };
    let mut random = Random::new(seed_of(input));
    let mut expected = before.bytes.clone().unwrap_or_default();
    let (what, done) = match random.below(3) {
        0 => resized(&path, before.size, &mut random, &mut expected),
        1 => ("commit".to_owned(), committed(&path, &mut random)),
        _ => ("serve".to_owned(), serve(&path, &before, &mut random, &mut expected)),
    };
    if !before.is_good() {
        return Ok(());
    }
    if let Err(Failed::Wrong(why)) = done {
        return Err(format!("{what}: {why}"));
    }
    match State::of(&path) {
        Some(State { sound: true, bytes: Some(bytes), .. }) if bytes == expected => Ok(()),
        Some(State { sound: true, bytes: Some(_), .. }) => {
            Err(format!("{what} ({done:?}) has left other bytes"))
        }
        other => Err(format!(
            "{what} ({done:?}) has left {:?}",
            other.map(|state| (state.sound, state.size))
        )),
    }
}

/// Why a change did not succeed.
#[derive(Debug)]
enum Failed {
    /// The image was rejected.
    Refused,
    /// A finding.
    Wrong(String),
}

type Done = Result<(), Failed>;

fn resized(path: &Path, old: u64, random: &mut Random, expected: &mut Vec<u8>) -> (String, Done) {
    let by = [1, 511, 512, 513, 4096, GROWTH_BYTES, old / 2, old];
    let by = random.pick(&by).unwrap_or(1);
    let size = match random.chance(1 << 15) {
        true => old.saturating_add(by.min(GROWTH_BYTES)),
        false => old.saturating_sub(by),
    };
    let done = open(path, true)
        .and_then(|chain| resize(&chain, size, true).map_err(|error| error.to_string()));
    let what = format!("resize from {old} to {size}");
    match done {
        Ok(size) => {
            expected.resize(size.min(COMPARED_BYTES) as usize, 0);
            (what, Ok(()))
        }
        Err(_) => (what, Err(Failed::Refused)),
    }
}

/// Commits the image. The disk must have the same bytes afterwards, in whichever file.
fn committed(path: &Path, random: &mut Random) -> Done {
    let overlay = [Overlay::Emptied, Overlay::Kept][random.below(2) as usize];
    let chain = open(path, true).map_err(|_| Failed::Refused)?;
    commit(&chain, overlay, true, &mut |_, _| {}).map_err(|_| Failed::Refused)?;
    Ok(())
}

fn serve(path: &Path, before: &State, random: &mut Random, expected: &mut [u8]) -> Done {
    let chain = open(path, true).map_err(|_| Failed::Refused)?;
    let options =
        ServeOptions { writable: true, direct: Direct::Off, cache_holes: random.below(2) == 0 };
    let (disk, open_image) = qcow2_disk::open(chain, options).map_err(|_| Failed::Refused)?;
    let disk = Arc::new(disk);
    let file = BlockingFile::new(disk.clone());
    let asked = (0..REQUESTS).try_for_each(|_| request(&file, before.size, random, expected));
    drop(file);
    let asked = asked.and_then(|()| if random.below(4) == 0 { status(disk) } else { Ok(()) });
    let closed = open_image.close().map_err(|error| Failed::Wrong(format!("close: {error}")));
    asked.and(closed)
}

/// One block status request for the whole disk, whatever size the image has: the reply covers a
/// part of it, after a bounded number of lookups. An unbounded number would exceed the time limit
/// of an input.
fn status(disk: Arc<BlockDevice<Qcow2Map>>) -> Done {
    let wrong = |why: String| Failed::Wrong(format!("status: {why}"));
    let failed = |error: Error| wrong(error.to_string());
    let range = ByteRange::new(0, disk.size().min(i64::MAX as u64));
    if range.len == 0 {
        return Ok(());
    }
    let config = Config { slots: 1, ..Config::default() };
    let queue = AioThreadQueue::new(config.slots).map_err(failed)?;
    let workers = WorkerPool::new(1);
    let mut engine = SingleDisk::new(disk, workers, queue, config).map_err(failed)?;
    let io = Request { op: Op::Status, flags: Flags::NONE, range };
    engine.submit_no_data(io, 0).map_err(|rejected| failed(rejected.error))?;
    while engine.in_flight() > 0 {
        engine.wait(None, &mut |_, _| {}).map_err(failed)?;
        while let Some(done) = engine.next() {
            done.result().map_err(failed)?;
        }
    }
    let spans = engine.take_extents(0);
    let described_bytes = spans.iter().try_fold(0u64, |all, span| all.checked_add(span.len));
    let is_good = spans.iter().all(|span| span.len > 0)
        && described_bytes.is_some_and(|described_bytes| described_bytes > 0);
    match is_good && described_bytes <= Some(range.len) {
        true => Ok(()),
        false => {
            Err(wrong(format!("{} spans of {described_bytes:?} bytes for {range:?}", spans.len())))
        }
    }
}

/// Makes one request, and applies it to `expected` as well.
fn request(
    file: &BlockingFile<Qcow2Map>,
    size: u64,
    random: &mut Random,
    expected: &mut [u8],
) -> Done {
    let room = size.min(COMPARED_BYTES);
    let pos = random.below(room);
    let len = (1 + random.below(REQUEST_BYTES)).min(room - pos);
    let range = ByteRange::new(pos, len);
    let mut memory = vec![random.next() as u8; len as usize];
    let known = expected.get_mut(pos as usize..(pos + len) as usize);
    let kind = random.below(5);
    let (kind, result) = match kind {
        0 | 1 => ("write", file.write_at(&memory, pos, Flags::NONE)),
        2 => ("zero", file.zero(range, Flags::NONE).map(|()| 0)),
        3 => ("discard", file.discard(range).map(|()| 0)),
        _ => ("read", file.read_at(&mut memory, pos)),
    };
    let wrong = |why: String| Err(Failed::Wrong(format!("{kind} of {range:?}: {why}")));
    match (result, known) {
        (Err(error), _) => wrong(error.to_string()),
        (Ok(_), None) => Ok(()),
        (Ok(done), Some(known)) => match kind {
            "write" if done as u64 == len => {
                known.copy_from_slice(&memory);
                Ok(())
            }
            "read" if done as u64 == len && *memory == *known => Ok(()),
            "zero" => {
                known.fill(0);
                Ok(())
            }
            // Parts of clusters may keep their data (C52).
            "discard" if file.read_at(&mut memory, pos).is_ok_and(|done| done as u64 == len) => {
                let gone = known.iter().zip(&memory).all(|(old, new)| [*old, 0].contains(new));
                known.copy_from_slice(&memory);
                if gone { Ok(()) } else { wrong("neither the old bytes nor zeros".into()) }
            }
            _ => wrong(format!("{done} bytes, or other ones")),
        },
    }
}
