//! Runs the steps of a seed one after the other until a violation, and shrinks a failing plan to
//! fewer steps.
//!
//! Invariant: the same plan gives the same run. A panic in the simulated code is a failure like any
//! other.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nowait::sim::{EngineBug, Fault, inject_bug};
use nowait_image::ImageBug;
use nowait_remote::RemoteBug;
use nowait_server::ServerBug;

use crate::backup::backup_scenario::BackupScenario;
use crate::backup::backup_simulation::BackupSimulation;
use crate::engines::Engines;
use crate::log::log_scenario::LogScenario;
use crate::log::log_simulation::LogSimulation;
use crate::model::Violation;
use crate::moves::move_scenario::MoveScenario;
use crate::moves::move_simulation::MoveSimulation;
use crate::raw_bitmaps::bitmaps_scenario::BitmapsScenario;
use crate::raw_bitmaps::bitmaps_simulation::BitmapsSimulation;
use crate::remote::remote_scenario::RemoteScenario;
use crate::remote::remote_simulation::RemoteSimulation;
use crate::scenario::{Mode, Scenario};
use crate::server::Server;
use crate::simulation::{Counts, Simulation};
use crate::system_under_test::SystemUnderTest;
use crate::ublk_server::UblkServer;
use crate::vhost_server::VhostServer;

/// An injected bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// A bug of the engine or the device.
    Engine(EngineBug),
    /// A bug of the server.
    Server(ServerBug),
    /// A bug of the qcow2 code.
    Image(ImageBug),
    /// A bug of the storage of an export.
    Remote(RemoteBug),
}

impl InjectedBug {
    /// All injectable bugs.
    pub fn all() -> Vec<Self> {
        let engine = EngineBug::ALL.iter().copied().map(Self::Engine);
        let server = ServerBug::ALL.iter().copied().map(Self::Server);
        let image = ImageBug::ALL.iter().copied().map(Self::Image);
        let remote = RemoteBug::ALL.iter().copied().map(Self::Remote);
        engine.chain(server).chain(image).chain(remote).collect()
    }
}

/// The plan of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Whether engines or a server are run.
    pub mode: Mode,
    /// The seed.
    pub seed: u64,
    /// The numbers of the steps, in order.
    pub steps: Vec<u64>,
    /// The injected bug, if any.
    pub bug: Option<InjectedBug>,
    /// The only fault of the run, and the number of the device operation at which it is injected.
    /// `None`: the seed's faults.
    pub once: Option<(u64, Fault)>,
}

impl Plan {
    /// The first `steps` steps of `seed`.
    pub fn new(mode: Mode, seed: u64, steps: u64) -> Self {
        Self { mode, seed, steps: (0..steps).collect(), bug: None, once: None }
    }

    /// The scenario of the seed in this plan.
    pub fn scenario(&self) -> Scenario {
        let mut scenario = Scenario::of(self.mode, self.seed);
        if self.once.is_some() {
            scenario = scenario.without_faults();
            scenario.faults.once = self.once;
        }
        scenario
    }
}

/// Device operations that a run continues after its only fault.
const EXTRA_OPERATIONS: u64 = 50;

/// A failed run.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The number of the step; `None`: at the end of the run.
    pub step: Option<u64>,
    /// The violation.
    pub what: String,
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Keeps panic messages for [`run`] instead of printing them, on all threads of this process.
pub fn keep_panics() {
    std::panic::set_hook(Box::new(|info| {
        PANIC.with_borrow_mut(|kept| *kept = Some(info.to_string().replace('\n', " ")));
    }));
}

/// Runs a simulation without a system under test, step by step.
macro_rules! run_steps {
    ($plan:expr, $scenario:ident, $new:expr) => {
        watched(|now| {
            let scenario = $scenario::of($plan.seed);
            let new: fn($scenario) -> Result<_, Violation> = $new;
            let mut simulation = ManuallyDrop::new(new(scenario.clone())?);
            for &number in &$plan.steps {
                *now = Some(number);
                let (action, random) = scenario.step(number);
                simulation.step(action, random)?;
            }
            *now = None;
            simulation.end()?;
            // One that has failed is leaked: its requests in flight never end.
            Ok(ManuallyDrop::into_inner(simulation).counts())
        })
    };
}

