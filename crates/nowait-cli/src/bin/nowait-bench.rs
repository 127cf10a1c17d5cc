//! The program `nowait-bench`, which `nowait bench` runs: runs the measurements of the bench crate
//! and prints their tables.
//!
//! Invariant: a file that exists is only written to with `--overwrite`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::{env, io};

use clap::error::ErrorKind;
use clap::{Args, Command, FromArgMatches};
use nowait_bench::{
    Caching, CancelFlag, ClientKind, CopyOptions, EngineOptions, ImagesOptions, Output,
    PeersOptions, ServerKind, TableSelection, Transport, run_copies, run_engine, run_images,
};
use nowait_cli::bench_args::{BenchArgs, BenchCaching, BenchClient, BenchTransport, BenchWhat};
use nowait_cli::error::{CliError, os_message};
use nowait_cli::{log, process};

fn main() -> ExitCode {
    process::set_up();
    // `nowait bench` passes on what it has parsed itself, so that clap's messages are good enough.
    let program = Command::new("nowait-bench").bin_name("nowait bench");
    let mut program = BenchArgs::augment_args(program).version(env!("CARGO_PKG_VERSION"));
    let parsed = BenchArgs::from_arg_matches(&program.get_matches_mut());
    let args = parsed.unwrap_or_else(|error| error.exit());
    if let Err(why) = args.check() {
        program.error(ErrorKind::ArgumentConflict, why).exit();
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::write_line(tracing::Level::ERROR, &error);
            ExitCode::from(error.status())
        }
    }
}

/// Measures and prints.
///
/// # Errors
/// A measurement failed or was interrupted.
fn run(args: &BenchArgs) -> Result<(), CliError> {
    let what = match args.what {
        BenchWhat::Peers => return peers(args),
        BenchWhat::Copy => return copies(args),
        BenchWhat::Images => return images(args),
        BenchWhat::Simple => TableSelection::Simple,
        BenchWhat::Completion => TableSelection::Completion,
        BenchWhat::Vectored => TableSelection::Vectored,
        BenchWhat::Pool => TableSelection::Pool,
        BenchWhat::Nowait => TableSelection::Nowait,
        BenchWhat::Engines => TableSelection::Engines,
        BenchWhat::All => TableSelection::All,
    };
    let mut options = EngineOptions {
        what,
        file: args.file.clone(),
        overwrite: args.overwrite,
        duration: args.duration(),
        rounds: args.rounds,
        html: args.html.clone(),
        output: output(args),
        stop: CancelFlag::on_signal().map_err(failed)?,
        ..EngineOptions::default()
    };
    if !args.latency.is_empty() {
        options.latency.clone_from(&args.latency);
    }
    let report = run_engine(&options, &mut io::stdout().lock()).map_err(failed)?;
    match report.problems().first() {
        _ if report.interrupted => Err(interrupted()),
        Some(problem) => Err(incomplete(problem)),
        None => Ok(()),
    }
}

fn failed(error: nowait_bench::Error) -> CliError {
    CliError::new(error.to_string())
}

fn interrupted() -> CliError {
    CliError::new("interrupted, the tables above are complete")
}

fn output(args: &BenchArgs) -> Output {
    if args.json { Output::Json } else { Output::Text }
}

/// The program to measure: the one that started this one, or else the one beside it.
fn nowait() -> Result<PathBuf, CliError> {
    if let Some(path) = env::var_os("NOWAIT") {
        return Ok(path.into());
    }
    let this = env::current_exe();
    let this =
        this.map_err(|e| CliError::new(format!("cannot find this program: {}", os_message(&e))))?;
    Ok(this.with_file_name("nowait"))
}

/// The servers to measure, in the order of the command line.
fn servers(args: &BenchArgs) -> Vec<ServerKind> {
    let named = |name: &&str| ServerKind::ALL.into_iter().find(|kind| kind.name() == *name);
    match args.servers.as_slice() {
        [] => ServerKind::ALL.to_vec(),
        names => names.iter().filter_map(named).collect(),
    }
}

fn copies(args: &BenchArgs) -> Result<(), CliError> {
    let options = CopyOptions {
        nowait: nowait()?,
        directory: args.directory.clone(),
        bytes: args.size(),
        rounds: args.rounds,
        output: output(args),
        stop: CancelFlag::on_signal().map_err(failed)?,
    };
    let report = run_copies(&options, &mut io::stdout().lock()).map_err(failed)?;
    match report.failures.first() {
        _ if report.interrupted => Err(interrupted()),
        Some(line) => Err(incomplete(line)),
        None => Ok(()),
    }
}

fn no_matching_row(text: &str) -> CliError {
    CliError::new(format!("--only {text}: no row has this in its title"))
}

fn incomplete(problem: &str) -> CliError {
    CliError::new(format!("not everything could be measured: {problem}"))
}

fn images(args: &BenchArgs) -> Result<(), CliError> {
    let mut options = ImagesOptions {
        nowait: Some(nowait()?),
        servers: servers(args),
        duration: args.duration(),
        rounds: args.rounds,
        output: output(args),
        stop: CancelFlag::on_signal().map_err(failed)?,
        ..ImagesOptions::default()
    };
    if let Some(text) = &args.only {
        options.cases.retain(|case| case.workload.to_string().contains(text));
        if options.cases.is_empty() {
            return Err(no_matching_row(text));
        }
    }
    let report = run_images(&options, &mut io::stdout().lock()).map_err(failed)?;
    match report.failures.first() {
        _ if report.interrupted => Err(interrupted()),
        Some(failure) => Err(incomplete(&failure.problem)),
        None => Ok(()),
    }
}

fn peers(args: &BenchArgs) -> Result<(), CliError> {
    let mut options = PeersOptions {
        nowait: Some(nowait()?),
        servers: servers(args),
        file: args.file.clone(),
        overwrite: args.overwrite,
        duration: args.duration(),
        rounds: args.rounds,
        connections: args.connections(),
        html: args.html.clone(),
        output: output(args),
        stop: CancelFlag::on_signal().map_err(failed)?,
        ..PeersOptions::default()
    };
    if let Some(text) = &args.only {
        options.workloads.retain(|workload| workload.to_string().contains(text));
        if options.workloads.is_empty() {
            return Err(no_matching_row(text));
        }
    }
    options.tables.retain(|table| {
        let caching = match args.caching {
            Some(BenchCaching::Direct) => table.caching == Caching::Direct,
            Some(BenchCaching::Cached) => table.caching == Caching::PageCache,
            None => true,
        };
        let transport = match args.transport {
            Some(BenchTransport::Plain) => table.transport == Transport::Plain,
            Some(BenchTransport::Tls) => table.transport == Transport::Tls,
            Some(BenchTransport::Tcp) => table.transport == Transport::Tcp,
            None => table.transport != Transport::Tcp,
        };
        caching && transport
    });
    if args.client == Some(BenchClient::Fio) {
        options.client = ClientKind::Fio;
        options.tables.retain(|table| table.transport != Transport::Tls);
        options.workloads.retain(|workload| workload.beside.is_none());
    }
    let report = nowait_bench::run(&options, &mut io::stdout().lock()).map_err(failed)?;
    if report.interrupted {
        return Err(interrupted());
    }
    if let Some(failure) = report.failures.first() {
        return Err(incomplete(&failure.problem));
    }
    Ok(())
}
