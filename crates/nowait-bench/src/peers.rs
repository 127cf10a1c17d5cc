//! The comparison of NBD servers: for each table and workload, each server in turn, round after
//! round.
//!
//! Invariant: at most one server runs at a time.

use std::io::Write;
use std::path::{Path, PathBuf};

use nowait_nbd::Address;
use serde_json::{Value, json};

use crate::address;
use crate::certificates::SUITE;
use crate::error::Error;
use crate::fio;
use crate::measurement::Runner;
use crate::page::escaped;
use crate::report::{Entry, Machine, Report, Reporter, RunOptions};
use crate::samples::{Sample, cells, json as figures_json, titles};
use crate::server::{Program, ServerFiles, ServerKind, Servers};
use crate::table::{aligned, html_cells, ratio};
use crate::test_file::{Access, Format, Target};
use crate::workload::{Caching, ClientKind, Conditions, Transport, Workload};

/// The port that the command lines in a report show.
const EXAMPLE_PORT: u16 = 10809;
/// From this busy time on, the client may limit the result.
const CLIENT_BUSY_LIMIT: f64 = 0.9;

/// The options of a comparison of NBD servers. The default is all servers and workloads, without
/// TCP, on a temporary file.
#[derive(Clone, Debug)]
pub struct PeersOptions {
    /// The options of every measurement.
    pub run: RunOptions,
    /// The nowait program; `None` measures the others alone.
    pub nowait: Option<PathBuf>,
    /// The servers to measure, if installed.
    pub servers: Vec<ServerKind>,
    /// The file or block device to serve, at least 64 MiB; `None` creates a file of 256 MiB in
    /// `$TMPDIR`, or in /var/tmp, and removes it afterwards.
    pub file: Option<PathBuf>,
    /// The client that makes the requests. fio makes no requests over TLS or beside others here.
    pub client: ClientKind,
    /// Concurrent connections, 1 to 64, each with the depth of the workload.
    pub connections: usize,
    /// Only workloads whose title contains this.
    pub only: Option<String>,
    /// Only tables with this caching.
    pub caching: Option<Caching>,
    /// Only tables with this transport; `None` is all but TCP.
    pub transport: Option<Transport>,
}

impl Default for PeersOptions {
    fn default() -> PeersOptions {
        PeersOptions {
            run: RunOptions::default(),
            nowait: None,
            servers: ServerKind::ALL.to_vec(),
            file: None,
            client: ClientKind::Own,
            connections: 1,
            only: None,
            caching: None,
            transport: None,
        }
    }
}

impl PeersOptions {
    fn tables(&self) -> Vec<Conditions> {
        let is_chosen = |terms: &Conditions| {
            let transport = match self.transport {
                Some(transport) => terms.transport == transport,
                None => terms.transport != Transport::Tcp,
            };
            let by_fio = self.client == ClientKind::Fio && terms.transport == Transport::Tls;
            transport && !by_fio && self.caching.is_none_or(|caching| terms.caching == caching)
        };
        Conditions::ALL.into_iter().filter(is_chosen).collect()
    }

    fn workloads(&self) -> Result<Vec<Workload>, Error> {
        let mut chosen = only(self.only.as_deref(), Workload::standard(), Workload::to_string)?;
        chosen.retain(|workload| self.client == ClientKind::Own || workload.beside.is_none());
        Ok(chosen)
    }
}

/// Those of `all` whose title contains `text`.
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

/// Measures, writes the result to `out` and returns it.
///
/// A server that fails is left out of the rest of its table and named in the report.
///
/// # Errors
/// [`Error::Option`], [`Error::NoRow`] and [`Error::File`] before anything is started,
/// [`Error::NoServer`] if nothing can be, [`Error::System`] if `out` cannot be written or the file
/// not be prepared.
pub fn run_peers(options: &PeersOptions, out: &mut dyn Write) -> Result<Report, Error> {
    let connections = options.connections;
    Error::unless((1..=64).contains(&connections), "connections", "has to be 1 to 64")?;
    let has_fio = options.client == ClientKind::Own || fio::version().is_some();
    Error::unless(has_fio, "client", "fio is not installed")?;
    let (tables, mut workloads) = (options.tables(), options.workloads()?);
    let mut reporter = Reporter::begin(&options.run, out)?;
    let servers = Servers::find(&options.servers, options.nowait.as_deref())?;
    let direct = tables.iter().any(|terms| terms.caching == Caching::Direct);
    let target = Target::open(options.file.as_deref(), options.run.overwrite, direct)?;
    workloads.retain(|workload| target.access == Access::ReadWrite || !workload.writes());
    let runner = Runner::new(&options.run, options.client, connections)?;
    let peers = Peers { options, target, servers, machine: Machine::this()?, runner };
    let entries = tables.len() * workloads.len() * peers.servers.programs.len();
    reporter.heading(peers.heading(), entries)?;
    for terms in tables {
        if !peers.table(terms, &workloads, &mut reporter)? {
            break;
        }
    }
    peers.end(reporter)
}

