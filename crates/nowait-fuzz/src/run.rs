//! A run: input after input until a bound is reached or one is found that something is wrong with,
//! which is made smaller.
//!
//! Invariant: the inputs follow from seed and corpus, and where coverage is measured from that too.
//! An input that does not end is reported by a thread of its own, which then ends the program.
//! Knows: target, mutate, coverage, memory, finding. Known by: the program, the tests.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nowait::sim::Random;

use crate::target::{Check, Target};
use crate::{coverage, finding, memory, mutate};

/// How long one input may take: a thousand times what the slowest takes.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked whether one takes longer.
const LOOK: Duration = Duration::from_millis(200);
/// How long a finding is made smaller.
const SHRINKING: Duration = Duration::from_secs(20);

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// After so long.
    Time(Duration),
    /// After so many inputs.
    Inputs(u64),
}

/// What is run.
pub struct Plan<'a> {
    /// The target.
    pub target: &'static Target,
    /// Where the inputs come from.
    pub seed: u64,
    /// When it ends.
    pub limit: Limit,
    /// A directory of inputs to begin with, beside the target's own.
    pub corpus: Option<&'a Path>,
    /// Where findings are written.
    pub findings: &'a Path,
    /// Where inputs are written that reach something new, if coverage is measured.
    pub keep: Option<&'a Path>,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// Inputs that were looked at.
    pub inputs: u64,
    /// How long they took together.
    pub time: Duration,
    /// Inputs that others are made of, at the end.
    pub corpus: usize,
    /// What is wrong, and the input in a file, if something is.
    pub finding: Option<(String, PathBuf)>,
}

/// A target at work, and what it works on.
struct Bench {
    target: &'static Target,
    check: Check,
    now: Arc<Mutex<Now>>,
}

/// The input that is looked at.
#[derive(Default)]
struct Now {
    since: Option<Instant>,
    input: Vec<u8>,
    over: bool,
}

impl Bench {
    fn new(target: &'static Target, findings: &Path) -> Result<Self, String> {
        let check = (target.prepare)()?;
        finding::note_panics();
        let now = Arc::new(Mutex::new(Now::default()));
        let (watched, findings) = (now.clone(), findings.to_owned());
        std::thread::spawn(move || watch(target, &watched, &findings));
        Ok(Self { target, check, now })
    }

    /// What is wrong with `input`, if something is.
    fn look_at(&mut self, input: &[u8]) -> Option<String> {
        {
            let mut now = lock(&self.now);
            now.input.clear();
            now.input.extend_from_slice(input);
            now.since = Some(Instant::now());
        }
        let before = memory::forget_most();
        let checked = catch_unwind(AssertUnwindSafe(|| (self.check)(input)));
        let most = memory::most().saturating_sub(before);
        lock(&self.now).since = None;
        if let Some(panic) = finding::take_panic() {
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

    /// The smallest input found in time that something is wrong with. A target that a panic may
    /// have left in pieces is made anew for each try.
    fn shrink(&mut self, mut input: Vec<u8>, mut wrong: String) -> (Vec<u8>, String) {
        let began = Instant::now();
        let mut piece = input.len().next_power_of_two();
        while piece > 0 {
            let mut at = 0;
            while at < input.len() && began.elapsed() < SHRINKING {
                let mut less = input.clone();
                less.drain(at..(at + piece).min(input.len()));
                let Ok(check) = (self.target.prepare)() else { return (input, wrong) };
                self.check = check;
                match self.look_at(&less) {
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
        finding::print_panics();
    }
}

/// Ends the program when an input takes too long.
fn watch(target: &Target, now: &Mutex<Now>, findings: &Path) {
    loop {
        std::thread::sleep(LOOK);
        let now = lock(now);
        if now.over {
            return;
        }
        if now.since.is_some_and(|since| since.elapsed() > PATIENCE) {
            let what = format!("it takes longer than {} s", PATIENCE.as_secs());
            match finding::keep(findings, target.name, &now.input) {
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
/// What is missing on this machine, or what the system said of a file.
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
        // First those that there are, as they are.
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
        if let Some(wrong) = bench.look_at(&input) {
            let (input, wrong) = bench.shrink(input, wrong);
            finding = Some((wrong, finding::keep(plan.findings, target.name, &input)?));
            break;
        }
        if coverage::take_new() > 0 && !is_own {
            if let Some(directory) = plan.keep {
                finding::keep(directory, target.name, &input)?;
            }
            corpus.push(input);
        }
    }
    Ok(Report { inputs, time: began.elapsed(), corpus: corpus.len(), finding })
}

/// What is wrong with the input in the file at `path`, if something is.
///
/// # Errors
/// As [`run`].
pub fn replay(target: &'static Target, path: &Path) -> Result<Option<String>, String> {
    let input = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let findings = path.parent().unwrap_or(Path::new("."));
    Ok(Bench::new(target, findings)?.look_at(&input))
}

/// The inputs in `directory`, in the order of their names. None if it is not there.
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
