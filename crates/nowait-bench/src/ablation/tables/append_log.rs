//! Records that are appended to a log, against one durable write for each, and against groups as a program makes them.
//!
//! Invariant: all variants write the same records, to files of their own that exist beforehand and were written before.

use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use nowait::{Log, LogOptions};
use rustix::fs::OFlags;

use crate::ablation::blocking_calls::{Block, calls, in_threads};
use crate::ablation::fixture::Fixture;
use crate::ablation::gain_table::{Metric, Row, Sample, Table, Unit, cell};
use crate::ablation::tables::{PAGE_BYTES, RANDOM_READ};
use crate::args::What;
use crate::offsets::Offsets;
use crate::workload::{Direction, Order, Workload};

const NOTE: &str = "records of 256 bytes, each durable when its call returns, by so many threads, in \
    a directory beside the file if that is a temporary one, else in the directory for temporary files. \
    a write each: one block of a file by O_DIRECT and O_DSYNC, in no order. by hand: all that wait in one such write, made by \
    the first of them, under a mutex and a condition. log: Log::append";
const RECORD_BYTES: usize = 256;
/// The default of `LogOptions`.
const SEGMENT_BYTES: u64 = 64 << 20;
/// The longest record, of which four fill a segment.
const LONG_RECORD: usize = 15 << 20;
/// So many of them fill three segments.
const LONG_RECORDS: usize = 12;
/// One of so many appends of the first thread truncates the log.
const APPENDS_PER_TRUNCATION: u64 = 1024;

pub(crate) fn table<'a>(fixture: &'a Fixture<'a>) -> Table<'a> {
    let row = |depth| {
        let load = Workload {
            direction: Direction::Write,
            order: Order::Sequential,
            block_bytes: RECORD_BYTES,
            depth,
            durable: true,
            ..RANDOM_READ
        };
        let each = move || by_writes(fixture, &load);
        let hand = move || by_hand(fixture, &load);
        let log = move || by_log(fixture, &load);
        let title = format!("records, {depth} {}", if depth == 1 { "writer" } else { "writers" });
        let cells = vec![cell("a write each", each), cell("by hand", hand), cell("log", log)];
        Row { title, source: None, cells }
    };
    Table {
        what: What::Log,
        title: "records by one durable write each and by a log".to_owned(),
        unit: Unit::Iops,
        gain: Metric::OverFirst,
        note: NOTE.to_owned(),
        rows: [1, 8, 64].map(row).into(),
    }
}

/// Calls `append` on `load.depth` threads, with the number of the thread and of its call.
fn measure(
    fixture: &Fixture<'_>,
    load: &Workload,
    append: impl Fn(usize, u64) -> io::Result<()> + Sync,
) -> io::Result<Sample> {
    fixture.measure(load, true, |_, stop_condition| {
        in_threads(load.depth, |thread, gate| {
            let region = fixture.region(load.block_bytes);
            let mut offsets = Offsets::endless(load.order, region, thread as u64);
            let mut count = 0;
            gate.wait();
            calls(&mut offsets, stop_condition, load.block_bytes, |_| {
                count += 1;
                append(thread, count)
            })
        })
    })
}

/// A file of zeros, which takes durable writes.
fn written_file(fixture: &Fixture<'_>) -> io::Result<fs::File> {
    let path = fixture.scratch_path("blocks");
    fs::write(&path, vec![0; SEGMENT_BYTES as usize])?;
    fs::File::open(&path)?.sync_all()?;
    let direct = if fixture.direct { OFlags::DIRECT } else { OFlags::empty() };
    let flags = (direct | OFlags::DSYNC).bits().cast_signed();
    fs::OpenOptions::new().write(true).custom_flags(flags).open(&path)
}

/// The loop that a program would have without a log: the next block is reserved, written and durable.
fn by_writes(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let file = written_file(fixture)?;
    let (next, mut block) = (AtomicU64::new(0), Block::random());
    block.0[RECORD_BYTES..].fill(0);
    measure(fixture, load, |_, _| {
        let pos = next.fetch_add(1, Ordering::Relaxed) * PAGE_BYTES as u64 % SEGMENT_BYTES;
        file.write_all_at(&block.0[..PAGE_BYTES], pos)
    })
}

/// Records that wait; while one of their callers writes, the other block is missing.
struct Groups {
    block: Box<Block>,
    other_block: Option<Box<Block>>,
    used: usize,
    number: u64,
    written: u64,
    pos: u64,
}

/// Groups as a program makes them that has no use for the checks of a log.
fn by_hand(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let file = written_file(fixture)?;
    let record = &Block::random().0[..RECORD_BYTES];
    let groups = Mutex::new(Groups {
        block: Block::zeros(),
        other_block: Some(Block::zeros()),
        used: 0,
        number: 1,
        written: 0,
        pos: 0,
    });
    let written = Condvar::new();
    let append = || {
        let mut all = groups.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, number) = (all.used, all.number);
        let place = all.block.0.get_mut(at..at + RECORD_BYTES);
        place.ok_or(io::ErrorKind::OutOfMemory)?.copy_from_slice(record);
        all.used += RECORD_BYTES;
        while all.written < number {
            let Some(other) = all.other_block.take() else {
                all = written.wait(all).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let mut block = std::mem::replace(&mut all.block, other);
            let len = std::mem::take(&mut all.used).next_multiple_of(PAGE_BYTES);
            let (pos, group) = (all.pos % SEGMENT_BYTES, all.number);
            (all.number, all.pos) = (group + 1, all.pos + Block::BYTES as u64);
            drop(all);
            let done = file.write_all_at(&block.0[..len], pos);
            block.0[..len].fill(0);
            all = groups.lock().unwrap_or_else(PoisonError::into_inner);
            (all.written, all.other_block) = (group, Some(block));
            written.notify_all();
            done?;
        }
        Ok(())
    };
    measure(fixture, load, |_, _| append())
}

fn by_log(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let path = fixture.scratch_path("log");
    let sample = in_log(fixture, load, &path);
    let removed = fs::remove_dir_all(&path);
    sample.and_then(|sample| removed.map(|()| sample))
}

fn in_log(fixture: &Fixture<'_>, load: &Workload, path: &Path) -> io::Result<Sample> {
    let log = Log::open(path, LogOptions::new().segment_bytes(SEGMENT_BYTES).spares(2))?;
    // Two spare segments, which the log reuses in turns.
    let long = vec![1; LONG_RECORD];
    (0..LONG_RECORDS).try_for_each(|_| log.append(&long).map(drop))?;
    log.truncate_before(log.end())?;
    let record = &Block::random().0[..RECORD_BYTES];
    measure(fixture, load, |thread, count| {
        let position = log.append(record)?;
        if thread == 0 && count % APPENDS_PER_TRUNCATION == 0 {
            log.truncate_before(position)?;
        }
        Ok(())
    })
}
