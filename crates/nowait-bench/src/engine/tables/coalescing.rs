//! The same bytes in small segments: a call for each, the page cache, and one request for many; and
//! a durable write of 1024 segments.
//!
//! Invariant: all variants write the same bytes to the same places, one after the other. Knows:
//! scene, scatter, psync. Known by: tables.

use std::io;
use std::os::unix::fs::FileExt;

use nowait::{Config, File, Flags, MAX_SEGMENTS};

use super::vectored::{Load, Storage};
use super::{PAGE_BYTES, names, source};
use crate::engine::What;
use crate::engine::places::Places;
use crate::engine::plan::{Plan, PlannedRow, Turn};
use crate::engine::psync::{Block, calls};
use crate::engine::scatter::{Hand, Mix, Shape};
use crate::engine::scene::Scene;
use crate::engine::table::{Gain, Sample, Unit};
use crate::workload::{Direction, Order};

const SEGMENT_BYTES: [usize; 5] = [1, 16, 128, 512, PAGE_BYTES];
/// What one writev moves, unless its segments are so small that fewer bytes fit.
const REQUEST_BYTES: usize = 64 << 10;
const NOTE: &str = "The same bytes, one after the other, in segments of 1 byte to 4K. write: File, a \
    call for each. buffered: a write(2) for each, and an fdatasync(2) at the end that counts. one by \
    one: Engine, a request for each segment, waited for. merged: Engine, up to 1024 segments in one \
    request. Source: write 55 s, writev 39 s → 9.2 s";
const NOTE_DURABLE: &str = "1024 × 4K, durable. segment-wise: each segment is made durable before \
    the next is written. Source: 1024-segment O_SYNC writev 68 s → 0.23 s";

fn shape(segment_bytes: usize) -> Shape {
    Shape { segments: (REQUEST_BYTES / segment_bytes).min(MAX_SEGMENTS), segment_bytes }
}

pub(crate) fn plan<'a>(scene: &'a Scene<'a>) -> Option<Plan<'a>> {
    let row = |segment_bytes: usize| {
        let writev = |hand| -> Turn<'a> {
            let load = Load {
                mix: Mix::Only(Direction::Write),
                order: Order::Sequential,
                shape: shape(segment_bytes),
                flags: Flags::NONE,
                hand,
            };
            Box::new(move || load.on(Storage::File, scene, Config::default()))
        };
        let turns: Vec<Turn<'a>> = vec![
            Box::new(move || write(scene, segment_bytes)),
            Box::new(move || buffered_write(scene, segment_bytes)),
            writev(Hand::OneByOne),
            writev(Hand::Together),
        ];
        let source = source("55 s, 39 s → 9.2 s", 55.0 / 9.2);
        PlannedRow { title: format!("{segment_bytes}-byte segments"), source, turns }
    };
    scene.writable.then(|| Plan {
        what: What::Vectored,
        title: "small segments".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Gain::OverFirst,
        variants: names(&["write", "buffered write", "writev, one by one", "writev, merged"]),
        note: NOTE.to_owned(),
        rows: SEGMENT_BYTES.map(row).into(),
    })
}

/// On the file and on a queue of the shortest given latency.
pub(crate) fn plan_durable<'a>(scene: &'a Scene<'a>) -> Option<Plan<'a>> {
    let shortest = scene.latency.iter().min().map(|&latency| Storage::Latency(latency));
    let rows = std::iter::once(Storage::File).chain(shortest).map(|storage| {
        let turns = [Hand::OneByOne, Hand::Together].map(|hand| -> Turn<'a> {
            let load = Load {
                mix: Mix::Only(Direction::Write),
                order: Order::Sequential,
                shape: Shape { segments: MAX_SEGMENTS, segment_bytes: PAGE_BYTES },
                flags: Flags::DSYNC,
                hand,
            };
            Box::new(move || load.on(storage, scene, Config::default()))
        });
        let source = source("68 s → 0.23 s", 68.0 / 0.23);
        PlannedRow { title: storage.name(), source, turns: turns.into() }
    });
    scene.writable.then(|| Plan {
        what: What::Vectored,
        title: "durable writev of 1024 segments".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Gain::OverFirst,
        variants: names(&["segment-wise", "merged"]),
        note: NOTE_DURABLE.to_owned(),
        rows: rows.collect(),
    })
}

fn write(scene: &Scene<'_>, segment_bytes: usize) -> io::Result<Sample> {
    let file = File::new(scene.disk()?);
    each(
        scene,
        segment_bytes,
        |segment, pos| {
            let put = file.write_at(segment, pos, Flags::NONE)?;
            if put == segment.len() {
                Ok(())
            } else {
                Err(io::Error::other("a write was cut short"))
            }
        },
        || Ok(()),
    )
}

fn buffered_write(scene: &Scene<'_>, segment_bytes: usize) -> io::Result<Sample> {
    let file = scene.plain(scene.path, false)?;
    let write = |segment: &[u8], pos| file.write_all_at(segment, pos);
    let sample = each(scene, segment_bytes, write, || file.sync_data());
    scene.drop_cache()?;
    sample
}

/// Writes segment after segment, then makes sure of it.
fn each(
    scene: &Scene<'_>,
    segment_bytes: usize,
    mut write: impl FnMut(&[u8], u64) -> io::Result<()>,
    finish: impl FnOnce() -> io::Result<()>,
) -> io::Result<Sample> {
    let block = Block::random();
    let segment = &block.0[..segment_bytes];
    let mut places = Places::endless(Order::Sequential, scene.region(segment_bytes), 1);
    let pace = scene.pace(false);
    let mut stretch = calls(&mut places, pace, segment_bytes, |pos| write(segment, pos))?;
    finish()?;
    stretch.end();
    stretch.sample()
}
