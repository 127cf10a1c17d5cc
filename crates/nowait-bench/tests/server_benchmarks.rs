//! End-to-end tests of the measurements, as short as possible, with the installed servers.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use clap::Parser;
use nowait_bench::{Bench, BenchArgs, CancelFlag, Error, Report, ServerKind, Transport, run};
use serde_json::Value;
use tempfile::TempDir;

const FILE_BYTES: usize = 64 << 20;

fn file_of_zeros(directory: &TempDir) -> PathBuf {
    let path = directory.path().join("image, of zeros");
    File::create(&path).and_then(|file| file.set_len(FILE_BYTES as u64)).expect("a sparse file");
    path
}

/// A short benchmark by this command line, without nowait.
fn bench(words: &str) -> Bench {
    let line = ["nowait-bench"].into_iter().chain(words.split(' '));
    let mut args = BenchArgs::parse_from(line);
    args.seconds = Some(0.05);
    Bench { args, nowait: None, stop: CancelFlag::default() }
}

/// Reads, and writes if the file may be overwritten, 16 in flight, in two rounds.
fn options(file: &Path) -> Bench {
    // Not every file system for temporary files supports direct I/O.
    let mut bench = bench("peers --caching cached --transport plain --rounds 2");
    bench.args.servers =
        vec![ServerKind::QemuNbd, ServerKind::QemuStorageDaemon, ServerKind::Nbdkit];
    (bench.args.file, bench.args.only) = (Some(file.to_owned()), Some("depth 16".into()));
    bench
}

/// Like [`options`], and the file may be overwritten.
fn overwriting(file: &Path) -> Bench {
    let mut bench = options(file);
    bench.args.overwrite = true;
    bench
}

