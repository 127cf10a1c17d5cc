//! Work of the exports of a server between two answers of its control interface.
//!
//! Invariant: a counter that is lower than before (another server answers) counts as nothing done.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::api::LatencyInfo;
use crate::counted_api::ExportInfo;

/// The load of an export, or of all.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Load {
    /// The number of the export.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Requests of all kinds a second.
    pub requests_per_second: f64,
    /// Reads among them.
    pub reads_per_second: f64,
    /// Writes among them.
    pub writes_per_second: f64,
    /// Bytes read a second.
    pub read_bytes_per_second: f64,
    /// Bytes written a second.
    pub written_bytes_per_second: f64,
    /// The time that half of the requests stayed within, in seconds, too high by at most a factor of
    /// two; `None` if no request was timed.
    pub p50_seconds: Option<f64>,
    /// Seconds that 99 of 100 requests stayed within.
    pub p99_seconds: Option<f64>,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Connections and queues that are served now.
    pub members: u64,
    /// Requests that failed since the export was added.
    pub errors: u64,
    /// Those among them that failed since the moment before.
    #[serde(skip)]
    pub new_errors: u64,
    /// Requests that were timed, by the upper bound of their bucket.
    #[serde(skip)]
    pub latencies: Vec<(Option<f64>, u64)>,
}

impl Load {
    /// Work of `now` since `before`, `seconds` ago; of a new export everything.
    #[must_use]
    pub fn between(before: Option<&ExportInfo>, now: &ExportInfo, seconds: f64) -> Self {
        let (old, new) = (before.map(Totals::of).unwrap_or_default(), Totals::of(now));
        let rate = |new: u64, old: u64| new.saturating_sub(old) as f64 / seconds;
        let done = |(at, &(bound, requests)): (usize, &(Option<f64>, u64))| {
            let old = old.latencies.get(at).map_or(0, |&(_, requests)| requests);
            (bound, requests.saturating_sub(old))
        };
        Self {
            id: now.id,
            name: now.name.clone(),
            requests_per_second: rate(new.requests, old.requests),
            reads_per_second: rate(new.reads, old.reads),
            writes_per_second: rate(new.writes, old.writes),
            read_bytes_per_second: rate(new.read, old.read),
            written_bytes_per_second: rate(new.written, old.written),
            in_flight: now.in_flight,
            members: now.members,
            errors: new.errors,
            new_errors: new.errors.saturating_sub(old.errors),
            latencies: new.latencies.iter().enumerate().map(done).collect(),
            ..Self::default()
        }
        .with_quantiles()
    }

    /// All of them together.
    #[must_use]
    pub fn sum(all: &[Self]) -> Self {
        let mut sum = Self::default();
        for load in all {
            sum.requests_per_second += load.requests_per_second;
            sum.reads_per_second += load.reads_per_second;
            sum.writes_per_second += load.writes_per_second;
            sum.read_bytes_per_second += load.read_bytes_per_second;
            sum.written_bytes_per_second += load.written_bytes_per_second;
            sum.in_flight += load.in_flight;
            sum.members += load.members;
            sum.errors += load.errors;
            sum.new_errors += load.new_errors;
            add(&mut sum.latencies, load.latencies.iter().copied());
        }
        sum.with_quantiles()
    }

    fn with_quantiles(self) -> Self {
        let [p50_seconds, p99_seconds] = [50, 99].map(|part| quantile(&self.latencies, part));
        Self { p50_seconds, p99_seconds, ..self }
    }
}

/// The sums of an export's counters.
#[derive(Default)]
struct Totals {
    requests: u64,
    reads: u64,
    writes: u64,
    read: u64,
    written: u64,
    errors: u64,
    latencies: Vec<(Option<f64>, u64)>,
}

