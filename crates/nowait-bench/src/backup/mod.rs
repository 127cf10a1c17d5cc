//! The cost of what backups need: dirty bitmaps, and old bytes that are copied before they are overwritten; of nowait and of
//! qemu-storage-daemon, each divided by the same server without.
//!
//! Invariant: each measurement has a server of its own on the same image, and all of them have the same options.

mod measured_server;

use std::io::{self, Write};
use std::time::Duration;

use serde_json::{Value, json};

use crate::bench::Bench;
use crate::cancel::CancelFlag;
use crate::client::{Client, ConnectOptions, Load, latency_histogram};
use crate::error::Error;
use crate::image_kind::ImageKind;
use crate::machine::Machine;
use crate::measurement::Runner;
use crate::peers::only;
use crate::report::{Entry, Report, Reporter};
use crate::samples::Sample;
use crate::server::{Server, ServerKind, Servers};
use crate::table::{aligned, ratio, strings};
use crate::test_file::Target;
use crate::test_images::TestImages;
use crate::workload::{Direction, Order, Workload, flood};
use measured_server::{BackupFeature, MeasuredServer, ServerPlaces};

const KINDS: [ServerKind; 2] = [ServerKind::Nowait, ServerKind::QemuStorageDaemon];
/// Bytes of which both servers copy the old content together.
const COPIED_BYTES: u64 = 64 << 10;
/// Where the client writes whose longest write is the pause at the start of a backup.
const PAUSED_BYTES: u64 = 1 << 20;
/// How long that client writes at most, and before the start.
const PAUSED_TIME: Duration = Duration::from_secs(60);
const BEFORE_START: Duration = Duration::from_millis(100);
const NS_PER_MS: f64 = 1e6;

/// A table: writes of 4 KiB at one depth.
#[derive(Clone, Copy)]
struct Load4K {
    image: ImageKind,
    depth: usize,
    /// Whether each write is the first one of its 64 KiB, or else at random.
    is_first: bool,
}

impl Load4K {
    fn all() -> Vec<Self> {
        let of = |image, is_first| [1, 64].map(|depth| Self { image, depth, is_first });
        let loads = [(ImageKind::Raw, false), (ImageKind::Qcow2, false), (ImageKind::Raw, true)];
        loads.into_iter().flat_map(|(image, is_first)| of(image, is_first)).collect()
    }

    fn title(&self) -> String {
        let Self { image, depth, is_first } = self;
        let which = if *is_first { "first write of each 64K" } else { "random write" };
        format!("4K {which}, depth {depth}, {}", image.name())
    }

    /// Features of a server that this table measures, the one to compare with first.
    fn features(&self, kind: ServerKind) -> Vec<BackupFeature> {
        match (self.is_first, self.image) {
            (true, _) => vec![BackupFeature::Off, BackupFeature::CopyBeforeWrite],
            (false, ImageKind::Raw) if kind == ServerKind::Nowait => {
                vec![BackupFeature::Off, BackupFeature::InMemory, BackupFeature::Stored]
            }
            (false, ImageKind::Raw) => vec![BackupFeature::Off, BackupFeature::InMemory],
            (false, _) => vec![BackupFeature::Off, BackupFeature::Stored],
        }
    }

    fn workload(&self) -> Workload {
        Workload {
            order: Order::Random,
            block_bytes: 4 << 10,
            depth: self.depth,
            ..flood(Direction::Write)
        }
    }
}

