//! Counters of a server: requests, bytes and errors of each export, by frontend and operation.
//!
//! Invariant: counting costs a thread no atomic read-modify-write: each counter has one writer. A
//! counter never goes back while its export is served, whichever threads have come and gone.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use nowait::{Op, Stats};

use crate::frontend_kind::FrontendKind;
use crate::latency::{Latencies, LatencyCounters, Times};
use crate::locking::lock;

/// The operations that are counted, in the order of the arrays here.
const OPS: [Op; 6] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::Zero, Op::Status];
/// The most different errnos of an export that are counted apart.
/// Beyond it: others count as `EIO`.
const MAX_ERRNOS: usize = 32;

/// The counts of an engine, in the order of [`Stats::mechanisms`].
pub(crate) type MechanismCounts = [u64; Stats::MECHANISMS];

/// The requests of one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpTotals {
    /// Requests that were answered, those with an error included.
    pub requests: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// How long those took that were timed.
    pub latencies: Latencies,
    /// How long of that storage took: from their submission to it, with all that it waits for, to
    /// the moment at which the thread has taken the result.
    pub device_latencies: Latencies,
}

/// Counts of one frontend of an export since the export was added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrontendTotals {
    /// In the order of [`FrontendTotals::ops`].
    by_op: [OpTotals; OPS.len()],
    /// Errors and how many requests had them, in the order of the errnos.
    pub errnos: Vec<(i32, u64)>,
}

impl FrontendTotals {
    /// The operations with their names and totals.
    pub fn ops(&self) -> impl Iterator<Item = (&'static str, &OpTotals)> {
        OPS.into_iter().map(op_name).zip(&self.by_op)
    }

    /// The requests of all operations.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.by_op.iter().map(|totals| totals.requests).sum()
    }
}

/// The name of an operation for programs.
fn op_name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Flush => "flush",
        Op::Discard => "discard",
        Op::Zero => "zero",
        Op::Status => "status",
    }
}

/// The counters of one thread for one export.
#[derive(Default)]
pub(crate) struct ThreadStatistics {
    /// Made with the first request of a frontend: there may be many exports.
    by_frontend: [OnceLock<Box<FrontendCounters>>; FrontendKind::ALL.len()],
    /// How the engines of this thread and of those before it have served their requests.
    mechanisms: [AtomicU64; Stats::MECHANISMS],
    /// Requests in flight, as published last.
    in_flight: AtomicU32,
}

#[derive(Default)]
struct FrontendCounters {
    by_op: [OpCounters; OPS.len()],
    errnos: Mutex<Vec<(i32, u64)>>,
}

#[derive(Default)]
struct OpCounters {
    requests: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    latencies: LatencyCounters,
    device_latencies: LatencyCounters,
}

/// Adds to a counter that only the calling thread changes.
#[inline]
fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
}

impl ThreadStatistics {
    #[inline]
    fn of(&self, frontend: FrontendKind) -> &FrontendCounters {
        self.by_frontend[frontend as usize].get_or_init(Box::default)
    }

    /// A request of `bytes` has succeeded. To be called by the thread itself.
    #[inline]
    pub(crate) fn count(&self, frontend: FrontendKind, op: Op, bytes: u64) {
        let counters = &self.of(frontend).by_op[op as usize];
        add(&counters.requests, 1);
        add(&counters.bytes, bytes);
    }

    /// A request was timed. To be called by the thread itself.
    pub(crate) fn record(&self, frontend: FrontendKind, op: Op, times: Times) {
        let counters = &self.of(frontend).by_op[op as usize];
        counters.latencies.record(times.whole);
        counters.device_latencies.record(times.device);
    }

    /// The mechanisms' counts so far, to which those of a new engine are added.
    pub(crate) fn mechanisms(&self) -> MechanismCounts {
        self.mechanisms.each_ref().map(|counter| counter.load(Ordering::Relaxed))
    }

    /// Publishes the counts of the thread's engine, on top of those `before` it, and the requests in
    /// flight. To be called by the thread itself.
    pub(crate) fn publish(&self, before: &MechanismCounts, stats: &Stats, in_flight: u32) {
        self.in_flight.store(in_flight, Ordering::Relaxed);
        for ((counter, before), (_, count)) in
            self.mechanisms.iter().zip(before).zip(stats.mechanisms())
        {
            counter.store(before + count, Ordering::Relaxed);
        }
    }

    /// A request has failed. To be called by the thread itself.
    #[cold]
    pub(crate) fn count_error(&self, frontend: FrontendKind, op: Op, errno: i32) {
        let frontend = self.of(frontend);
        let counters = &frontend.by_op[op as usize];
        add(&counters.requests, 1);
        add(&counters.errors, 1);
        let mut errnos = lock(&frontend.errnos);
        let is_known = errnos.iter().any(|(known, _)| *known == errno);
        let errno = if is_known || errnos.len() < MAX_ERRNOS { errno } else { libc::EIO };
        add_errno(&mut errnos, errno, 1);
    }