/// Measures and returns the report with the printed text; `None`, with a message, if no server is
/// installed.
fn measured(bench: &Bench) -> Option<(Report, String)> {
    let mut printed = Vec::new();
    match run(bench, &mut printed) {
        Ok(report) => {
            assert!(report.failures.is_empty(), "{:?}", report.failures);
            Some((report, String::from_utf8(printed).expect("UTF-8")))
        }
        Err(Error::NoServer) => {
            nowait_testkit::skip("no qemu-nbd, no qemu-storage-daemon, no nbdkit");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn array<'a>(object: &'a Value, name: &str) -> &'a Vec<Value> {
    object[name].as_array().unwrap_or_else(|| panic!("no {name} in {object}"))
}

/// The lowest of the rounds.
fn lowest(row: &Value, figure: &str) -> f64 {
    row[figure]["min"].as_f64().unwrap_or_else(|| panic!("no {figure} in {row}"))
}

/// Checks that every server has figures in each of `comparisons` comparisons.
fn check_complete(report: &Report, comparisons: usize) {
    let all = array(&report.json, "comparisons");
    assert_eq!(all.len(), comparisons);
    for comparison in all {
        let rows = array(comparison, "servers");
        assert_eq!(rows.len(), array(&report.json, "servers").len());
        for row in rows {
            let [iops, cpu] = ["iops", "server_cpu_us_per_request"].map(|it| lowest(row, it));
            // On a busy machine a server may have made its answers before the interval began.
            assert!(iops > 0.0 && cpu >= 0.0 && lowest(row, "server_rss_mib") > 0.0, "{row}");
            assert!(lowest(row, "p99_us") >= lowest(row, "p50_us"), "{row}");
            assert!(lowest(row, "p50_us") > 0.0, "{row}");
        }
    }
}

#[test]
fn every_server_is_measured_over_every_transport_and_text_has_the_figures() {
    let directory = TempDir::new().expect("a temporary directory");
    let mut options = overwriting(&file_of_zeros(&directory));
    options.args.connections = Some(2);
    for (transport, comparisons) in [(None, 4), (Some(Transport::Tcp), 2)] {
        options.args.transport = transport;
        let Some((report, printed)) = measured(&options) else {
            return;
        };
        check_complete(&report, comparisons);
        for comparison in array(&report.json, "comparisons") {
            let workload = comparison["workload"].as_str().expect("a workload");
            assert!(printed.contains(workload));
            for row in array(comparison, "servers") {
                let iops = row["iops"]["median"].as_f64().expect("a figure");
                assert!(printed.contains(&format!(" {iops:.0} ")), "{printed}");
            }
        }
        let over = transport.map_or("page cache, TLS", |_| "page cache, TCP");
        assert!(printed.contains(&format!("== {over} ==")));
        let is_named = printed.contains("negotiated: TLS 1.3 with");
        assert_eq!(is_named, transport.is_none());
    }
}

#[test]
fn the_throughput_of_a_flood_is_reported_with_that_of_the_small_reader() {
    let directory = TempDir::new().expect("a temporary directory");
    let mut options = overwriting(&file_of_zeros(&directory));
    (options.args.rounds, options.args.only) = (1, Some("beside".into()));
    let Some((report, _)) = measured(&options) else {
        return;
    };
    check_complete(&report, 2);
    for row in array(&report.json, "comparisons").iter().flat_map(|it| array(it, "servers")) {
        assert!(lowest(row, "beside_mib_s") > 0.0, "{row}");
    }
}

#[test]
fn disks_of_virtual_machines_are_measured_with_one_queue_and_with_two_raw_and_qcow2() {
    let directory = TempDir::new().expect("a temporary directory");
    let mut options = options(&file_of_zeros(&directory));
    options.args.transport = Some(Transport::VhostUser);
    options.args.only = Some("64K random".into());
    options.args.overwrite = true;
    let Some((report, printed)) = measured(&options) else {
        return;
    };
    // Reads and writes at three depths.
    check_complete(&report, 2 * 6);
    assert!(printed.contains("vhost-user, 1 queue(s), raw"), "{printed}");
    assert!(printed.contains("vhost-user, 2 queue(s), raw"), "{printed}");
    let args = &mut options.args;
    args.only = Some("4K random read, depth 16".into());
    (args.connections, args.file, args.overwrite) = (Some(3), None, false);
    if let Some((report, printed)) = measured(&options) {
        // Of 4K and of 64K, on both formats.
        check_complete(&report, 4);
        assert!(printed.contains("vhost-user, 3 queue(s), qcow2"), "{printed}");
    }
}

#[test]
fn a_file_is_only_written_to_with_permission() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = file_of_zeros(&directory);
    let is_zero = || fs::read(&path).expect("the file") == vec![0; FILE_BYTES];

    let Some((report, printed)) = measured(&options(&path)) else {
        return;
    };
    assert!(is_zero());
    let is_read = |comparison: &Value| comparison["direction"] == "read";
    assert!(array(&report.json, "comparisons").iter().all(is_read));
    assert!(printed.contains("only reads"));

    let mut with_leave = overwriting(&path);
    with_leave.args.json = true;
    let Some((_, printed)) = measured(&with_leave) else {
        return;
    };
    assert!(!is_zero());
    let json: Value = serde_json::from_str(&printed).expect("one JSON object");
    assert_eq!(json["comparisons"][1]["direction"], "write");
}

#[test]
fn a_cancelled_measurement_reports_what_was_finished() {
    let directory = TempDir::new().expect("a temporary directory");
    let options = options(&file_of_zeros(&directory));
    options.stop.request();
    let Some((report, printed)) = measured(&options) else {
        return;
    };
    assert!(report.interrupted && array(&report.json, "comparisons").is_empty());
    assert!(printed.ends_with("stopped before the end\n"));
}

#[test]
fn images_are_measured_with_every_server_that_supports_them_and_removed_afterwards() {
    let mut images = bench("images --rounds 1");
    images.args.only = Some("depth 16".into());
    let mut printed = Vec::new();
    let report = match run(&images, &mut printed) {
        Ok(report) => report,
        Err(e) => {
            assert!(matches!(e, Error::NoServer | Error::System { .. }), "{e}");
            nowait_testkit::skip(&e.to_string());
            return;
        }
    };
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    let files = array(&report.json, "files");
    let path = |file: &Value| PathBuf::from(file["path"].as_str().expect("a path"));
    assert!(files.len() == 3 && files.iter().all(|file| !path(file).exists()));
    // A chain is only read: in it a first write to a cluster allocates.
    check_complete(&report, 2 + 2 + 1);
    let printed = String::from_utf8(printed).expect("UTF-8");
    for table in ["direct", "direct, qcow2", "direct, chain of 3"] {
        assert!(printed.contains(&format!("== {table} ==")), "{printed}");
    }
}
