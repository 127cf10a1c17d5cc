//! The segments of a request one after the other against all in one transfer, on the file and on
//! queues of a given latency; the same bytes in small segments; a durable write of 1024 segments.
//!
//! Invariant: all variants of a row transfer the same bytes.

use std::cell::RefCell;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::time::Duration;

use nowait::{BlockingFile, Config, Flags, IoQueue, MAX_SEGMENTS, SingleDisk, WorkerPool};

use crate::ablation::blocking_calls::{Block, calls, whole};
use crate::ablation::delayed::Delayed;
use crate::ablation::fixture::{Fixture, ring_engine};
use crate::ablation::gain_table::{Metric, Row, Sample, Source, Table, Unit, cell};
use crate::ablation::tables::{PAGE_BYTES, every_request_tried, source, switched};
use crate::ablation::vectored_io::{Load, Shape, VectoredIo};
use crate::args::What;
use crate::offsets::Offsets;
use crate::workload::{Direction, Order};

const SEGMENT_BYTES: [usize; 5] = [1, 16, 128, 512, PAGE_BYTES];
/// The bytes of one writev call, unless the limit on the number of segments allows fewer.
const REQUEST_BYTES: usize = 64 << 10;
const NOTE: &str = "8 × 4K in memory that does not touch, one request at a time; mixed: a read and a \
    write in turn. one by one: each segment is waited for. With 8 segments the most that a queue of \
    pure latency can gain is 8×; it waits in a busy loop, which is in CPU ns. Source: random writev \
    8.7×, sequential 6.6×, mixed 5× (of which order it does not say), readv a fifth of the system time";
const NOTE_SMALL: &str = "The same bytes, one after the other, in segments of 1 byte to 4K. write: \
    BlockingFile, a call for each. buffered write: a write(2) for each into the page cache; fwrite: a \
    write(2) for each 4K that a buffer in the process has gathered; for both an fdatasync(2) at the \
    end counts. one by one: Engine, a request for each segment, waited for. merged: Engine, up to 1024 \
    segments in one request. CPU ns is for the bytes of one such request in each variant. Source: \
    write 55 s, writev 39 s → 9.2 s";
const NOTE_DURABLE: &str = "1024 × 4K, durable. segment-wise: each segment is made durable before \
    the next is written. Source: 1024-segment O_SYNC writev 68 s → 0.23 s";

/// The target of the transfers.
#[derive(Clone, Copy)]
enum Storage {
    File,
    Latency(Duration),
}

impl Storage {
    fn name(self) -> String {
        match self {
            Storage::File => "file".to_owned(),
            Storage::Latency(latency) => format!("{latency:?} queue"),
        }
    }
}

pub(crate) fn tables<'a>(fixture: &'a Fixture<'a>) -> Vec<Table<'a>> {
    let table = |title: &str, note: &str, rows| Table {
        what: What::Vectored,
        title: title.to_owned(),
        unit: Unit::MibPerSecond,
        gain: Metric::OverFirst,
        note: note.to_owned(),
        rows,
    };
    let mut tables = vec![table("segments one by one and all together", NOTE, segments(fixture))];
    if fixture.writable {
        tables.push(table(
            "small segments",
            NOTE_SMALL,
            SEGMENT_BYTES.map(|n| small(fixture, n)).into(),
        ));
        tables.push(table("durable writev of 1024 segments", NOTE_DURABLE, durable(fixture)));
    }
    tables
}

fn segments<'a>(fixture: &'a Fixture<'a>) -> Vec<Row<'a>> {
    const READ: &[Direction] = &[Direction::Read];
    const WRITE: &[Direction] = &[Direction::Write];
    const BOTH: &[Direction] = &[Direction::Read, Direction::Write];
    let system_time = Some(Source { words: "system time 5×", factor: None });
    let loads = [
        ("random readv", READ, Order::Random, system_time),
        ("sequential readv", READ, Order::Sequential, system_time),
        ("random writev", WRITE, Order::Random, source("8.7×", 8.7)),
        ("sequential writev", WRITE, Order::Sequential, source("6.6×", 6.6)),
        ("random mixed", BOTH, Order::Random, source("5×", 5.0)),
        ("sequential mixed", BOTH, Order::Sequential, source("5×", 5.0)),
    ];
    let row = |storage: Storage| {
        let allowed =
            loads.into_iter().filter(|(_, directions, ..)| fixture.writable || *directions == READ);
        allowed.map(move |(name, directions, order, source)| {
            let shape = Shape { segments: 8, segment_bytes: PAGE_BYTES };
            let load = Load { directions, order, shape, flags: Flags::NONE, together: true };
            let measure = move |vectored| {
                on(storage, load, fixture, Config { vectored, ..every_request_tried() })
            };
            let title = format!("{}, {name}", storage.name());
            Row { title, source, cells: switched(["one by one", "together"], measure) }
        })
    };
    let queues = fixture.latency.iter().map(|&latency| Storage::Latency(latency));
    std::iter::once(Storage::File).chain(queues).flat_map(row).collect()
}