    fn add_to(&self, kind: FrontendKind, totals: &mut FrontendTotals) {
        let Some(frontend) = self.by_frontend[kind as usize].get() else { return };
        for (total, counters) in totals.by_op.iter_mut().zip(&frontend.by_op) {
            total.requests += counters.requests.load(Ordering::Relaxed);
            total.bytes += counters.bytes.load(Ordering::Relaxed);
            total.errors += counters.errors.load(Ordering::Relaxed);
            counters.latencies.add_to(&mut total.latencies);
            counters.device_latencies.add_to(&mut total.device_latencies);
        }
        for (errno, count) in lock(&frontend.errnos).iter() {
            add_errno(&mut totals.errnos, *errno, *count);
        }
    }
}

fn add_errno(errnos: &mut Vec<(i32, u64)>, errno: i32, count: u64) {
    match errnos.binary_search_by_key(&errno, |(errno, _)| *errno) {
        Ok(at) => errnos[at].1 += count,
        Err(at) => errnos.insert(at, (errno, count)),
    }
}

/// The counters of all threads that an export has had.
#[derive(Default)]
pub(crate) struct ExportStatistics {
    threads: Mutex<Vec<Arc<ThreadStatistics>>>,
}

impl ExportStatistics {
    /// The counters for a thread that starts: those of one that has ended, if there are any.
    pub(crate) fn for_thread(&self) -> Arc<ThreadStatistics> {
        let mut threads = lock(&self.threads);
        if let Some(unused) = threads.iter().find(|thread| Arc::strong_count(thread) == 1) {
            return unused.clone();
        }
        let new = Arc::new(ThreadStatistics::default());
        threads.push(new.clone());
        new
    }

    /// How the engines have served the requests ([`Stats`]): names and counts.
    pub(crate) fn mechanisms(&self) -> Vec<(&'static str, u64)> {
        let mut sums: MechanismCounts = Default::default();
        for thread in lock(&self.threads).iter() {
            sums.iter_mut().zip(thread.mechanisms()).for_each(|(sum, count)| *sum += count);
        }
        Stats::default().mechanisms().map(|(name, _)| name).zip(sums).collect()
    }

    /// Requests in flight on all threads, as published last.
    pub(crate) fn in_flight(&self) -> usize {
        let threads = lock(&self.threads);
        threads.iter().map(|thread| thread.in_flight.load(Ordering::Relaxed) as usize).sum()
    }

    /// The totals of one frontend.
    pub(crate) fn totals(&self, frontend: FrontendKind) -> FrontendTotals {
        let mut totals = FrontendTotals::default();
        lock(&self.threads).iter().for_each(|thread| thread.add_to(frontend, &mut totals));
        totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_its_own_counters() {
        for (at, op) in OPS.into_iter().enumerate() {
            assert_eq!(op as usize, at, "{op:?}");
        }
    }

    #[test]
    fn totals_are_those_of_all_threads_also_of_ended_ones() {
        let export = ExportStatistics::default();
        let first = export.for_thread();
        let second = export.for_thread();
        first.count(FrontendKind::Nbd, Op::Read, 4096);
        second.count(FrontendKind::Nbd, Op::Read, 512);
        second.count(FrontendKind::Ublk, Op::Read, 1);
        drop(second);
        let third = export.for_thread();
        third.count(FrontendKind::Nbd, Op::Read, 1);
        third.count_error(FrontendKind::Nbd, Op::Write, libc::ENOSPC);
        first.count_error(FrontendKind::Nbd, Op::Read, libc::EIO);
        let totals = export.totals(FrontendKind::Nbd);
        let reads = OpTotals { requests: 4, bytes: 4609, errors: 1, ..OpTotals::default() };
        let writes = OpTotals { requests: 1, bytes: 0, errors: 1, ..OpTotals::default() };
        let ops: Vec<_> = totals.ops().take(2).collect();
        assert_eq!(ops, [("read", &reads), ("write", &writes)]);
        assert_eq!(totals.errnos, [(libc::EIO, 1), (libc::ENOSPC, 1)]);
        assert_eq!(totals.requests(), 5);
        assert_eq!(lock(&export.threads).len(), 2, "the third took the counters of the second");
    }

    #[test]
    fn a_new_engine_of_a_thread_counts_on_from_where_the_last_one_was() {
        let export = ExportStatistics::default();
        let counted = |simple, merged| {
            let mut stats = Stats::default();
            (stats.simple, stats.merged) = (simple, merged);
            stats
        };
        for (simple, merged) in [(5, 1), (2, 0)] {
            let thread = export.for_thread();
            let before = thread.mechanisms();
            thread.publish(&before, &counted(1, 0), 7);
            assert_eq!(export.in_flight(), 7);
            thread.publish(&before, &counted(simple, merged), 0);
        }
        let counts = export.mechanisms();
        let of = |wanted| counts.iter().find(|(name, _)| *name == wanted).map(|(_, count)| *count);
        assert_eq!((of("simple"), of("merged"), of("general")), (Some(7), Some(1), Some(0)));
    }

    #[test]
    fn the_errnos_that_are_counted_apart_are_bounded() {
        let thread = ThreadStatistics::default();
        (1..1000).for_each(|errno| thread.count_error(FrontendKind::Nbd, Op::Read, errno));
        let mut totals = FrontendTotals::default();
        thread.add_to(FrontendKind::Nbd, &mut totals);
        assert_eq!(totals.errnos.len(), MAX_ERRNOS);
        assert_eq!(totals.errnos.iter().map(|(_, count)| count).sum::<u64>(), 999);
    }
}
