//! A log, the tasks that append to it, and the process that it lives in, to which steps are applied.
//!
//! Invariant: an append that has returned was checked before the next step. The threads of a process have
//! ended before another one opens the log.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use nowait::sim::Random;
use nowait::{Error, Log, LogOptions, LogPosition, WorkerPool};

use crate::coroutines::Coroutines;
use crate::log::log_oracle::LogOracle;
use crate::log::log_scenario::{LogAction, LogScenario, SEGMENT_BYTES};
use crate::log::sim_directory::SimDirectory;
use crate::model::Violation;
use crate::simulation::Counts;

/// Threads of a process.
const THREADS: usize = 4;
/// Steps within which all that waits has to end.
const SETTLE_STEPS: usize = 100_000;

type Jobs = Arc<Mutex<VecDeque<Box<dyn FnOnce() + Send>>>>;
type Append = Pin<Box<dyn Future<Output = Result<LogPosition, Error>>>>;
/// The result of a call on another thread, when it has returned.
type Slot<T> = Rc<RefCell<Option<T>>>;

/// The use that the process makes of its log.
enum Use {
    /// The log is being opened.
    Opening(Slot<Result<Log, Error>>),
    /// The log is open, and its records were checked.
    Open(Log),
}

/// The simulation.
pub struct LogSimulation {
    scenario: LogScenario,
    directory: Arc<SimDirectory>,
    /// Dropped before the threads, which end the simulation.
    log: Use,
    appends: Vec<(u64, Append)>,
    jobs: Jobs,
    threads: Coroutines,
    /// A pool without jobs: a log has no requests of an engine.
    workers: WorkerPool,
    truncation: Option<Slot<Result<(), Error>>>,
    oracle: LogOracle,
    /// Without faults until the log is open: an open has failed.
    is_mended: bool,
    cuts: u64,
    steps: u64,
}

impl LogSimulation {
    /// The simulation of a scenario.
    pub fn new(scenario: LogScenario) -> Self {
        let mut simulation = Self {
            directory: Arc::new(SimDirectory::new(&scenario)),
            threads: Coroutines::new(THREADS),
            workers: WorkerPool::simulated(),
            jobs: Jobs::default(),
            log: Use::Opening(Slot::default()),
            appends: Vec::new(),
            truncation: None,
            oracle: LogOracle::default(),
            is_mended: false,
            cuts: 0,
            steps: 0,
            scenario,
        };
        simulation.open();
        simulation
    }

    /// The counters so far; a thread's step counts as an operation.
    pub fn counts(&self) -> Counts {
        Counts { requests: self.oracle.appends(), cuts: self.cuts, operations: self.steps }
    }

    /// Executes an action.
    pub fn step(&mut self, action: LogAction, mut random: Random) -> Result<(), Violation> {
        let random = &mut random;
        match action {
            LogAction::Append(len) => self.append(len),
            LogAction::Work => self.work(random)?,
            LogAction::Read => self.read(random)?,
            LogAction::Iterate => self.iterate(false)?,
            LogAction::Truncate => self.truncate(random)?,
            LogAction::Kill => {
                self.directory.kill();
                self.end_process(random)?;
                self.open();
            }
            LogAction::Cut => self.cut(random)?,
        }
        self.poll()
    }

    fn append(&mut self, len: u64) {
        let Use::Open(log) = &self.log else { return };
        if self.appends.len() < self.scenario.depth {
            let (number, data) = self.oracle.begin(len);
            let log = log.clone();
            let append = Box::pin(async move { log.append_async(&data).await });
            self.appends.push((number, append));
        }
    }

    fn thread(&mut self, job: impl FnOnce() + 'static) -> Result<(), Violation> {
        self.threads.start(job).map_err(|error| Violation::new(error.to_string()))
    }

    /// Runs a thread, one that is paused or one with a new job.
    fn work(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.steps += 1;
        let paused = self.threads.choices(&self.workers);
        let jobs = self.jobs.clone();
        let mut jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let count = paused + usize::from(!jobs.is_empty());
        let choice = random.below(count as u64) as usize;
        if choice < paused {
            drop(jobs);
            let ran = self.threads.run(choice, &self.workers);
            return ran.map_err(|error| Violation::new(error.to_string()));
        }
        let job = jobs.pop_front();
        drop(jobs);
        job.map_or(Ok(()), |job| self.thread(job))
    }

    fn read(&mut self, random: &mut Random) -> Result<(), Violation> {
        let Use::Open(log) = &self.log else { return Ok(()) };
        let Some(record) = self.oracle.some_durable(random) else { return Ok(()) };
        self.oracle.read(record, log.read(LogPosition::new(record.0)))
    }

    /// Reads all records; `is_new` if the log was just opened.
    fn iterate(&mut self, is_new: bool) -> Result<(), Violation> {
        let Use::Open(log) = &self.log else { return Ok(()) };
        let start = log.start().get();
        let mut records = Vec::new();
        for record in log.records() {
            let failed = record.is_err();
            records.push(record);
            if failed {
                break;
            }
        }
        self.oracle.all(start, &records, is_new)
    }

