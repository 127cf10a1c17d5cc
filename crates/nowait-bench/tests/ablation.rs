//! End-to-end tests of the tables of the engine, as short as possible: they check the content,
//! never the speed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nowait_bench::{EngineOptions, Error, Output, Report, RunOptions, TableSelection, run_engine};
use serde_json::Value;
use tempfile::TempDir;

const FILE_BYTES: usize = 64 << 20;

fn file_of_zeros(directory: &TempDir) -> PathBuf {
    let path = directory.path().join("image: of zeros");
    File::create(&path).and_then(|file| file.set_len(FILE_BYTES as u64)).expect("a sparse file");
    path
}

fn options(what: TableSelection, file: &Path) -> EngineOptions {
    // Starting fio is slow.
    let rounds = if what == TableSelection::Engines { 1 } else { 2 };
    let duration = Duration::from_millis(2);
    let run = RunOptions { overwrite: true, duration, rounds, ..RunOptions::default() };
    let (file, latency) = (Some(file.to_owned()), vec![Duration::from_micros(50)]);
    EngineOptions { run, what, file, latency }
}

fn measured(options: &EngineOptions) -> (Report, String) {
    let mut printed = Vec::new();
    let report = run_engine(options, &mut printed).expect("a report");
    (report, String::from_utf8(printed).expect("UTF-8"))
}

fn array<'a>(object: &'a Value, name: &str) -> &'a Vec<Value> {
    object[name].as_array().unwrap_or_else(|| panic!("no {name} in {object}"))
}

/// Measures one selection and checks that every cell of its tables has a figure, and that all are
/// printed. Returns the titles of the rows with the numbers of their variants.
fn measure_complete(what: TableSelection) -> Vec<(String, usize)> {
    let directory = TempDir::new().expect("a temporary directory");
    let options = options(what, &file_of_zeros(&directory));
    let (report, printed) = measured(&options);
    assert!(!report.interrupted);
    let mut rows = Vec::new();
    for table in array(&report.json, "tables") {
        assert_eq!(table["what"], what.name());
        assert!(printed.contains(table["title"].as_str().expect("a title")), "{printed}");
        for row in array(table, "rows") {
            let title = row["row"].as_str().expect("a title").to_owned();
            assert!(printed.contains(&title), "{title} is not in {printed}");
            for cell in array(row, "cells") {
                if cell["variant"] == "loop device" && !cell["problem"].is_null() {
                    nowait_testkit::skip(&format!("no loop device ({cell})"));
                    continue;
                }
                let figure = cell["mib_per_second"]["min"].as_f64();
                assert!(figure.is_some_and(|figure| figure > 0.0), "{title}: {cell}");
                assert!(cell["problem"].is_null());
            }
            rows.push((title, array(row, "cells").len()));
        }
    }
    rows
}

#[test]
fn simple_has_both_queues_all_depths_and_all_three_interfaces() {
    let rows = measure_complete(TableSelection::Simple);
    let titles: Vec<&str> = rows.iter().map(|(title, _)| title.as_str()).collect();
    assert_eq!(titles.len(), 4 + 4 + 1 + 4);
    let parts = [
        "null queue, poll, depth 512",
        "file, poll, depth 128",
        "file, sync, depth 1",
        "file, async, depth 256",
    ];
    for part in parts {
        assert!(titles.contains(&part), "{titles:?}");
    }
}

#[test]
fn completion_has_four_block_sizes() {
    assert_eq!(measure_complete(TableSelection::Completion).len(), 4);
}

#[test]
fn durable_has_three_depths() {
    assert_eq!(measure_complete(TableSelection::Durable).len(), 3);
}

#[test]
fn vectored_has_the_file_the_given_latency_small_segments_and_a_durable_write() {
    let rows = measure_complete(TableSelection::Vectored);
    assert_eq!(rows.iter().filter(|row| row.0.starts_with("50µs queue, ")).count(), 5);
    assert_eq!(rows.iter().filter(|row| row.1 == 4).count(), 5);
    assert_eq!(rows.len(), 5 + 5 + 5 + 2);
}

#[test]
fn pool_has_slots_freed_on_the_same_and_on_another_thread() {
    assert_eq!(measure_complete(TableSelection::Pool).len(), 4);
}

#[test]
fn nowait_has_stable_and_sparse_files_three_variants_and_the_loop_device() {
    let rows = measure_complete(TableSelection::Nowait);
    assert_eq!(rows.iter().filter(|row| row.1 == 3).count(), 4);
    let loops = rows.iter().filter(|row| row.1 == 2).count();
    if loops == 0 {
        nowait_testkit::skip("no loop device");
    }
    assert!(loops == 0 || loops == 2, "{rows:?}");
}

#[test]
fn engines_are_compared_at_three_depths_in_both_directions() {
    let rows = measure_complete(TableSelection::Engines);
    assert_eq!(rows.len(), 6);
    let fio = rows.iter().all(|row| row.1 == 7);
    if !fio {
        nowait_testkit::skip("no fio");
    }
}

#[test]
fn a_file_is_only_written_to_with_permission() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = file_of_zeros(&directory);
    for what in TableSelection::EACH {
        let mut options = options(what, &path);
        options.run.overwrite = false;
        let (report, printed) = measured(&options);
        assert!(printed.contains("only reads"));
        let is_empty = array(&report.json, "tables").is_empty();
        let writes_only = [TableSelection::Completion, TableSelection::Durable];
        assert_eq!(is_empty, writes_only.contains(&what));
    }
    let bytes = fs::read(&path).expect("the file");
    assert!(bytes.len() == FILE_BYTES && bytes.iter().all(|&byte| byte == 0));
    let (_, _) = measured(&options(TableSelection::Completion, &path));
    assert!(fs::read(&path).expect("the file").iter().any(|&byte| byte != 0));
}

#[test]
fn the_page_is_self_contained_and_the_json_object_has_the_figures_of_the_text() {
    let directory = TempDir::new().expect("a temporary directory");
    let html = directory.path().join("report.html");
    let mut options = options(TableSelection::Pool, &file_of_zeros(&directory));
    options.run.html = Some(html.clone());
    let (text, printed) = measured(&options);
    assert!(printed.contains("allocator") && text.failures.is_empty());
    options.run.output = Output::Json;
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

    let page = fs::read_to_string(&html).expect("a page");
    assert_eq!(page.matches("<svg").count(), 2);
    for from_outside in ["http:", "https:", "url(", "<script", "<link", "<img", "@import"] {
        assert!(!page.contains(from_outside), "{from_outside}");
    }
    options.run.overwrite = false;
    assert!(matches!(run_engine(&options, &mut Vec::new()), Err(Error::File { .. })));
}

#[test]
fn a_cancelled_measurement_reports_the_finished_tables() {
    let directory = TempDir::new().expect("a temporary directory");
    let options = options(TableSelection::All, &file_of_zeros(&directory));
    options.run.stop.request();
    let (report, printed) = measured(&options);
    assert!(report.interrupted && array(&report.json, "tables").is_empty());
    assert!(printed.ends_with("stopped before the end\n"));
}
