//! The comparison of servers, by NBD or vhost-user, and on images: for each table and workload, each server in turn,
//! round after round.
//!
//! Invariant: at most one server runs at a time.

use std::fmt;
use std::io::Write;
use std::path::Path;

use nowait_nbd::Address;
use serde_json::{Value, json};

use crate::address;
use crate::args::{BenchArgs, What};
use crate::bench::Bench;
use crate::certificates::SUITE;
use crate::error::Error;
use crate::image_kind::ImageKind;
use crate::machine::Machine;
use crate::measurement::Runner;
use crate::report::{Entry, Report, Reporter};
use crate::samples::{Sample, cells, json as figures_json, titles};
use crate::server::{Program, ServerFiles, ServerKind, Servers};
use crate::table::{aligned, ratio};
use crate::test_file::{Access, Target};
use crate::test_images::TestImages;
use crate::workload::{Caching, Conditions, Direction, Transport, Workload, flood};

/// The port that the command lines in a report show.
const EXAMPLE_PORT: u16 = 10809;
/// From this busy time on, the client may limit the result.
const CLIENT_BUSY_LIMIT: f64 = 0.9;

/// The numbers of queues of a virtual machine that are measured.
const QUEUES: [usize; 2] = [1, 2];

/// The tables, on `images`. There are none over TCP and vhost-user unless they are asked for. Formats are compared past the
/// page cache, which would hide them.
fn tables(args: &BenchArgs, images: &[ImageKind]) -> Vec<TableTerms> {
    let of_images = args.what == What::Images;
    let is_chosen = |terms: &Conditions| {
        let transport = match args.transport {
            Some(transport) => terms.transport == transport,
            None if of_images => terms.transport == Transport::Plain,
            None => !matches!(terms.transport, Transport::Tcp | Transport::VhostUser),
        };
        let caching = if of_images { Some(Caching::Direct) } else { args.caching };
        transport && caching.is_none_or(|caching| terms.caching == caching)
    };
    let mut tables = Vec::new();
    for terms in Conditions::ALL.into_iter().filter(is_chosen) {
        let of_nbd = &[args.connections().unwrap_or(1)][..];
        let connections = match (terms.transport, args.connections) {
            (Transport::VhostUser, None) => &QUEUES,
            _ => of_nbd,
        };
        for &image in images {
            let table = |&connections: &usize| TableTerms { terms, connections, image };
            tables.extend(connections.iter().map(table));
        }
    }
    tables
}

fn workloads(args: &BenchArgs) -> Result<Vec<Workload>, Error> {
    let all = match (args.what, args.transport) {
        (What::Images, _) => Workload::of_images(),
        (_, Some(Transport::VhostUser)) => Workload::of_virtual_machines(),
        _ => Workload::standard(),
    };
    only(args.only.as_deref(), all, Workload::to_string)
}

/// The items of `all` whose title contains `text`.
pub(crate) fn only<T>(
    text: Option<&str>,
    mut all: Vec<T>,
    title: impl Fn(&T) -> String,
) -> Result<Vec<T>, Error> {
    let Some(text) = text else { return Ok(all) };
    all.retain(|one| title(one).contains(text));
    let nothing = Error::NoRow { only: text.to_owned() };
    if all.is_empty() { Err(nothing) } else { Ok(all) }
}

/// Measures servers; without a file vhost-user is also measured on a qcow2 image, if qemu-img is installed. Image formats
/// are measured on images that are made, which nbdkit cannot serve all of.
pub(crate) fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let args = &bench.args;
    let of_images = args.what == What::Images;
    let of_vhost_user = args.transport == Some(Transport::VhostUser);
    let mut workloads = workloads(args)?;
    let mut reporter = Reporter::begin(bench, out);
    let mut kinds = args.servers();
    kinds.retain(|kind| args.transport.is_none_or(|transport| kind.has(transport)));
    kinds.retain(|kind| !of_images || *kind != ServerKind::Nbdkit);
    let servers = Servers::find(&kinds, bench.nowait.as_deref())?;
    let mut targets = Vec::new();
    if !of_images {
        let direct = args.caching != Some(Caching::PageCache);
        targets.push(Target::open(args.file.as_deref(), args.overwrite, direct)?);
    }
    let makes = of_images || (of_vhost_user && args.file.is_none() && TestImages::has_tools());
    let images = makes.then(TestImages::make).transpose()?;
    let kinds = if of_images { &ImageKind::ALL[..] } else { &[ImageKind::Qcow2] };
    for (images, kind) in
        images.iter().flat_map(|images| kinds.iter().map(move |kind| (images, *kind)))
    {
        targets.push(images.image(kind).map_err(Error::system("opening an image"))?);
    }
    let writes = |target: &Target| target.access == Access::ReadWrite;
    workloads.retain(|workload| targets.iter().all(writes) || !workload.writes());
    let runner = Runner::new(bench)?;
    let kinds: Vec<ImageKind> = targets.iter().map(|target| target.image).collect();
    let tables = tables(args, &kinds);
    let peers = Peers { bench, targets, images, servers, machine: Machine::this()?, runner };
    let entries = tables.len() * workloads.len() * peers.servers.programs.len();
    reporter.heading(&peers.heading(), entries)?;
    for terms in tables {
        if !peers.table(terms, &workloads, &mut reporter)? {
            break;
        }
    }
    peers.end(reporter)
}

