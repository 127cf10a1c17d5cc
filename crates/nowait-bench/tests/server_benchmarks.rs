//! End-to-end tests of the measurements, as short as possible, with the installed servers.

#[path = "../../nowait-cli/tests/suite/common/tool.rs"]
#[allow(dead_code)]
mod tool;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nowait_bench::{
    BackgroundLoad, Caching, ClientKind, Conditions, Direction, Error, ImageCase, ImageKind,
    ImagesOptions, Order, Output, PeersOptions, Report, ServerKind, Transport, Workload,
    run_images,
};
use serde_json::Value;
use tempfile::TempDir;

const FILE_BYTES: usize = 64 << 20;
const LOAD: Workload = Workload {
    direction: Direction::Read,
    order: Order::Random,
    block_bytes: 4096,
    depth: 16,
    beside: None,
};

const PLAIN: Conditions = Conditions { caching: Caching::PageCache, transport: Transport::Plain };
const TCP: Conditions = Conditions { caching: Caching::PageCache, transport: Transport::Tcp };
const TLS: Conditions = Conditions { caching: Caching::PageCache, transport: Transport::Tls };

fn file_of_zeros(directory: &TempDir) -> PathBuf {
    let path = directory.path().join("image, of zeros");
    File::create(&path).and_then(|file| file.set_len(FILE_BYTES as u64)).expect("a sparse file");
    path
}

fn options(file: &Path) -> PeersOptions {
    PeersOptions {
        servers: vec![ServerKind::QemuNbd, ServerKind::QemuStorageDaemon, ServerKind::Nbdkit],
        file: Some(file.to_owned()),
        duration: Duration::from_millis(50),
        rounds: 2,
        workloads: vec![LOAD, Workload { direction: Direction::Write, ..LOAD }],
        // Not every file system for temporary files supports direct I/O.
        tables: vec![PLAIN],
        ..PeersOptions::default()
    }
}