/// Sequential writes of `segments` segments.
fn writev(segments: usize, segment_bytes: usize, flags: Flags) -> impl Fn(bool) -> Load + Copy {
    move |together| Load {
        directions: &[Direction::Write],
        order: Order::Sequential,
        shape: Shape { segments, segment_bytes },
        flags,
        together,
    }
}

/// The segments of one writev call.
fn segments_of(segment_bytes: usize) -> usize {
    (REQUEST_BYTES / segment_bytes).min(MAX_SEGMENTS)
}

fn small<'a>(fixture: &'a Fixture<'a>, segment_bytes: usize) -> Row<'a> {
    let load = writev(segments_of(segment_bytes), segment_bytes, Flags::NONE);
    let on_file = move |together| on(Storage::File, load(together), fixture, every_request_tried());
    let mut cells = vec![
        cell("write", move || write(fixture, segment_bytes)),
        cell("buffered write", move || buffered_write(fixture, segment_bytes, 0)),
        cell("fwrite", move || buffered_write(fixture, segment_bytes, PAGE_BYTES)),
    ];
    cells.extend(switched(["writev, one by one", "writev, merged"], on_file));
    let source = source("55 s, 39 s → 9.2 s", 55.0 / 9.2);
    Row { title: format!("{segment_bytes}-byte segments"), source, cells }
}

/// The durable write, on the file and on a queue of the shortest given latency.
fn durable<'a>(fixture: &'a Fixture<'a>) -> Vec<Row<'a>> {
    let load = writev(MAX_SEGMENTS, PAGE_BYTES, Flags::DSYNC);
    let shortest = fixture.latency.iter().min().map(|&latency| Storage::Latency(latency));
    let row = |storage: Storage| {
        let measure = move |together| on(storage, load(together), fixture, every_request_tried());
        let cells = switched(["segment-wise", "merged"], measure);
        Row { title: storage.name(), source: source("68 s → 0.23 s", 68.0 / 0.23), cells }
    };
    std::iter::once(Storage::File).chain(shortest).map(row).collect()
}

/// Measures the requests of `load` on one target.
fn on(storage: Storage, load: Load, fixture: &Fixture<'_>, config: Config) -> io::Result<Sample> {
    let disk = fixture.disk()?;
    let workers = WorkerPool::default();
    match storage {
        Storage::File => run(ring_engine(&disk, &workers, config)?, load, fixture),
        Storage::Latency(latency) => {
            run(SingleDisk::new(disk, workers, Delayed::new(latency)?, config)?, load, fixture)
        }
    }
}

fn run<Q: IoQueue>(
    engine: SingleDisk<Q, nowait::LinearMap>,
    load: Load,
    fixture: &Fixture<'_>,
) -> io::Result<Sample> {
    let mut vectored_io = VectoredIo::new(engine, load.shape);
    let offsets = Offsets::endless(load.order, fixture.region(load.shape.bytes() as usize), 0);
    fixture.measure_at(offsets, load.shape.bytes() as usize, true, |offsets, stop_condition| {
        vectored_io.run(&load, offsets, stop_condition)
    })
}

fn write(fixture: &Fixture<'_>, segment_bytes: usize) -> io::Result<Sample> {
    let file = BlockingFile::new(fixture.disk()?);
    let write =
        |segment: &[u8], pos| whole(file.write_at(segment, pos, Flags::NONE)?, segment.len());
    each(fixture, segment_bytes, write, || Ok(()))
}

/// Writes through the page cache, and through a buffer of `buffer_bytes` in this process.
fn buffered_write(
    fixture: &Fixture<'_>,
    segment_bytes: usize,
    buffer_bytes: usize,
) -> io::Result<Sample> {
    let file = Fixture::plain(fixture.path, true, false)?;
    let writer = RefCell::new(BufWriter::with_capacity(buffer_bytes, &file));
    let write = |segment: &[u8], pos| {
        let mut writer = writer.borrow_mut();
        if pos == 0 {
            writer.seek(SeekFrom::Start(0))?;
        }
        writer.write_all(segment)
    };
    let flush = || {
        writer.borrow_mut().flush()?;
        file.sync_data()
    };
    let sample = each(fixture, segment_bytes, write, flush);
    fixture.drop_cache()?;
    sample
}

/// Writes the segments one after the other, then calls `finish`.
fn each(
    fixture: &Fixture<'_>,
    segment_bytes: usize,
    write: impl Fn(&[u8], u64) -> io::Result<()>,
    finish: impl FnOnce() -> io::Result<()>,
) -> io::Result<Sample> {
    let block = Block::random();
    let segment = &block.0[..segment_bytes];
    let mut offsets = Offsets::endless(Order::Sequential, fixture.region(segment_bytes), 0);
    let stop_condition = fixture.stop_condition(false);
    let mut interval =
        calls(&mut offsets, stop_condition, segment_bytes, |pos| write(segment, pos))?;
    finish()?;
    interval.end();
    interval.sample(segments_of(segment_bytes) * segment_bytes)
}