/// Measures both servers.
pub(crate) fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let loads = only(bench.args.only.as_deref(), Load4K::all(), Load4K::title)?;
    let mut reporter = Reporter::begin(bench, out);
    let servers = Servers::find(&KINDS, bench.nowait.as_deref())?;
    let images = TestImages::make()?;
    let (machine, runner) = (Machine::this()?, Runner::new(bench)?);
    let rows = |load: &Load4K| -> Vec<MeasuredServer> {
        let of = |program: &crate::server::Program| {
            let measured =
                |feature| MeasuredServer { program: program.clone(), image: load.image, feature };
            load.features(program.kind).into_iter().map(measured).collect::<Vec<_>>()
        };
        servers.programs.iter().flat_map(of).collect()
    };
    let heading = format!(
        "{}; {}\n{}; direct I/O, one connection\n{}",
        machine.line(),
        runner.placement,
        bench.rounds(" row"),
        servers.lines()
    );
    reporter.heading(&heading, loads.iter().map(|load| rows(load).len()).sum())?;
    for load in loads {
        let target = images.image(load.image).map_err(Error::system("opening an image"))?;
        let scene = Scene { bench, runner: &runner, images: &images, target: &target, load };
        let title = |row: &MeasuredServer| {
            format!("{}: {}, {}", load.title(), row.program.kind.name(), row.feature.name())
        };
        let failure = |row: &MeasuredServer, problem: &str| {
            let line = format!("{} failed: {problem}", title(row));
            (line.clone(), line.into())
        };
        let measure = |row: &MeasuredServer| scene.measure(row);
        let Some(rows) = reporter.compare(rows(&load), title, measure, failure) else { break };
        let table = BackupTable { load, rows };
        reporter.table(&table.text(), table.to_json())?;
    }
    let mut head = servers.to_json(&machine, runner.placement);
    head["seconds"] = bench.args.duration().as_secs_f64().into();
    reporter.end(head, "tables")
}

/// The parameters of the measurements of a table.
struct Scene<'a> {
    bench: &'a Bench,
    runner: &'a Runner<'a>,
    images: &'a TestImages,
    target: &'a Target,
    load: Load4K,
}

impl Scene<'_> {
    fn measure(&self, row: &MeasuredServer) -> io::Result<BackupSample> {
        let Self { runner, images, target, .. } = *self;
        let places = ServerPlaces { images, target, directory: runner.scratch.path() };
        row.prepare(places)?;
        let start = || row.start(places);
        let sample = runner.at_server(1, start, |server| self.measure_at(server, row, places));
        row.clean_up(places)?;
        sample
    }

    fn measure_at(
        &self,
        server: &mut Server,
        row: &MeasuredServer,
        places: ServerPlaces<'_>,
    ) -> io::Result<BackupSample> {
        let (workload, bytes, export) =
            (self.load.workload(), self.target.bytes, row.program.kind.export());
        let stop = &self.bench.stop;
        let pausing = Workload { depth: 1, ..workload };
        let client = server.when_ready(|address| {
            Client::connect(&ConnectOptions::plain(address, export), &pausing, 1, PAUSED_BYTES)
        })?;
        let start_ms = longest_write_ms(client, || row.begin(places, stop))?;
        let client = server.when_ready(|address| {
            let options = ConnectOptions::plain(address, export);
            match self.load.is_first {
                true => Client::of_firsts(&options, &workload, bytes, COPIED_BYTES),
                false => Client::connect(&options, &workload, 1, bytes),
            }
        })?;
        let sample = match self.load.is_first {
            true => self.runner.measure_warm(client, server),
            false => self.runner.measure_client(client, server),
        }?;
        Ok(BackupSample { sample, start_ms })
    }
}

/// The longest write of `client` while `begin` runs, in ms.
fn longest_write_ms(mut client: Client, begin: impl FnOnce() -> io::Result<()>) -> io::Result<f64> {
    let enough = CancelFlag::default();
    let mut latencies_ns = latency_histogram()?;
    client.run_for(BEFORE_START, &mut latencies_ns, &enough)?;
    latencies_ns.reset();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let ran = client.run_for(PAUSED_TIME, &mut latencies_ns, &enough);
            ran.and_then(|_| client.finish())
        });
        let begun = begin();
        enough.request();
        writer.join().map_err(|_| io::Error::other("the writer panicked"))??;
        begun
    })?;
    Ok(latencies_ns.max() as f64 / NS_PER_MS)
}

/// A server with a feature, in one round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct BackupSample {
    sample: Sample,
    /// The longest write while the backup or the bitmap began, in ms.
    start_ms: f64,
}

