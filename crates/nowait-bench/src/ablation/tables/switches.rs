//! The tables of one switch of the engine each: the same requests with it off and on.
//!
//! Invariant: rows that write are made only if writing is allowed.

use std::io;

use fastrand::Rng;
use nowait::{Config, Flags, IoBuffer, LocalDriver, MAX_SEGMENTS, OpenOptions, WorkerPool};

use crate::ablation::blocking_calls::calls;
use crate::ablation::fixture::{Fixture, Queue, ring_of_this_thread};
use crate::ablation::gain_table::{Metric, Row, Sample, Source, Table, Unit};
use crate::ablation::tables::{PAGE_BYTES, RANDOM_READ, every_request_tried, source, switched};
use crate::args::What;
use crate::workload::{Direction, Order, Workload};

/// The engine that a row's requests go through.
#[derive(Clone, Copy)]
enum Through {
    Engine(Queue),
    /// It takes its extents from the allocation cache, as in a server.
    Cached(Queue),
    /// Requests of so many buffers.
    Vectored(usize),
}

/// A row: its title, the engine and its configuration without the switch, the load, and the published figures.
struct Case {
    title: String,
    through: Through,
    config: Config,
    load: Workload,
    source: Option<Source>,
}

/// A switch, and what its table is called.
struct Switch {
    what: What,
    title: &'static str,
    /// The variants: off, on.
    names: [&'static str; 2],
    set: fn(&mut Config, bool),
    unit: Unit,
    note: &'static str,
    cases: fn() -> Vec<Case>,
}

const SWITCHES: [Switch; 6] = [
    Switch {
        what: What::Simple,
        title: "simple path off and on",
        names: ["off", "on"],
        set: |config, on| config.simple = on,
        unit: Unit::Iops,
        note: "4K random, on a queue that does nothing (the engine's own cost, no latencies taken) and on the file, by \
            io_uring where nothing else is named. allocation cache: extents come from it, as in a server; else every \
            byte counts as mapped. polled: the ring polls the device (HIPRI), which the source's figure for depth 512 \
            is about. Instructions are counted by cargo test -p nowait --test cost. Source: 4K randread, polled, depth \
            512 +16 %; libaio +4 %; depth 1 no change",
        cases: simple,
    },
    Switch {
        what: What::Completion,
        title: "deferred and inline completion",
        names: ["deferred", "inline"],
        set: |config, on| config.inline_completion = on,
        unit: Unit::MibPerSecond,
        note: "Random writes to the file, depth 64. deferred: each completion makes a detour over a worker thread. \
            Source: AIO direct writes, 4K 1004 → 1193 MiB/s",
        cases: completion,
    },
    Switch {
        what: What::Vectored,
        title: "segments one by one and all together",
        names: ["one by one", "together"],
        set: |config, on| config.vectored = on,
        unit: Unit::MibPerSecond,
        note: "4K in memory that does not touch, one request at a time, by LocalAsyncFile. one by one: each segment is \
            waited for, and a durable one made durable. Source: random writev 8.7×, sequential 6.6×, readv a fifth of \
            the system time; 1024-segment O_SYNC writev 68 s → 0.23 s",
        cases: vectored,
    },
    Switch {
        what: What::Pool,
        title: "request slots from the allocator and from the pool",
        names: ["allocator", "pool"],
        set: |config, on| config.pool = on,
        unit: Unit::Iops,
        note: "4K random reads, depth 128. another thread: each completion is handed to a worker thread, which \
            returns the slot. Source: 562K → 574K; freed on another CPU 648K and 647K",
        cases: pool,
    },
    Switch {
        what: What::Merge,
        title: "neighbours one by one and merged",
        names: ["one by one", "merged"],
        set: |config, on| config.merge = on,
        unit: Unit::Iops,
        note: "4K requests on the file; random ones do not touch, so that they gain nothing. one by one: merge off",
        cases: merge,
    },
    Switch {
        what: What::Durable,
        title: "durable writes one by one and together",
        names: ["each", "together"],
        set: |config, on| config.group_syncs = on,
        unit: Unit::Iops,
        note: "4K random writes to the file, each durable when it completes. each: the kernel syncs for each write. \
            together: the writes in flight share a sync. Both are the same at depth 1, and on a block device or a file \
            system on one, where the kernel shares flushes by itself",
        cases: durable,
    },
];

/// The table of `what`; none without rows, or if `what` is not a switch.
pub(crate) fn table<'a>(fixture: &'a Fixture<'a>, what: What) -> Option<Table<'a>> {
    let switch = SWITCHES.into_iter().find(|switch| switch.what == what)?;
    let may_run = |case: &Case| fixture.writable || !case.load.writes();
    let row = |case: Case| {
        let Case { title, through, config, load, source } = case;
        let measure = move |on| {
            let mut config = config;
            (switch.set)(&mut config, on);
            through.measure(fixture, &load, config)
        };
        Row { title, source, cells: switched(switch.names, measure) }
    };
    let rows: Vec<_> = (switch.cases)().into_iter().filter(may_run).map(row).collect();
    (!rows.is_empty()).then(|| Table {
        what,
        title: switch.title.to_owned(),
        unit: switch.unit,
        gain: Metric::OverFirst,
        note: switch.note.to_owned(),
        rows,
    })
}

impl Through {
    fn measure(self, fixture: &Fixture<'_>, load: &Workload, config: Config) -> io::Result<Sample> {
        match self {
            Self::Engine(queue) => fixture.on(queue, load, config),
            Self::Cached(queue) => fixture.on_cache(queue, load, config),
            Self::Vectored(segments) => by_tasks(fixture, load, segments, config),
        }
    }
}

/// Measures requests of `segments` buffers, one at a time.
fn by_tasks(
    fixture: &Fixture<'_>,
    load: &Workload,
    segments: usize,
    config: Config,
) -> io::Result<Sample> {
    let disk = fixture.cached_disk(fixture.path, OpenOptions::new())?;
    let driver = LocalDriver::new()?;
    let file = ring_of_this_thread(disk, WorkerPool::default(), config)?;
    let flags = if load.durable { Flags::DSYNC } else { Flags::NONE };
    let mut random = Rng::with_seed(1);
    let filled = |_| {
        let mut buffer = IoBuffer::zeroed(load.block_bytes / segments)?;
        random.fill(&mut buffer);
        Ok(buffer)
    };
    let mut buffers = (0..segments).map(filled).collect::<io::Result<Vec<_>>>()?;
    let mut transfer = |pos| {
        let taken = std::mem::take(&mut buffers);
        let (done, returned) = match load.direction {
            Direction::Read => driver.block_on(file.read_vectored_at(taken, pos)),
            Direction::Write => driver.block_on(file.write_vectored_at(taken, pos, flags)),
        };
        buffers = returned;
        match done? {
            bytes if bytes == load.block_bytes => Ok(()),
            _ => Err(io::Error::other("a transfer was cut short")),
        }
    };
    fixture.measure(load, true, |offsets, stop_condition| {
        calls(offsets, stop_condition, load.block_bytes, &mut transfer)
    })
}

/// A case through `through` whose title begins with its name.
fn case(through: Through, load: Workload, source: Option<Source>) -> Case {
    let (direction, depth) = (load.direction.name(), load.depth);
    let title = match through {
        Through::Engine(queue) => format!("{}, {direction}, depth {depth}", queue.name()),
        Through::Cached(queue) => {
            format!("{}, allocation cache, {direction}, depth {depth}", queue.name())
        }
        Through::Vectored(segments) => {
            let durable = if load.durable { "durable " } else { "" };
            format!("{segments} segments, {durable}{} {direction}", load.order.name())
        }
    };
    Case { title, through, config: every_request_tried(), load, source }
}

/// A case on the file.
fn on_file(title: String, load: Workload, source: Option<Source>) -> Case {
    Case { title, ..case(Through::Engine(Queue::File), load, source) }
}

fn simple() -> Vec<Case> {
    let load = |direction, depth| Workload { direction, depth, ..RANDOM_READ };
    let mut cases = Vec::new();
    for queue in [Queue::Null, Queue::File] {
        let same = if queue == Queue::File { source("±0", 1.0) } else { None };
        cases.extend([1, 128, 256, 512].map(|depth| {
            let source = same.filter(|_| depth == 1);
            case(Through::Engine(queue), load(Direction::Read, depth), source)
        }));
        cases.push(case(Through::Engine(queue), load(Direction::Write, 128), None));
        cases.extend(
            [Direction::Read, Direction::Write]
                .map(|direction| case(Through::Cached(queue), load(direction, 128), None)),
        );
    }
    let deep = load(Direction::Read, 512);
    let polled = source("+16 % (polled)", 1.16);
    cases.push(case(Through::Engine(Queue::Polled), deep, polled));
    cases.push(case(Through::Engine(Queue::Aio), deep, source("+4 % (libaio)", 1.04)));
    cases
}

fn completion() -> Vec<Case> {
    let measured = source("1004 → 1193 MiB/s", 1193.0 / 1004.0);
    let case = |kib: usize| {
        let (direction, block_bytes) = (Direction::Write, kib << 10);
        let load = Workload { direction, block_bytes, depth: 64, ..RANDOM_READ };
        on_file(format!("{kib}K write"), load, measured.filter(|_| kib == 4))
    };
    [4, 8, 12, 16].map(case).into()
}

fn vectored() -> Vec<Case> {
    let of = |segments: usize, direction, order, durable, source| {
        let block_bytes = segments * PAGE_BYTES;
        let load = Workload { direction, order, block_bytes, durable, ..RANDOM_READ };
        case(Through::Vectored(segments), load, source)
    };
    let system_time = Some(Source { words: "system time 5×", factor: None });
    vec![
        of(8, Direction::Read, Order::Random, false, system_time),
        of(8, Direction::Read, Order::Sequential, false, system_time),
        of(8, Direction::Write, Order::Random, false, source("8.7×", 8.7)),
        of(8, Direction::Write, Order::Sequential, false, source("6.6×", 6.6)),
        of(
            MAX_SEGMENTS,
            Direction::Write,
            Order::Sequential,
            true,
            source("68 s → 0.23 s", 68.0 / 0.23),
        ),
    ]
}

/// Slots that are freed on the allocating thread and on another one.
fn pool() -> Vec<Case> {
    let load = Workload { depth: 128, ..RANDOM_READ };
    let frees = [
        (true, "same thread", source("562K → 574K", 574.0 / 562.0)),
        (false, "another thread", source("648K, 647K", 647.0 / 648.0)),
    ];
    let cases = [Queue::Null, Queue::File].into_iter().flat_map(|queue| {
        frees.map(|(inline_completion, freed, source)| Case {
            title: format!("{}, freed on {freed}", queue.name()),
            config: Config { inline_completion, ..every_request_tried() },
            ..case(Through::Engine(queue), load, source)
        })
    });
    cases.collect()
}

fn merge() -> Vec<Case> {
    let loads = [(Order::Sequential, 16), (Order::Sequential, 64), (Order::Random, 64)];
    let cases = [Direction::Read, Direction::Write].into_iter().flat_map(|direction| {
        loads.map(|(order, depth)| {
            let load = Workload { direction, order, depth, ..RANDOM_READ };
            on_file(format!("{} {}, depth {depth}", order.name(), direction.name()), load, None)
        })
    });
    cases.collect()
}

fn durable() -> Vec<Case> {
    let case = |depth| {
        let load = Workload { direction: Direction::Write, depth, durable: true, ..RANDOM_READ };
        on_file(format!("4K durable write, depth {depth}"), load, None)
    };
    [1, 16, 64].map(case).into()
}