/// The terms of a table, which its servers have in common.
#[derive(Clone, Copy)]
struct TableTerms {
    terms: Conditions,
    /// Connections, or queues of vhost-user.
    connections: usize,
    image: ImageKind,
}

/// Text: `direct, TLS`, `direct, qcow2`, or `direct, vhost-user, 2 queue(s), qcow2`.
impl fmt::Display for TableTerms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TableTerms { terms, connections, image } = self;
        match (terms.transport, image) {
            (Transport::VhostUser, _) => {
                write!(f, "{terms}, {connections} queue(s), {}", image.name())
            }
            (_, ImageKind::Raw) => terms.fmt(f),
            _ => write!(f, "{terms}, {}", image.name()),
        }
    }
}

/// The servers and images that all tables have in common.
struct Peers<'a> {
    bench: &'a Bench,
    /// Each kind of image that is measured.
    targets: Vec<Target>,
    /// The images that were made.
    images: Option<TestImages>,
    servers: Servers,
    machine: Machine,
    runner: Runner<'a>,
}

impl Peers<'_> {
    /// Measures one table. False if cancelled.
    fn table(
        &self,
        table: TableTerms,
        workloads: &[Workload],
        reporter: &mut Reporter<'_>,
    ) -> Result<bool, Error> {
        let TableTerms { terms, connections, image } = table;
        let Some(target) = self.targets.iter().find(|it| it.image == image) else {
            return Ok(true);
        };
        // In a chain the first write to a cluster allocates.
        let is_there =
            |it: &&Workload| image != ImageKind::Chain || it.direction == Direction::Read;
        let mut working = self.servers.programs.clone();
        let mut heading = self.heading_of_table(table, target.access);
        for &workload in workloads.iter().filter(is_there) {
            let name = |program: &Program| format!("{workload}, {table}: {}", program.kind.name());
            let measure = |program: &Program| {
                self.images.iter().try_for_each(TestImages::drop_cached)?;
                target.prepare(terms.caching)?;
                self.runner.take(program, target, &workload, (terms, connections))
            };
            let failure = |program: &Program, problem: &str| {
                let server = program.kind.name();
                let object = json!({
                    "server": server,
                    "workload": workload.to_string(),
                    "caching": terms.caching.name(),
                    "transport": terms.transport.name(),
                    "connections": connections,
                    "format": image.name(),
                    "problem": problem,
                });
                (format!("{server} failed at {workload}, {table}: {problem}"), object)
            };
            let Some(rows) = reporter.compare(working, name, measure, failure) else {
                return Ok(false);
            };
            working = rows.iter().map(|row| row.key.clone()).collect();
            if rows.is_empty() {
                break;
            }
            let comparison = Comparison { workload, table, rows };
            let text = std::mem::take(&mut heading) + &comparison.text();
            reporter.table(&text, comparison.to_json())?;
        }
        Ok(true)
    }

    /// The lines before the first table.
    fn heading(&self) -> String {
        let of_target = |target: &Target| target.lines(target.bytes);
        let args = &self.bench.args;
        let connections = match args.transport {
            Some(Transport::VhostUser) => String::new(),
            _ => format!("; {} connection(s)", args.connections().unwrap_or(1)),
        };
        format!(
            "{}; {}\n{}{}{connections}\n{}",
            self.machine.line(),
            self.runner.placement,
            self.targets.iter().map(of_target).collect::<String>(),
            self.bench.rounds(" server"),
            self.servers.lines()
        )
    }

    /// The lines before the first workload of a table: how the servers are started.
    fn heading_of_table(&self, table: TableTerms, access: Access) -> String {
        let terms = table.terms;
        let mut text = format!("\n== {table} ==\n");
        let kinds: Vec<ServerKind> = self.servers.programs.iter().map(|it| it.kind).collect();
        for &kind in &kinds {
            text += &format!("{}\n", command_line(kind, table, access));
        }
        if terms.transport == Transport::Tls {
            text += &format!("negotiated: {} (the client offers nothing else)\n", SUITE);
        }
        if terms.transport == Transport::VhostUser && table.connections > 1 {
            text += &self.runner.placement.of_several_queues();
        }
        if kinds.iter().any(|kind| !kind.can(terms.caching)) {
            text += "* through the page cache, dropping pages after use: it has no direct I/O, and is not \
                     counted as a peer in this table\n";
        }
        if terms.caching == Caching::PageCache {
            text += "writing back to storage is done by the kernel and is not in the servers' CPU time\n";
        }
        text
    }

    fn end(&self, reporter: Reporter<'_>) -> Result<Report, Error> {
        let mut head = self.servers.to_json(&self.machine, self.runner.placement);
        let files = self.targets.iter().map(|target| target.to_json(target.bytes));
        head["files"] = files.collect();
        head["seconds"] = self.bench.args.duration().as_secs_f64().into();
        head["connections"] = self.bench.args.connections().unwrap_or(1).into();
        reporter.end(head, "comparisons")
    }
}

