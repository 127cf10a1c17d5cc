//! The comparison of NBD servers: for each table and workload, each server in turn, round after
//! round.
//!
//! Invariant: at most one server runs at a time, and a comparison is in the report only if all its
//! rounds are complete.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tempfile::TempDir;

use crate::cancel::CancelFlag;
use crate::certificates::Certificates;
use crate::comparison::{Comparison, Row, Sample};
use crate::cpus::Placement;
use crate::error::Error;
use crate::measurement::Runner;
use crate::report::{Failure, Machine, MeasuredFile, Report};
use crate::server::{Program, ServerKind};
use crate::test_file::{Access, Target};
use crate::workload::{Caching, ClientKind, Conditions, Transport, Workload};
use crate::{fio, nbd_servers_page, page};

pub(crate) const DURATION_MIN: Duration = Duration::from_millis(50);
pub(crate) const ROUNDS_MAX: u32 = 100;
/// The number of clients that qemu-nbd is started for.
const CONNECTIONS_MAX: usize = 64;
/// So many replies fit into a Unix socket that is not read. With more, a server that cannot send
/// and a client that cannot send could wait for each other.
const DEPTH_MAX: usize = 128;
const BLOCK_BYTES_UNIT: usize = 4096;
const BLOCK_BYTES_MAX: usize = 1 << 20;

/// The format of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Text tables, each printed as soon as it is finished.
    Text,
    /// One JSON object at the end.
    Json,
}

/// The options of a comparison of NBD servers.
#[derive(Clone, Debug)]
pub struct PeersOptions {
    /// The nowait program; `None` measures the others alone.
    pub nowait: Option<PathBuf>,
    /// The servers to measure, if installed.
    pub servers: Vec<ServerKind>,
    /// The file or block device to serve, at least 64 MiB; `None` creates a file of 256 MiB in
    /// `$TMPDIR`, or in /var/tmp, and removes it afterwards.
    pub file: Option<PathBuf>,
    /// Whether `file` may be overwritten (otherwise only reads are measured), and `html` replaced.
    pub overwrite: bool,
    /// How long one server is measured with one workload in one round, at least 50 ms, after 200 ms
    /// of warm-up.
    pub duration: Duration,
    /// The number of rounds, 1 to 100.
    pub rounds: u32,
    /// The client that makes the requests. fio supports neither TLS nor a background load here.
    pub client: ClientKind,
    /// Concurrent connections, 1 to 64, each with the depth of the workload.
    pub connections: usize,
    /// The rows: depth 1 to 128, blocks of 4 KiB to 1 MiB in steps of 4 KiB.
    pub workloads: Vec<Workload>,
    /// The tables.
    pub tables: Vec<Conditions>,
    /// The path of an additional report as an HTML page.
    pub html: Option<PathBuf>,
    /// Text or JSON.
    pub output: Output,
    /// Ends the measurement early.
    pub stop: CancelFlag,
}

/// All servers, workloads and tables, three rounds of a second each, on a temporary file.
impl Default for PeersOptions {
    fn default() -> PeersOptions {
        PeersOptions {
            nowait: None,
            servers: ServerKind::ALL.to_vec(),
            file: None,
            overwrite: false,
            duration: Duration::from_secs(1),
            rounds: 3,
            client: ClientKind::Own,
            connections: 1,
            workloads: Workload::standard(),
            tables: Conditions::ALL.to_vec(),
            html: None,
            output: Output::Text,
            stop: CancelFlag::default(),
        }
    }
}

