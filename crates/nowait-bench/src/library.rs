//! Files of the library beside those of other Rust runtimes, and scans beside the page cache and dd(1).
//!
//! Invariant: all files are read and written by one program, `nowait-runtimes`, which has the same loop for each runtime, and
//! a process for each measurement. It is built by itself, so that nothing else needs these runtimes. The files are made for
//! this and removed afterwards.

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::bench::Bench;
use crate::copying::timed;
use crate::error::Error;
use crate::machine::Machine;
use crate::other_programs::{last_line, printed, version};
use crate::peers::only;
use crate::report::{Entry, Report, Reporter};
use crate::table::{aligned, ratio, strings};
use crate::test_file::{drop_cached, temporary_directory};
use crate::workload::{Direction, Order, Workload};

const PROGRAM: &str = "nowait-runtimes";
const HOW_TO_BUILD: &str = "not there ('cargo build --release --locked --manifest-path benches/runtimes/Cargo.toml \
    --target-dir target', in a clone of nowait, builds it; --peers names one elsewhere)";
/// Bytes of the files without `--size`.
const BYTES: u64 = 256 << 20;
const MANY_FILES: u64 = 1000;
const PAGE_BYTES: u64 = 4096;
const DD_BLOCK_BYTES: u64 = 1 << 20;

/// The files of the library, by their types. `nowait-runtimes` knows these names and those below.
const OWN: [&str; 4] = ["LocalAsyncFile", "LocalAsyncFile, tokio", "AsyncFile", "BlockingFile"];
const OTHERS: [&str; 6] = ["compio", "glommio", "monoio", "tokio-uring", "spawn_blocking", "pread"];
/// Types that scans are measured with, and which read ahead.
const OWN_SCANS: [&str; 3] = ["LocalAsyncFile", "AsyncFile", "BlockingFile"];
const OTHER_SCANS: [&str; 2] = ["pread", DD];
const DD: &str = "dd iflag=direct bs=1M";

/// The load of a table, on so many files.
#[derive(Clone, Copy, Debug)]
struct Case {
    load: Workload,
    files: u64,
}

/// Text: `4K random read, depth 32, 1000 files`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} file{}", self.load, self.files, if self.files == 1 { "" } else { "s" })
    }
}

impl Case {
    fn all() -> Vec<Self> {
        let Some(&load) = Workload::standard().first() else { return Vec::new() };
        let both = [Direction::Read, Direction::Write];
        let random = |files, depth| {
            both.map(|direction| Workload { direction, depth, ..load })
                .map(|load| Self { load, files })
        };
        let loads = [(1, 1), (1, 32), (1, 128), (MANY_FILES, 32), (MANY_FILES, 128)];
        let mut all: Vec<Self> =
            loads.into_iter().flat_map(|(files, depth)| random(files, depth)).collect();
        let scan =
            |kib: usize| Workload { order: Order::Sequential, block_bytes: kib << 10, ..load };
        all.extend([8, 64].map(|kib| Self { load: scan(kib), files: 1 }));
        all
    }

    /// The word for it in the program's command line.
    fn work(self) -> &'static str {
        match (self.load.order, self.load.direction) {
            (Order::Sequential, _) => "scan",
            (Order::Random, direction) => direction.name(),
        }
    }

    fn subjects(self) -> Vec<&'static str> {
        match self.load.order {
            Order::Sequential => [&OWN_SCANS[..], &OTHER_SCANS].concat(),
            Order::Random => [&OWN[..], &OTHERS].concat(),
        }
    }
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figures {
    requests_per_second: f64,
    mib_per_second: f64,
    /// Processor time for a MiB, in µs, of all threads of the process.
    cpu_us_per_mib: f64,
}

impl Figures {
    fn of(bytes: f64, requests: f64, seconds: f64, cpu_seconds: f64) -> Option<Self> {
        let mib = bytes / f64::from(1 << 20);
        let is_good = requests >= 1.0 && seconds > 0.0 && seconds.is_finite() && cpu_seconds >= 0.0;
        is_good.then(|| Self {
            requests_per_second: requests / seconds,
            mib_per_second: mib / seconds,
            cpu_us_per_mib: cpu_seconds * 1e6 / mib,
        })
    }

    /// The figures of the last line of `printed`, of requests of `block_bytes`.
    fn parse(printed: &str, block_bytes: usize) -> Option<Self> {
        let line: Value = serde_json::from_str(last_line(printed)?).ok()?;
        let [requests, seconds, cpu] = ["requests", "seconds", "cpu_seconds"]
            .map(|name| line.get(name).and_then(Value::as_f64));
        Self::of(requests? * block_bytes as f64, requests?, seconds?, cpu?)
    }
}

/// The program, and the files that it is run on.
struct Subject<'a> {
    bench: &'a Bench,
    program: PathBuf,
    directory: TempDir,
}

