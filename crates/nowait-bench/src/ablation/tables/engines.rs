//! This engine compared with a bare ring, plain system calls and fio, under the same load.
//!
//! Invariant: all clients get the same file, offsets in the same region, and the same depth.

use std::{io, thread};

use nowait::Config;

use crate::ablation::bare_ring::BareRing;
use crate::ablation::fio_engine::FioEngine;
use crate::ablation::fixture::Fixture;
use crate::ablation::plan::{Measurement, Plan, PlannedRow};
use crate::ablation::result_table::{Metric, Sample, Unit};
use crate::ablation::tables::{RANDOM_READ, word};
use crate::ablation::{TableSelection, blocking_calls, fio_engine};
use crate::cpus::Placement;
use crate::workload::{Direction, Workload};

const DEPTHS: [usize; 3] = [1, 32, 128];
const NOTE: &str = "bare ring: io_uring with registered file and buffers, SINGLE_ISSUER and \
    DEFER_TASKRUN, and no bookkeeping. blocking: the engine's face for callers that wait, and psync: \
    plain system calls, each with a thread for each request in flight. Each is kept, with \
    all its threads, on one processor";

/// The client that makes the requests.
#[derive(Clone, Copy)]
enum Client {
    Nowait,
    BareRing,
    Blocking,
    Psync,
    Fio(FioEngine),
}

impl Client {
    fn name(self) -> String {
        match self {
            Client::Nowait => "nowait".to_owned(),
            Client::BareRing => "bare ring".to_owned(),
            Client::Blocking => "blocking".to_owned(),
            Client::Psync => "psync".to_owned(),
            Client::Fio(engine) => format!("fio {}", engine.name()),
        }
    }

    fn measure(self, fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
        match self {
            Client::Nowait => fixture.on_file(load, Config::default()),
            Client::BareRing => on_bare_ring(fixture, load),
            Client::Blocking => on_blocking(fixture, load),
            Client::Psync => on_psync(fixture, load),
            Client::Fio(engine) => fio_engine::run(engine, load, fixture),
        }
    }

    /// Measures on a thread that is pinned to one processor, together with all threads and
    /// processes that it starts.
    fn measure_pinned(self, fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
        let placement = Placement::choose().map_err(io::Error::other)?;
        thread::scope(|scope| {
            let measurement = scope.spawn(|| {
                placement.pin_to_server_cpu()?;
                self.measure(fixture, load)
            });
            measurement.join().unwrap_or_else(|_| Err(io::Error::other("the client panicked")))
        })
    }
}

pub(crate) fn plan<'a>(fixture: &'a Fixture<'a>) -> Vec<Plan<'a>> {
    let mut clients = vec![Client::Nowait, Client::BareRing, Client::Blocking, Client::Psync];
    let mut note = NOTE.to_owned();
    match crate::fio::version() {
        Some(version) => {
            clients.extend(FioEngine::ALL.map(Client::Fio));
            note += &format!(". {version}: io_uring with fixed buffers and registered files");
        }
        None => note += ". fio is not installed",
    }
    let row = |direction, depth| {
        let load = Workload { direction, depth, ..RANDOM_READ };
        let measurement = |&client: &Client| -> Measurement<'a> {
            Box::new(move || client.measure_pinned(fixture, &load))
        };
        let measurements = clients.iter().map(measurement).collect();
        PlannedRow { title: format!("depth {depth}"), source: None, measurements }
    };
    let table = |&direction: &Direction| Plan {
        what: TableSelection::Engines,
        title: format!("this engine and others, 4K random {}", word(direction)),
        unit: Unit::Iops,
        gain: Metric::FirstOver,
        variants: clients.iter().map(|client| client.name()).collect(),
        note: note.clone(),
        rows: DEPTHS.map(|depth| row(direction, depth)).into(),
    };
    fixture.directions().iter().map(table).collect()
}

fn on_bare_ring(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let file = fixture.plain(fixture.path, fixture.direct)?;
    let mut ring = BareRing::new(&file, load)?;
    let run = |offsets: &mut _, stop_condition: crate::ablation::closed_loop::StopCondition<'_>| {
        ring.run(offsets, stop_condition.warm_up())?;
        ring.run(offsets, stop_condition)
    };
    fixture.measure_loop(load, run, true)
}

fn on_blocking(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let file = nowait::BlockingFile::new(fixture.disk()?);
    blocking_calls::run(&file, load, fixture, fixture.stop_condition(true).warm_up())?;
    blocking_calls::run(&file, load, fixture, fixture.stop_condition(true))?.sample()
}

fn on_psync(fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
    let file = fixture.plain(fixture.path, fixture.direct)?;
    blocking_calls::run(&file, load, fixture, fixture.stop_condition(true).warm_up())?;
    blocking_calls::run(&file, load, fixture, fixture.stop_condition(true))?.sample()
}
