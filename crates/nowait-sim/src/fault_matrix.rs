//! Runs with exactly one fault: each fault at each of the first operations of a device.
//!
//! Invariant: the parameters determine the plans; no plan is run twice.

use std::sync::atomic::{AtomicU64, Ordering};

use nowait::sim::Fault;

use crate::run::{Failure, Plan, run_all};
use crate::scenario::Mode;

/// The faults, each injected in a run of its own. `Short` has no effect on a transfer of at most
/// one block, and `Errno(EAGAIN)` only on requests that may not wait.
pub const FAULTS: [Fault; 10] = [
    Fault::Errno(libc::EIO),
    Fault::Errno(libc::ENOSPC),
    Fault::Errno(libc::ENOMEM),
    Fault::Errno(libc::EINTR),
    Fault::Errno(libc::EAGAIN),
    Fault::Errno(libc::EINVAL),
    Fault::Errno(libc::EOPNOTSUPP),
    Fault::Short,
    Fault::Full,
    Fault::SubmitError,
];

/// The extent of the matrix.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Seeds, from 0 on; odd seeds run the server.
    pub seeds: u64,
    /// Device operations, from the first on, at each of which a fault is injected once.
    pub operations: u64,
    /// Faults at each operation of each seed; if fewer than all, they rotate.
    pub faults: u64,
}

impl Matrix {
    /// Each of [`FAULTS`] at each of the first 200 operations of 50 seeds.
    pub const ALL: Self = Self { seeds: 50, operations: 200, faults: FAULTS.len() as u64 };

    /// The number of runs.
    pub fn runs(&self) -> u64 {
        self.seeds * self.operations * self.faults
    }

    /// The plan of run number `n`.
    fn plan(&self, n: u64) -> Plan {
        let (cell, fault_index) = (n / self.faults, n % self.faults);
        let (seed, at) = (cell / self.operations, 1 + cell % self.operations);
        let mode = Mode::ALL[(seed % 2) as usize];
        let fault = FAULTS[((seed / 2 + at + fault_index) % FAULTS.len() as u64) as usize];
        Plan { once: Some((at, fault)), ..Plan::new(mode, seed, 4 * self.operations) }
    }

    /// Runs all plans on `threads` threads, and calls `each` after each run. Returns the first
    /// failure, if any.
    pub fn run(&self, threads: usize, each: impl Fn() + Sync) -> Option<(Plan, Failure)> {
        let next = AtomicU64::new(0);
        let plan = || {
            let n = next.fetch_add(1, Ordering::Relaxed);
            (n < self.runs()).then(|| self.plan(n))
        };
        run_all(threads, plan, |_| each())
    }
}