    fn truncate(&mut self, random: &mut Random) -> Result<(), Violation> {
        let Use::Open(log) = &self.log else { return Ok(()) };
        let Some((position, _)) = self.oracle.some_durable(random) else { return Ok(()) };
        if self.truncation.is_some() {
            return Ok(());
        }
        self.oracle.truncates(position);
        let (log, done) = (log.clone(), Slot::default());
        self.truncation = Some(done.clone());
        self.thread(move || {
            let result = log.truncate_before(LogPosition::new(position));
            done.replace(Some(result));
        })
    }

    /// Checks what has returned.
    fn poll(&mut self) -> Result<(), Violation> {
        if let Some(what) = self.directory.violations().pop() {
            return Err(Violation::new(what));
        }
        self.poll_open()?;
        let mut context = Context::from_waker(Waker::noop());
        let mut waiting = Vec::new();
        for (number, mut append) in std::mem::take(&mut self.appends) {
            match append.as_mut().poll(&mut context) {
                Poll::Ready(result) => self.oracle.end(number, result)?,
                Poll::Pending => waiting.push((number, append)),
            }
        }
        self.appends = waiting;
        let truncated = self.truncation.as_ref().and_then(|slot| slot.take());
        if let (Some(result), Use::Open(log)) = (truncated, &self.log) {
            self.truncation = None;
            if result.is_ok() {
                self.oracle.truncated(log.start().get());
            }
        }
        Ok(())
    }

    /// Takes the log when it is open. An open that failed is tried again without faults.
    fn poll_open(&mut self) -> Result<(), Violation> {
        let Use::Opening(slot) = &self.log else { return Ok(()) };
        let Some(opened) = slot.take() else { return Ok(()) };
        match opened {
            Ok(log) => {
                self.directory.mend();
                self.log = Use::Open(log);
                self.iterate(true)?;
                self.is_mended = false;
                self.directory.spoil(&self.scenario);
            }
            Err(error) if error.errno() == libc::EBADMSG || self.is_mended => {
                return Err(Violation::new(format!("C68: it does not open: {error}")));
            }
            Err(_) => {
                self.is_mended = true;
                self.directory.mend();
                self.open();
            }
        }
        Ok(())
    }

    /// A process starts and opens the log.
    fn open(&mut self) {
        let slot = Slot::default();
        self.log = Use::Opening(slot.clone());
        let directory = Arc::new(self.directory.start());
        let LogScenario { spares, prepare_ahead, .. } = self.scenario;
        let options = LogOptions::new().segment_bytes(SEGMENT_BYTES).spares(spares);
        let options = options.prepare_ahead(prepare_ahead);
        let (jobs, id) = (self.jobs.clone(), self.scenario.seed);
        let spawn = move |job: Box<dyn FnOnce() + Send>| {
            jobs.lock().unwrap_or_else(PoisonError::into_inner).push_back(job);
        };
        let job = move || {
            let opened = Log::simulated(directory, options, id, spawn);
            slot.replace(Some(opened));
        };
        if let Err(error) = self.threads.start(job) {
            let failed = Error::from_io(&error, nowait::Operation::SetUp);
            self.log = Use::Opening(Rc::new(RefCell::new(Some(Err(failed)))));
        }
    }

    /// The power fails; another process opens the log.
    fn cut(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.cuts += 1;
        self.directory.cut_power();
        self.end_process(random)?;
        self.directory.power_on();
        self.open();
        Ok(())
    }

    /// The process is gone: what its threads did last ends, and nothing else is seen of them.
    fn end_process(&mut self, random: &mut Random) -> Result<(), Violation> {
        self.appends.clear();
        self.truncation = None;
        self.log = Use::Opening(Slot::default());
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).clear();
        for _ in 0..SETTLE_STEPS {
            if self.threads.choices(&self.workers) == 0 {
                self.jobs.lock().unwrap_or_else(PoisonError::into_inner).clear();
                return Ok(());
            }
            self.work(random)?;
        }
        Err(Violation::new("the threads of a process that is gone never end".to_owned()))
    }

    /// Ends the run: all appends return, and all records are there after a kill and after a power cut.
    pub fn end(&mut self) -> Result<(), Violation> {
        let random = &mut Random::part(self.scenario.seed, u64::MAX - 1);
        self.settle(random)?;
        self.iterate(false)?;
        self.directory.kill();
        self.end_process(random)?;
        self.open();
        self.settle(random)?;
        self.cut(random)?;
        self.settle(random)?;
        let is_open = matches!(self.log, Use::Open(_));
        self.end_process(random)?;
        match is_open {
            true => Ok(()),
            false => Err(Violation::new("the log is not open at the end".to_owned())),
        }
    }

    /// Runs until nothing waits.
    fn settle(&mut self, random: &mut Random) -> Result<(), Violation> {
        for _ in 0..SETTLE_STEPS {
            let is_idle = self.threads.choices(&self.workers) == 0 && self.appends.is_empty();
            if is_idle && matches!(self.log, Use::Open(_)) {
                return Ok(());
            }
            self.work(random)?;
            self.poll()?;
        }
        let first = self.appends.first().map(|(number, _)| *number);
        Err(Violation::new(format!("C41: an append never returns: {first:?}")))
    }
}
