//! A valid qcow2 image with damaged refcounts, served and written to. Which counts are damaged, and
//! how, depends on a number derived from the bytes.
//!
//! Checked: reads succeed and return the original or the last written data; a write succeeds, or
//! fails and affects only its own range; the same after the image is opened again, and after a
//! repair, which corrects all counts.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use nowait::sim::Random;
use nowait::{BlockingFile, ByteRange, Direct, Flags};
use nowait_image::check::check;
use nowait_image::qcow2_disk::{self, Qcow2Map, ServeOptions};
use nowait_image::repair::repair;
use nowait_image::{Chain, ChainOptions, ChainReader, Format, Header, Locking};

use crate::split::seed_of;
use crate::target::{Check, Target};
use crate::targets::image;
use crate::targets::image::{BACKING, scratch};
use crate::targets::image_ops::seeds;

/// The bytes of the disk that are compared, from its start.
const COMPARED_BYTES: u64 = 128 << 10;
/// The number of requests to the image.
const REQUESTS: u32 = 12;
/// The length of the longest request.
const REQUEST_BYTES: u64 = 3000;
/// The most counts that are damaged.
const MAX_DAMAGED: u64 = 6;

pub(crate) const TARGET: Target = Target {
    name: "counts",
    about: "sound qcow2 images whose counts are damaged, served and written to",
    prepare,
    seeds,
    ..image::TARGET
};

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    Ok(Box::new(move |input| check_input(directory.path(), input)))
}

fn open(path: &Path, writable: bool, damaged: bool) -> Result<Chain, String> {
    let options = ChainOptions {
        format: Some(Format::Qcow2),
        writable,
        damaged,
        locking: Locking::Unlocked,
        ..ChainOptions::default()
    };
    Chain::open(path, &options).map_err(|error| error.to_string())
}

/// The first bytes of the disk, read as the offline commands do.
fn contents(chain: &Chain) -> Result<Vec<u8>, String> {
    let reader = ChainReader::new(chain.layers()).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; reader.size().min(COMPARED_BYTES) as usize];
    reader.read_at(0, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

fn check_input(directory: &Path, input: &[u8]) -> Result<(), String> {
    let path = directory.join("image");
    let written = fs::write(directory.join(BACKING), image::backing_bytes());
    let written = written.and_then(|()| fs::write(&path, input));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    let Ok(chain) = open(&path, true, false) else { return Ok(()) };
    let is_sound = check(&chain, &mut |_, _| {}).is_ok_and(|report| report.corruptions == 0);
    let (true, Ok(before)) = (is_sound, contents(&chain)) else { return Ok(()) };
    let Some(header) = chain.top().header().cloned() else { return Ok(()) };
    if header.bitmaps.is_some() {
        // It may be refused: the counts of bitmaps are relied on.
        return Ok(());
    }
    drop(chain);
    let mut random = Random::new(seed_of(input));
    let mut bytes = input.to_vec();
    let what = damage(&mut bytes, &header, &mut random);
    fs::write(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()))?;
    serve(&path, before, &mut random).map_err(|why| format!("{what}: {why}"))
}

/// Damages counts of the image in `bytes`. Returns a description of the damage.
fn damage(bytes: &mut [u8], header: &Header, random: &mut Random) -> String {
    let number = |bytes: &[u8], at: usize| -> Option<u64> {
        Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
    };
    let entries = 0..header.refcount_table_entries() as usize;
    let positions =
        entries.filter_map(|n| number(bytes, header.refcount_table_pos as usize + n * 8));
    let blocks: Vec<u64> = positions.filter(|&pos| pos != 0).collect();
    let Some(block) = random.pick(&blocks) else { return "no counts".to_owned() };
    let cluster = header.cluster_bytes();
    let clusters = (bytes.len() as u64).div_ceil(cluster).min(header.block_entries());
    let mut what = "counts damaged:".to_owned();
    for _ in 0..1 + random.below(MAX_DAMAGED) {
        let (start, len, byte) = match random.below(12) {
            0 => (0, cluster, 0),
            _ => {
                let bits = 1 << header.refcount_order;
                let at = random.below(clusters) * bits / 8;
                let byte = random.pick(&[0, 0, 0, 1, 2, 0xff]).unwrap_or(0);
                (at + (bits / 8).saturating_sub(1), 1, byte)
            }
        };
        what += &format!(" {start}+{len}={byte}");
        let start = (block + start) as usize;
        if let Some(counts) = bytes.get_mut(start..start + len as usize) {
            counts.fill(byte);
        }
    }
    what
}

