//! `nowait-fuzz`: feeds mutated bytes to one target, until a time limit or a finding.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use nowait_fuzz::{ALL, Limit, Plan, Target, by_name, is_measured, replay, run};

/// The inputs in the tree, one directory for each target.
const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");

/// Feeds mutated bytes to one of the parsers of nowait.
///
/// With `--profile fuzz` instead of `--release` overflows and debug assertions are findings too.
/// With RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=3
/// -Cllvm-args=-sanitizer-coverage-inline-8bit-counters" (and a --target, so that build scripts are
/// left alone) inputs that reach something new are built upon.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Target of the fuzzing; without it, the targets are listed.
    target: Option<String>,
    /// How long.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// How many inputs, whatever time they take.
    #[arg(long, value_name = "N", conflicts_with = "seconds")]
    inputs: Option<u64>,
    /// Where the inputs come from; without it, from a number that was never used before.
    #[arg(long)]
    seed: Option<u64>,
    /// Looks at one input, as a finding was written, and nothing else.
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
    /// Where findings are written.
    #[arg(long, value_name = "DIRECTORY", default_value = "target/fuzz")]
    findings: PathBuf,
    /// Where inputs are written that reach something new, where that is measured.
    #[arg(long, value_name = "DIRECTORY")]
    keep: Option<PathBuf>,
}

fn main() -> ExitCode {
    match start(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("nowait-fuzz: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the command. True if there was no finding.
fn start(args: &Args) -> Result<bool, String> {
    let Some(name) = &args.target else {
        ALL.iter().for_each(|target| println!("{:<14}{}", target.name, target.about));
        return Ok(true);
    };
    let target = by_name(name).ok_or(format!("{name}: no such target"))?;
    if let Some(path) = &args.replay {
        let wrong = replay(target, path)?;
        println!("{}", wrong.as_deref().unwrap_or("all well"));
        return Ok(wrong.is_none());
    }
    fuzz(target, args)
}

fn fuzz(target: &'static Target, args: &Args) -> Result<bool, String> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seed = args.seed.unwrap_or(since.as_nanos() as u64 / 1000);
    let checks = if cfg!(debug_assertions) { "on" } else { "off" };
    let coverage = if is_measured() { "measured" } else { "not measured" };
    println!("{}: seed {seed}, overflow checks {checks}, coverage {coverage}", target.name);
    let report = run(&Plan {
        target,
        seed,
        limit: match args.inputs {
            Some(inputs) => Limit::Inputs(inputs),
            None => Limit::Time(Duration::from_secs(args.seconds)),
        },
        corpus: Some(&Path::new(CORPUS).join(target.name)),
        findings: &args.findings,
        keep: args.keep.as_deref(),
    })?;
    let rate = report.inputs as f64 / report.time.as_secs_f64().max(1e-9);
    println!("{} inputs ({rate:.0}/s), a corpus of {}", report.inputs, report.corpus);
    match report.finding {
        None => Ok(true),
        Some((wrong, path)) => {
            println!(
                "wrong: {wrong}\nagain: nowait-fuzz {} --replay {}",
                target.name,
                path.display()
            );
            Ok(false)
        }
    }
}
