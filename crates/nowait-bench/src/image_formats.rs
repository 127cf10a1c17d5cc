//! The benchmark of image formats: servers on images, workload by workload, round after round.
//!
//! Invariant: at most one server runs at a time.

use std::io::Write;

use serde_json::{Value, json};

use crate::bench::Bench;
use crate::error::Error;
use crate::machine::Machine;
use crate::measurement::Runner;
use crate::peers::only;
use crate::report::{Entry, Report, Reporter};
use crate::samples::{Sample, cells, json as figures_json, titles};
use crate::server::{Program, ServerKind, Servers};
use crate::table::{aligned, ratio};
use crate::test_images::{ImageKind, TestImages};
use crate::workload::{BackgroundLoad, Caching, Conditions, Direction, Transport, Workload};

/// All measurements use direct I/O: the page cache would hide the format.
const TERMS: Conditions = Conditions { caching: Caching::Direct, transport: Transport::Plain };

/// A table to measure.
struct ImageCase {
    workload: Workload,
    /// The images that nowait is measured on; the other servers are measured on those that are not
    /// raw.
    images: &'static [ImageKind],
}

impl ImageCase {
    /// 4K random reads and writes at depth 1, 16 and 64; and 4K random reads at depth 1 of an
    /// overlay, alone and beside writes that allocate.
    fn standard() -> Vec<ImageCase> {
        use ImageKind::{Chain, Overlay, Qcow2, Raw};
        let small = |w: &Workload| w.beside.is_none() && w.block_bytes == 4096;
        let small: Vec<Workload> = Workload::standard().into_iter().filter(small).collect();
        let images = |workload: &Workload| match workload.direction {
            Direction::Read => &[Raw, Qcow2, Chain][..],
            // In a chain the first write to a cluster allocates.
            Direction::Write => &[Raw, Qcow2],
        };
        let case = |&workload: &Workload| ImageCase { workload, images: images(&workload) };
        let mut cases: Vec<ImageCase> = small.iter().map(case).collect();
        for beside in [None, Some(BackgroundLoad::Allocations)] {
            let overlay = |&alone: &Workload| Workload { beside, ..alone };
            let workload = small.first().map(overlay);
            cases.extend(workload.map(|workload| ImageCase { workload, images: &[Overlay] }));
        }
        cases
    }
}

/// A server on an image.
type Subject = (Program, ImageKind);
type Row = Entry<Subject, Sample>;

/// The name in tables: `nowait, raw`.
fn name((program, image): &Subject) -> String {
    format!("{}, {}", program.kind.name(), image.name())
}

/// Makes the images and measures; nbdkit does not support qcow2 and is left out.
pub(crate) fn run(bench: &Bench, out: &mut dyn Write) -> Result<Report, Error> {
    let args = &bench.args;
    let title = |case: &ImageCase| case.workload.to_string();
    let cases = only(args.only.as_deref(), ImageCase::standard(), title)?;
    let mut reporter = Reporter::begin(bench, out)?;
    let mut kinds = args.servers();
    kinds.retain(|kind| *kind != ServerKind::Nbdkit);
    let servers = Servers::find(&kinds, bench.nowait.as_deref())?;
    let test_images = TestImages::make()?;
    let runner = Runner::new(bench)?;
    let machine = Machine::this()?;
    let entries = cases.iter().map(|case| subjects(case, &servers).len()).sum();
    let heading = format!(
        "{}; {}\n{}: 128 MiB of data\ndirect I/O; {}\n{}",
        machine.line(),
        runner.placement,
        test_images.directory().display(),
        bench.rounds(""),
        servers.lines()
    );
    reporter.heading(heading, entries)?;
    let mut tables = Vec::new();
    for case in &cases {
        let workload = case.workload;
        let message = |subject: &Subject| format!("{workload}: {}", name(subject));
        let measure = |(program, image): &Subject| {
            // The image is created again or reset to the common initial state.
            let target = test_images.image(*image)?;
            target.prepare(TERMS.caching)?;
            runner.take(program, &target, &workload, (TERMS, 1))
        };
        let failure = |subject: &Subject, problem: &str| {
            let line = format!("{} failed at {workload}: {problem}", name(subject));
            let (subject, workload) = (subject_json(subject), workload.to_string());
            let object = json!({ "subject": subject, "workload": workload, "problem": problem });
            (line, object)
        };
        let subjects = subjects(case, &servers);
        let Some(rows) = reporter.compare(subjects, message, measure, failure) else { break };
        let table = ImageTable { workload, rows };
        reporter.table(&table.text(), table.to_json(), "")?;
        tables.push(table);
    }
    let prices = prices(&tables);
    let mut ending = String::new();
    if !prices.is_empty() {
        let price =
            |((server, _), price): &(&Subject, f64)| format!("{} {price:.2}", server.kind.name());
        let list: Vec<String> = prices.iter().map(price).collect();
        ending += &format!("\np99 beside allocating writes ÷ alone: {}\n", list.join(", "));
    }
    ending.extend(reporter.failure_lines().iter().map(|line| format!("\n{line}\n")));
    let mut head = servers.to_json(&machine, runner.placement);
    head["directory"] = test_images.directory().to_string_lossy().into();
    head["seconds"] = args.duration().as_secs_f64().into();
    let price =
        |(of, price): &(&Subject, f64)| json!({ "subject": subject_json(of), "p99_ratio": price });
    head["beside_to_alone"] = prices.iter().map(price).collect();
    reporter.end(("", ""), &ending, head, "tables")
}

