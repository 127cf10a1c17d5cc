//! One measurement: a server is started, warmed up, measured under one workload, and stopped.
//!
//! Invariant: the server has ended when the measurement returns, on success and on failure, and the
//! affinity of the calling thread is restored.

use std::time::{Duration, Instant};
use std::{io, thread};

use nowait_nbd::Address;
use rustix::time::ClockId;
use tempfile::TempDir;

use crate::bench::Bench;
use crate::cancel::CancelFlag;
use crate::certificates::Certificates;
use crate::client::{Client, ConnectOptions, Interval, Load, latency_histogram};
use crate::cpus::Placement;
use crate::error::Error;
use crate::process_stats::{clock_ns, process_ns, resident_bytes};
use crate::samples::Sample;
use crate::server::{Program, Server};
use crate::test_file::Target;
use crate::vhost_client::VhostClient;
use crate::workload::{Conditions, Transport, Workload, flood};

const WARM_UP: Duration = Duration::from_millis(200);
const BYTES_PER_MIB: f64 = 1_048_576.0;
const NS_PER_US: f64 = 1e3;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// The parameters that all measurements have in common.
pub(crate) struct Runner<'a> {
    pub(crate) placement: Placement,
    /// The certificates for the tables over TLS.
    certificates: Certificates,
    /// A directory for sockets and messages.
    pub(crate) scratch: TempDir,
    duration: Duration,
    stop: &'a CancelFlag,
}

impl<'a> Runner<'a> {
    pub(crate) fn new(bench: &'a Bench) -> Result<Self, Error> {
        let scratch = TempDir::with_prefix("nowait-bench-")
            .map_err(Error::system("making a directory for sockets"))?;
        let certificates = Certificates::make().map_err(Error::system("making certificates"))?;
        let (duration, stop) = (bench.args.duration(), &bench.stop);
        let placement = Placement::choose()?;
        Ok(Self { placement, certificates, scratch, duration, stop })
    }

    /// Measures `program` on `target` once, with so many `connections`: of vhost-user they are
    /// queues of one device. After a cancellation the sample is meaningless.
    pub(crate) fn take(
        &self,
        program: &Program,
        target: &Target,
        workload: &Workload,
        (terms, connections): (Conditions, usize),
    ) -> io::Result<Sample> {
        let queues = if terms.transport == Transport::VhostUser { connections } else { 1 };
        let places = (&self.certificates, self.scratch.path());
        let start = || Server::start(program, target, terms, queues, places);
        let on = (terms, connections);
        self.at_server(queues, start, |server| self.measure(server, program, target, workload, on))
    }

    /// Starts a server on its processor, or on both for several `queues`, and has it measured on that of the client.
    pub(crate) fn at_server<T: Send>(
        &self,
        queues: usize,
        start: impl FnOnce() -> io::Result<Server> + Send,
        measure: impl FnOnce(&mut Server) -> io::Result<T> + Send,
    ) -> io::Result<T> {
        thread::scope(|scope| {
            let measurement = scope.spawn(|| {
                self.placement.pin_to_server_cpus(queues)?;
                let mut server = start()?;
                self.placement.pin_to_client_cpu()?;
                let sample = measure(&mut server)
                    .map_err(|e| io::Error::other(format!("{e}{}", server.last_message())))?;
                server.stop()?;
                Ok(sample)
            });
            measurement.join().unwrap_or_else(|_| Err(io::Error::other("the client panicked")))
        })
    }

    fn measure(
        &self,
        server: &mut Server,
        program: &Program,
        target: &Target,
        workload: &Workload,
        (terms, connections): (Conditions, usize),
    ) -> io::Result<Sample> {
        let export = program.kind.export();
        if terms.transport == Transport::VhostUser {
            let client = server.when_ready(|address| match address {
                Address::Unix(path) => {
                    VhostClient::connect(path, workload, connections, target.bytes)
                }
                Address::Tcp { .. } => Err(io::Error::other("a socket of vhost-user is a path")),
            })?;
            return self.measure_client(client, server);
        }
        let certificates = (terms.transport == Transport::Tls).then_some(&self.certificates);
        let mut connect = |workload: &Workload, connections| {
            server.when_ready(|address| {
                let connect_options =
                    ConnectOptions { certificates, ..ConnectOptions::plain(address, export) };
                Client::connect(&connect_options, workload, connections, target.bytes)
            })
        };
        let client = connect(workload, connections)?;
        let Some(load) = workload.beside.map(flood) else {
            return self.measure_client(client, server);
        };
        let beside = connect(&load, 1)?;
        let enough = CancelFlag::default();
        thread::scope(|scope| {
            let beside = scope.spawn(|| run_until(beside, &enough));
            let sample = self.measure_client(client, server);
            enough.request();
            let beside =
                beside.join().map_err(|_| io::Error::other("the neighbour's client panicked"))?;
            let bytes_a_second = beside?.per_second() * load.block_bytes as f64;
            Ok(Sample { beside_mib_s: bytes_a_second / BYTES_PER_MIB, ..sample? })
        })
    }

    /// Measures `client` after a while of its load.
    pub(crate) fn measure_client<L: Load>(
        &self,
        mut client: L,
        server: &Server,
    ) -> io::Result<Sample> {
        client.run_for(WARM_UP, &mut latency_histogram()?, self.stop)?;
        self.measure_warm(client, server)
    }

    /// Measures `client` from its next request on.
    pub(crate) fn measure_warm<L: Load>(
        &self,
        mut client: L,
        server: &Server,
    ) -> io::Result<Sample> {
        let mut latencies_ns = latency_histogram()?;
        let (server_before, client_before) = (process_ns(server.pid())?, this_threads_ns());
        let interval = client.run_for(self.duration, &mut latencies_ns, self.stop)?;
        let (server_after, client_after) = (process_ns(server.pid())?, this_threads_ns());
        let resident = resident_bytes(server.pid())?;
        client.finish()?;
        if interval.requests == 0 {
            return Err(io::Error::other("finished no request in time"));
        }

        let (requests, seconds) = (interval.requests as f64, interval.elapsed.as_secs_f64());
        let client_ns = client_after.saturating_sub(client_before);
        Ok(Sample {
            iops: interval.per_second(),
            p50_us: latencies_ns.value_at_quantile(0.5) as f64 / NS_PER_US,
            p99_us: latencies_ns.value_at_quantile(0.99) as f64 / NS_PER_US,
            server_cpu_us: server_after.saturating_sub(server_before) as f64 / NS_PER_US / requests,
            server_rss_mib: resident as f64 / BYTES_PER_MIB,
            client_busy: client_ns as f64 / NS_PER_SECOND as f64 / seconds,
            beside_mib_s: 0.0,
        })
    }
}

/// Runs the background `client` until `enough` is set. It yields its processor to the measured
/// client after each receive, so that the measured client waits only for the server.
fn run_until(mut client: Client, enough: &CancelFlag) -> io::Result<Interval> {
    let (begin, mut requests, mut unused) = (Instant::now(), 0, latency_histogram()?);
    while !enough.requested() {
        requests += client.run_for(Duration::ZERO, &mut unused, enough)?.requests;
        thread::yield_now();
    }
    let elapsed = begin.elapsed();
    client.finish()?;
    Ok(Interval { requests, elapsed })
}

fn this_threads_ns() -> u64 {
    clock_ns(ClockId::ThreadCPUTime)
}
