//! The benchmark of image formats: servers on images, workload by workload, round after round.
//!
//! Invariant: at most one server runs at a time, and a table is in the report only if all its
//! rounds are complete.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::Value;
use tempfile::TempDir;

use crate::cancel::CancelFlag;
use crate::certificates::Certificates;
use crate::comparison::Sample;
use crate::cpus::Placement;
use crate::error::Error;
use crate::measurement::Runner;
use crate::nbd_servers::{DURATION_MIN, Output, ROUNDS_MAX, find_programs, progress_bar};
use crate::qcow2_report::{ImageFailure, ImageRow, ImageTable, ImagesReport, Subject};
use crate::report::Machine;
use crate::server::{Program, ServerKind};
use crate::test_images::{ImageKind, TestImages};
use crate::workload::{
    BackgroundLoad, Caching, ClientKind, Conditions, Direction, Transport, Workload,
};

/// All measurements use direct I/O: the page cache would hide the format.
const TERMS: Conditions = Conditions { caching: Caching::Direct, transport: Transport::Plain };

/// A table to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageCase {
    /// The workload of each subject.
    pub workload: Workload,
    /// The images that nowait is measured on; the other servers are measured on those that are not
    /// raw.
    pub images: &'static [ImageKind],
}

impl ImageCase {
    /// What `nowait bench images` measures: 4K random reads and writes at depth 1, 16 and 64; and 4K random
    /// reads at depth 1 of an overlay, alone and beside writes that allocate.
    pub fn standard() -> Vec<ImageCase> {
        let of = |direction| move |w: &Workload| w.direction == direction && w.block_bytes == 4096;
        let small: Vec<Workload> =
            Workload::standard().into_iter().filter(|w| w.beside.is_none()).collect();
        let mut cases = Vec::new();
        for workload in small.iter().copied().filter(of(Direction::Read)) {
            let images = &[ImageKind::Raw, ImageKind::Qcow2, ImageKind::Chain];
            cases.push(ImageCase { workload, images });
        }
        for workload in small.iter().copied().filter(of(Direction::Write)) {
            // In a chain the first write to a cluster allocates.
            cases.push(ImageCase { workload, images: &[ImageKind::Raw, ImageKind::Qcow2] });
        }
        let alone = small.into_iter().find(of(Direction::Read));
        for beside in [None, Some(BackgroundLoad::Allocations)] {
            let workload = alone.map(|alone| Workload { beside, ..alone });
            cases.extend(
                workload.map(|workload| ImageCase { workload, images: &[ImageKind::Overlay] }),
            );
        }
        cases
    }
}

/// The options of the benchmark of image formats.
#[derive(Clone, Debug)]
pub struct ImagesOptions {
    /// The nowait program; `None` measures the others alone.
    pub nowait: Option<PathBuf>,
    /// The servers to measure, if installed; nbdkit does not support qcow2 and is left out.
    pub servers: Vec<ServerKind>,
    /// How long a subject is measured in one round, at least 50 ms, after 200 ms of warm-up.
    pub duration: Duration,
    /// The number of rounds, 1 to 100.
    pub rounds: u32,
    /// The tables.
    pub cases: Vec<ImageCase>,
    /// Text or JSON.
    pub output: Output,
    /// Ends the measurement early.
    pub stop: CancelFlag,
}

/// All servers and tables, three rounds of a second each.
impl Default for ImagesOptions {
    fn default() -> ImagesOptions {
        ImagesOptions {
            nowait: None,
            servers: ServerKind::ALL.to_vec(),
            duration: Duration::from_secs(1),
            rounds: 3,
            cases: ImageCase::standard(),
            output: Output::Text,
            stop: CancelFlag::default(),
        }
    }
}

