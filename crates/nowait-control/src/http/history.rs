//! The last hour (`GET /v1/history`): a sample of the counters every ten seconds.
//!
//! Invariant: memory is bounded by [`SAMPLES`] for each of [`MAX_EXPORTS`] exports, and by
//! [`MAX_ERRORS`]. Samples are taken from the counters that there are: requests cost nothing more.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior};

use crate::api::{ExportHistory, HistoryInfo, PastErrors, SeriesInfo};
use crate::controlled_server::ControlledServer;
use crate::counted_api::ExportInfo;
use crate::http::blocking_calls::blocking;
use crate::load::Load;

/// The time between two samples.
const PERIOD: Duration = Duration::from_secs(10);
/// The most samples that are kept: those of an hour.
const SAMPLES: usize = 360;
/// The most exports with samples of their own in the history.
/// Beyond it: others are counted only.
const MAX_EXPORTS: usize = 64;
/// The most errors that the history keeps.
/// Beyond it: the oldest one is forgotten.
const MAX_ERRORS: usize = 64;

/// The history of a server; clones share it.
#[derive(Clone, Default)]
pub(crate) struct History(Arc<Mutex<Samples>>);

impl History {
    /// Takes the samples of `server` as long as this runs.
    pub(crate) async fn run(self, server: Arc<dyn ControlledServer>) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let server = server.clone();
            // A task that has panicked has been reported.
            if let Some(exports) = blocking(move || server.exports()).await {
                self.samples().take(Instant::now(), exports);
            }
        }
    }

    /// The samples as of now.
    pub(crate) fn info(&self) -> HistoryInfo {
        self.samples().info(Instant::now())
    }

    fn samples(&self) -> MutexGuard<'_, Samples> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
struct Samples {
    /// The moments of the samples.
    times: VecDeque<Instant>,
    total: VecDeque<Sample>,
    exports: BTreeMap<u64, Past>,
    errors: VecDeque<(Instant, PastErrors)>,
    /// The counters as of the last sample, and its moment.
    last: Option<(Instant, BTreeMap<u64, ExportInfo>)>,
}

/// An export and its samples: the last one is of the last of all moments.
struct Past {
    name: String,
    samples: VecDeque<Sample>,
}

struct Sample {
    reads: f64,
    writes: f64,
    read_bytes: f64,
    written_bytes: f64,
    p50: Option<f64>,
    p99: Option<f64>,
    errors: u64,
}

impl Samples {
    /// Notes what `exports` have done since the last time; the first time there is nothing to note.
    fn take(&mut self, now: Instant, exports: Vec<ExportInfo>) {
        let exports: BTreeMap<u64, _> = exports.into_iter().map(|it| (it.id, it)).collect();
        if let Some((at, before)) = self.last.take() {
            let seconds = (now - at).as_secs_f64().max(1e-3);
            let load = |now: &ExportInfo| Load::between(before.get(&now.id), now, seconds);
            let loads: Vec<_> = exports.values().map(load).collect();
            push(&mut self.times, now, SAMPLES);
            push(&mut self.total, Sample::of(&Load::sum(&loads)), SAMPLES);
            self.exports.retain(|id, _| exports.contains_key(id));
            for load in &loads {
                self.note(load);
            }
            for export in exports.values() {
                self.note_errors(now, before.get(&export.id), export);
            }
        }
        self.last = Some((now, exports));
    }

    fn note(&mut self, load: &Load) {
        if self.exports.len() >= MAX_EXPORTS && !self.exports.contains_key(&load.id) {
            return;
        }
        let empty = || Past { name: load.name.clone(), samples: VecDeque::new() };
        let past = self.exports.entry(load.id).or_insert_with(empty);
        push(&mut past.samples, Sample::of(load), SAMPLES);
    }

    fn note_errors(&mut self, at: Instant, before: Option<&ExportInfo>, now: &ExportInfo) {
        for (frontend, totals) in &now.frontends {
            let old = before.and_then(|before| before.frontends.get(frontend));
            for error in &totals.errors {
                let old = old.and_then(|it| it.errors.iter().find(|it| it.errno == error.errno));
                let requests = error.requests.saturating_sub(old.map_or(0, |old| old.requests));
                if requests == 0 {
                    continue;
                }
                let errors = PastErrors {
                    seconds_ago: 0.0,
                    export: now.id,
                    name: now.name.clone(),
                    frontend: frontend.clone(),
                    errno: error.errno,
                    message: error.message.clone(),
                    requests,
                };
                push(&mut self.errors, (at, errors), MAX_ERRORS);
            }
        }
    }

    fn info(&self, now: Instant) -> HistoryInfo {
        let ago = |at: &Instant| rounded(now.saturating_duration_since(*at).as_secs_f64());
        let export = |(&id, past): (&u64, &Past)| ExportHistory {
            id,
            name: past.name.clone(),
            series: series(&past.samples),
        };
        let error = |(at, error): &(Instant, PastErrors)| PastErrors {
            seconds_ago: ago(at),
            ..error.clone()
        };
        let all = self.last.as_ref().map_or(0, |(_, exports)| exports.len());
        let is_begun = !self.times.is_empty();
        let left_out = if is_begun { all.saturating_sub(self.exports.len()) } else { 0 };
        HistoryInfo {
            period_seconds: PERIOD.as_secs(),
            seconds_ago: self.times.iter().map(ago).collect(),
            total: series(&self.total),
            exports: self.exports.iter().map(export).collect(),
            exports_left_out: left_out as u64,
            errors: self.errors.iter().map(error).collect(),
        }
    }
}