/// What all tables have in common.
struct Peers<'a> {
    options: &'a PeersOptions,
    target: Target,
    servers: Servers,
    machine: Machine,
    runner: Runner<'a>,
}

impl Peers<'_> {
    /// Measures one table. False if cancelled.
    fn table(
        &self,
        terms: Conditions,
        workloads: &[Workload],
        reporter: &mut Reporter<'_>,
    ) -> Result<bool, Error> {
        let mut working = self.servers.programs.clone();
        let mut heading = self.heading_of_table(terms);
        let mut section = format!("<h2>{}</h2>\n", escaped(&terms.to_string()));
        for line in heading.lines().skip(2) {
            section += &format!("<p>{}</p>\n", escaped(line));
        }
        for &workload in workloads {
            let name = |program: &Program| format!("{workload}, {terms}: {}", program.kind.name());
            let measure = |program: &Program| {
                self.target.prepare(terms.caching)?;
                self.runner.take(program, &self.target, &workload, terms)
            };
            let failure = |program: &Program, problem: &str| {
                let server = program.kind.name();
                let object = json!({
                    "server": server,
                    "workload": workload.to_string(),
                    "caching": terms.caching.name(),
                    "transport": terms.transport.name(),
                    "problem": problem,
                });
                (format!("{server} failed at {workload}, {terms}: {problem}"), object)
            };
            let Some(rows) = reporter.compare(working, name, measure, failure) else {
                return Ok(false);
            };
            working = rows.iter().map(|row| row.key.clone()).collect();
            if rows.is_empty() {
                break;
            }
            let comparison = Comparison { workload, terms, rows };
            let text = std::mem::take(&mut heading) + &comparison.text();
            let section = std::mem::take(&mut section) + &comparison.section();
            reporter.table(&text, comparison.to_json(), &section)?;
        }
        Ok(true)
    }

    /// The lines before the first table.
    fn heading(&self) -> String {
        let run = &self.options.run;
        format!(
            "Linux {}, {}; {}\n{}{} rounds of {} s for each server, in turns; {} connection(s)\n{}",
            self.machine.kernel,
            self.machine.processor,
            self.runner.placement,
            self.target.lines(self.target.bytes),
            run.rounds,
            run.duration.as_secs_f64(),
            self.options.connections,
            self.servers.lines()
        )
    }

    /// The lines before the first workload of a table: how the servers are started.
    fn heading_of_table(&self, terms: Conditions) -> String {
        let mut text = format!("\n== {terms} ==\n");
        let kinds: Vec<ServerKind> = self.servers.programs.iter().map(|it| it.kind).collect();
        for &kind in &kinds {
            text += &format!("{}\n", command_line(kind, terms, self.target.access));
        }
        if terms.transport == Transport::Tls {
            text += &format!("negotiated: {} (the client offers nothing else)\n", SUITE);
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
        let failures = reporter.failure_lines();
        let ending: String = failures.iter().map(|line| format!("\n{line}\n")).collect();
        let warn = |line: &String| format!("<p class=warn>{}</p>\n", escaped(line));
        let mut head = self.servers.to_json(&self.machine, self.runner.placement);
        head["file"] = self.target.to_json(self.target.bytes);
        head["seconds"] = self.options.run.duration.as_secs_f64().into();
        head["connections"] = self.options.connections.into();
        let glance: String = failures.iter().map(warn).collect();
        reporter.end(("nowait bench peers", &glance), &ending, head, "comparisons")
    }
}

fn command_line(kind: ServerKind, terms: Conditions, access: Access) -> String {
    let [file, certificates] = ["FILE", "DIR"].map(Path::new);
    let address = match terms.transport {
        Transport::Tcp => address::loopback(EXAMPLE_PORT),
        Transport::Plain | Transport::Tls => Address::Unix("SOCKET".into()),
    };
    let server_files = ServerFiles { file, format: Format::Raw, address: &address, certificates };
    let arguments = kind.arguments(terms, access, server_files).join(" ".as_ref());
    format!("{} {}", kind.name(), arguments.to_string_lossy())
}

