//! The same bytes in small segments: one call for each, through the page cache, and as one request;
//! and a durable write of 1024 segments.
//!
//! Invariant: all variants write the same bytes to the same sequential offsets.

use std::io;
use std::os::unix::fs::FileExt;

use nowait::{BlockingFile, Config, Flags, MAX_SEGMENTS};

use crate::ablation::TableSelection;
use crate::ablation::blocking_calls::{Block, calls};
use crate::ablation::fixture::Fixture;
use crate::ablation::offsets::Offsets;
use crate::ablation::plan::{Measurement, Plan, PlannedRow};
use crate::ablation::result_table::{Metric, Sample, Unit};
use crate::ablation::tables::vectored::{Load, Storage};
use crate::ablation::tables::{PAGE_BYTES, names, source};
use crate::ablation::vectored_io::{OperationMix, Shape, SubmitMode};
use crate::workload::{Direction, Order};

const SEGMENT_BYTES: [usize; 5] = [1, 16, 128, 512, PAGE_BYTES];
/// The bytes of one writev call, unless the limit on the number of segments allows fewer.
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

pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>) -> Option<Plan<'a>> {
    let row = |segment_bytes: usize| {
        let writev = |submit_mode| -> Measurement<'a> {
            let load = Load {
                mix: OperationMix::Only(Direction::Write),
                order: Order::Sequential,
                shape: shape(segment_bytes),
                flags: Flags::NONE,
                submit_mode,
            };
            Box::new(move || load.on(Storage::File, fixture, Config::default()))
        };
        let measurements: Vec<Measurement<'a>> = vec![
            Box::new(move || write(fixture, segment_bytes)),
            Box::new(move || buffered_write(fixture, segment_bytes)),
            writev(SubmitMode::OneByOne),
            writev(SubmitMode::Together),
        ];
        let source = source("55 s, 39 s → 9.2 s", 55.0 / 9.2);
        PlannedRow { title: format!("{segment_bytes}-byte segments"), source, measurements }
    };
    fixture.writable.then(|| Plan {
        what: TableSelection::Vectored,
        title: "small segments".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Metric::OverFirst,
        variants: names(&["write", "buffered write", "writev, one by one", "writev, merged"]),
        note: NOTE.to_owned(),
        rows: SEGMENT_BYTES.map(row).into(),
    })
}

/// The durable write, on the file and on a queue of the shortest given latency.
pub(crate) fn plan_durable<'a>(fixture: &'a Fixture<'a>) -> Option<Plan<'a>> {
    let shortest = fixture.latency.iter().min().map(|&latency| Storage::Latency(latency));
    let rows = std::iter::once(Storage::File).chain(shortest).map(|storage| {
        let measurements =
            [SubmitMode::OneByOne, SubmitMode::Together].map(|submit_mode| -> Measurement<'a> {
                let load = Load {
                    mix: OperationMix::Only(Direction::Write),
                    order: Order::Sequential,
                    shape: Shape { segments: MAX_SEGMENTS, segment_bytes: PAGE_BYTES },
                    flags: Flags::DSYNC,
                    submit_mode,
                };
                Box::new(move || load.on(storage, fixture, Config::default()))
            });
        let source = source("68 s → 0.23 s", 68.0 / 0.23);
        PlannedRow { title: storage.name(), source, measurements: measurements.into() }
    });
    fixture.writable.then(|| Plan {
        what: TableSelection::Vectored,
        title: "durable writev of 1024 segments".to_owned(),
        unit: Unit::MibPerSecond,
        gain: Metric::OverFirst,
        variants: names(&["segment-wise", "merged"]),
        note: NOTE_DURABLE.to_owned(),
        rows: rows.collect(),
    })
}

fn write(fixture: &Fixture<'_>, segment_bytes: usize) -> io::Result<Sample> {
    let file = BlockingFile::new(fixture.disk()?);
    each(
        fixture,
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

fn buffered_write(fixture: &Fixture<'_>, segment_bytes: usize) -> io::Result<Sample> {
    let file = fixture.plain(fixture.path, false)?;
    let write = |segment: &[u8], pos| file.write_all_at(segment, pos);
    let sample = each(fixture, segment_bytes, write, || file.sync_data());
    fixture.drop_cache()?;
    sample
}

/// Writes the segments one after the other, then flushes.
fn each(
    fixture: &Fixture<'_>,
    segment_bytes: usize,
    mut write: impl FnMut(&[u8], u64) -> io::Result<()>,
    finish: impl FnOnce() -> io::Result<()>,
) -> io::Result<Sample> {
    let block = Block::random();
    let segment = &block.0[..segment_bytes];
    let mut offsets = Offsets::endless(Order::Sequential, fixture.region(segment_bytes), 1);
    let stop_condition = fixture.stop_condition(false);
    let mut interval =
        calls(&mut offsets, stop_condition, segment_bytes, |pos| write(segment, pos))?;
    finish()?;
    interval.end();
    interval.sample()
}
