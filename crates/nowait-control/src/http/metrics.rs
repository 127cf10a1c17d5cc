//! The metrics of a server in the text format of OpenMetrics, which Prometheus reads.
//!
//! Invariant: the names are those of node_exporter's disks (`node_disk_`) with another prefix; a
//! metric of an operation is there from the first request of its frontend on.

use std::fmt;

use nowait::internal::{CountKind, CountValue, Counted};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use crate::api::{BucketInfo, LatencyInfo};
use crate::counted_api::{ExportInfo, FrontendInfo, OperationInfo, ServerInfo};

/// The content type of [`text_of`].
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of a server and its exports.
///
/// # Errors
/// None: writing to a string does not fail.
pub(crate) fn text_of(server: ServerInfo, exports: Vec<ExportInfo>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot { server, exports }));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

#[derive(Debug)]
struct Snapshot {
    server: ServerInfo,
    exports: Vec<ExportInfo>,
}

/// Names of one operation: its own, the metric of its requests, and of its bytes.
type OperationNames = (&'static str, &'static str, Option<&'static str>);

const OPERATIONS: [OperationNames; 6] = [
    ("read", "nowait_export_reads_completed", Some("nowait_export_read")),
    ("write", "nowait_export_writes_completed", Some("nowait_export_written")),
    ("discard", "nowait_export_discards_completed", Some("nowait_export_discarded")),
    ("zero", "nowait_export_zeroings_completed", Some("nowait_export_zeroed")),
    ("flush", "nowait_export_flush_requests", None),
    ("status", "nowait_export_status_requests", None),
];

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self { server, exports } = self;
        counts(&mut encoder, [(None, server)])?;
        counts(&mut encoder, exports.iter().map(|it| (Some(("export", it.name.as_str())), it)))?;
        let with_backup = exports.iter().filter_map(|it| Some((it, it.backup.as_ref()?)));
        if with_backup.clone().next().is_some() {
            let backups =
                with_backup.map(|(it, backup)| (Some(("export", it.name.as_str())), backup));
            counts(&mut encoder, backups)?;
        }
        let moved = exports.iter().filter_map(|it| Some((it, it.moving.as_ref()?)));
        if moved.clone().next().is_some() {
            let moves = moved.map(|(it, moving)| (Some(("export", it.name.as_str())), moving));
            counts(&mut encoder, moves)?;
        }
        let replicated = exports.iter().filter_map(|it| Some((it, it.replication.as_ref()?)));
        if replicated.clone().next().is_some() {
            let replications =
                replicated.map(|(it, one)| (Some(("export", it.name.as_str())), one));
            counts(&mut encoder, replications)?;
        }
        for (operation, requests, bytes) in OPERATIONS {
            let help = format!("Requests of kind {operation} that were answered");
            counters(&mut encoder, (requests, &help, None), exports, |info| {
                info.operations.get(operation).map(|totals| totals.requests)
            })?;
            let Some(bytes) = bytes else { continue };
            let help = format!("Bytes of requests of kind {operation} that succeeded");
            counters(&mut encoder, (bytes, &help, Some(&Unit::Bytes)), exports, |info| {
                info.operations.get(operation).map(|totals| totals.bytes)
            })?;
        }
        for (name, help, latency) in DURATIONS {
            durations(&mut encoder, exports, (name, help), latency)?;
        }
        let help = "How the engine has served requests";
        let name = "nowait_export_mechanism";
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for export in exports {
            for (mechanism, count) in &export.mechanisms {
                let labels = [("export", escaped(&export.name)), ("mechanism", mechanism.clone())];
                ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
            }
        }
        stores(&mut encoder, server)?;
        let behind = &server.nbd_servers;
        if !behind.is_empty() {
            counts(
                &mut encoder,
                behind.iter().map(|it| (Some(("uri", it.uri.as_str())), &it.counts)),
            )?;
        }
        let help = "Errors that requests failed with";
        let mut family =
            encoder.encode_descriptor("nowait_export_errors", help, None, MetricType::Counter)?;
        for (export, frontend, info) in frontends(exports) {
            for error in &info.errors {
                let (errno, export) = (error.errno.to_string(), escaped(export));
                let labels =
                    [("export", export), ("frontend", escaped(frontend)), ("errno", errno)];
                ConstCounter::new(error.requests).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// A histogram of durations: its name, its help and its value.
type Durations = (&'static str, &'static str, fn(&OperationInfo) -> Option<&LatencyInfo>);

const DURATIONS: [Durations; 2] = [
    (
        "nowait_export_request_duration",
        "How long requests took, of which one in sixteen is timed",
        |totals| totals.latency.as_ref(),
    ),
    ("nowait_export_device_duration", "How long of that the storage took", |totals| {
        totals.device_latency.as_ref()
    }),
];

/// The histograms of the durations of requests.
fn durations(
    encoder: &mut DescriptorEncoder<'_>,
    exports: &[ExportInfo],
    (name, help): (&str, &str),
    latency: impl Fn(&OperationInfo) -> Option<&LatencyInfo>,
) -> Result<(), fmt::Error> {
    let unit = Some(&Unit::Seconds);
    let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Histogram)?;
    for (export, frontend, info) in frontends(exports) {
        for (operation, totals) in &info.operations {
            let Some(latency) = latency(totals) else { continue };
            let (export, frontend) = (escaped(export), escaped(frontend));
            let labels =
                [("export", export), ("frontend", frontend), ("operation", operation.clone())];
            // The library writes this bound as infinite.
            let bucket = |it: &BucketInfo| (it.below_seconds.unwrap_or(f64::MAX), it.requests);
            let buckets: Vec<_> = latency.buckets.iter().map(bucket).collect();
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                latency.sum_seconds,
                latency.timed,
                &buckets,
                None,
            )?;
        }
    }
    Ok(())
}

/// A label: its name and its value.
type Label<'a> = (&'static str, &'a str);

/// The counts of all `items`, by their labels.
fn counts<'a, T: Counted>(
    encoder: &mut DescriptorEncoder<'_>,
    items: impl IntoIterator<Item = (Option<Label<'a>>, &'a T)> + Clone,
) -> Result<(), fmt::Error> {
    for count in T::COUNTS {
        let unit = match count.unit {
            "" => None,
            "bytes" => Some(Unit::Bytes),
            "seconds" => Some(Unit::Seconds),
            other => Some(Unit::Other(other.into())),
        };
        let kind = match count.kind {
            CountKind::Counter => MetricType::Counter,
            CountKind::Gauge => MetricType::Gauge,
        };
        let help = count.help.trim().trim_end_matches('.');
        let mut family = encoder.encode_descriptor(count.name, help, unit.as_ref(), kind)?;
        for (label, item) in items.clone() {
            let value = (count.get)(item);
            match label {
                Some((name, text)) => {
                    encode(value, kind, family.encode_family(&[(name, escaped(text))])?)?;
                }
                None => {
                    encode(value, kind, family)?;
                    break;
                }
            }
        }
    }
    Ok(())
}

