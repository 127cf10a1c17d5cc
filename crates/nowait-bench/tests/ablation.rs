//! End-to-end tests of the tables of the engine, as short as possible: they check the content,
//! never the speed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use clap::Parser;
use nowait_bench::{Bench, BenchArgs, CancelFlag, Report, What, run};
use serde_json::Value;
use tempfile::TempDir;

const FILE_BYTES: usize = 64 << 20;

fn file_of_zeros(directory: &TempDir) -> PathBuf {
    let path = directory.path().join("image: of zeros");
    File::create(&path).and_then(|file| file.set_len(FILE_BYTES as u64)).expect("a sparse file");
    path
}

fn options(what: What, file: &Path) -> Bench {
    let line = ["nowait-bench", &what.name(), "--overwrite", "--rounds", "2", "--file", "x"];
    let mut args = BenchArgs::parse_from(line);
    (args.file, args.seconds) = (Some(file.to_owned()), Some(0.002));
    Bench { args, nowait: None, stop: CancelFlag::default() }
}

fn measured(bench: &Bench) -> (Report, String) {
    let mut printed = Vec::new();
    let report = run(bench, &mut printed).expect("a report");
    (report, String::from_utf8(printed).expect("UTF-8"))
}

fn array<'a>(object: &'a Value, name: &str) -> &'a Vec<Value> {
    object[name].as_array().unwrap_or_else(|| panic!("no {name} in {object}"))
}

/// Whether a machine may lack what this cell measures.
fn may_lack(row: &str, variant: &str) -> bool {
    variant == "loop device" || row.contains("polled")
}

/// Measures one selection and checks that every cell of its tables has a figure and its processor
/// time, or the reason why it has none, and that all are printed. Returns the titles of the rows
/// with the numbers of their variants.
fn measure_complete(what: What) -> Vec<(String, usize)> {
    let directory = TempDir::new().expect("a temporary directory");
    let options = options(what, &file_of_zeros(&directory));
    let (report, printed) = measured(&options);
    // losetup may fail for root for reasons of the host's.
    let has_failed = report.failures.iter().any(|line| !line.contains(": loop device: "));
    assert!(!report.interrupted && !has_failed, "{:?}", report.failures);
    let (mut rows, mut lacking) = (Vec::new(), BTreeSet::new());
    for table in array(&report.json, "tables") {
        assert_eq!(table["what"], what.name());
        assert!(printed.contains(table["title"].as_str().expect("a title")), "{printed}");
        for row in array(table, "rows") {
            let title = row["row"].as_str().expect("a title").to_owned();
            assert!(printed.contains(&title), "{title} is not in {printed}");
            for cell in array(row, "cells") {
                let variant = cell["variant"].as_str().expect("a title");
                if let Some(problem) = cell["problem"].as_str() {
                    assert!(may_lack(&title, variant), "{title}: {cell}");
                    if !title.contains("polled") {
                        lacking.insert(problem.to_owned());
                    }
                    assert!(printed.contains(&format!(": {problem}\n")), "{printed}");
                    assert!(cell["iops"].is_null() && cell["cpu_ns_per_request"].is_null());
                    continue;
                }
                let least = |figure: &str| cell[figure]["min"].as_f64();
                let (speed, cpu) = (least("mib_per_second"), least("cpu_ns_per_request"));
                assert!(speed > Some(0.0) && cpu > Some(0.0), "{title}: {cell}");
            }
            rows.push((title, array(row, "cells").len()));
        }
    }
    for problem in lacking {
        nowait_testkit::skip(&problem);
    }
    rows
}

#[test]
fn simple_has_all_queues_all_depths_writes_and_the_allocation_cache() {
    let rows = measure_complete(What::Simple);
    let titles: Vec<&str> = rows.iter().map(|(title, _)| title.as_str()).collect();
    assert_eq!(titles.len(), 2 * (4 + 1 + 2) + 2);
    for part in [
        "null queue, read, depth 512",
        "null queue, allocation cache, write, depth 128",
        "file, read, depth 1",
        "file, write, depth 128",
        "file, allocation cache, read, depth 128",
        "file, polled, read, depth 512",
        "file, Linux AIO, read, depth 512",
    ] {
        assert!(titles.contains(&part), "{titles:?}");
    }
}

#[test]
fn a_row_is_called_polled_only_where_the_device_is_polled() {
    let directory = TempDir::new().expect("a temporary directory");
    let (report, printed) = measured(&options(What::Simple, &file_of_zeros(&directory)));
    let rows = array(&report.json["tables"][0], "rows");
    let named_so = |row: &&Value| row["row"].as_str().is_some_and(|title| title.contains("polled"));
    let polled: Vec<&Value> = rows.iter().filter(named_so).collect();
    assert_eq!(polled.len(), 1);
    // A temporary file's device has no poll queues, as a rule.
    if polled[0]["cells"][0]["problem"].is_null() {
        nowait_testkit::say_skipped("the device of temporary files is polled");
        return;
    }
    let title = polled[0]["row"].as_str().expect("a title");
    let reason = format!("{title}: no transfer was polled: the device has no poll queues");
    assert_eq!(printed.lines().filter(|line| *line == reason).count(), 1, "{printed}");
    assert!(report.failures.is_empty(), "{:?}", report.failures);
}