/// Runs `plan`.
///
/// # Errors
/// The violation and its step.
pub fn run(plan: &Plan) -> Result<Counts, Failure> {
    match plan.bug {
        Some(InjectedBug::Engine(bug)) => inject_bug(Some(bug)),
        Some(InjectedBug::Server(bug)) => nowait_server::inject(Some(bug)),
        Some(InjectedBug::Image(bug)) => nowait_image::inject(Some(bug)),
        Some(InjectedBug::Remote(bug)) => nowait_remote::inject(Some(bug)),
        None => {}
    }
    let result = match plan.mode {
        Mode::Engine => run_in::<Engines>(plan),
        Mode::Server => run_in::<Server>(plan),
        Mode::VhostUser => run_in::<VhostServer>(plan),
        Mode::Ublk => run_in::<UblkServer>(plan),
        Mode::Remote => run_steps!(plan, RemoteScenario, |it| Ok(RemoteSimulation::new(it))),
        Mode::Log => run_steps!(plan, LogScenario, |it| Ok(LogSimulation::new(it))),
        Mode::Backup => run_steps!(plan, BackupScenario, BackupSimulation::new),
        Mode::Bitmaps => run_steps!(plan, BitmapsScenario, BitmapsSimulation::new),
        Mode::Move => run_steps!(plan, MoveScenario, MoveSimulation::new),
    };
    inject_bug(None);
    nowait_server::inject(None);
    nowait_image::inject(None);
    nowait_remote::inject(None);
    result
}

fn run_in<S: SystemUnderTest>(plan: &Plan) -> Result<Counts, Failure> {
    let scenario = plan.scenario();
    let mut simulation = Simulation::<S>::new(scenario.clone())
        .map_err(|error| Failure { step: None, what: error.to_string() })?;
    let mut now = None;
    let ran = catch_unwind(AssertUnwindSafe(|| {
        for &step in &plan.steps {
            if plan.once.is_some_and(|(at, _)| simulation.operations() >= at + EXTRA_OPERATIONS) {
                break;
            }
            now = Some(step);
            simulation.step(scenario.step(step))?;
        }
        now = None;
        simulation.end()
    }));
    let what = match ran {
        Ok(Ok(())) => return Ok(simulation.counts()),
        Ok(Err(wrong)) => {
            let ends = catch_unwind(AssertUnwindSafe(|| simulation.abort()));
            if !ends.unwrap_or(false) {
                // Some requests never end; dropping their engine would wait for them.
                std::mem::forget(simulation);
            }
            wrong.to_string()
        }
        Err(_) => {
            std::mem::forget(simulation);
            PANIC.take().unwrap_or_else(|| "a panic".to_owned())
        }
    };
    Err(Failure { step: now, what })
}

/// Runs `run`, which notes the step that it is at: a violation or a panic is a failure of that step.
fn watched(
    run: impl FnOnce(&mut Option<u64>) -> Result<Counts, Violation>,
) -> Result<Counts, Failure> {
    let mut now = None;
    let what = match catch_unwind(AssertUnwindSafe(|| run(&mut now))) {
        Ok(Ok(counts)) => return Ok(counts),
        Ok(Err(wrong)) => wrong.to_string(),
        Err(_) => PANIC.take().unwrap_or_else(|| "a panic".to_owned()),
    };
    Err(Failure { step: now, what })
}

/// Runs the plans of `next` on `threads` threads, until `next` returns `None` or a run fails; calls
/// `on_success` after each successful run. Returns the failed plan, if any.
pub fn run_all(
    threads: usize,
    next: impl Fn() -> Option<Plan> + Sync,
    on_success: impl Fn(Counts) + Sync,
) -> Option<(Plan, Failure)> {
    let failed = Mutex::new(None);
    let failed = || failed.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        while failed().is_none()
            && let Some(plan) = next()
        {
            match run(&plan) {
                Ok(counts) => on_success(counts),
                Err(failure) => _ = failed().get_or_insert((plan, failure)),
            }
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    failed().take()
}

/// The shortest failing version of the failing `plan` that was found within `time_limit`.
pub fn shrink(plan: &Plan, failure: &Failure, time_limit: Duration) -> (Plan, Failure) {
    let until = Instant::now() + time_limit;
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
