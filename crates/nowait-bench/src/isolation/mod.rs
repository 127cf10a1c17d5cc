//! Isolation of a client from its neighbours: the latencies of one that reads a good disk, alone and beside
//! other exports of the same process whose disks or clients misbehave.
//!
//! Invariant: each measurement has a server of its own, which has the same exports with every neighbour. The
//! neighbour begins with the measurement, so that the time in which the server notices it counts, too.

mod held_disk;
mod neighbour;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nowait::Uring;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bench::Bench;
use crate::client::{Client, ConnectOptions, Load, latency_histogram};
use crate::error::Error;
use crate::machine::Machine;
use crate::report::{Entry, Report, Reporter};
use crate::server::Server;
use crate::table::{aligned, ratio, strings};
use crate::test_file::{put_random, temporary_directory};
use held_disk::{Answer, HeldDisk};
use neighbour::{Neighbour, NeighbourClient, READER};

const WARM_UP: Duration = Duration::from_millis(200);
/// Bytes of each disk.
const DISK_BYTES: u64 = 64 << 20;
const NS_PER_US: f64 = 1e3;

/// How a server does I/O, as the values of `--queue`.
const QUEUES: [&str; 2] = [URING, "threads"];
const URING: &str = "uring";

/// Measures a reader beside each neighbour. Where no FUSE file system can be mounted, the report says so, and the disks on
/// one are left out.
pub(crate) fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let nowait = bench.nowait()?;
    let mut reporter = Reporter::begin(bench, out);
    let places = Places::make().map_err(Error::system("making disks in $TMPDIR or /var/tmp"))?;
    let mounted = HeldDisk::mount(&places.mount, DISK_BYTES);
    let no_disk = mounted.as_ref().err().map(|error| {
        format!("no FUSE file system can be mounted ({error}): the disks on one are left out")
    });
    let no_ring = Uring::new().err().map(|error| format!("no io_uring ({error}): it is left out"));
    let mut queues = QUEUES.to_vec();
    queues.retain(|queue| no_ring.is_none() || *queue != URING);
    let left_out: Vec<_> = no_disk.into_iter().chain(no_ring).collect();
    let disk = mounted.ok();
    let is_there = |it: &Neighbour| disk.is_some() || it.answer().is_none();
    let mut neighbours: Vec<_> = Neighbour::ALL.into_iter().filter(is_there).collect();
    if let Some(only) = &bench.args.only {
        neighbours.retain(|it| *it == Neighbour::None || it.to_string().contains(only));
        if neighbours.len() == 1 && !Neighbour::None.to_string().contains(only) {
            return Err(Error::NoRow { only: only.clone() });
        }
    }
    let machine = Machine::this()?;
    let heading = format!(
        "{}\none client with 4K random reads, depth 1, of one export; its neighbours use others of the \
         same process\n{}\n{}",
        machine.line(),
        bench.rounds(""),
        left_out.iter().map(|line| format!("{line}\n")).collect::<String>()
    );
    reporter.heading(&heading, neighbours.len() * queues.len())?;
    for queue in queues {
        let scene = Scene { bench, nowait, places: &places, disk: disk.as_ref(), queue };
        let title = |it: &Neighbour| format!("--queue {queue}: {it}");
        let failure = |it: &Neighbour, problem: &str| {
            let line = format!("{} failed: {problem}", title(it));
            (line.clone(), line.into())
        };
        let measure = |it: &Neighbour| scene.measure(*it);
        let Some(rows) = reporter.compare(neighbours.clone(), title, measure, failure) else {
            break;
        };
        let table = IsolationTable { queue, rows };
        reporter.table(&table.text(), table.to_json())?;
    }
    let seconds = bench.args.duration().as_secs_f64();
    let head = json!({ "machine": machine.to_json(), "left_out": left_out, "seconds": seconds });
    reporter.end(head, "tables")
}

/// The files of the measurements, which are removed afterwards.
struct Places {
    /// The disk of the reader, and that of a client that floods.
    good: PathBuf,
    other: PathBuf,
    /// Where a file system is mounted.
    mount: PathBuf,
    /// The socket and the messages of the server.
    scratch: TempDir,
    _directory: TempDir,
}

impl Places {
    fn make() -> io::Result<Self> {
        let directory = temporary_directory(None)?;
        let scratch = TempDir::with_prefix("nowait-bench-")?;
        let disk = |name: &str| {
            let path = directory.path().join(name);
            let mut file = File::create_new(&path)?;
            put_random(&mut file, DISK_BYTES)?;
            file.sync_all().map(|()| path)
        };
        let (good, other) = (disk("good")?, disk("other")?);
        let mount = scratch.path().join("mount");
        std::fs::create_dir(&mount)?;
        Ok(Self { good, other, mount, scratch, _directory: directory })
    }
}

/// The parameters of one measurement.
struct Scene<'a> {
    bench: &'a Bench,
    nowait: &'a Path,
    places: &'a Places,
    disk: Option<&'a HeldDisk>,
    queue: &'static str,
}

