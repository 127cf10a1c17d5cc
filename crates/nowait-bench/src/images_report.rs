//! What was measured of image formats: the servers on them beside each other, for people and for programs.
//!
//! Invariant: what is printed piece by piece while measuring is what `Display` prints as a whole; text and
//! JSON are made from the same samples. Knows: comparison, gallery, report (the machine), server (names),
//! workload. Known by: images.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::comparison::{
    Sample, Spread, aligned, figure_cells, figure_titles, figures_json, ratio,
};
use crate::gallery::ImageKind;
use crate::report::Machine;
use crate::server::ServerKind;
use crate::workload::Workload;

/// A server on an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Who serves.
    pub server: ServerKind,
    /// What is served.
    pub image: ImageKind,
}

/// For people: `nowait, raw`.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.server.name(), self.image.name())
    }
}

/// One subject in a table.
#[derive(Clone, Debug)]
pub struct ImageRow {
    /// Whose figures these are.
    pub subject: Subject,
    /// One per round.
    pub samples: Vec<Sample>,
}

impl ImageRow {
    /// The middle of one figure over the rounds.
    fn median(&self, figure: impl Fn(&Sample) -> f64) -> f64 {
        Spread::of(&self.samples, figure).median
    }
}

/// All subjects under one workload.
#[derive(Clone, Debug)]
pub struct ImageTable {
    /// What was asked.
    pub workload: Workload,
    /// In the order of measuring, without subjects that failed.
    pub rows: Vec<ImageRow>,
}

impl ImageTable {
    /// Requests per second of `row` as a part of the first one's.
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
    /// Which.
    pub subject: Subject,
    /// At what.
    pub workload: Workload,
    /// What it said or did.
    pub problem: String,
}

/// The whole of a measurement. `Display` gives the text, `Value::from(&report)` the JSON object.
#[derive(Clone, Debug)]
pub struct ImagesReport {
    /// Where.
    pub machine: Machine,
    /// The directory that the images were in.
    pub directory: String,
    /// The servers, and what each says its version is.
    pub versions: Vec<(ServerKind, String)>,
    /// Servers asked for that are not installed.
    pub missing: Vec<ServerKind>,
    /// Measured time of one subject in one round.
    pub duration: Duration,
    /// Rounds of each table.
    pub rounds: u32,
    /// What was finished, in the order of measuring.
    pub tables: Vec<ImageTable>,
    /// What went wrong.
    pub failures: Vec<ImageFailure>,
    /// Whether it was stopped before the end.
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

    /// What a neighbour does to the 99th percentile of each subject that was measured alone too: with it
    /// divided by without.
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
    use crate::workload::Neighbour;

    fn report() -> ImagesReport {
        let alone = Workload::standard()[0];
        let beside = Workload { beside: Some(Neighbour::Allocations), ..alone };
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
    fn the_text_and_the_json_say_how_images_do_against_the_first_and_beside_a_neighbour() {
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
