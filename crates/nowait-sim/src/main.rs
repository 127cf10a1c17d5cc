//! `nowait-sim`: runs seeds until the time is up or a seed fails; a failure is shrunk and printed.

mod hosts_args;

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Parser, Subcommand};
use hosts_args::HostsArgs;
use indicatif::{ProgressBar, ProgressStyle};
use nowait_sim::fault_matrix::Matrix;
use nowait_sim::run::{self, Failure, Plan};
use nowait_sim::scenario::Mode;
use nowait_sim::simulation::Counts;
use nowait_sim::trace;

/// The time limit for shrinking a failure.
const SHRINK_TIME: Duration = Duration::from_secs(60);

/// Runs nowait on simulated devices and judges everything that it answers.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The first seed; without it, one that was never used before.
    #[arg(long)]
    seed: Option<u64>,
    /// Steps of each seed.
    #[arg(long, default_value_t = 10_000)]
    steps: u64,
    /// Kind of the simulation: engine, server, vhost-user, ublk, remote (the storage of an export, with a server
    /// that dies behind a network), or all of them: one seed in four is a server's, one in eight a
    /// virtual machine's, one in eight a block device's, one in eight a remote storage's. With `log`, an
    /// append log whose processes are killed and lose their power, with `backup` a backup of a disk that is written, with `bitmaps`
    /// the stored bitmaps of a disk, with `move` a disk that moves while it is written, which `all` leaves out. With `hosts`,
    /// many hosts boot from one image in a store, in virtual time.
    #[arg(long, default_value = "all")]
    mode: String,
    /// Passes over seeds whose disk is not a qcow2 image.
    #[arg(long)]
    images: bool,
    /// How long seed after seed is run; without it and --runs, one seed.
    #[arg(long)]
    seconds: Option<u64>,
    /// How many seeds are run, whatever time they take.
    #[arg(long, value_name = "N", conflicts_with = "seconds")]
    runs: Option<u64>,
    /// Runs the seeds of this file, one a line, of the usual mode or of one that is named before it; what follows a # is a comment.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seed", "seconds", "runs"])]
    seeds: Option<PathBuf>,
    /// Seeds that are run at the same time, each on a thread of its own [default: one for each CPU].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Makes a mistake on purpose. In the engine: drop-flush, complete-before-data,
    /// free-slot-twice, reply-from-stale-buffer, forget-range-lock, answer-unmoved-neighbours; with
    /// several exports: complete-elsewhere; in a log: answer-unsynced, forget-generation, ignore-failed-sync. In the server: reply-from-old-buffer, reply-twice, lose-at-disconnect, trust-reports, forget-held,
    /// ignore-protection, lose-parked-input; with several exports: reuse-index, drain-with-request; of a disk that moves: take-after-copy; with a
    /// virtual machine:
    /// forget-in-flight, repeat-told, tell-before-data; with a block device: commit-before-data. In a qcow2 image:
    /// forget-tail, read-below-elsewhere, forget-order, forget-given-back, cut-too-short,
    /// forget-to-grow, forget-failure, flush-beside-another, forget-overlap-check, bit-after-write,
    /// forget-removal, cool-in-flight; of a raw disk: trust-changed-disk. In a remote storage:
    /// forget-replay, trim-when-asked, trim-too-much, replay-out-of-order, replay-overwritten,
    /// forget-durable, answer-unanswered, forget-overlap, read-beside-repeated, forget-failed-flush.
    #[arg(long, value_name = "MISTAKE")]
    r#break: Option<String>,
    /// Prints a failure as it is, without looking for fewer steps.
    #[arg(long)]
    whole: bool,
    /// Writes the trace of a failure to this file, for --replay.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Runs the trace of a failure.
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    #[command(flatten)]
    hosts: HostsArgs,
}

#[derive(Subcommand)]
enum Command {
    /// Each fault once at each of the first operations of each seed, in runs of their own.
    Errnos {
        /// Seeds, from 0 on; every second one is a server's.
        #[arg(long, default_value_t = Matrix::ALL.seeds)]
        seeds: u64,
        /// Operations of the device, from the first on.
        #[arg(long, default_value_t = Matrix::ALL.operations)]
        operations: u64,
    },
}

