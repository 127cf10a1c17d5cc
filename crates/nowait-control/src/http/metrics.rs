//! The metrics of a server in the text format of OpenMetrics, which Prometheus reads.
//!
//! Invariant: the names are those of node_exporter's disks (`node_disk_`) with another prefix; a
//! metric of an operation is there from the first request of its frontend on.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use crate::api::{
    BucketInfo, ExportInfo, FrontendInfo, LatencyInfo, NbdServerInfo, OperationInfo, ServerInfo,
    StoreInfo,
};

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

/// What one operation is called: its name, the metric of its requests, and of its bytes.
type OperationNames = (&'static str, &'static str, Option<&'static str>);

const OPERATIONS: [OperationNames; 6] = [
    ("read", "nowait_export_reads_completed", Some("nowait_export_read")),
    ("write", "nowait_export_writes_completed", Some("nowait_export_written")),
    ("discard", "nowait_export_discards_completed", Some("nowait_export_discarded")),
    ("zero", "nowait_export_zeroings_completed", Some("nowait_export_zeroed")),
    ("flush", "nowait_export_flush_requests", None),
    ("status", "nowait_export_status_requests", None),
];

/// A metric of an export: its name, its help, its unit and its value.
type OfExport = (&'static str, &'static str, Option<Unit>, fn(&ExportInfo) -> u64);

const OF_EXPORTS: [OfExport; 4] = [
    ("nowait_export_size", "Size of the disk", Some(Unit::Bytes), |export| export.size_bytes),
    ("nowait_export_in_flight", "Requests in flight", None, |export| export.in_flight),
    ("nowait_export_members", "Connections and queues served", None, |export| export.members),
    ("nowait_export_read_only", "Whether writes are refused", None, |export| {
        u64::from(export.read_only)
    }),
];

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self { server, exports } = self;
        gauge(&mut encoder, "nowait_connections", "Connections of clients", server.connections)?;
        let most = server.max_connections;
        gauge(&mut encoder, "nowait_connections_limit", "The most connections", most)?;
        let registered = encoder.encode_descriptor(
            "nowait_registered",
            "Memory registered with the kernel",
            Some(&Unit::Bytes),
            MetricType::Gauge,
        )?;
        ConstGauge::new(server.registered_bytes).encode(registered)?;
        let uptime = encoder.encode_descriptor(
            "nowait_uptime",
            "Time since the server began",
            Some(&Unit::Seconds),
            MetricType::Gauge,
        )?;
        ConstGauge::new(server.uptime_seconds).encode(uptime)?;
        for (name, help, unit, value) in OF_EXPORTS {
            let mut family =
                encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
            for export in exports {
                let labels = [("export", escaped(&export.name))];
                ConstGauge::new(value(export)).encode(family.encode_family(&labels)?)?;
            }
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
        nbd_servers(&mut encoder, &server.nbd_servers)?;
        let help = "Errors that requests ended with";
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

/// A counter of a store: its name, its help, its unit and its value.
type OfStore = (&'static str, &'static str, Option<Unit>, fn(&StoreInfo) -> u64);

const OF_STORES: [OfStore; 6] = [
    ("nowait_store_hits", "Blocks that reads had from memory or the cache", None, |it| it.hits),
    ("nowait_store_misses", "Blocks that reads had from the store", None, |it| it.misses),
    ("nowait_store_corrupt", "Blocks of the cache that were corrupt", None, |it| it.corrupt),
    ("nowait_store_stored", "Blocks that were written to the cache", None, |it| it.stored),
    ("nowait_store_fetched", "Bytes that came from the store", Some(Unit::Bytes), |it| {
        it.fetched_bytes
    }),
    ("nowait_store_retries", "Requests to the store that were made again", None, |it| it.retries),
];

/// The memory and the counters of the objects that images are read from, and how long requests to them took.
fn stores(encoder: &mut DescriptorEncoder<'_>, server: &ServerInfo) -> Result<(), fmt::Error> {
    let stores = &server.stores;
    if stores.is_empty() {
        return Ok(());
    }
    let memory = "Memory for blocks of all objects";
    let most = "The most memory for blocks of all objects";
    for (name, help, bytes) in [
        ("nowait_block_memory", memory, server.block_memory_bytes),
        ("nowait_block_memory_limit", most, server.max_block_memory_bytes),
    ] {
        let gauge = encoder.encode_descriptor(name, help, Some(&Unit::Bytes), MetricType::Gauge)?;
        ConstGauge::new(bytes).encode(gauge)?;
    }
    for (name, help, unit, value) in OF_STORES {
        let mut family =
            encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        for store in stores {
            let labels = [("url", escaped(&store.url))];
            ConstCounter::new(value(store)).encode(family.encode_family(&labels)?)?;
        }
    }
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

/// A value of another NBD server: its name, its help, its unit, its kind and the value.
type OfServer = (&'static str, &'static str, Option<Unit>, MetricType, fn(&NbdServerInfo) -> u64);

const OF_SERVERS: [OfServer; 4] = [
    ("nowait_nbd_server_connected", "1 if there is a connection", None, MetricType::Gauge, |it| {
        u64::from(it.connected)
    }),
    (
        "nowait_nbd_server_reconnects",
        "Connections that were made in place of one that was lost",
        None,
        MetricType::Counter,
        |it| it.reconnects,
    ),
    (
        "nowait_nbd_server_requests_again",
        "Requests that were asked again because a connection was lost",
        None,
        MetricType::Counter,
        |it| it.asked_again,
    ),
    (
        "nowait_nbd_server_unflushed",
        "Bytes that were written and are covered by no flush",
        Some(Unit::Bytes),
        MetricType::Gauge,
        |it| it.unflushed_bytes,
    ),
];

/// The connections to other NBD servers.
fn nbd_servers(
    encoder: &mut DescriptorEncoder<'_>,
    servers: &[NbdServerInfo],
) -> Result<(), fmt::Error> {
    if servers.is_empty() {
        return Ok(());
    }
    for (name, help, unit, kind, value) in OF_SERVERS {
        let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for server in servers {
            let labels = [("uri", escaped(&server.uri))];
            let encoder = family.encode_family(&labels)?;
            match kind {
                MetricType::Gauge => ConstGauge::new(value(server)).encode(encoder)?,
                _ => ConstCounter::new(value(server)).encode(encoder)?,
            }
        }
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

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: u64,
) -> Result<(), fmt::Error> {
    let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    ConstGauge::new(value).encode(metric)
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
    use std::collections::BTreeMap;

    use super::*;
    use crate::api::ErrnoInfo;

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
        let operations = ["read", "write", "flush", "discard", "zero", "status"].into_iter().enumerate();
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
            "mechanisms": {{"simple": 45}}, "limits": {{}}}}"#,
            operations.join(", ")
        );
        (serde_json::from_str(&server).unwrap(), vec![serde_json::from_str(&export).unwrap()])
    }

    #[test]
    fn the_names_types_and_units_are_those_that_programs_know() {
        let (server, exports) = example();
        let text = text_of(server, exports).unwrap();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/metrics.txt");
        if std::env::var_os("NOWAIT_WRITE_DOCS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        assert_eq!(text, std::fs::read_to_string(path).unwrap());
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
            connected: true,
            reconnects: 2,
            unflushed_bytes: 4096,
            ..NbdServerInfo::default()
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
        let store = StoreInfo {
            url: "s3://b/k".into(),
            fetched_bytes: 65536,
            requests: 3,
            sum_seconds: 0.5,
            buckets: vec![bucket(Some(0.25), 2), bucket(None, 1)],
            ..StoreInfo::default()
        };
        let server = ServerInfo {
            stores: vec![store],
            block_memory_bytes: 4096,
            max_block_memory_bytes: 8192,
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
