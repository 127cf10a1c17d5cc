//! The figures of a server under load, as cells of a table and as JSON.
//!
//! Invariant: text and JSON are made from the same samples.

use serde_json::{Map, Value};

use crate::report::Entry;
use crate::server::ServerKind;
use crate::table::strings;
use crate::workload::Workload;

const MIB: f64 = 1_048_576.0;

/// One server, one workload, one round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sample {
    /// Finished requests per second.
    pub(crate) iops: f64,
    /// Median latency in µs, from before the request is sent until its reply has been received.
    pub(crate) p50_us: f64,
    /// The latency that 1 % of the requests exceed, in µs.
    pub(crate) p99_us: f64,
    /// Processor time of the server's threads per request, in µs.
    pub(crate) server_cpu_us: f64,
    /// Resident memory of the server at the end, in MiB.
    pub(crate) server_rss_mib: f64,
    /// Part of the time that the client was not asleep, 0 to 1.
    pub(crate) client_busy: f64,
    /// The throughput of the background load, in MiB per second; 0 without one.
    pub(crate) beside_mib_s: f64,
}

/// The titles of [`cells`].
pub(crate) fn titles(workload: &Workload) -> Vec<String> {
    let mut titles = strings(["IOPS", "lowest–highest", "MiB/s", "p50 µs", "p99 µs"]);
    titles.extend(strings(["CPU µs/request", "RSS MiB", "client busy"]));
    titles.extend(workload.beside.map(|_| "beside MiB/s".to_owned()));
    titles
}

/// The figures of a line of a table.
pub(crate) fn cells<K>(entry: &Entry<K, Sample>, workload: &Workload) -> Vec<String> {
    let iops = entry.of(|sample| sample.iops);
    let mut cells = vec![
        format!("{:.0}", iops.median),
        format!("{:.0}–{:.0}", iops.min, iops.max),
        format!("{:.0}", iops.median * workload.block_bytes as f64 / MIB),
        format!("{:.1}", entry.median(|sample| sample.p50_us)),
        format!("{:.1}", entry.median(|sample| sample.p99_us)),
        format!("{:.2}", entry.median(|sample| sample.server_cpu_us)),
        format!("{:.1}", entry.median(|sample| sample.server_rss_mib)),
        format!("{:.0} %", 100.0 * entry.median(|sample| sample.client_busy)),
    ];
    let beside = || format!("{:.0}", entry.median(|sample| sample.beside_mib_s));
    cells.extend(workload.beside.map(|_| beside()));
    cells
}

/// The figures of `entry` as JSON, with the name of its server.
pub(crate) fn json<K>(
    entry: &Entry<K, Sample>,
    workload: &Workload,
    server: ServerKind,
) -> Map<String, Value> {
    let of = |figure: fn(&Sample) -> f64| entry.of(figure).to_json();
    let figures = [
        ("server", server.name().into()),
        ("iops", of(|sample| sample.iops)),
        ("p50_us", of(|sample| sample.p50_us)),
        ("p99_us", of(|sample| sample.p99_us)),
        ("server_cpu_us_per_request", of(|sample| sample.server_cpu_us)),
        ("server_rss_mib", of(|sample| sample.server_rss_mib)),
        ("client_busy", of(|sample| sample.client_busy)),
        ("beside_mib_s", workload.beside.map(|_| of(|sample| sample.beside_mib_s)).into()),
    ];
    figures.into_iter().map(|(name, figure)| (name.to_owned(), figure)).collect()
}