/// Measures, writes the result to `out` and returns it. Progress goes to stderr, if that is a terminal.
///
/// A server that fails is left out of the rest of its table and named in the report. After a
/// cancellation by the [`CancelFlag`] the report contains the finished comparisons.
///
/// # Errors
/// [`Error::Option`] and [`Error::File`] before anything is started, [`Error::NoServer`] if nothing can be,
/// [`Error::System`] if `out` cannot be written or the file not be prepared.
pub fn run(options: &PeersOptions, out: &mut impl Write) -> Result<Report, Error> {
    check(options)?;
    let page = options.html.as_deref().map(|path| page::create(path, options.overwrite));
    let page = page.transpose()?;
    let (programs, missing) = find_programs(&options.servers, options.nowait.as_deref())?;
    let caching: Vec<Caching> = options.tables.iter().map(|terms| terms.caching).collect();
    let target = Target::open(options.file.as_deref(), options.overwrite, &caching)?;
    let scratch = TempDir::with_prefix("nowait-bench-")
        .map_err(Error::system("making a directory for sockets"))?;
    let certificates = Certificates::make().map_err(Error::system("making certificates"))?;
    let placement = Placement::choose()?;
    let mut workloads = options.workloads.clone();
    if target.access == Access::ReadOnly {
        workloads.retain(|workload| !workload.writes());
    }
    let mut report = Report {
        machine: Machine::this(placement)?,
        file: MeasuredFile::of(&target),
        versions: programs.iter().map(|program| (program.kind, program.version.clone())).collect(),
        missing,
        duration: options.duration,
        rounds: options.rounds,
        connections: options.connections,
        comparisons: Vec::new(),
        failures: Vec::new(),
        interrupted: false,
    };
    let runner = Runner {
        placement,
        certificates: &certificates,
        scratch: scratch.path(),
        client: options.client,
        connections: options.connections,
        duration: options.duration,
        stop: &options.stop,
    };
    let turns_in_all = options.tables.len() * workloads.len() * programs.len();
    let progress = progress_bar(turns_in_all as u64 * u64::from(options.rounds));
    let bench = Bench { runner, target: &target, rounds: options.rounds, progress: &progress };
    let mut writer = Writer::begin(options, &report, out)?;
    'tables: for &terms in &options.tables {
        let mut working = programs.clone();
        for &workload in &workloads {
            let rows = bench.compare(workload, terms, &mut working, &mut report.failures)?;
            if options.stop.requested() {
                report.interrupted = true;
                break 'tables;
            }
            if rows.is_empty() {
                break;
            }
            let comparison = Comparison { workload, terms, rows };
            progress.suspend(|| writer.comparison(&report, &comparison))?;
            report.comparisons.push(comparison);
        }
    }
    progress.finish_and_clear();
    writer.end(&report)?;
    if let Some(mut page) = page {
        let html = nbd_servers_page::page(&report);
        page.write_all(html.as_bytes()).map_err(Error::system("writing the page"))?;
    }
    Ok(report)
}

fn check(options: &PeersOptions) -> Result<(), Error> {
    let within = |good: bool, name: &'static str, problem: &'static str| {
        if good { Ok(()) } else { Err(Error::Option { name, problem }) }
    };
    let good_workload = |workload: &Workload| {
        (1..=DEPTH_MAX).contains(&workload.depth)
            && (1..=BLOCK_BYTES_MAX).contains(&workload.block_bytes)
            && workload.block_bytes.is_multiple_of(BLOCK_BYTES_UNIT)
    };
    within(options.duration >= DURATION_MIN, "duration", "has to be 0.05 seconds or more")?;
    within((1..=ROUNDS_MAX).contains(&options.rounds), "rounds", "has to be 1 to 100")?;
    within(
        (1..=CONNECTIONS_MAX).contains(&options.connections),
        "connections",
        "has to be 1 to 64",
    )?;
    let rule = "depth has to be 1 to 128, blocks 4 KiB to 1 MiB in steps of 4 KiB";
    within(options.workloads.iter().all(good_workload), "workloads", rule)?;
    if options.client == ClientKind::Own {
        return Ok(());
    }
    let alone = options.workloads.iter().all(|workload| workload.beside.is_none());
    let plain = options.tables.iter().all(|terms| terms.transport != Transport::Tls);
    within(alone && plain, "client", "fio takes no TLS here, and has nobody beside it")?;
    within(fio::version().is_some(), "client", "fio is not installed")
}

/// The requested servers that are installed, and those that are not.
pub(crate) fn find_programs(
    servers: &[ServerKind],
    nowait: Option<&Path>,
) -> Result<(Vec<Program>, Vec<ServerKind>), Error> {
    let (mut programs, mut missing) = (Vec::new(), Vec::new());
    for &kind in servers {
        let path = match (kind, nowait) {
            (ServerKind::Nowait, None) => continue,
            (ServerKind::Nowait, path) => path,
            _ => None,
        };
        match (Program::find(kind, path), path) {
            (Ok(program), _) => programs.push(program),
            (Err(e), Some(path)) => {
                return Err(Error::File {
                    path: path.to_owned(),
                    problem: format!("does not run: {e}"),
                });
            }
            (Err(_), None) => missing.push(kind),
        }
    }
    if programs.is_empty() { Err(Error::NoServer) } else { Ok((programs, missing)) }
}