/// All servers under one workload, without those that failed.
struct Comparison {
    workload: Workload,
    terms: Conditions,
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
            row.key.kind != ServerKind::Nowait && row.key.kind.can(self.terms.caching)
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
        let star = if row.key.kind.can(self.terms.caching) { "" } else { " *" };
        let mut all = vec![format!("{}{star}", row.key.kind.name())];
        all.extend(cells(row, &self.workload));
        all.extend(self.nowait().map(|nowait| format!("{:.2}", ratio(iops(nowait), iops(row)))));
        all
    }

    fn text(&self) -> String {
        let lines = std::iter::once(self.titles()).chain(self.rows.iter().map(|r| self.cells(r)));
        let lines = aligned(&lines.collect::<Vec<_>>());
        let mut text = format!("\n{}, {}\n{lines}", self.workload, self.terms);
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
            object.insert("comparable".to_owned(), row.key.kind.can(self.terms.caching).into());
            object
        };
        json!({
            "workload": self.workload.to_string(),
            "caching": self.terms.caching.name(),
            "transport": self.terms.transport.name(),
            "direction": self.workload.direction.name(),
            "order": self.workload.order.name(),
            "block_bytes": self.workload.block_bytes,
            "depth": self.workload.depth,
            "beside": self.workload.beside.map(|neighbour| neighbour.to_string()),
            "servers": self.rows.iter().map(row).collect::<Vec<_>>(),
            "nowait_to_best_peer": best,
        })
    }

    /// The section of the page: a bar for the requests per second of each server, and all figures.
    fn section(&self) -> String {
        let title = escaped(&self.workload.to_string());
        let mut titles = self.titles();
        titles.insert(1, String::new());
        let mut html = format!(
            "<section><h2>{title}</h2>\n<div class=scroll><table>\n<tr>{}</tr>\n",
            html_cells("th", 0, &titles)
        );
        let most = self.rows.iter().map(iops).fold(f64::MIN_POSITIVE, f64::max);
        for row in &self.rows {
            let ours = if row.key.kind == ServerKind::Nowait { " class=ours" } else { "" };
            let (percent, cells) = (100.0 * iops(row) / most, self.cells(row));
            let (name, figures) = cells.split_at(1);
            html += &format!(
                "<tr{ours}>{}<td class=bar><i style=\"width:{percent:.0}%\"></i></td>{}</tr>\n",
                html_cells("td", 1, name),
                html_cells("td", 0, figures)
            );
        }
        html + "</table></div></section>\n"
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
        Comparison { workload: Workload::standard()[0], terms: Conditions::ALL[0], rows }
    }

    #[test]
    fn a_server_without_direct_io_is_shown_but_is_not_the_best_peer_of_the_direct_table() {
        let mut comparison = comparison();
        let text = comparison.text();
        assert!(text.contains("\nnbdkit * "), "{text}");
        let best = "nowait ÷ best peer (qemu-nbd): IOPS 2.00, p99 1.00, CPU per request 0.50\n";
        assert!(text.contains(best), "{text}");
        comparison.terms.caching = Caching::PageCache;
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
    fn an_option_out_of_range_is_rejected_by_name_before_a_file_is_created() {
        let many = PeersOptions { connections: 65, ..PeersOptions::default() };
        let none = PeersOptions { only: Some("x".into()), ..PeersOptions::default() };
        let alone = PeersOptions { servers: vec![ServerKind::Nowait], ..PeersOptions::default() };
        for (options, text) in [(many, "connections: "), (none, "--only x: "), (alone, "no server")]
        {
            let error = run_peers(&options, &mut Vec::new()).err().map(|error| error.to_string());
            assert!(error.as_ref().is_some_and(|error| error.starts_with(text)), "{error:?}");
        }
    }

    #[test]
    fn fio_has_no_tables_over_tls_and_no_rows_beside_others() {
        let options = PeersOptions { client: ClientKind::Fio, ..PeersOptions::default() };
        assert!(options.tables().iter().all(|terms| terms.transport == Transport::Plain));
        let workloads = options.workloads().expect("rows");
        assert!(workloads.iter().all(|workload| workload.beside.is_none()));
    }
}
