//! A run: input after input until a limit or a finding, which is then minimized.
//!
//! Invariant: the inputs depend only on the seed, the corpus and, where it is measured, the
//! coverage. An input that does not end is reported by a separate thread, which then exits the
//! program.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nowait::sim::Random;

use crate::target::{Check, Target};
use crate::{counting_allocator, coverage, crash, mutate};

/// The time limit of one input: a thousand times that of the slowest one.
const INPUT_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval at which the time limit is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The time limit for minimizing a finding.
const SHRINK_TIMEOUT: Duration = Duration::from_secs(20);

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// After this time.
    Time(Duration),
    /// After this number of inputs.
    Inputs(u64),
}

/// The parameters of a run.
pub struct Plan<'a> {
    /// The target.
    pub target: &'static Target,
    /// The seed of the inputs.
    pub seed: u64,
    /// When it ends.
    pub limit: Limit,
    /// A directory of initial inputs, in addition to those of the target.
    pub corpus: Option<&'a Path>,
    /// The directory for findings.
    pub findings: &'a Path,
    /// The directory for inputs that reach new edges, if coverage is measured.
    pub keep: Option<&'a Path>,
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// The number of inputs that were checked.
    pub inputs: u64,
    /// The total time.
    pub time: Duration,
    /// The number of inputs in the corpus at the end.
    pub corpus: usize,
    /// The finding, if there is one: the message and the file of the input.
    pub finding: Option<(String, PathBuf)>,
}

/// A prepared target and the input that it checks.
struct Bench {
    target: &'static Target,
    check: Check,
    now: Arc<Mutex<Now>>,
}

/// The input that is being checked.
#[derive(Default)]
struct Now {
    since: Option<Instant>,
    input: Vec<u8>,
    over: bool,
}

impl Bench {
    fn new(target: &'static Target, findings: &Path) -> Result<Self, String> {
        let check = (target.prepare)()?;
        crash::note_panics();
        let now = Arc::new(Mutex::new(Now::default()));
        let (watched, findings) = (now.clone(), findings.to_owned());
        std::thread::spawn(move || watch(target, &watched, &findings));
        Ok(Self { target, check, now })
    }

    /// Checks `input`. Returns the message of a finding.
    fn check(&mut self, input: &[u8]) -> Option<String> {
        {
            let mut now = lock(&self.now);
            now.input.clear();
            now.input.extend_from_slice(input);
            now.since = Some(Instant::now());
        }
        let before = counting_allocator::reset_peak();
        let checked = catch_unwind(AssertUnwindSafe(|| (self.check)(input)));
        let most = counting_allocator::peak().saturating_sub(before);
        lock(&self.now).since = None;
        if let Some(panic) = crash::take_panic() {
            return Some(panic);
        }
        let bound = self.target.memory;
        match checked {
            Ok(Err(wrong)) => Some(wrong),
            Ok(Ok(())) if most > bound => {
                Some(format!("{most} bytes of memory, where {bound} are enough"))
            }
            Ok(Ok(())) => None,
            Err(_) => Some("a panic without words".into()),
        }
    }

    /// The smallest failing input found within the time limit. If a panic may have left the target
    /// inconsistent, it is prepared again for each attempt.
    fn shrink(&mut self, mut input: Vec<u8>, mut wrong: String) -> (Vec<u8>, String) {
        let began = Instant::now();
        let mut piece = input.len().next_power_of_two();
        while piece > 0 {
            let mut at = 0;
            while at < input.len() && began.elapsed() < SHRINK_TIMEOUT {
                let mut less = input.clone();
                less.drain(at..(at + piece).min(input.len()));
                let Ok(check) = (self.target.prepare)() else { return (input, wrong) };
                self.check = check;
                match self.check(&less) {
                    Some(still) => (input, wrong) = (less, still),
                    None => at += piece,
                }
            }
            piece /= 2;
        }
        (input, wrong)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        lock(&self.now).over = true;
        crash::print_panics();
    }
}

/// Exits the program if an input takes too long.
fn watch(target: &Target, now: &Mutex<Now>, findings: &Path) {
    loop {
        std::thread::sleep(POLL_INTERVAL);
        let now = lock(now);
        if now.over {
            return;
        }
        if now.since.is_some_and(|since| since.elapsed() > INPUT_TIMEOUT) {
            let what = format!("it takes longer than {} s", INPUT_TIMEOUT.as_secs());
            match crash::keep(findings, target.name, &now.input) {
                Ok(path) => eprintln!("{}: {what}: {}", target.name, path.display()),
                Err(error) => eprintln!("{}: {what}; {error}", target.name),
            }
            std::process::exit(1);
        }
    }
}

/// Runs `plan`.
///
/// # Errors
/// What is missing on this host, or the error of the system for a file.
pub fn run(plan: &Plan<'_>) -> Result<Report, String> {
    let target = plan.target;
    let mut bench = Bench::new(target, plan.findings)?;
    let mut corpus = (target.seeds)();
    if let Some(directory) = plan.corpus {
        corpus.extend(inputs_in(directory)?);
    }
    let (mut random, began, mut inputs) = (Random::new(plan.seed), Instant::now(), 0);
    let ended = |inputs: u64| match plan.limit {
        Limit::Time(limit) => began.elapsed() >= limit,
        Limit::Inputs(limit) => inputs >= limit,
    };
    let mut finding = None;
    coverage::take_new();
    while !ended(inputs) {
        // First the inputs of the corpus, unchanged.
        let own = corpus.get(inputs as usize).filter(|_| inputs < corpus.len() as u64);
        let mut input = match own {
            Some(input) => input.clone(),
            None => {
                corpus.get(random.below(corpus.len() as u64) as usize).cloned().unwrap_or_default()
            }
        };
        let is_own = own.is_some();
        if !is_own {
            mutate::mutate(&mut input, &mut random, &corpus, target.words, target.longest);
        }
        inputs += 1;
        if let Some(wrong) = bench.check(&input) {
            let (input, wrong) = bench.shrink(input, wrong);
            finding = Some((wrong, crash::keep(plan.findings, target.name, &input)?));
            break;
        }
        if coverage::take_new() > 0 && !is_own {
            if let Some(directory) = plan.keep {
                crash::keep(directory, target.name, &input)?;
            }
            corpus.push(input);
        }
    }
    Ok(Report { inputs, time: began.elapsed(), corpus: corpus.len(), finding })
}

/// Checks the input in the file at `path`. Returns the message of a finding.
///
/// # Errors
/// Like [`run`].
pub fn replay(target: &'static Target, path: &Path) -> Result<Option<String>, String> {
    let input = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let findings = path.parent().unwrap_or(Path::new("."));
    Ok(Bench::new(target, findings)?.check(&input))
}

/// The inputs in `directory`, in the order of their names; empty if it does not exist.
fn inputs_in(directory: &Path) -> Result<Vec<Vec<u8>>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", directory.display());
    if !directory.exists() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(directory).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut paths: Vec<PathBuf> = entries.map_err(failed)?.iter().map(|e| e.path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).map_err(failed)).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