fn command_line(kind: ServerKind, table: TableTerms, access: Access) -> String {
    let TableTerms { terms, connections: queues, image } = table;
    let [file, certificates] = ["FILE", "DIR"].map(Path::new);
    let address = match terms.transport {
        Transport::Tcp => address::loopback(EXAMPLE_PORT),
        Transport::Plain | Transport::Tls | Transport::VhostUser => Address::Unix("SOCKET".into()),
    };
    let server_files = ServerFiles { file, image, address: &address, queues, certificates };
    let arguments = kind.arguments(terms, access, server_files).join(" ".as_ref());
    format!("{} {}", kind.name(), arguments.to_string_lossy())
}

/// All servers under one workload, without those that failed.
struct Comparison {
    workload: Workload,
    table: TableTerms,
    rows: Vec<Entry<Program, Sample>>,
}

/// Nowait compared with the best other server: each figure divided by its.
struct ToBestPeer {
    peer: &'static str,
    iops: f64,
    p99: f64,
    cpu: f64,
}

fn iops(row: &Entry<Program, Sample>) -> f64 {
    row.median(|sample| sample.iops)
}

impl Comparison {
    fn nowait(&self) -> Option<&Entry<Program, Sample>> {
        self.rows.iter().find(|row| row.key.kind == ServerKind::Nowait)
    }

    /// The best peer is the one with the most requests per second, or beside a flood with the
    /// lowest 99th percentile, among those that support the caching mode of this table.
    fn to_best_peer(&self) -> Option<ToBestPeer> {
        let nowait = self.nowait()?;
        let p99 = |row: &Entry<_, Sample>| row.median(|sample| sample.p99_us);
        let cpu = |row: &Entry<_, Sample>| row.median(|sample| sample.server_cpu_us);
        let is_peer = |row: &&Entry<Program, Sample>| {
            row.key.kind != ServerKind::Nowait && row.key.kind.can(self.table.terms.caching)
        };
        let best = self.rows.iter().filter(is_peer).max_by(|a, b| match self.workload.beside {
            None => iops(a).total_cmp(&iops(b)),
            Some(_) => p99(b).total_cmp(&p99(a)),
        })?;
        Some(ToBestPeer {
            peer: best.key.kind.name(),
            iops: ratio(iops(nowait), iops(best)),
            p99: ratio(p99(nowait), p99(best)),
            cpu: ratio(cpu(nowait), cpu(best)),
        })
    }

    fn titles(&self) -> Vec<String> {
        let mut all = vec!["server".to_owned()];
        all.extend(titles(&self.workload));
        all.extend(self.nowait().map(|_| "nowait ÷ it".to_owned()));
        all
    }

    fn cells(&self, row: &Entry<Program, Sample>) -> Vec<String> {
        let star = if row.key.kind.can(self.table.terms.caching) { "" } else { " *" };
        let mut all = vec![format!("{}{star}", row.key.kind.name())];
        all.extend(cells(row, &self.workload));
        all.extend(self.nowait().map(|nowait| format!("{:.2}", ratio(iops(nowait), iops(row)))));
        all
    }

