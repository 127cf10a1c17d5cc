//! A run: the steps of a seed, one after the other, until something is wrong; and the fewest steps
//! after which it still is.
//!
//! Invariant: the same plan gives the same run. A panic in what is simulated is a failure like any
//! other.
//! Knows: scenario, front, engines, server, world. Known by: matrix, trace, main.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nowait::sim::{Break, Fault, set_break};
use nowait_image::Flaw;
use nowait_server::Mistake;

use crate::engines::Engines;
use crate::front::Front;
use crate::scenario::{Mode, Scenario};
use crate::server::Server;
use crate::world::{Counts, World};

/// What is done wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The engine, or the device.
    Engine(Break),
    /// The server.
    Server(Mistake),
    /// A qcow2 image.
    Image(Flaw),
}

impl Broken {
    /// Everything that can be.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let engine = Break::ALL.into_iter().map(Self::Engine);
        let server = Mistake::ALL.into_iter().map(Self::Server);
        engine.chain(server).chain(Flaw::ALL.into_iter().map(Self::Image)).collect()
    }
}

/// What is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What is asked.
    pub mode: Mode,
    /// The seed.
    pub seed: u64,
    /// The numbers of its steps, in order.
    pub steps: Vec<u64>,
    /// A mistake that is made on purpose.
    pub broken: Option<Broken>,
    /// The only thing that goes wrong, and with which of the device's operations. `None`: what
    /// the seed says.
    pub once: Option<(u64, Fault)>,
}

impl Plan {
    /// The first `steps` steps of `seed`.
    #[must_use]
    pub fn new(mode: Mode, seed: u64, steps: u64) -> Self {
        Self { mode, seed, steps: (0..steps).collect(), broken: None, once: None }
    }

    /// What the seed stands for, in this plan.
    #[must_use]
    pub fn scenario(&self) -> Scenario {
        let mut scenario = Scenario::of(self.mode, self.seed);
        if self.once.is_some() {
            scenario = scenario.without_faults();
            scenario.faults.once = self.once;
        }
        scenario
    }
}

/// Operations that a run has after the only thing that goes wrong in it.
const AFTERMATH: u64 = 50;

/// A run that went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The number of the step; `None`: at the end of the run.
    pub step: Option<u64>,
    /// What was wrong.
    pub what: String,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Panics on this process's threads are kept for [`run`] instead of being printed.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|info| {
        PANIC.with_borrow_mut(|kept| *kept = Some(info.to_string().replace('\n', " ")));
    }));
}

/// Runs `plan`.
///
/// # Errors
/// What was wrong, and when.
pub fn run(plan: &Plan) -> Result<Counts, Failure> {
    match plan.broken {
        Some(Broken::Engine(broken)) => set_break(Some(broken)),
        Some(Broken::Server(mistake)) => nowait_server::make(Some(mistake)),
        Some(Broken::Image(flaw)) => nowait_image::make(Some(flaw)),
        None => {}
    }
    let result = match plan.mode {
        Mode::Engine => run_in::<Engines>(plan),
        Mode::Server => run_in::<Server>(plan),
    };
    set_break(None);
    nowait_server::make(None);
    nowait_image::make(None);
    result
}

fn run_in<F: Front>(plan: &Plan) -> Result<Counts, Failure> {
    let scenario = plan.scenario();
    let mut world = World::<F>::new(scenario.clone())
        .map_err(|error| Failure { step: None, what: error.to_string() })?;
    let mut now = None;
    let ran = catch_unwind(AssertUnwindSafe(|| {
        for &step in &plan.steps {
            if plan.once.is_some_and(|(at, _)| world.operations() >= at + AFTERMATH) {
                break;
            }
            now = Some(step);
            world.step(scenario.step(step))?;
        }
        now = None;
        world.end()
    }));
    let what = match ran {
        Ok(Ok(())) => return Ok(world.counts()),
        Ok(Err(wrong)) => {
            let ends = catch_unwind(AssertUnwindSafe(|| world.give_up()));
            if !ends.unwrap_or(false) {
                // Requests that never end: their engine would wait for them.
                std::mem::forget(world);
            }
            wrong.to_string()
        }
        Err(_) => {
            std::mem::forget(world);
            PANIC.take().unwrap_or_else(|| "a panic".to_owned())
        }
    };
    Err(Failure { step: now, what })
}

/// Runs what `next` gives on `threads` threads, until it gives nothing more or a run has gone wrong;
/// calls `well` after each that has not. Returns the one that has, if one has.
#[must_use]
pub fn run_all(
    threads: usize,
    next: impl Fn() -> Option<Plan> + Sync,
    well: impl Fn(Counts) + Sync,
) -> Option<(Plan, Failure)> {
    let failed = Mutex::new(None);
    let failed = || failed.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        while failed().is_none()
            && let Some(plan) = next()
        {
            match run(&plan) {
                Ok(counts) => well(counts),
                Err(failure) => _ = failed().get_or_insert((plan, failure)),
            }
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    failed().take()
}

/// The fewest steps of `plan`, which fails, that were found to fail within `patience`.
#[must_use]
pub fn shrink(plan: &Plan, failure: &Failure, patience: Duration) -> (Plan, Failure) {
    let until = Instant::now() + patience;
    let (mut plan, mut failure) = (plan.clone(), failure.clone());
    if let Some(step) = failure.step {
        plan.steps.retain(|&n| n <= step);
    }
    let mut size = plan.steps.len().div_ceil(2);
    while size > 0 && Instant::now() < until {
        let mut from = 0;
        let before = plan.steps.len();
        while from < plan.steps.len() && Instant::now() < until {
            let mut fewer = plan.clone();
            let to = (from + size).min(fewer.steps.len());
            fewer.steps.drain(from..to);
            match run(&fewer) {
                Ok(_) => from = to,
                Err(other) => (plan, failure) = (fewer, other),
            }
        }
        if size > 1 || plan.steps.len() == before {
            size /= 2;
        }
    }
    (plan, failure)
}