fn subject_json((program, image): &Subject) -> Value {
    json!({ "server": program.kind.name(), "image": image.name() })
}

/// The pairs of server and image of a table.
fn subjects(case: &ImageCase, servers: &Servers) -> Vec<Subject> {
    let of = |program: &Program| {
        let is_nowait = program.kind == ServerKind::Nowait;
        let images = case.images.iter().filter(move |image| is_nowait || **image != ImageKind::Raw);
        let program = program.clone();
        images.map(move |&image| (program.clone(), image))
    };
    servers.programs.iter().flat_map(of).collect()
}

/// All subjects under one workload, without those that failed.
struct ImageTable {
    workload: Workload,
    rows: Vec<Row>,
}

impl ImageTable {
    /// Requests per second of `row` divided by those of the first row.
    fn to_first(&self, row: &Row) -> f64 {
        let iops = |row: &Row| row.median(|sample| sample.iops);
        self.rows.first().map_or(0.0, |first| ratio(iops(row), iops(first)))
    }

    fn text(&self) -> String {
        let line = |name: String, figures: Vec<String>, last: String| {
            [vec![name], figures, vec![last]].concat()
        };
        let first = line("server, image".into(), titles(&self.workload), "IOPS ÷ first".into());
        let mut lines = vec![first];
        for row in &self.rows {
            let to_first = format!("{:.2}", self.to_first(row));
            lines.push(line(name(&row.key), cells(row, &self.workload), to_first));
        }
        format!("\n{}\n{}", self.workload, aligned(&lines))
    }

    fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let (program, image) = &row.key;
            let mut object = figures_json(row, &self.workload, program.kind);
            object.insert("image".to_owned(), image.name().into());
            object.insert("iops_to_first".to_owned(), self.to_first(row).into());
            object
        };
        let rows: Vec<_> = self.rows.iter().map(row).collect();
        json!({ "workload": self.workload.to_string(), "rows": rows })
    }
}

/// The effect of the background load on the 99th percentile of each subject that was also measured
/// alone: the latency with it divided by that without.
fn prices(tables: &[ImageTable]) -> Vec<(&Subject, f64)> {
    let p99 = |row: &Row| row.median(|sample| sample.p99_us);
    let mut prices = Vec::new();
    for table in tables.iter().filter(|table| table.workload.beside.is_some()) {
        let alone = Workload { beside: None, ..table.workload };
        let rows = || tables.iter().filter(|t| t.workload == alone).flat_map(|table| &table.rows);
        for row in &table.rows {
            if let Some(alone) = rows().find(|alone| name(&alone.key) == name(&row.key)) {
                prices.push((&row.key, ratio(p99(row), p99(alone))));
            }
        }
    }
    prices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_tables_have_three_depths_and_reads_with_allocating_writes() {
        let cases = ImageCase::standard();
        let titles: Vec<String> = cases.iter().map(|case| case.workload.to_string()).collect();
        for direction in ["read", "write"] {
            for depth in [1, 16, 64] {
                let title = format!("4K random {direction}, depth {depth}");
                assert!(titles.contains(&title), "{title} is not in {titles:?}");
            }
        }
        assert_eq!(titles.len(), 8);
        assert!(titles[7].ends_with("beside 64K allocating write, depth 1"), "{titles:?}");
    }

    #[test]
    fn images_are_compared_with_the_first_and_with_a_background_load() {
        let alone = Workload::standard()[0];
        let beside = Workload { beside: Some(BackgroundLoad::Allocations), ..alone };
        let row = |image, iops, p99_us| {
            let sample = Sample { iops, p99_us, beside_mib_s: 100.0, ..Sample::default() };
            let key = (Program::example(ServerKind::Nowait), image);
            Entry { samples: vec![sample; 3], ..Entry::new(key) }
        };
        let (raw, overlay) = (ImageKind::Raw, ImageKind::Overlay);
        let rows = vec![row(raw, 1000.0, 50.0), row(overlay, 900.0, 60.0)];
        let tables = [
            ImageTable { workload: alone, rows },
            ImageTable { workload: beside, rows: vec![row(overlay, 800.0, 90.0)] },
        ];
        let (text, json) = (tables[0].text(), tables[0].to_json());
        assert!(text.contains("nowait, new overlay") && text.contains("  0.90\n"), "{text}");
        assert_eq!(json["rows"][1]["iops_to_first"], 0.9);
        assert_eq!(prices(&tables)[0].1, 1.5);
        assert_eq!(tables[1].to_json()["rows"][0]["beside_mib_s"]["median"], 100.0);
    }
}