fn encode(value: CountValue, kind: MetricType, encoder: MetricEncoder<'_>) -> fmt::Result {
    match (kind, value) {
        (MetricType::Counter, CountValue::Float(value)) => ConstCounter::new(value).encode(encoder),
        (_, CountValue::Float(value)) => ConstGauge::new(value).encode(encoder),
        (MetricType::Counter, value) => ConstCounter::new(value.integer()).encode(encoder),
        (_, value) => ConstGauge::new(value.integer()).encode(encoder),
    }
}

/// The memory and the counters of the objects that images are read from, and how long requests to them took.
fn stores(encoder: &mut DescriptorEncoder<'_>, server: &ServerInfo) -> Result<(), fmt::Error> {
    let stores = &server.stores;
    if stores.is_empty() {
        return Ok(());
    }
    counts(encoder, [(None, &server.block_memory)])?;
    counts(encoder, stores.iter().map(|it| (Some(("url", it.url.as_str())), &it.counts)))?;
    let (name, unit) = ("nowait_store_request_duration", Some(&Unit::Seconds));
    let help = "How long requests to the store took";
    let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Histogram)?;
    for store in stores {
        let labels = [("url", escaped(&store.url))];
        let bucket = |it: &BucketInfo| (it.below_seconds.unwrap_or(f64::MAX), it.requests);
        let buckets: Vec<_> = store.buckets.iter().map(bucket).collect();
        family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
            store.sum_seconds,
            store.requests,
            &buckets,
            None,
        )?;
    }
    Ok(())
}

