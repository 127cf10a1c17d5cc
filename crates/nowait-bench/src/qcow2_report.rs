//! The report of the benchmark of image formats, as text and as JSON.
//!
//! Invariant: the parts that are printed during the measurement add up to the output of `Display`;
//! text and JSON are made from the same samples.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::comparison::{
    MinMedianMax, Sample, aligned, figure_cells, figure_titles, figures_json, ratio,
};
use crate::report::Machine;
use crate::server::ServerKind;
use crate::test_images::ImageKind;
use crate::workload::Workload;

/// A server on an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The server.
    pub server: ServerKind,
    /// The image that it serves.
    pub image: ImageKind,
}

/// As text: `nowait, raw`.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.server.name(), self.image.name())
    }
}

/// One subject in a table.
#[derive(Clone, Debug)]
pub struct ImageRow {
    /// The subject that was measured.
    pub subject: Subject,
    /// One sample for each round.
    pub samples: Vec<Sample>,
}

impl ImageRow {
    /// The median of one figure over the rounds.
    fn median(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        MinMedianMax::of(&self.samples, figure).median
    }
}

/// All subjects under one workload.
#[derive(Clone, Debug)]
pub struct ImageTable {
    /// The workload of all subjects.
    pub workload: Workload,
    /// The rows in the order of measuring, without subjects that failed.
    pub rows: Vec<ImageRow>,
}

impl ImageTable {
    /// Requests per second of `row` divided by those of the first row.
    fn to_first(&self, row: &ImageRow) -> f64 {
        let iops = |row: &ImageRow| row.median(|sample| sample.iops);
        self.rows.first().map_or(0.0, |first| ratio(iops(row), iops(first)))
    }

    fn to_json(&self) -> Value {
        let row = |row: &ImageRow| {
            let mut object = figures_json(&row.samples, &self.workload);
            object.insert("server".to_owned(), row.subject.server.name().into());
            object.insert("image".to_owned(), row.subject.image.name().into());
            object.insert("iops_to_first".to_owned(), self.to_first(row).into());
            Value::Object(object)
        };
        json!({
            "workload": self.workload.to_string(),
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for ImageTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut titles = vec!["server, image".to_owned()];
        titles.extend(figure_titles(&self.workload));
        titles.push("IOPS ÷ first".to_owned());
        let mut lines = vec![titles];
        for row in &self.rows {
            let mut cells = vec![row.subject.to_string()];
            cells.extend(figure_cells(&row.samples, &self.workload));
            cells.push(format!("{:.2}", self.to_first(row)));
            lines.push(cells);
        }
        write!(f, "\n{}\n{}", self.workload, aligned(&lines))
    }
}

/// A subject that could not be measured; it is left out of its table.
#[derive(Clone, Debug)]
pub struct ImageFailure {
    /// The subject that failed.
    pub subject: Subject,
    /// The workload that it failed at.
    pub workload: Workload,
    /// Its last message, or the failure.
    pub problem: String,
}

/// The complete report. `Display` formats the text, `Value::from(&report)` the JSON object.
#[derive(Clone, Debug)]
pub struct ImagesReport {
    /// The machine that was measured.
    pub machine: Machine,
    /// The directory of the images.
    pub directory: String,
    /// The servers and the version that each reports.
    pub versions: Vec<(ServerKind, String)>,
    /// Requested servers that are not installed.
    pub missing: Vec<ServerKind>,
    /// Measured time of one subject in one round.
    pub duration: Duration,
    /// Rounds of each table.
    pub rounds: u32,
    /// The finished tables, in the order of measuring.
    pub tables: Vec<ImageTable>,
    /// The failures.
    pub failures: Vec<ImageFailure>,
    /// Whether the measurement was cancelled before the end.
    pub interrupted: bool,
}

impl ImagesReport {
    /// The lines before the first table.
    pub(crate) fn heading(&self) -> String {
        let mut text = format!("{}{}: 128 MiB of data\n", self.machine.line(), self.directory);
        let seconds = self.duration.as_secs_f64();
        text += &format!("direct I/O; {} rounds of {seconds} s for each, in turns\n", self.rounds);
        for (_, version) in &self.versions {
            text += &format!("{version}\n");
        }
        for server in &self.missing {
            text += &format!("{}: not installed\n", server.name());
        }
        text
    }

    /// The effect of the background load on the 99th percentile of each subject that was also
    /// measured alone: the latency with it divided by that without.
    fn prices(&self) -> Vec<(Subject, f64)> {
        let mut prices = Vec::new();
        for table in self.tables.iter().filter(|table| table.workload.beside.is_some()) {
            let alone = Workload { beside: None, ..table.workload };
            let rows = || self.tables.iter().filter(|t| t.workload == alone).flat_map(|t| &t.rows);
            for row in &table.rows {
                let p99 = |row: &ImageRow| row.median(|sample| sample.p99_us);
                if let Some(alone) = rows().find(|alone| alone.subject == row.subject) {
                    prices.push((row.subject, ratio(p99(row), p99(alone))));
                }
            }
        }
        prices
    }

    /// The lines after the last table.
    pub(crate) fn ending(&self) -> String {
        let mut text = String::new();
        let prices: Vec<String> = self
            .prices()
            .iter()
            .map(|(subject, price)| format!("{} {price:.2}", subject.server.name()))
            .collect();
        if !prices.is_empty() {
            text += &format!("\np99 beside allocating writes ÷ alone: {}\n", prices.join(", "));
        }
        for failure in &self.failures {
            let ImageFailure { subject, workload, problem } = failure;
            text += &format!("\n{subject} failed at {workload}: {problem}\n");
        }
        if self.interrupted {
            text += "\nstopped before the end\n";
        }
        text
    }
}

impl fmt::Display for ImagesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.heading())?;
        for table in &self.tables {
            table.fmt(f)?;
        }
        f.write_str(&self.ending())
    }
}