/// Makes the images, measures, writes the result to `out` and returns it. Progress goes to stderr, if that is
/// a terminal.
///
/// A subject that fails is left out of its table and named in the report. After a cancellation by
/// the [`CancelFlag`] the report contains the finished tables.
///
/// # Errors
/// [`Error::Option`] before anything is started, [`Error::NoServer`] if nothing can be, [`Error::System`] if the
/// images cannot be made or `out` not be written.
pub fn run_images(options: &ImagesOptions, out: &mut impl Write) -> Result<ImagesReport, Error> {
    check(options)?;
    let servers: Vec<ServerKind> =
        options.servers.iter().copied().filter(|kind| *kind != ServerKind::Nbdkit).collect();
    let (programs, missing) = find_programs(&servers, options.nowait.as_deref())?;
    let test_images = TestImages::make()?;
    let scratch = TempDir::with_prefix("nowait-bench-")
        .map_err(Error::system("making a directory for sockets"))?;
    let certificates = Certificates::make().map_err(Error::system("making certificates"))?;
    let placement = Placement::choose()?;
    let mut report = ImagesReport {
        machine: Machine::this(placement)?,
        directory: test_images.directory().display().to_string(),
        versions: programs.iter().map(|program| (program.kind, program.version.clone())).collect(),
        missing,
        duration: options.duration,
        rounds: options.rounds,
        tables: Vec::new(),
        failures: Vec::new(),
        interrupted: false,
    };
    let runner = Runner {
        client: ClientKind::Own,
        placement,
        certificates: &certificates,
        scratch: scratch.path(),
        connections: 1,
        duration: options.duration,
        stop: &options.stop,
    };
    let mut say = |output: Output, text: String| {
        if output != options.output {
            return Ok(());
        }
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        written.map_err(Error::system("writing the report"))
    };
    let count: usize = options.cases.iter().map(|case| subjects(case, &programs).len()).sum();
    let progress = progress_bar(count as u64 * u64::from(options.rounds));
    let bench =
        Bench { runner, test_images: &test_images, rounds: options.rounds, progress: &progress };
    say(Output::Text, report.heading())?;
    for case in &options.cases {
        let rows = bench.rows(case, &programs, &mut report.failures);
        if options.stop.requested() {
            report.interrupted = true;
            break;
        }
        let table = ImageTable { workload: case.workload, rows };
        progress.suspend(|| say(Output::Text, table.to_string()))?;
        report.tables.push(table);
    }
    progress.finish_and_clear();
    say(Output::Text, report.ending())?;
    say(Output::Json, format!("{:#}\n", Value::from(&report)))?;
    Ok(report)
}

/// The parameters that are the same for all tables.
struct Bench<'a> {
    runner: Runner<'a>,
    test_images: &'a TestImages,
    rounds: u32,
    progress: &'a ProgressBar,
}

impl Bench<'_> {
    /// Runs all rounds of one table, or fewer if cancelled. Failed subjects are added to
    /// `failures`.
    fn rows(
        &self,
        case: &ImageCase,
        programs: &[Program],
        failures: &mut Vec<ImageFailure>,
    ) -> Vec<ImageRow> {
        let workload = case.workload;
        let mut rows: Vec<(&Program, ImageRow)> = subjects(case, programs)
            .into_iter()
            .map(|(program, image)| {
                let subject = Subject { server: program.kind, image };
                (program, ImageRow { subject, samples: Vec::new() })
            })
            .collect();
        for _ in 0..self.rounds {
            rows.retain_mut(|(program, row)| {
                if self.runner.stop.requested() {
                    return true;
                }
                let subject = row.subject;
                self.progress.set_message(format!("{workload}: {subject}"));
                let outcome = self.take(program, subject.image, workload);
                self.progress.inc(1);
                match outcome {
                    Ok(sample) => row.samples.push(sample),
                    Err(e) => {
                        failures.push(ImageFailure { subject, workload, problem: e.to_string() });
                        return false;
                    }
                }
                true
            });
        }
        rows.into_iter().map(|(_, row)| row).collect()
    }

    /// One measurement on an image that is created anew or reset to the common initial state.
    fn take(&self, program: &Program, image: ImageKind, workload: Workload) -> io::Result<Sample> {
        let target = self.test_images.image(image)?;
        target.prepare(TERMS.caching)?;
        self.runner.take(program, &target, &workload, TERMS)
    }
}

/// The pairs of server and image of a table.
fn subjects<'a>(case: &ImageCase, programs: &'a [Program]) -> Vec<(&'a Program, ImageKind)> {
    let mut subjects = Vec::new();
    for program in programs {
        for &image in case.images {
            if program.kind == ServerKind::Nowait || image != ImageKind::Raw {
                subjects.push((program, image));
            }
        }
    }
    subjects
}

fn check(options: &ImagesOptions) -> Result<(), Error> {
    let bad = |name, problem| Err(Error::Option { name, problem });
    if options.duration < DURATION_MIN {
        return bad("duration", "has to be 0.05 seconds or more");
    }
    if !(1..=ROUNDS_MAX).contains(&options.rounds) {
        return bad("rounds", "has to be 1 to 100");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_out_of_range_is_rejected_by_name() {
        let good = ImagesOptions::default();
        assert!(check(&good).is_ok());
        let short = ImagesOptions { duration: Duration::ZERO, ..good.clone() };
        let never = ImagesOptions { rounds: 0, ..good };
        for (options, name) in [(short, "duration"), (never, "rounds")] {
            let text = check(&options).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(text.starts_with(name), "{text:?}");
        }
    }

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
}
