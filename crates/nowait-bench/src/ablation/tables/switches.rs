//! The tables of one switch of the engine each: the same requests with it off and on.
//!
//! Invariant: rows that write are made only if writing is allowed.

use nowait::Config;

use crate::ablation::fixture::{Fixture, Queue};
use crate::ablation::gain_table::{Metric, Row, Source, Table, Unit};
use crate::ablation::tables::{RANDOM_READ, every_request_tried, source, switched};
use crate::args::What;
use crate::workload::{Direction, Order, Workload};

/// A row: its title, the queue, the load, the configuration without the switch, and the published figures.
type Case = (String, Queue, Workload, Config, Option<Source>);

/// A switch, and what its table is called.
struct Switch {
    what: What,
    title: &'static str,
    /// The variants: off, on.
    names: [&'static str; 2],
    set: fn(&mut Config, bool),
    unit: Unit,
    note: &'static str,
}

const COMPLETION: Switch = Switch {
    what: What::Completion,
    title: "deferred and inline completion",
    names: ["deferred", "inline"],
    set: |config, on| config.inline_completion = on,
    unit: Unit::MibPerSecond,
    note: "Random writes to the file, depth 64. deferred: each completion makes a detour \
        over a worker thread. Source: AIO direct writes, 4K 1004 → 1193 MiB/s",
};
const POOL: Switch = Switch {
    what: What::Pool,
    title: "request slots from the allocator and from the pool",
    names: ["allocator", "pool"],
    set: |config, on| config.pool = on,
    unit: Unit::Iops,
    note: "4K random reads, depth 128. another thread: each completion is handed to a \
        worker thread, from where the slot comes home. Source: 562K → 574K; freed on another CPU 648K \
        and 647K",
};
const MERGE: Switch = Switch {
    what: What::Merge,
    title: "neighbours one by one and merged",
    names: ["one by one", "merged"],
    set: |config, on| config.merge = on,
    unit: Unit::Iops,
    note: "4K requests on the file; random ones do not touch, so that they gain nothing. \
        one by one: merge off",
};
const DURABLE: Switch = Switch {
    what: What::Durable,
    title: "durable writes one by one and together",
    names: ["each", "together"],
    set: |config, on| config.group_syncs = on,
    unit: Unit::Iops,
    note: "4K random writes to the file, each durable when it completes. each: the kernel \
        syncs for each write. together: the writes in flight share a sync. Both are the same at depth \
        1, and on a block device or a file system on one, where the kernel shares flushes by itself",
};

impl Switch {
    /// The table of `cases`; none without rows.
    fn table<'a>(&self, fixture: &'a Fixture<'a>, cases: Vec<Case>) -> Option<Table<'a>> {
        let set = self.set;
        let row = |(title, queue, load, config, source): Case| {
            let measure = move |on| {
                let mut config = config;
                set(&mut config, on);
                fixture.on(queue, &load, config)
            };
            Row { title, source, cells: switched(self.names, measure) }
        };
        let cases = cases.into_iter().filter(|(_, _, load, ..)| fixture.writable || !load.writes());
        let rows: Vec<_> = cases.map(row).collect();
        (!rows.is_empty()).then(|| Table {
            what: self.what,
            title: self.title.to_owned(),
            unit: self.unit,
            gain: Metric::OverFirst,
            note: self.note.to_owned(),
            rows,
        })
    }
}

/// A case on the file.
fn on_file(title: String, load: Workload) -> Case {
    (title, Queue::File, load, every_request_tried(), None)
}

/// Deferred against inline completion of writes.
pub(crate) fn completion<'a>(fixture: &'a Fixture<'a>) -> Option<Table<'a>> {
    let measured = source("1004 → 1193 MiB/s", 1193.0 / 1004.0);
    let case = |kib: usize| {
        let (direction, block_bytes) = (Direction::Write, kib << 10);
        let load = Workload { direction, block_bytes, depth: 64, ..RANDOM_READ };
        let (title, queue, load, config, _) = on_file(format!("{kib}K write"), load);
        (title, queue, load, config, measured.filter(|_| kib == 4))
    };
    COMPLETION.table(fixture, [4, 8, 12, 16].map(case).into())
}

/// Request slots from the allocator against slots from the pool, freed on the allocating thread and on another one.
pub(crate) fn pool<'a>(fixture: &'a Fixture<'a>) -> Option<Table<'a>> {
    let load = Workload { depth: 128, ..RANDOM_READ };
    let frees = [
        (true, "same thread", source("562K → 574K", 574.0 / 562.0)),
        (false, "another thread", source("648K, 647K", 647.0 / 648.0)),
    ];
    let cases = [Queue::Null, Queue::File].into_iter().flat_map(|queue| {
        frees.map(|(inline_completion, freed, source)| {
            let config = Config { inline_completion, ..every_request_tried() };
            (format!("{}, freed on {freed}", queue.name()), queue, load, config, source)
        })
    });
    POOL.table(fixture, cases.collect())
}

/// Requests that touch each in a transfer of its own, against all of a burst in one transfer.
pub(crate) fn merge<'a>(fixture: &'a Fixture<'a>) -> Option<Table<'a>> {
    let loads = [(Order::Sequential, 16), (Order::Sequential, 64), (Order::Random, 64)];
    let cases = [Direction::Read, Direction::Write].into_iter().flat_map(|direction| {
        loads.map(|(order, depth)| {
            let load = Workload { direction, order, depth, ..RANDOM_READ };
            on_file(format!("{} {}, depth {depth}", order.name(), direction.name()), load)
        })
    });
    MERGE.table(fixture, cases.collect())
}

/// A sync for each durable write against one sync for all that are in flight.
pub(crate) fn durable<'a>(fixture: &'a Fixture<'a>) -> Option<Table<'a>> {
    let case = |depth| {
        let load = Workload { direction: Direction::Write, depth, durable: true, ..RANDOM_READ };
        on_file(format!("4K durable write, depth {depth}"), load)
    };
    DURABLE.table(fixture, [1, 16, 64].map(case).into())
}