type Row = Entry<MeasuredServer, BackupSample>;

/// Both servers under one load.
struct BackupTable {
    load: Load4K,
    rows: Vec<Row>,
}

impl BackupTable {
    /// A figure of `row` divided by that of its server that notes nothing; `None` if that was not measured.
    fn to_nothing(&self, row: &Row, figure: fn(&BackupSample) -> f64) -> Option<f64> {
        let is_base = |it: &&Row| {
            it.key.feature == BackupFeature::Off && it.key.program.kind == row.key.program.kind
        };
        let base = self.rows.iter().find(is_base)?;
        Some(ratio(row.median(figure), base.median(figure)))
    }

    fn text(&self) -> String {
        let mut titles = strings(["", "", "IOPS", "lowest–highest", "÷ nothing", "p50 µs"]);
        titles.extend(strings(["CPU µs/request", "÷ nothing", "start ms"]));
        let mut lines = vec![titles];
        for row in &self.rows {
            let iops = row.of(|it| it.sample.iops);
            let to_nothing = |figure| {
                self.to_nothing(row, figure).map_or_else(|| "–".to_owned(), |it| format!("{it:.2}"))
            };
            lines.push(vec![
                row.key.program.kind.name().to_owned(),
                row.key.feature.name().to_owned(),
                format!("{:.0}", iops.median),
                format!("{:.0}–{:.0}", iops.min, iops.max),
                to_nothing(|it| it.sample.iops),
                format!("{:.1}", row.median(|it| it.sample.p50_us)),
                format!("{:.2}", row.median(|it| it.sample.server_cpu_us)),
                to_nothing(|it| it.sample.server_cpu_us),
                format!("{:.1}", row.median(|it| it.start_ms)),
            ]);
        }
        format!("\n{}\n{}", self.load.title(), aligned(&lines))
    }

    fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let of = |figure: fn(&BackupSample) -> f64| row.of(figure).to_json();
            json!({
                "server": row.key.program.kind.name(),
                "notes": row.key.feature.name(),
                "iops": of(|it| it.sample.iops),
                "p50_us": of(|it| it.sample.p50_us),
                "p99_us": of(|it| it.sample.p99_us),
                "server_cpu_us_per_request": of(|it| it.sample.server_cpu_us),
                "start_ms": of(|it| it.start_ms),
                "iops_to_nothing": self.to_nothing(row, |it| it.sample.iops),
                "cpu_to_nothing": self.to_nothing(row, |it| it.sample.server_cpu_us),
            })
        };
        json!({ "load": self.load.title(), "rows": self.rows.iter().map(row).collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Program;

    #[test]
    fn figures_are_divided_by_those_of_the_same_server_that_notes_nothing() {
        let row = |kind, feature, iops| {
            let sample = Sample { iops, server_cpu_us: 1e6 / iops, ..Sample::default() };
            let key =
                MeasuredServer { program: Program::example(kind), image: ImageKind::Raw, feature };
            let samples = vec![BackupSample { sample, start_ms: 7.0 }; 3];
            Entry { samples, ..Entry::new(key) }
        };
        let rows = vec![
            row(ServerKind::Nowait, BackupFeature::Off, 100.0),
            row(ServerKind::Nowait, BackupFeature::InMemory, 80.0),
            row(ServerKind::QemuStorageDaemon, BackupFeature::InMemory, 10.0),
        ];
        let load = Load4K { image: ImageKind::Raw, depth: 64, is_first: false };
        let table = BackupTable { load, rows };
        let (text, json) = (table.text(), table.to_json());
        assert!(text.contains("4K random write, depth 64, raw") && text.contains("0.80"), "{text}");
        assert_eq!(json["rows"][1]["iops_to_nothing"], 0.8);
        assert_eq!(json["rows"][1]["cpu_to_nothing"], 1.25);
        assert_eq!(json["rows"][1]["start_ms"]["median"], 7.0);
        assert_eq!(json["rows"][2]["iops_to_nothing"], Value::Null);
    }
}