    fn text(&self) -> String {
        let lines = std::iter::once(self.titles()).chain(self.rows.iter().map(|r| self.cells(r)));
        let lines = aligned(&lines.collect::<Vec<_>>());
        let mut text = format!("\n{}, {}\n{lines}", self.workload, self.table);
        if let Some(ToBestPeer { peer, iops, p99, cpu }) = self.to_best_peer() {
            text += &format!(
                "nowait ÷ best peer ({peer}): IOPS {iops:.2}, p99 {p99:.2}, CPU per request {cpu:.2}\n"
            );
        }
        let is_busy = |row: &Entry<_, Sample>| row.median(|it| it.client_busy) > CLIENT_BUSY_LIMIT;
        for row in self.rows.iter().filter(|row| is_busy(row)) {
            let name = row.key.kind.name();
            text += &format!("{name}: the client may be the limit here, not the server\n");
        }
        text
    }

    fn to_json(&self) -> Value {
        let best = self.to_best_peer().map(|best| {
            json!({
                "peer": best.peer,
                "iops_ratio": best.iops,
                "p99_ratio": best.p99,
                "server_cpu_ratio": best.cpu,
            })
        });
        let row = |row: &Entry<Program, Sample>| {
            let mut object = figures_json(row, &self.workload, row.key.kind);
            object
                .insert("comparable".to_owned(), row.key.kind.can(self.table.terms.caching).into());
            object
        };
        json!({
            "workload": self.workload.to_string(),
            "caching": self.table.terms.caching.name(),
            "transport": self.table.terms.transport.name(),
            "connections": self.table.connections,
            "format": self.table.image.name(),
            "direction": self.workload.direction.name(),
            "order": self.workload.order.name(),
            "block_bytes": self.workload.block_bytes,
            "depth": self.workload.depth,
            "beside": self.workload.beside.map(|direction| flood(direction).to_string()),
            "servers": self.rows.iter().map(row).collect::<Vec<_>>(),
            "nowait_to_best_peer": best,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comparison() -> Comparison {
        let row = |kind, iops: [f64; 3], server_cpu_us| {
            let of = |iops| Sample { iops, p99_us: 20.0, server_cpu_us, ..Sample::default() };
            let samples = iops.map(of).to_vec();
            Entry { samples, ..Entry::new(Program::example(kind)) }
        };
        let rows = vec![
            row(ServerKind::Nowait, [3000.0, 1000.0, 2000.0], 5.0),
            row(ServerKind::QemuNbd, [1000.0; 3], 10.0),
            row(ServerKind::Nbdkit, [9000.0; 3], 1.0),
        ];
        let terms = Conditions::ALL[0];
        let table = TableTerms { terms, connections: 1, image: ImageKind::Raw };
        Comparison { workload: Workload::standard()[0], table, rows }
    }

    #[test]
    fn a_server_without_direct_io_is_shown_but_is_not_the_best_peer_of_the_direct_table() {
        let mut comparison = comparison();
        let text = comparison.text();
        assert!(text.contains("\nnbdkit * "), "{text}");
        let best = "nowait ÷ best peer (qemu-nbd): IOPS 2.00, p99 1.00, CPU per request 0.50\n";
        assert!(text.contains(best), "{text}");
        comparison.table.terms.caching = Caching::PageCache;
        assert_eq!(comparison.to_best_peer().map(|best| best.peer), Some("nbdkit"));
    }

    #[test]
    fn the_json_object_has_the_figures_of_the_text() {
        let json = comparison().to_json();
        let iops = json!({ "median": 2000.0, "min": 1000.0, "max": 3000.0 });
        assert_eq!((&json["depth"], &json["servers"][0]["iops"]), (&json!(1), &iops));
        assert_eq!(json["servers"][2]["comparable"], false);
        assert_eq!(json["nowait_to_best_peer"]["iops_ratio"], 2.0);
    }

    #[test]
    fn nothing_to_measure_is_an_error_before_a_file_is_created() {
        for (words, text) in [("--only x", "--only x: "), ("--servers nowait", "no server")] {
            let bench = Bench::of(&format!("peers {words}"));
            let error = run(&bench, &mut Vec::new()).err().map(|error| error.to_string());
            assert!(error.as_ref().is_some_and(|error| error.starts_with(text)), "{error:?}");
        }
    }
}