impl<'a> Subject<'a> {
    /// Makes the files that `cases` need: a directory for each count of them, in which each has the same size.
    fn make(bench: &'a Bench, program: PathBuf, cases: &[Case]) -> io::Result<Self> {
        let directory = temporary_directory(bench.args.directory.clone())?;
        let mut counts: Vec<u64> = cases.iter().map(|case| case.files).collect();
        counts.sort_unstable();
        counts.dedup();
        for count in counts {
            let place = directory.path().join(count.to_string());
            fs::create_dir(&place)?;
            let bytes = bench.args.size.unwrap_or(BYTES) / count / PAGE_BYTES * PAGE_BYTES;
            let mut random = fastrand::Rng::with_seed(count);
            let mut data = vec![0; bytes as usize];
            for number in 0..count {
                random.fill(&mut data);
                let mut file = File::create_new(place.join(number.to_string()))?;
                file.write_all(&data)?;
                file.sync_all()?;
                drop_cached(&file)?;
            }
        }
        Ok(Self { bench, program, directory })
    }

    /// Measures `name` in `case`.
    fn measure(&self, name: &str, case: Case) -> io::Result<Figures> {
        let place = self.directory.path().join(case.files.to_string());
        let first = File::open(place.join("0"))?;
        drop_cached(&first)?;
        if name == DD {
            return dd(&place.join("0"), first.metadata()?.len());
        }
        let Workload { block_bytes, depth, order, .. } = case.load;
        let duration = match order {
            Order::Random => self.bench.args.duration(),
            // A scan ends with the file.
            Order::Sequential => std::time::Duration::from_secs(3600),
        };
        let mut command = Command::new(&self.program);
        command.arg(name).arg(&place);
        command.args([block_bytes.to_string(), depth.to_string(), case.files.to_string()]);
        command.args([duration.as_secs_f64().to_string().as_str(), case.work()]);
        let answer = printed(&mut command, duration, &self.bench.stop)?;
        let figures = Figures::parse(&answer, block_bytes);
        figures.ok_or_else(|| io::Error::other(format!("{PROGRAM} printed no figures")))
    }
}

/// Reads `file` by dd(1), whose time from its start to its end counts.
fn dd(file: &Path, bytes: u64) -> io::Result<Figures> {
    let mut command = Command::new("dd");
    command.arg(format!("if={}", file.display())).args(["of=/dev/null", "iflag=direct", "bs=1M"]);
    let timed = timed::run(&mut command, &File::open(file)?)?;
    let (seconds, cpu) = (timed.ended.as_secs_f64(), timed.processor.as_secs_f64());
    let figures = Figures::of(bytes as f64, bytes.div_ceil(DD_BLOCK_BYTES) as f64, seconds, cpu);
    figures.ok_or_else(|| io::Error::other("it took no time"))
}

/// The program that has the runtimes, and its versions of them.
fn find(bench: &Bench) -> Result<(PathBuf, String), Error> {
    let program = bench.args.peers.clone().unwrap_or_else(|| {
        let beside = env::current_exe().unwrap_or_default().with_file_name(PROGRAM);
        let released = beside.with_file_name("../release").join(PROGRAM);
        if !beside.exists() && released.exists() { released } else { beside }
    });
    match version(&program) {
        Ok(versions) => Ok((program, versions)),
        Err(error) => {
            let is_missing = error.kind() == ErrorKind::NotFound;
            let problem = if is_missing { HOW_TO_BUILD.to_owned() } else { error.to_string() };
            Err(Error::File { path: program, problem })
        }
    }
}

/// Measures every case.
pub(crate) fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let args = &bench.args;
    let cases = only(args.only.as_deref(), Case::all(), Case::to_string)?;
    let (program, versions) = find(bench)?;
    let mut reporter = Reporter::begin(bench, out);
    let subject = Subject::make(bench, program, &cases)
        .map_err(Error::system("making files to measure on (name a place with --directory)"))?;
    let machine = Machine::this()?;
    let heading = format!(
        "{}\n{versions}; pread: plain calls on threads; direct I/O\n{}\nscans read ahead, but for pread, which has the page \
         cache, and dd; nothing is cached when they begin\n",
        machine.line(),
        bench.rounds("")
    );
    reporter.heading(&heading, cases.iter().map(|case| case.subjects().len()).sum())?;
    for case in cases {
        let title = |name: &&str| format!("{case}: {name}");
        let measure = |name: &&str| subject.measure(name, case);
        let failure = |name: &&str, problem: &str| {
            let line = format!("{name} failed, {case}: {problem}");
            (line.clone(), line.into())
        };
        let Some(rows) = reporter.compare(case.subjects(), title, measure, failure) else { break };
        let table = LibraryTable { case, rows };
        reporter.table(&table.text(), table.to_json())?;
    }
    let seconds = args.duration().as_secs_f64();
    let head = json!({ "machine": machine.to_json(), "peers": versions, "seconds": seconds });
    reporter.end(head, "tables")
}

