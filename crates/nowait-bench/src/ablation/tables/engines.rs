//! This engine compared with a bare ring and plain system calls, under the same load.
//!
//! Invariant: all clients get the same file, offsets in the same region, and the same depth.

use std::{io, thread};

use nowait::BlockingFile;

use crate::ablation::async_loop::{self, AsyncApi};
use crate::ablation::bare_ring::BareRing;
use crate::ablation::blocking_calls;
use crate::ablation::fixture::{Fixture, Queue};
use crate::ablation::gain_table::{Metric, Row, Sample, Table, Unit, cell};
use crate::ablation::tables::{RANDOM_READ, every_request_tried};
use crate::args::What;
use crate::cpus::Placement;
use crate::workload::{Direction, Workload};

const NOTE: &str = "nowait: Engine on io_uring, by which the others' figures are divided. Linux AIO: \
    Engine on its other queue, Linux AIO and threads. LocalAsyncFile: tasks of the engine's thread, \
    driven by LocalDriver; AsyncFile: tasks, and an engine on another thread. bare ring: io_uring with registered file and buffers, SINGLE_ISSUER and \
    DEFER_TASKRUN, and no bookkeeping. BlockingFile: the library's calls that wait, and psync: \
    plain system calls, each with a thread for each request in flight. Each is kept, with \
    all its threads, on one processor";

/// The client that makes the requests.
#[derive(Clone, Copy)]
enum Client {
    Nowait,
    Aio,
    Tasks(AsyncApi),
    BareRing,
    Blocking,
    Psync,
}

impl Client {
    fn name(self) -> String {
        match self {
            Client::Nowait => "nowait".to_owned(),
            Client::Aio => "nowait, Linux AIO".to_owned(),
            Client::Tasks(api) => api.name().to_owned(),
            Client::BareRing => "bare ring".to_owned(),
            Client::Blocking => "BlockingFile".to_owned(),
            Client::Psync => "psync".to_owned(),
        }
    }

    fn measure(self, fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
        let plain = || Fixture::plain(fixture.path, fixture.writable, fixture.direct);
        let config = every_request_tried();
        match self {
            Client::Nowait => fixture.on(Queue::File, load, config),
            Client::Aio => fixture.on(Queue::Aio, load, config),
            Client::Tasks(api) => async_loop::run(api, fixture, load, config),
            Client::BareRing => {
                let mut ring = BareRing::new(&plain()?, load)?;
                fixture.measure(load, true, |offsets, condition| ring.run(offsets, condition))
            }
            Client::Blocking => {
                blocking_calls::run(&BlockingFile::new(fixture.disk()?), load, fixture)
            }
            Client::Psync => blocking_calls::run(&plain()?, load, fixture),
        }
    }

    /// Measures on a thread that is pinned to one processor, together with all threads and
    /// processes that it starts.
    fn measure_pinned(self, fixture: &Fixture<'_>, load: &Workload) -> io::Result<Sample> {
        let placement = Placement::choose().map_err(io::Error::other)?;
        thread::scope(|scope| {
            let measurement = scope.spawn(|| {
                placement.pin_to_server_cpus(1)?;
                self.measure(fixture, load)
            });
            measurement.join().unwrap_or_else(|_| Err(io::Error::other("the client panicked")))
        })
    }
}

pub(crate) fn tables<'a>(fixture: &'a Fixture<'a>) -> Vec<Table<'a>> {
    let apis = [AsyncApi::ThisThread, AsyncApi::AnyThread].map(Client::Tasks);
    let mut clients = vec![Client::Nowait, Client::BareRing, Client::Aio];
    clients.extend(apis.into_iter().chain([Client::Blocking, Client::Psync]));
    let row = |direction, depth| {
        let load = Workload { direction, depth, ..RANDOM_READ };
        let measured =
            |&client: &Client| cell(client.name(), move || client.measure_pinned(fixture, &load));
        let cells = clients.iter().map(measured).collect();
        Row { title: format!("depth {depth}"), source: None, cells }
    };
    let table = |&direction: &Direction| Table {
        what: What::Engines,
        title: format!("this engine and others, 4K random {}", direction.name()),
        unit: Unit::Iops,
        gain: Metric::FirstOver,
        note: NOTE.to_owned(),
        rows: [1, 32, 128].map(|depth| row(direction, depth)).into(),
    };
    fixture.directions().iter().map(table).collect()
}