/// A counter of each frontend of each export that has a value.
fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, unit): (&str, &str, Option<&Unit>),
    exports: &[ExportInfo],
    value: impl Fn(&FrontendInfo) -> Option<u64>,
) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
    for (export, frontend, info) in frontends(exports) {
        if let Some(value) = value(info) {
            let labels = [("export", escaped(export)), ("frontend", escaped(frontend))];
            ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// The value of a label as the format has it (OpenMetrics, "Escaping"): the library writes it as it is.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// All frontends of all exports, with the names of both.
fn frontends(exports: &[ExportInfo]) -> impl Iterator<Item = (&str, &str, &FrontendInfo)> {
    exports.iter().flat_map(|export| {
        let name = export.name.as_str();
        export.frontends.iter().map(move |(frontend, info)| (name, frontend.as_str(), info))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    use nowait_remote::{LinkCounts, MemoryCounts, StoreCounts};
    use nowait_testkit::written_docs::{assert_file, assert_part};

    use super::*;
    use crate::api::ErrnoInfo;
    use crate::counted_api::{NbdServerInfo, StoreInfo};

    /// A task that goes on for a while with an export.
    const TASKS: &str = r#"
        "backup": {"name": "a.backup", "only_dirty": false, "since_unix_seconds": 1, "size_bytes": 41, "copied_bytes": 46,
            "scratch_bytes": 47, "max_scratch_bytes": 48, "failure": "full"},
        "moving": {"target": "/b", "state": "following", "running": true, "total_bytes": 49, "copied_bytes": 50,
            "left_bytes": 51, "rounds": 52},
        "replication": {"target": "nbd://h/b", "state": "waiting", "running": true, "every_seconds": 53, "rounds": 54,
            "failures": 55, "copied_bytes": 56, "left_bytes": 57, "consistent": true, "lag_seconds": 58.5,
            "last_error": "gone"}"#;

    /// One of everything, each value another one.
    fn example() -> (ServerInfo, Vec<ExportInfo>) {
        let store = r#"{"url": "s3://b/k", "hits": 1, "misses": 2, "corrupt": 3, "stored": 4, "fetched_bytes": 5,
            "requests": 6, "retries": 7, "sum_seconds": 0.5, "buckets": [{"below_seconds": 0.25, "requests": 6}]}"#;
        let behind = r#"{"uri": "nbd://h/a", "connected": true, "reconnects": 8, "asked_again": 9,
            "unflushed_bytes": 10}"#;
        let server = format!(
            r#"{{"version": "1", "pid": 11, "uptime_seconds": 12.5, "connections": 13, "max_connections": 14,
            "registered_bytes": 15, "stores": [{store}], "block_memory_bytes": 16, "max_block_memory_bytes": 17,
            "nbd_servers": [{behind}]}}"#
        );
        let latency = r#"{"timed": 18, "sum_seconds": 1.5, "p50_seconds": 0.5, "p99_seconds": 0.5,
            "buckets": [{"below_seconds": 0.5, "requests": 18}, {"requests": 0}]}"#;
        let operations =
            ["read", "write", "flush", "discard", "zero", "status"].into_iter().enumerate();
        let operations: Vec<_> = operations
            .map(|(at, name)| {
                format!(
                    r#""{name}": {{"requests": {}, "bytes": {}, "errors": 1, "latency": {latency},
                    "device_latency": {latency}}}"#,
                    20 + at,
                    30 + at
                )
            })
            .collect();
        let export = format!(
            r#"{{"id": 40, "name": "a", "description": "", "image": "", "format": "raw", "size_bytes": 41,
            "read_only": true, "direct_io": true, "places": [], "members": 42, "in_flight": 43,
            "frontends": {{"nbd": {{"operations": {{{}}},
                "errors": [{{"errno": 5, "message": "", "requests": 44}}]}}}},
            "mechanisms": {{"simple": 45}}, "limits": {{}}, {TASKS}}}"#,
            operations.join(", ")
        );
        (serde_json::from_str(&server).unwrap(), vec![serde_json::from_str(&export).unwrap()])
    }

    #[test]
    fn the_names_types_and_units_are_those_that_programs_know() {
        let (server, exports) = example();
        let text = text_of(server, exports).unwrap();
        assert_file(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metrics.txt"), &text);
    }

    /// Rows of a table of all metrics: name, kind, labels, meaning.
    fn table(text: &str) -> String {
        let mut rows = String::from("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
        for family in text.split("# HELP ").skip(1) {
            let (name, rest) = family.split_once(' ').unwrap();
            let (help, rest) = rest.split_once('\n').unwrap();
            let kind = rest.lines().next().unwrap().rsplit(' ').next().unwrap();
            let suffix = if kind == "counter" { "_total" } else { "" };
            let sample = rest.lines().find(|line| !line.starts_with('#')).unwrap();
            let labels =
                sample.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
            let labels: Vec<_> =
                labels.split(',').filter_map(|label| label.split_once('=')).collect();
            let labels: Vec<_> = labels.iter().map(|(name, _)| format!("`{name}`")).collect();
            let row = format!("| `{name}{suffix}` | {kind} | {} | {help} |\n", labels.join(", "));
            rows.push_str(&row);
        }
        rows
    }

    #[test]
    fn each_operation_has_names() {
        let totals = nowait_server::FrontendTotals::default();
        let counted: BTreeSet<_> = totals.ops().map(|(name, _)| name).collect();
        assert_eq!(counted, OPERATIONS.into_iter().map(|(name, ..)| name).collect());
    }

    #[test]
    fn the_document_lists_every_metric() {
        let (server, exports) = example();
        let table = table(&text_of(server, exports).unwrap());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/control.md");
        assert_part(&path, ("| metric |", "\n\n"), &format!("{table}\n"));
    }

    #[test]
    fn a_name_with_quotes_and_line_ends_stays_in_its_label() {
        let read =
            OperationInfo { requests: 3, bytes: 4096, errors: 1, ..OperationInfo::default() };
        let frontend = FrontendInfo {
            operations: BTreeMap::from([("read".to_owned(), read)]),
            errors: vec![ErrnoInfo { errno: 5, message: "x".into(), requests: 1 }],
        };
        let export = ExportInfo {
            name: "a\"b\n\\c".into(),
            size_bytes: 512,
            frontends: BTreeMap::from([("nbd".to_owned(), frontend)]),
            ..ExportInfo::default()
        };
        let text = text_of(ServerInfo::default(), vec![export]).unwrap();
        let name = r#"export="a\"b\n\\c""#;
        for line in [
            format!("nowait_export_size_bytes{{{name}}} 512"),
            format!("nowait_export_reads_completed_total{{{name},frontend=\"nbd\"}} 3"),
            format!("nowait_export_read_bytes_total{{{name},frontend=\"nbd\"}} 4096"),
            format!("nowait_export_errors_total{{{name},frontend=\"nbd\",errno=\"5\"}} 1"),
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in {text}");
        }
        assert!(text.ends_with("# EOF\n") && !text.contains("nowait_store"));
        assert!(!text.contains("nowait_block_memory"));
    }

    #[test]
    fn another_nbd_server_has_its_connection() {
        let behind = NbdServerInfo {
            uri: "nbd://h/a".into(),
            counts: LinkCounts {
                connected: true,
                reconnects: 2,
                unflushed_bytes: 4096,
                ..LinkCounts::default()
            },
        };
        let server = ServerInfo { nbd_servers: vec![behind], ..ServerInfo::default() };
        let text = text_of(server, Vec::new()).unwrap();
        for line in [
            "nowait_nbd_server_connected{uri=\"nbd://h/a\"} 1",
            "nowait_nbd_server_reconnects_total{uri=\"nbd://h/a\"} 2",
            "nowait_nbd_server_unflushed_bytes{uri=\"nbd://h/a\"} 4096",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in {text}");
        }
    }

    #[test]
    fn a_store_has_its_counters_and_a_histogram() {
        let bucket = |below_seconds, requests| BucketInfo { below_seconds, requests };
        let mut counts = StoreCounts::default();
        counts.fetched_bytes = 65536;
        let store = StoreInfo {
            url: "s3://b/k".into(),
            counts,
            requests: 3,
            sum_seconds: 0.5,
            buckets: vec![bucket(Some(0.25), 2), bucket(None, 1)],
        };
        let server = ServerInfo {
            stores: vec![store],
            block_memory: MemoryCounts { block_memory_bytes: 4096, max_block_memory_bytes: 8192 },
            ..ServerInfo::default()
        };
        let text = text_of(server, Vec::new()).unwrap();
        for line in [
            "nowait_block_memory_bytes 4096",
            "nowait_block_memory_limit_bytes 8192",
            "nowait_store_fetched_bytes_total{url=\"s3://b/k\"} 65536",
            "nowait_store_request_duration_seconds_bucket{le=\"0.25\",url=\"s3://b/k\"} 2",
            "nowait_store_request_duration_seconds_bucket{le=\"+Inf\",url=\"s3://b/k\"} 3",
            "nowait_store_request_duration_seconds_sum{url=\"s3://b/k\"} 0.5",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in {text}");
        }
    }
}