type Row = Entry<&'static str, Figures>;

/// All files in one case.
struct LibraryTable {
    case: Case,
    rows: Vec<Row>,
}

impl LibraryTable {
    /// Two figures of `row`, each divided by the best of those that are not the library's: above 1 the row has the higher
    /// rate, and below 1 it takes less processor time. Zeros if there are no others.
    fn to_best(&self, row: &Row) -> [f64; 2] {
        let (rate, cpu) = (|it: &Figures| it.mib_per_second, |it: &Figures| it.cpu_us_per_mib);
        let others = || self.rows.iter().filter(|row| !OWN.contains(&row.key));
        let highest = others().map(|row| row.median(rate)).fold(0.0, f64::max);
        let lowest = others().map(|row| row.median(cpu)).fold(f64::INFINITY, f64::min);
        [ratio(row.median(rate), highest), ratio(row.median(cpu), lowest)]
    }

    fn text(&self) -> String {
        let titles = [
            "",
            "per second",
            "lowest–highest",
            "MiB/s",
            "CPU µs/MiB",
            "÷ best other",
            "CPU ÷ least other",
        ];
        let mut lines = vec![strings(titles)];
        for row in &self.rows {
            let rate = row.of(|it| it.requests_per_second);
            let [to_best, cpu_to_least] = self.to_best(row);
            lines.push(vec![
                row.key.to_owned(),
                format!("{:.0}", rate.median),
                format!("{:.0}–{:.0}", rate.min, rate.max),
                format!("{:.0}", row.median(|it| it.mib_per_second)),
                format!("{:.0}", row.median(|it| it.cpu_us_per_mib)),
                format!("{to_best:.2}"),
                format!("{cpu_to_least:.2}"),
            ]);
        }
        format!("\n{}\n{}", self.case, aligned(&lines))
    }

    fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let [to_best, cpu_to_least] = self.to_best(row);
            json!({
                "name": row.key,
                "requests_per_second": row.of(|it| it.requests_per_second).to_json(),
                "mib_per_second": row.of(|it| it.mib_per_second).to_json(),
                "cpu_us_per_mib": row.of(|it| it.cpu_us_per_mib).to_json(),
                "to_best_other": to_best,
                "cpu_to_least_other": cpu_to_least,
            })
        };
        let rows: Vec<Value> = self.rows.iter().map(row).collect();
        json!({ "load": self.case.to_string(), "files": self.case.files, "rows": rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_the_program_has_three_figures() {
        let printed = "a warning\n{\"requests\":512,\"seconds\":0.5,\"cpu_seconds\":0.25}\n";
        let (per_second, mib, cpu) = (1024.0, 4.0, 125_000.0);
        let figures = Figures::parse(printed, 4096)
            .map(|it| (it.requests_per_second, it.mib_per_second, it.cpu_us_per_mib));
        assert_eq!(figures, Some((per_second, mib, cpu)));
        for wrong in [
            "",
            "no figures",
            "{}",
            r#"{"requests":0,"seconds":1,"cpu_seconds":1}"#,
            r#"{"requests":1,"seconds":0,"cpu_seconds":1}"#,
            r#"{"requests":1,"seconds":1,"cpu_seconds":-1}"#,
            r#"{"requests":"1","seconds":1,"cpu_seconds":1}"#,
        ] {
            assert_eq!(Figures::parse(wrong, 4096), None, "{wrong}");
        }
    }

    #[test]
    fn rows_are_compared_with_the_best_that_is_not_the_librarys() {
        let row = |name, seconds, cpu| {
            let samples =
                Figures::of(f64::from(1 << 20), 256.0, seconds, cpu).into_iter().collect();
            Entry { samples, ..Entry::new(name) }
        };
        let rows = vec![
            row(OWN[0], 0.5, 1.0),
            row(OWN[2], 2.0, 4.0),
            row("compio", 1.0, 2.0),
            row("pread", 4.0, 1.6),
        ];
        let case = Case::all().pop().expect("a case");
        let table = LibraryTable { case, rows };
        let json = table.to_json();
        assert_eq!(json["load"], "64K sequential read, depth 1, 1 file");
        let ratios = |row: usize| {
            ["to_best_other", "cpu_to_least_other"].map(|it| json["rows"][row][it].as_f64())
        };
        assert_eq!(ratios(0), [Some(2.0), Some(0.625)]);
        assert_eq!((ratios(1), ratios(2)), ([Some(0.5), Some(2.5)], [Some(1.0), Some(1.25)]));
        let text = table.text();
        let line = text.lines().find(|line| line.starts_with(OWN[0])).unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        let expected = [OWN[0], "512", "512–512", "2", "1000000", "2.00", "0.62"];
        assert_eq!(words, expected, "{text}");
    }
}