impl From<&ImagesReport> for Value {
    fn from(report: &ImagesReport) -> Value {
        let server = |(kind, version): &(ServerKind, String)| json!({ "name": kind.name(), "version": version });
        let subject = |subject: &Subject| json!({ "server": subject.server.name(), "image": subject.image.name() });
        let failure = |failure: &ImageFailure| {
            json!({
                "subject": subject(&failure.subject),
                "workload": failure.workload.to_string(),
                "problem": failure.problem,
            })
        };
        let price =
            |(of, price): &(Subject, f64)| json!({ "subject": subject(of), "p99_ratio": price });
        json!({
            "machine": report.machine.to_json(),
            "directory": report.directory,
            "servers": report.versions.iter().map(server).collect::<Vec<_>>(),
            "not_installed": report.missing.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
            "seconds": report.duration.as_secs_f64(),
            "rounds": report.rounds,
            "tables": report.tables.iter().map(ImageTable::to_json).collect::<Vec<_>>(),
            "beside_to_alone": report.prices().iter().map(price).collect::<Vec<_>>(),
            "failures": report.failures.iter().map(failure).collect::<Vec<_>>(),
            "interrupted": report.interrupted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comparison::examples::sample;
    use crate::workload::BackgroundLoad;

    fn report() -> ImagesReport {
        let alone = Workload::standard()[0];
        let beside = Workload { beside: Some(BackgroundLoad::Allocations), ..alone };
        let subject = |image| Subject { server: ServerKind::Nowait, image };
        let row = |image, iops: f64, p99_us| {
            let sample = Sample { p99_us, beside_mib_s: Some(100.0), ..sample(iops, 5.0) };
            ImageRow { subject: subject(image), samples: vec![sample; 3] }
        };
        let (raw, overlay) = (ImageKind::Raw, ImageKind::Overlay);
        ImagesReport {
            machine: Machine { kernel: "6.18".into(), processor: "any".into(), pinned: None },
            directory: "/images".into(),
            versions: vec![(ServerKind::Nowait, "nowait 1".into())],
            missing: vec![ServerKind::QemuNbd],
            duration: Duration::from_secs(1),
            rounds: 3,
            tables: vec![
                ImageTable {
                    workload: alone,
                    rows: vec![row(raw, 1000.0, 50.0), row(overlay, 900.0, 60.0)],
                },
                ImageTable { workload: beside, rows: vec![row(overlay, 800.0, 90.0)] },
            ],
            failures: Vec::new(),
            interrupted: true,
        }
    }

    #[test]
    fn text_and_json_compare_images_with_the_first_and_with_a_background_load() {
        let report = report();
        let (text, json) = (report.to_string(), Value::from(&report));
        for part in [
            "qemu-nbd: not installed",
            "nowait, new overlay",
            "  0.90\n",
            "depth 1, beside 64K allocating write, depth 1\n",
            "alone: nowait 1.50\n",
            "stopped before",
        ] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert_eq!(json["tables"][0]["rows"][1]["iops_to_first"], 0.9);
        assert_eq!(json["beside_to_alone"][0]["p99_ratio"], 1.5);
        assert_eq!(json["tables"][1]["rows"][0]["beside_mib_s"]["median"], 100.0);
        assert_eq!(json["interrupted"], true);
    }
}