/// Measures and returns the report with the printed text; `None`, with a message, if no server is
/// installed.
fn measured(options: &PeersOptions) -> Option<(Report, String)> {
    let mut printed = Vec::new();
    match nowait_bench::run(options, &mut printed) {
        Ok(report) => Some((report, String::from_utf8(printed).expect("UTF-8"))),
        Err(Error::NoServer) => {
            tool::skip("no qemu-nbd, no qemu-storage-daemon, no nbdkit");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn every_server_is_measured_in_every_round_and_the_text_is_the_report() {
    let directory = TempDir::new().expect("a temporary directory");
    let options = PeersOptions {
        overwrite: true,
        connections: 2,
        tables: vec![PLAIN, TCP, TLS],
        html: Some(directory.path().join("report.html")),
        ..options(&file_of_zeros(&directory))
    };
    let Some((report, printed)) = measured(&options) else {
        return;
    };
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    assert_eq!(report.comparisons.len(), 6);
    for comparison in &report.comparisons {
        assert_eq!(comparison.rows.len(), report.versions.len());
        for row in &comparison.rows {
            assert_eq!(row.samples.len(), 2);
            for sample in &row.samples {
                assert!(
                    sample.iops > 0.0 && sample.server_cpu_us > 0.0 && sample.server_rss_mib > 0.0
                );
                assert!(sample.p99_us >= sample.p50_us && sample.p50_us > 0.0);
            }
        }
    }
    assert_eq!(printed, report.to_string());
    let page = fs::read_to_string(directory.path().join("report.html")).expect("a page");
    for comparison in &report.comparisons {
        assert!(page.contains(&format!("<h2>{}</h2>", comparison.workload)));
        assert!(page.contains(&format!("<h2>{}</h2>", comparison.terms)));
        for row in &comparison.rows {
            assert!(page.contains(&format!("<td>{:.0}</td>", row.iops().median)));
        }
    }
    assert!(page.ends_with("</html>\n"));
}

#[test]
fn fio_measures_the_same_rows_where_it_is_installed() {
    let directory = TempDir::new().expect("a temporary directory");
    let options = PeersOptions {
        client: ClientKind::Fio,
        overwrite: true,
        tables: vec![PLAIN, TCP],
        rounds: 1,
        ..options(&file_of_zeros(&directory))
    };
    if Command::new("fio").arg("--version").output().is_err() {
        tool::skip("no fio");
        return;
    }
    let Some((report, _)) = measured(&options) else {
        return;
    };
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    assert_eq!(report.comparisons.len(), 4);
    let rows = report.comparisons.iter().flat_map(|comparison| &comparison.rows);
    for sample in rows.flat_map(|row| &row.samples) {
        assert!(sample.iops > 0.0 && sample.server_cpu_us > 0.0 && sample.p99_us >= sample.p50_us);
    }
}

#[test]
fn the_throughput_of_a_flood_is_reported_with_that_of_the_small_reader() {
    let directory = TempDir::new().expect("a temporary directory");
    let flood =
        |direction| Workload { depth: 1, beside: Some(BackgroundLoad::Flood(direction)), ..LOAD };
    let options = PeersOptions {
        overwrite: true,
        workloads: vec![flood(Direction::Read), flood(Direction::Write)],
        rounds: 1,
        ..options(&file_of_zeros(&directory))
    };
    let Some((report, _)) = measured(&options) else {
        return;
    };
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    let rows: Vec<_> = report.comparisons.iter().flat_map(|comparison| &comparison.rows).collect();
    assert_eq!(rows.len(), 2 * report.versions.len());
    for sample in rows.iter().flat_map(|row| &row.samples) {
        assert!(sample.iops > 0.0 && sample.beside_mib_s.is_some_and(|rate| rate > 0.0));
    }
}

#[test]
fn a_file_is_only_written_to_with_permission() {
    let directory = TempDir::new().expect("a temporary directory");
    let path = file_of_zeros(&directory);
    let is_zero = || fs::read(&path).expect("the file").iter().all(|&byte| byte == 0);

    let Some((report, printed)) = measured(&options(&path)) else {
        return;
    };
    assert!(is_zero());
    assert!(
        report
            .comparisons
            .iter()
            .all(|comparison| comparison.workload.direction == Direction::Read)
    );
    assert!(printed.contains("only reads"));

    let with_leave = PeersOptions { overwrite: true, output: Output::Json, ..options(&path) };
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
    assert!(report.interrupted && report.comparisons.is_empty());
    assert!(printed.ends_with("stopped before the end\n"));
}

#[test]
fn images_are_measured_with_every_server_that_supports_them_and_removed_afterwards() {
    let cases: Vec<ImageCase> = ImageCase::standard()
        .into_iter()
        .filter(|case| case.workload.direction == Direction::Read && case.workload.depth == 1)
        .collect();
    let options = ImagesOptions {
        servers: ServerKind::ALL.to_vec(),
        duration: Duration::from_millis(50),
        rounds: 1,
        cases,
        ..ImagesOptions::default()
    };
    let mut printed = Vec::new();
    let report = match run_images(&options, &mut printed) {
        Ok(report) => report,
        Err(e) => {
            assert!(matches!(e, Error::NoServer | Error::System { .. }), "{e}");
            tool::skip(&e.to_string());
            return;
        }
    };
    assert!(!Path::new(&report.directory).exists());
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    let images: Vec<&[ImageKind]> = options.cases.iter().map(|case| case.images).collect();
    assert_eq!(report.tables.len(), images.len());
    for (table, images) in report.tables.iter().zip(images) {
        // None of these servers is measured on raw files.
        let kinds = images.iter().filter(|image| **image != ImageKind::Raw).count();
        assert_eq!(table.rows.len(), kinds * report.versions.len());
        for row in &table.rows {
            assert!(row.samples.iter().all(|sample| sample.iops > 0.0), "{}", row.subject);
            let beside =
                |sample: &nowait_bench::Sample| sample.beside_mib_s.is_some_and(|mib| mib > 0.0);
            assert_eq!(row.samples.iter().all(beside), table.workload.beside.is_some());
        }
    }
    assert_eq!(String::from_utf8(printed).expect("UTF-8"), report.to_string());
}