#[test]
fn each_table_has_its_rows_with_all_variants() {
    for (what, count, variants) in [
        (What::Completion, 4, 2),
        (What::Vectored, 5, 2),
        (What::Pool, 4, 2),
        (What::Merge, 6, 2),
        (What::Durable, 3, 2),
        (What::Log, 3, 3),
    ] {
        let rows = measure_complete(what);
        let are_complete = rows.len() == count && rows.iter().all(|row| row.1 == variants);
        assert!(are_complete, "{what:?}: {rows:?}");
    }
}

#[test]
fn nowait_has_stable_and_sparse_files_with_1_job_and_12_and_the_loop_device() {
    let rows = measure_complete(What::Nowait);
    let variants = |variants| rows.iter().filter(move |row| row.1 == variants);
    assert_eq!((variants(6).count(), variants(2).count()), (2 + 4, 2 * 4 + 4));
    for jobs in ["1 job", "12 jobs"] {
        let title = format!("sparse file, random write, {jobs}, depth 16");
        assert_eq!(rows.iter().filter(|row| row.0 == title).count(), 2, "{rows:?}");
    }
    for depth in ["1 job, depth 1", "1 job, depth 16", "1 job, depth 64", "12 jobs, depth 16"] {
        let title = format!("stable mapping, random read, {depth}");
        assert!(rows.contains(&(title, 2)), "{rows:?}");
    }
}

#[test]
fn only_measures_the_rows_with_a_text_in_their_titles() {
    let directory = TempDir::new().expect("a temporary directory");
    let mut options = options(What::Merge, &file_of_zeros(&directory));
    options.args.only = Some("random".into());
    let (report, _) = measured(&options);
    let tables = array(&report.json, "tables");
    assert_eq!((tables.len(), array(&tables[0], "rows").len()), (1, 2));
}

#[test]
fn engines_are_compared_at_three_depths_in_both_directions() {
    let rows = measure_complete(What::Engines);
    assert_eq!(rows.len(), 6);
    assert!(rows.iter().all(|row| row.1 == 7), "{rows:?}");
}

#[test]
fn without_the_right_to_a_loop_device_its_rows_say_so_and_nothing_has_failed() {
    if rustix::process::geteuid().is_root() {
        nowait_testkit::say_skipped("root may set up loop devices");
        return;
    }
    let directory = TempDir::new().expect("a temporary directory");
    let (report, printed) = measured(&options(What::Nowait, &file_of_zeros(&directory)));
    assert!(printed.contains("\nloop device: only root can set up a loop device\n"), "{printed}");
    assert!(report.failures.is_empty(), "{:?}", report.failures);
}

#[test]
fn a_file_is_only_written_to_with_permission() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = file_of_zeros(&directory);
    for what in What::TABLES {
        let mut options = options(what, &path);
        options.args.overwrite = false;
        let (report, printed) = measured(&options);
        assert!(printed.contains("only reads"));
        let is_empty = array(&report.json, "tables").is_empty();
        let writes_only = [What::Completion, What::Durable];
        assert_eq!(is_empty, writes_only.contains(&what));
    }
    let bytes = fs::read(&path).expect("the file");
    let zeros = vec![0; FILE_BYTES];
    assert!(bytes == zeros);
    let (_, _) = measured(&options(What::Completion, &path));
    assert!(fs::read(&path).expect("the file") != zeros);
}

#[test]
fn the_json_object_has_the_figures_of_the_report() {
    let directory = TempDir::new().expect("a temporary directory");
    let mut options = options(What::Pool, &file_of_zeros(&directory));
    options.args.json = true;
    let (report, printed) = measured(&options);
    let json: Value = serde_json::from_str(&printed).expect("one JSON object");
    let cell = |json: &Value| json["tables"][0]["rows"][0]["cells"][1].clone();
    assert_eq!(
        (&json["tables"][0]["what"], &cell(&json)["variant"]),
        (&"pool".into(), &"pool".into())
    );
    // Reading a number back may change its last bit.
    let [read, gain] =
        [&json, &report.json].map(|json| cell(json)["gain"].as_f64().expect("a gain"));
    assert!((read - gain).abs() <= gain * 1e-12, "{read} {gain}");
}

#[test]
fn a_cancelled_measurement_reports_the_finished_tables() {
    let directory = TempDir::new().expect("a temporary directory");
    let options = options(What::All, &file_of_zeros(&directory));
    options.stop.request();
    let (report, printed) = measured(&options);
    assert!(report.interrupted && array(&report.json, "tables").is_empty());
    assert!(printed.ends_with("stopped before the end\n"));
}
