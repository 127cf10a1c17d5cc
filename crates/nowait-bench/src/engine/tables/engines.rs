//! This engine beside a bare ring, plain system calls and fio, under the same load.
//!
//! Invariant: all get the same file, places in the same region, and the same depth. Knows: scene,
//! bare_ring, psync, fio. Known by: tables.

use std::io;
use std::thread;

use nowait::Config;

use super::{RANDOM_READ, word};
use crate::cpus::Placement;
use crate::engine::What;
use crate::engine::bare_ring::BareRing;
use crate::engine::fio::{self, FioEngine};
use crate::engine::plan::{Plan, PlannedRow, Turn};
use crate::engine::psync;
use crate::engine::scene::Scene;
use crate::engine::table::{Gain, Sample, Unit};
use crate::workload::{Direction, Workload};

const DEPTHS: [usize; 3] = [1, 32, 128];
const NOTE: &str = "bare ring: io_uring with registered file and buffers, SINGLE_ISSUER and \
    DEFER_TASKRUN, and no bookkeeping. blocking: the engine's face for callers that wait, and psync: \
    plain system calls, each with a thread for each request in flight. Each is kept, with \
    all its threads, on one processor";

/// Who makes the requests.
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

    fn measure(self, scene: &Scene<'_>, load: &Workload) -> io::Result<Sample> {
        match self {
            Client::Nowait => scene.on_file(load, Config::default()),
            Client::BareRing => on_bare_ring(scene, load),
            Client::Blocking => on_blocking(scene, load),
            Client::Psync => on_psync(scene, load),
            Client::Fio(engine) => fio::run(engine, load, scene),
        }
    }

    /// Measures on a thread that is kept on one processor, as all that it starts is.
    fn measure_pinned(self, scene: &Scene<'_>, load: &Workload) -> io::Result<Sample> {
        let placement = Placement::choose().map_err(io::Error::other)?;
        thread::scope(|scope| {
            let turn = scope.spawn(|| {
                placement.take_servers_place()?;
                self.measure(scene, load)
            });
            turn.join().unwrap_or_else(|_| Err(io::Error::other("the client panicked")))
        })
    }
}

pub(crate) fn plan<'a>(scene: &'a Scene<'a>) -> Vec<Plan<'a>> {
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
        let turn = |&client: &Client| -> Turn<'a> {
            Box::new(move || client.measure_pinned(scene, &load))
        };
        let turns = clients.iter().map(turn).collect();
        PlannedRow { title: format!("depth {depth}"), source: None, turns }
    };
    let table = |&direction: &Direction| Plan {
        what: What::Engines,
        title: format!("this engine and others, 4K random {}", word(direction)),
        unit: Unit::Iops,
        gain: Gain::FirstOver,
        variants: clients.iter().map(|client| client.name()).collect(),
        note: note.clone(),
        rows: DEPTHS.map(|depth| row(direction, depth)).into(),
    };
    scene.directions().iter().map(table).collect()
}

fn on_bare_ring(scene: &Scene<'_>, load: &Workload) -> io::Result<Sample> {
    let file = scene.plain(scene.path, scene.direct)?;
    let mut ring = BareRing::new(&file, load)?;
    let run = |places: &mut _, pace: crate::engine::drive::Pace<'_>| {
        ring.run(places, pace.warm_up())?;
        ring.run(places, pace)
    };
    scene.stretch(load, run, true)
}

fn on_blocking(scene: &Scene<'_>, load: &Workload) -> io::Result<Sample> {
    let file = nowait::File::new(scene.disk()?);
    psync::run(&file, load, scene, scene.pace(true).warm_up())?;
    psync::run(&file, load, scene, scene.pace(true))?.sample()
}

fn on_psync(scene: &Scene<'_>, load: &Workload) -> io::Result<Sample> {
    let file = scene.plain(scene.path, scene.direct)?;
    psync::run(&file, load, scene, scene.pace(true).warm_up())?;
    psync::run(&file, load, scene, scene.pace(true))?.sample()
}
