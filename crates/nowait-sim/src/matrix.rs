//! One thing goes wrong, and it is each thing once, at each of the first operations of a device.
//!
//! Invariant: which plans there are follows from how many were asked for; none comes twice.
//! Knows: scenario, run. Known by: main, tests.

use std::sync::atomic::{AtomicU64, Ordering};

use nowait::sim::Fault;

use crate::run::{Failure, Plan, run_all};
use crate::scenario::Mode;

/// What goes wrong, each in a run of its own. A transfer of no more than a block that is to end
/// short does not, and only what may not wait is refused.
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
    Fault::Kick,
];

/// How much of it is run.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Seeds, from 0 on; every second one is a server's.
    pub seeds: u64,
    /// Operations of the device, from the first on, at each of which something goes wrong once.
    pub operations: u64,
    /// Faults at each operation of each seed; where it is not all of them, they take turns.
    pub faults: u64,
}

impl Matrix {
    /// Each of [`FAULTS`] at each of the first 200 operations of 50 seeds.
    pub const ALL: Self = Self { seeds: 50, operations: 200, faults: FAULTS.len() as u64 };

    /// How many runs it is.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.seeds * self.operations * self.faults
    }

    /// What is run as number `n`.
    fn plan(&self, n: u64) -> Plan {
        let (cell, turn) = (n / self.faults, n % self.faults);
        let (seed, at) = (cell / self.operations, 1 + cell % self.operations);
        let mode = Mode::ALL[(seed % 2) as usize];
        let fault = FAULTS[((seed / 2 + at + turn) % FAULTS.len() as u64) as usize];
        Plan { once: Some((at, fault)), ..Plan::new(mode, seed, 4 * self.operations) }
    }

    /// Runs all of it on `threads` threads, and calls `each` after each run. Returns what has gone
    /// wrong otherwise than it may, if something has.
    #[must_use]
    pub fn run(&self, threads: usize, each: impl Fn() + Sync) -> Option<(Plan, Failure)> {
        let next = AtomicU64::new(0);
        let plan = || {
            let n = next.fetch_add(1, Ordering::Relaxed);
            (n < self.runs()).then(|| self.plan(n))
        };
        run_all(threads, plan, |_| each())
    }
}