fn main() -> ExitCode {
    run::keep_panics();
    match start(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("nowait-sim: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the command; false if a failure was found.
fn start(args: &Args) -> Result<bool, String> {
    if let Some(Command::Errnos { seeds, operations }) = args.command {
        return Ok(run_matrix(Matrix { seeds, operations, ..Matrix::ALL }));
    }
    let bug = match &args.r#break {
        None => None,
        Some(name) => Some(trace::bug_of(name).ok_or(format!("{name}: no such mistake"))?),
    };
    if let Some(path) = &args.replay {
        let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let plan = trace::read(&text).ok_or(format!("{}: not a trace", path.display()))?;
        print!("{}", trace::describe(&plan));
        return Ok(match run::run(&plan) {
            Ok(_) => true,
            Err(failure) => {
                report(&plan, &failure);
                false
            }
        });
    }
    if args.mode == "hosts" {
        return hosts_args::run(&args.hosts, args.seed.unwrap_or(1)).map(|()| true);
    }
    let only = Mode::ALL.into_iter().find(|mode| mode.name() == args.mode);
    if only.is_none() && args.mode != "all" {
        return Err(format!("{}: no such mode", args.mode));
    }
    let plan_in = |mode: Option<Mode>, seed| {
        let mode = only.or(mode).unwrap_or_else(|| Mode::of(seed));
        let plan = Plan { bug, ..Plan::new(mode, seed, args.steps) };
        let is_image = || Mode::ON_DEVICES.contains(&mode) && plan.scenario().qcow2.is_some();
        (!args.images || is_image()).then_some(plan)
    };
    let plan = |seed| plan_in(None, seed);
    if let Some(path) = &args.seeds {
        let seeds = listed_seeds(path)?;
        println!("{} seeds of {}, {} steps each", seeds.len(), path.display(), args.steps);
        let plans = seeds.into_iter().filter_map(|(mode, seed)| plan_in(mode, seed));
        return Ok(run_plans(args, None, plans));
    }
    let first = args.seed.unwrap_or_else(fresh_seed);
    println!("seed {first}, {} steps each", args.steps);
    let limit = args.seconds.map(Duration::from_secs);
    let runs = args.runs.or(limit.is_none().then_some(1)).unwrap_or(u64::MAX);
    let plans = (first..).filter_map(plan).take(usize::try_from(runs).unwrap_or(usize::MAX));
    Ok(run_plans(args, limit, plans))
}

/// The seeds of the file at `path`, and the modes that are named before them.
fn listed_seeds(path: &Path) -> Result<Vec<(Option<Mode>, u64)>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let seed = |line: &str| {
        let (mode, seed) = line.split_once(' ').unwrap_or(("", line));
        let named = Mode::ALL.into_iter().find(|it| it.name() == mode);
        let seed = seed.trim().parse().ok().filter(|_| mode.is_empty() || named.is_some());
        seed.map(|seed| (named, seed)).ok_or_else(|| format!("{line}: not a seed"))
    };
    lines.filter(|line| !line.is_empty()).map(seed).collect()
}

fn fresh_seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos() as u64 / 1000
}

fn run_matrix(matrix: Matrix) -> bool {
    let Matrix { seeds, operations, faults } = matrix;
    println!("{faults} faults at {operations} operations of {seeds} seeds: {} runs", matrix.runs());
    let bar = ProgressBar::new(matrix.runs());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let failed = matrix.run(threads, || bar.inc(1));
    let done = bar.position();
    bar.finish_and_clear();
    if let Some((plan, failure)) = &failed {
        report(plan, failure);
    }
    println!("{done} of {} runs are well", matrix.runs());
    failed.is_none()
}

/// Runs `plans` until one fails or the time is up. True if none failed.
fn run_plans(
    args: &Args,
    limit: Option<Duration>,
    plans: impl Iterator<Item = Plan> + Send,
) -> bool {
    let bar = ProgressBar::new(args.seconds.unwrap_or(1));
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {elapsed} {msg}") {
        bar.set_style(style);
    }
    let began = Instant::now();
    let plans = Mutex::new(plans);
    let next = || {
        let is_over = limit.is_some_and(|limit| began.elapsed() >= limit);
        let mut plans = plans.lock().unwrap_or_else(PoisonError::into_inner);
        if is_over { None } else { plans.next() }
    };
    let totals = Mutex::new((0, Counts::default()));
    let on_success = |counts: Counts| {
        let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
        let (seeds, all) = &mut *totals;
        *seeds += 1;
        all.requests += counts.requests;
        all.cuts += counts.cuts;
        all.operations += counts.operations;
        bar.set_position(began.elapsed().as_secs());
        bar.set_message(rates(*seeds, *all, began.elapsed()));
    };
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    let failed = run::run_all(args.jobs.map_or(cpus, usize::from), next, on_success);
    let time = began.elapsed();
    bar.finish_and_clear();
    let Some((plan, failure)) = failed else {
        let (seeds, all) = totals.into_inner().unwrap_or_else(PoisonError::into_inner);
        println!("all well: {}", rates(seeds, all, time));
        return true;
    };
    if args.whole {
        println!("seed {} fails: {}", plan.seed, failure.what);
        write_trace(args, &plan);
    } else {
        println!("seed {} fails; it is made smaller now: {}", plan.seed, failure.what);
        let (plan, failure) = run::shrink(&plan, &failure, SHRINK_TIME);
        report(&plan, &failure);
        write_trace(args, &plan);
    }
    false
}

/// Writes `plan` to the file of `--trace`, if there is one.
fn write_trace(args: &Args, plan: &Plan) {
    let Some(path) = &args.trace else { return };
    match std::fs::write(path, trace::write(plan)) {
        Ok(()) => println!("again: nowait-sim --replay {}", path.display()),
        Err(error) => eprintln!("nowait-sim: {}: {error}", path.display()),
    }
}

fn rates(seeds: u64, all: Counts, time: Duration) -> String {
    let Counts { requests, cuts, operations } = all;
    let rate = |count: u64| (count as f64 / time.as_secs_f64().max(1e-9)) as u64;
    format!(
        "{seeds} seeds, {requests} requests ({}/s), {operations} device operations ({}/s), \
         {cuts} power cuts",
        rate(requests),
        rate(operations)
    )
}

fn report(plan: &Plan, failure: &Failure) {
    let when = failure.step.map_or("the end".to_owned(), |step| format!("step {step}"));
    println!("{}", trace::scenario_of(plan));
    print!("{}{}", trace::describe(plan), trace::write(plan));
    println!("# wrong at {when}: {}", failure.what);
}