impl Sample {
    fn of(load: &Load) -> Self {
        Self {
            reads: rounded(load.reads_per_second),
            writes: rounded(load.writes_per_second),
            read_bytes: rounded(load.read_bytes_per_second),
            written_bytes: rounded(load.written_bytes_per_second),
            p50: load.p50_seconds,
            p99: load.p99_seconds,
            errors: load.new_errors,
        }
    }
}

/// Appends, in place of the oldest where there are `most`.
fn push<T>(all: &mut VecDeque<T>, one: T, most: usize) {
    if all.len() >= most {
        all.pop_front();
    }
    all.push_back(one);
}

fn series(samples: &VecDeque<Sample>) -> SeriesInfo {
    fn column<T>(samples: &VecDeque<Sample>, pick: impl Fn(&Sample) -> T) -> Vec<T> {
        samples.iter().map(pick).collect()
    }
    SeriesInfo {
        reads_per_second: column(samples, |it| it.reads),
        writes_per_second: column(samples, |it| it.writes),
        read_bytes_per_second: column(samples, |it| it.read_bytes),
        written_bytes_per_second: column(samples, |it| it.written_bytes),
        p50_seconds: column(samples, |it| it.p50),
        p99_seconds: column(samples, |it| it.p99),
        errors: column(samples, |it| it.errors),
    }
}

/// A number with one place behind the point: as precise as a chart shows it.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::ErrnoInfo;
    use crate::counted_api::{FrontendInfo, OperationInfo};

    fn export(id: u64, reads: u64, failed: u64) -> ExportInfo {
        let read = OperationInfo {
            requests: reads,
            bytes: reads * 4096,
            errors: failed,
            ..OperationInfo::default()
        };
        let errors = vec![ErrnoInfo { errno: 5, message: "EIO".into(), requests: failed }];
        let nbd = FrontendInfo { operations: [("read".into(), read)].into(), errors };
        ExportInfo { id, frontends: [("nbd".into(), nbd)].into(), ..ExportInfo::default() }
    }

    #[test]
    fn an_hour_is_kept_and_what_is_older_is_not() {
        let (start, mut samples) = (Instant::now(), Samples::default());
        let at = |tick: u64| start + PERIOD * tick as u32;
        // Two hours, in which each period has ten reads more than the one before.
        for tick in 0..=720 {
            samples.take(at(tick), vec![export(0, 5 * tick * (tick + 1), 0)]);
        }
        let info = samples.info(at(720) + Duration::from_secs(3));
        assert_eq!(info.seconds_ago.len(), SAMPLES);
        assert_eq!((info.seconds_ago[0], info.seconds_ago[SAMPLES - 1]), (3593.0, 3.0));
        let reads = &info.exports[0].series.reads_per_second;
        assert_eq!((reads.len(), reads[0], reads[SAMPLES - 1]), (SAMPLES, 361.0, 720.0));
        assert_eq!(info.total.reads_per_second, *reads);
        assert_eq!(info.total.read_bytes_per_second[0], 361.0 * 4096.0);
    }

    #[test]
    fn exports_come_and_go_and_too_many_have_no_samples_of_their_own() {
        let (start, mut samples) = (Instant::now(), Samples::default());
        let most = MAX_EXPORTS as u64;
        samples.take(start, vec![export(0, 100, 0)]);
        assert_eq!(samples.info(start), HistoryInfo { period_seconds: 10, ..Default::default() });
        samples.take(start + PERIOD, vec![export(0, 100, 0)]);
        samples.take(start + PERIOD * 2, (0..most + 6).map(|id| export(id, 100, 0)).collect());
        let info = samples.info(start + PERIOD * 2);
        assert_eq!((info.exports.len(), info.exports_left_out), (MAX_EXPORTS, 6));
        assert_eq!(info.exports[0].series.reads_per_second, [0.0, 0.0]);
        assert_eq!(info.exports[1].series.reads_per_second, [10.0]);
        // Those without samples of their own are a part of the total.
        assert_eq!(info.total.reads_per_second, [0.0, (most + 5) as f64 * 10.0]);
        samples.take(start + PERIOD * 3, vec![export(most, 100, 0)]);
        let info = samples.info(start + PERIOD * 3);
        assert_eq!(info.exports.iter().map(|it| it.id).collect::<Vec<_>>(), [most]);
        assert_eq!(info.exports_left_out, 0);
    }

    #[test]
    fn errors_are_told_once_with_their_time_and_only_the_last_are_kept() {
        let (start, mut samples) = (Instant::now(), Samples::default());
        samples.take(start, vec![export(0, 9, 7)]);
        samples.take(start + PERIOD, vec![export(0, 9, 9)]);
        samples.take(start + PERIOD * 2, vec![export(0, 9, 9)]);
        let info = samples.info(start + PERIOD * 2);
        let [error] = &info.errors[..] else { panic!("one error: {:?}", info.errors) };
        assert_eq!((error.seconds_ago, error.errno, error.requests), (10.0, 5, 2));
        assert_eq!(info.total.errors, [2, 0]);
        for tick in 3..200 {
            samples.take(start + PERIOD * tick, vec![export(0, 9, u64::from(tick) * 10)]);
        }
        let info = samples.info(start + PERIOD * 199);
        assert_eq!((info.errors.len(), info.errors[MAX_ERRORS - 1].seconds_ago), (MAX_ERRORS, 0.0));
    }
}