impl Totals {
    fn of(export: &ExportInfo) -> Self {
        let mut sum = Self::default();
        for (name, totals) in export.frontends.values().flat_map(|it| &it.operations) {
            sum.requests += totals.requests;
            sum.errors += totals.errors;
            match name.as_str() {
                "read" => {
                    sum.reads += totals.requests;
                    sum.read += totals.bytes;
                }
                "write" => {
                    sum.writes += totals.requests;
                    sum.written += totals.bytes;
                }
                _ => {}
            }
            let buckets = totals.latency.iter().flat_map(|it: &LatencyInfo| &it.buckets);
            add(&mut sum.latencies, buckets.map(|bucket| (bucket.below_seconds, bucket.requests)));
        }
        sum
    }
}

/// Adds a histogram with the same buckets.
fn add(sum: &mut Vec<(Option<f64>, u64)>, more: impl Iterator<Item = (Option<f64>, u64)>) {
    for (at, (bound, requests)) in more.enumerate() {
        match sum.get_mut(at) {
            Some(bucket) => bucket.1 += requests,
            None => sum.push((bound, requests)),
        }
    }
}

/// The upper bound that `percent` of the requests stayed within; `None` without requests.
fn quantile(buckets: &[(Option<f64>, u64)], percent: u64) -> Option<f64> {
    let all: u64 = buckets.iter().map(|&(_, requests)| requests).sum();
    let (mut seen, mut last) = (0, None);
    for &(bound, requests) in buckets {
        seen += requests;
        last = bound.or(last);
        if all > 0 && seen * 100 >= all * percent {
            return last;
        }
    }
    None
}

/// The parts of the requests between `before` and `now` that took each path of the engine, in
/// percent; empty if there were none.
#[must_use]
pub fn paths(before: &[ExportInfo], now: &[ExportInfo]) -> Vec<(&'static str, f64)> {
    const PATHS: [&str; 3] = ["simple", "general", "worker"];
    let old: BTreeMap<u64, &ExportInfo> = before.iter().map(|it| (it.id, it)).collect();
    let of = |export: &ExportInfo, name| export.mechanisms.get(name).copied().unwrap_or_default();
    let done = |name| -> u64 {
        let since = |it: &ExportInfo| {
            let before = old.get(&it.id).map_or(0, |before| of(before, name));
            of(it, name).saturating_sub(before)
        };
        now.iter().map(since).sum()
    };
    let all: u64 = PATHS.into_iter().map(done).sum();
    let parts = PATHS.into_iter().map(|name| (name, done(name) as f64 * 100.0 / all as f64));
    if all == 0 { Vec::new() } else { parts.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::BucketInfo;
    use crate::counted_api::{FrontendInfo, OperationInfo};

    fn export(reads: u64, buckets: [u64; 3]) -> ExportInfo {
        let bounds = [Some(0.001), Some(0.002), None];
        let bucket = |(below_seconds, requests)| BucketInfo { below_seconds, requests };
        let latency = LatencyInfo {
            buckets: bounds.into_iter().zip(buckets).map(bucket).collect(),
            ..LatencyInfo::default()
        };
        let read = OperationInfo {
            requests: reads,
            bytes: reads * 4096,
            latency: Some(latency),
            ..OperationInfo::default()
        };
        let operations = [("read".to_owned(), read)].into();
        let nbd = FrontendInfo { operations, ..FrontendInfo::default() };
        ExportInfo { frontends: [("nbd".to_owned(), nbd)].into(), ..ExportInfo::default() }
    }

    #[test]
    fn the_load_is_what_was_done_since_and_not_before() {
        let (before, now) = (export(100, [1000, 0, 0]), export(300, [1000, 90, 10]));
        let load = Load::between(Some(&before), &now, 2.0);
        assert_eq!((load.requests_per_second, load.read_bytes_per_second), (100.0, 409_600.0));
        assert_eq!((load.reads_per_second, load.writes_per_second), (100.0, 0.0));
        assert_eq!((load.p50_seconds, load.p99_seconds), (Some(0.002), Some(0.002)));
        let idle = Load::between(Some(&now), &now, 1.0);
        assert_eq!((idle.requests_per_second, idle.p50_seconds), (0.0, None));
        let restarted = Load::between(Some(&now), &before, 1.0);
        assert_eq!(restarted.requests_per_second, 0.0);
        assert_eq!(Load::sum(&[load.clone(), load]).requests_per_second, 200.0);
    }
}