/// The parameters that are the same for all workloads.
struct Bench<'a> {
    runner: Runner<'a>,
    target: &'a Target,
    rounds: u32,
    progress: &'a ProgressBar,
}

impl Bench<'_> {
    /// Runs all rounds of one workload, or fewer if cancelled. A server that fails is moved from
    /// `working` to `failures`.
    fn compare(
        &self,
        workload: Workload,
        terms: Conditions,
        working: &mut Vec<Program>,
        failures: &mut Vec<Failure>,
    ) -> Result<Vec<Row>, Error> {
        let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); working.len()];
        for _ in 0..self.rounds {
            let mut index = 0;
            while let Some(program) = working.get(index) {
                let server = program.kind;
                self.progress.set_message(format!("{workload}, {terms}: {}", server.name()));
                self.target
                    .prepare(terms.caching)
                    .map_err(Error::system("preparing the page cache"))?;
                let outcome = self.runner.take(program, self.target, &workload, terms);
                if self.runner.stop.requested() {
                    return Ok(Vec::new());
                }
                match outcome {
                    Ok(sample) => {
                        samples[index].push(sample);
                        index += 1;
                    }
                    Err(e) => {
                        failures.push(Failure { server, workload, terms, problem: e.to_string() });
                        working.remove(index);
                        samples.remove(index);
                    }
                }
                self.progress.inc(1);
            }
        }
        Ok(working
            .iter()
            .zip(samples)
            .map(|(program, samples)| Row { server: program.kind, samples })
            .collect())
    }
}

pub(crate) fn progress_bar(measurements: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(measurements), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {eta} left  {wide_msg}") {
        bar.set_style(style);
    }
    bar
}

/// Writes the report in parts, as soon as each is available.
struct Writer<'a, W> {
    output: Output,
    out: &'a mut W,
}

impl<'a, W: Write> Writer<'a, W> {
    fn begin(
        options: &PeersOptions,
        report: &Report,
        out: &'a mut W,
    ) -> Result<Writer<'a, W>, Error> {
        let mut writer = Writer { output: options.output, out };
        writer.text(report.heading())?;
        Ok(writer)
    }

    /// Writes one comparison; `report` contains the previous ones.
    fn comparison(&mut self, report: &Report, comparison: &Comparison) -> Result<(), Error> {
        if report.comparisons.last().is_none_or(|last| last.terms != comparison.terms) {
            self.text(report.heading_of_table(comparison.terms))?;
        }
        self.text(comparison.to_string())
    }

    fn end(mut self, report: &Report) -> Result<(), Error> {
        match self.output {
            Output::Text => self.text(report.ending()),
            Output::Json => self.put(format!("{:#}\n", serde_json::Value::from(report))),
        }
    }

    fn text(&mut self, text: String) -> Result<(), Error> {
        match self.output {
            Output::Text => self.put(text),
            Output::Json => Ok(()),
        }
    }

    fn put(&mut self, text: String) -> Result<(), Error> {
        let written = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
        written.map_err(Error::system("writing the report"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Direction, Order};

    #[test]
    fn an_option_out_of_range_is_rejected_by_name() {
        let good = PeersOptions::default();
        assert!(check(&good).is_ok());
        let odd = Workload {
            direction: Direction::Read,
            order: Order::Random,
            block_bytes: 512,
            depth: 1,
            beside: None,
        };
        let bad = [
            ("duration", PeersOptions { duration: Duration::ZERO, ..good.clone() }),
            ("rounds", PeersOptions { rounds: 0, ..good.clone() }),
            ("connections", PeersOptions { connections: 65, ..good.clone() }),
            ("workloads", PeersOptions { workloads: vec![odd], ..good.clone() }),
        ];
        for (name, options) in bad {
            let text = check(&options).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(text.starts_with(name), "{text:?}");
        }
    }

    #[test]
    fn an_empty_selection_is_rejected_before_a_file_is_created() {
        let nothing = PeersOptions { servers: vec![ServerKind::Nowait], ..PeersOptions::default() };
        assert!(matches!(run(&nothing, &mut Vec::new()), Err(Error::NoServer)));
    }
}