impl Scene<'_> {
    /// Measures the reader once, beside `neighbour`.
    fn measure(&self, neighbour: Neighbour) -> io::Result<Sample> {
        let mut server = self.start()?;
        let sample = self.measure_at(&mut server, neighbour);
        // Nothing hangs in the disk while the server ends.
        self.disk.iter().for_each(|disk| disk.set(Answer::Error));
        let told = |e| io::Error::other(format!("{e}{}", server.last_message()));
        let sample = sample.map_err(told)?;
        server.stop()?;
        Ok(sample)
    }

    /// A server of the good disks, and of the other one if that is mounted.
    fn start(&self) -> io::Result<Server> {
        let Places { good, other, scratch, .. } = self.places;
        self.disk.iter().for_each(|disk| disk.set(Answer::Zeros));
        let export = |name: &str, path: &Path| format!("{name}={}", path.display()).into();
        let options = ["--read-only", "--direct", "auto", "--queue", self.queue];
        let mut arguments: Vec<OsString> = options.into_iter().map(OsString::from).collect();
        arguments.extend([export("good", good), export("other", other)]);
        arguments.extend(self.disk.map(|disk| export("held", disk.path())));
        Server::of_nowait(self.nowait, arguments, scratch.path())
    }

    fn measure_at(&self, server: &mut Server, neighbour: Neighbour) -> io::Result<Sample> {
        let (duration, stop) = (self.bench.args.duration(), &self.bench.stop);
        let mut reader = server.when_ready(|address| {
            let options = ConnectOptions::plain(address, "good");
            Client::connect(&options, &READER, 1, DISK_BYTES)
        })?;
        reader.run_for(WARM_UP, &mut latency_histogram()?, stop)?;
        let client = match (neighbour.load(), neighbour.answer()) {
            (None, _) => None,
            (Some(load), answer) => {
                let export = if answer.is_some() { "held" } else { "other" };
                self.disk.zip(answer).iter().for_each(|(disk, answer)| disk.set(*answer));
                Some(server.when_ready(|address| {
                    let options = ConnectOptions {
                        takes_errors: true,
                        ..ConnectOptions::plain(address, export)
                    };
                    NeighbourClient::start(&options, &load, DISK_BYTES)
                })?)
            }
        };
        let mut latencies_ns = latency_histogram()?;
        let interval = reader.run_for(duration, &mut latencies_ns, stop);
        let answers = client.map_or(0, NeighbourClient::stop);
        let interval = interval?;
        reader.finish()?;
        let quantile = |part| latencies_ns.value_at_quantile(part) as f64 / NS_PER_US;
        Ok(Sample {
            iops: interval.per_second(),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            neighbour_per_s: answers as f64 / interval.elapsed.as_secs_f64(),
        })
    }
}

/// The reader beside one neighbour in one round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sample {
    /// Finished requests per second.
    iops: f64,
    /// Median latency in µs.
    p50_us: f64,
    /// The latency that 1 % of the requests exceed, in µs.
    p99_us: f64,
    /// Requests of the neighbour that were answered per second, errors included.
    neighbour_per_s: f64,
}

type Row = Entry<Neighbour, Sample>;

/// The reader beside all neighbours, at a server with one kind of queue.
struct IsolationTable {
    queue: &'static str,
    rows: Vec<Row>,
}

impl IsolationTable {
    /// A figure of `row` divided by that of the reader alone; `None` if that was not measured.
    fn to_alone(&self, row: &Row, figure: fn(&Sample) -> f64) -> Option<f64> {
        let alone = self.rows.iter().find(|row| row.key == Neighbour::None)?;
        Some(ratio(row.median(figure), alone.median(figure)))
    }

    fn text(&self) -> String {
        let mut titles = strings(["", "IOPS", "p50 µs", "÷ alone", "p99 µs", "lowest–highest"]);
        titles.extend(strings(["÷ alone", "neighbour/s"]));
        let mut lines = vec![titles];
        for row in &self.rows {
            let p99 = row.of(|sample| sample.p99_us);
            let to_alone = |figure| {
                self.to_alone(row, figure).map_or_else(|| "–".to_owned(), |it| format!("{it:.2}"))
            };
            lines.push(vec![
                row.key.to_string(),
                format!("{:.0}", row.median(|sample| sample.iops)),
                format!("{:.1}", row.median(|sample| sample.p50_us)),
                to_alone(|sample| sample.p50_us),
                format!("{:.1}", p99.median),
                format!("{:.1}–{:.1}", p99.min, p99.max),
                to_alone(|sample| sample.p99_us),
                format!("{:.0}", row.median(|sample| sample.neighbour_per_s)),
            ]);
        }
        format!("\nserve --queue {}\n{}", self.queue, aligned(&lines))
    }

    fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let of = |figure: fn(&Sample) -> f64| row.of(figure).to_json();
            json!({
                "neighbour": row.key.name(),
                "iops": of(|sample| sample.iops),
                "p50_us": of(|sample| sample.p50_us),
                "p99_us": of(|sample| sample.p99_us),
                "neighbour_per_s": of(|sample| sample.neighbour_per_s),
                "p50_to_alone": self.to_alone(row, |sample| sample.p50_us),
                "p99_to_alone": self.to_alone(row, |sample| sample.p99_us),
            })
        };
        json!({ "queue": self.queue, "rows": self.rows.iter().map(row).collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_compared_with_those_of_the_reader_alone() {
        let row = |neighbour, p50_us, p99_us| {
            let sample = Sample { iops: 100.0, p50_us, p99_us, neighbour_per_s: 7.0 };
            Entry { samples: vec![sample; 3], ..Entry::new(neighbour) }
        };
        let rows = vec![row(Neighbour::None, 50.0, 80.0), row(Neighbour::Slow, 60.0, 120.0)];
        let table = IsolationTable { queue: URING, rows: rows.clone() };
        let (text, json) = (table.text(), table.to_json());
        assert!(text.contains("takes 100 ms") && text.contains("1.20   120.0"), "{text}");
        assert_eq!(json["rows"][0]["p99_to_alone"], 1.0);
        assert_eq!(json["rows"][1]["neighbour"], "slow");
        assert_eq!(json["rows"][1]["p99_to_alone"], 1.5);
        let without = IsolationTable { queue: URING, rows: rows[1..].to_vec() };
        assert_eq!(without.to_json()["rows"][0]["p50_to_alone"], Value::Null);
    }
}