fn serve(path: &Path, before: Vec<u8>, random: &mut Random) -> Result<(), String> {
    let hint = random.below(2) == 0;
    let mut model = Model { known: before.into_iter().map(Some).collect() };
    for round in 0..2 {
        let Ok(chain) = open(path, true, false) else { break };
        let options = ServeOptions { writable: true, direct: Direct::Off, cache_holes: hint };
        let (disk, open_image) =
            qcow2_disk::open(chain, options).map_err(|error| error.to_string())?;
        let file = BlockingFile::new(Arc::new(disk));
        for _ in 0..REQUESTS {
            model.request(&file, random).map_err(|why| format!("round {round}: {why}"))?;
        }
        drop(file);
        open_image.close().map_err(|error| format!("close: {error}"))?;
        model.compare(path, "closed")?;
    }
    let chain = open(path, true, true)?;
    let repaired = repair(&chain, &mut |_, _| {}).map_err(|error| error.to_string())?;
    drop(chain);
    model.compare(path, "repaired")?;
    match repaired.report.corruptions {
        0 => Ok(()),
        left => Err(format!("{left} corruptions are left after a repair")),
    }
}

/// The expected content of the disk, where it is known.
struct Model {
    known: Vec<Option<u8>>,
}

impl Model {
    fn holds(&self, pos: u64, found: &[u8]) -> Result<(), String> {
        let known = self.known.iter().skip(pos as usize);
        match known.zip(found).position(|(known, found)| known.is_some_and(|it| it != *found)) {
            None => Ok(()),
            Some(at) => Err(format!("byte {} of the disk is lost", pos as usize + at)),
        }
    }

    fn compare(&self, path: &Path, when: &str) -> Result<(), String> {
        let bytes = open(path, false, true).and_then(|chain| contents(&chain));
        bytes.and_then(|bytes| self.holds(0, &bytes)).map_err(|why| format!("{when}: {why}"))
    }

    /// Makes one request and checks its result.
    fn request(
        &mut self,
        file: &BlockingFile<Qcow2Map>,
        random: &mut Random,
    ) -> Result<(), String> {
        let room = self.known.len() as u64;
        if room == 0 {
            return Ok(());
        }
        let pos = random.below(room);
        let len = (1 + random.below(REQUEST_BYTES)).min(room - pos);
        let mut memory = vec![random.next() as u8; len as usize];
        let place = pos as usize..(pos + len) as usize;
        let written = match random.below(5) {
            0..3 => {
                let value = memory.first().copied();
                file.write_at(&memory, pos, Flags::NONE).map(|_| value)
            }
            3 => file.zero(ByteRange::new(pos, len), Flags::NONE).map(|()| Some(0)),
            _ => {
                let read = file.read_at(&mut memory, pos).map_err(|error| error.to_string());
                return read.and_then(|_| self.holds(pos, &memory));
            }
        };
        let known = self.known.get_mut(place).unwrap_or_default();
        match written {
            Ok(value) => known.fill(value),
            Err(error) if error.errno() == libc::EIO => known.fill(None),
            // Version 2 cannot replace the bytes of a backing file by zeros.
            Err(error) if error.errno() == libc::EOPNOTSUPP => {}
            Err(error) => return Err(error.to_string()),
        }
        Ok(())
    }
}
