//! A qcow2 image, byte for byte, that somebody changes: resized, committed to what it stands on, or
//! served and written to. Which of them, and how, follows from a number made of the bytes.
//!
//! Checked: an image whose metadata holds together still does so afterwards, and has the bytes that
//! it must have; what is refused leaves it as it was. Of one that is damaged only that nobody falls
//! over it.
//! Knows: target, pieces, image. Known by: mod.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait::sim::Random;
use nowait::{Direct, File, Flags, Range};
use nowait_image::check::check;
use nowait_image::commit::{Overlay, commit};
use nowait_image::resize::resize;
use nowait_image::served::{self, Qcow2, ServeOptions};
use nowait_image::{Chain, ChainOptions, Format, Locking, Reader};

use super::image::{self, BACKING, scratch};
use crate::pieces::seed_of;
use crate::target::{Check, Target};

/// The disk's bytes that are compared, from its start on.
const COMPARED_BYTES: u64 = 128 << 10;
/// The most that a disk grows by.
const GROWTH_BYTES: u64 = 200 << 10;
/// Requests to an image that is served.
const REQUESTS: u32 = 10;
/// The longest of them, in bytes.
const REQUEST_BYTES: u64 = 9000;

pub(super) const TARGET: Target = Target {
    name: "changed",
    about: "qcow2 images that are resized, committed, served and written to",
    prepare,
    seeds,
    ..image::TARGET
};

/// The images that the target `image` begins with.
fn seeds() -> Vec<Vec<u8>> {
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

/// What the image holds.
#[derive(Debug)]
struct State {
    /// Whether its metadata holds together.
    sound: bool,
    size: u64,
    /// The first bytes of the disk, if they can be read.
    bytes: Option<Vec<u8>>,
}

impl State {
    /// `None` where the image is refused.
    fn of(path: &Path) -> Option<Self> {
        let chain = open(path, false).ok()?;
        let sound = check(&chain, &mut |_, _| {}).is_ok_and(|report| report.corruptions == 0);
        let size = chain.top().size;
        let mut bytes = vec![0; size.min(COMPARED_BYTES) as usize];
        let read = Reader::new(&chain).and_then(|reader| reader.read_at(0, &mut bytes));
        Some(Self { sound, size, bytes: read.is_ok().then_some(bytes) })
    }

    /// Whether it is one from which everything must go well.
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

/// How a change came to nothing.
#[derive(Debug)]
enum Failed {
    /// It was refused.
    Refused,
    /// It must not have been.
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

/// The disk has the same bytes afterwards, wherever they are.
fn committed(path: &Path, random: &mut Random) -> Done {
    let overlay = [Overlay::Emptied, Overlay::Kept][random.below(2) as usize];
    let chain = open(path, true).map_err(|_| Failed::Refused)?;
    commit(&chain, overlay, &mut |_, _| {}).map_err(|_| Failed::Refused)?;
    Ok(())
}

fn serve(path: &Path, before: &State, random: &mut Random, expected: &mut [u8]) -> Done {
    let chain = open(path, true).map_err(|_| Failed::Refused)?;
    let options = ServeOptions { writable: true, direct: Direct::Off, hint: random.below(2) == 0 };
    let (disk, keeper) = served::open(chain, options).map_err(|_| Failed::Refused)?;
    let file = File::new(Arc::new(disk));
    let asked = (0..REQUESTS).try_for_each(|_| request(&file, before.size, random, expected));
    drop(file);
    let closed = keeper.close().map_err(|error| Failed::Wrong(format!("close: {error}")));
    asked.and(closed)
}

/// One request, which does to `expected` what it does to the disk.
fn request(file: &File<Qcow2>, size: u64, random: &mut Random, expected: &mut [u8]) -> Done {
    let room = size.min(COMPARED_BYTES);
    let pos = random.below(room);
    let len = (1 + random.below(REQUEST_BYTES)).min(room - pos);
    let range = Range::new(pos, len);
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
            // What is no whole cluster may stay (C52).
            "discard" if file.read_at(&mut memory, pos).is_ok_and(|done| done as u64 == len) => {
                let gone = known.iter().zip(&memory).all(|(old, new)| [*old, 0].contains(new));
                known.copy_from_slice(&memory);
                if gone { Ok(()) } else { wrong("neither the old bytes nor zeros".into()) }
            }
            _ => wrong(format!("{done} bytes, or other ones")),
        },
    }
}
