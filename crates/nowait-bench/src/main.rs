//! The program `nowait-bench`, which `nowait bench` runs: runs the measurements of the bench crate
//! and prints their tables.
//!
//! Invariant: a file that exists, or a device, is only written to with `--overwrite`.

use std::path::PathBuf;
use std::{env, io};

use clap::error::ErrorKind;
use clap::{Args, Command, FromArgMatches};
use nowait_bench::{
    Caching, CancelFlag, ClientKind, CopyOptions, DevicesOptions, EngineOptions, Error,
    ImagesOptions, IsolationOptions, Output, PeersOptions, Report, RunOptions, ServerKind,
    TableSelection, Transport, run_copies, run_devices, run_engine, run_images, run_isolation,
    run_peers,
};
use nowait_cli::bench_args::{BenchArgs, BenchCaching, BenchClient, BenchTransport, BenchWhat};
use nowait_daemon::error::{CliError, os_message};
use nowait_daemon::process::{self, log};

fn main() {
    process::set_up();
    // `nowait bench` passes on what it has parsed itself, so that clap's messages are good enough.
    let program = Command::new("nowait-bench").bin_name("nowait bench");
    let mut program = BenchArgs::augment_args(program).version(env!("CARGO_PKG_VERSION"));
    let parsed = BenchArgs::from_arg_matches(&program.get_matches_mut());
    let args = parsed.unwrap_or_else(|error| error.exit());
    if let Err(why) = args.check() {
        program.error(ErrorKind::ArgumentConflict, why).exit();
    }
    process::end(match run(&args) {
        Ok(()) => 0,
        Err(error) => {
            log::write_line(tracing::Level::ERROR, &error);
            error.status()
        }
    });
}

/// Measures and prints.
fn run(args: &BenchArgs) -> Result<(), CliError> {
    let run = RunOptions {
        duration: args.duration(),
        rounds: args.rounds,
        overwrite: args.overwrite,
        html: args.html.clone(),
        output: if args.json { Output::Json } else { Output::Text },
        stop: CancelFlag::on_signal().map_err(failed)?,
    };
    let report = measure(args, run)?;
    match report.failures.first() {
        _ if report.interrupted => Err(CliError::new("interrupted, the tables above are complete")),
        Some(line) => Err(CliError::new(format!("not everything could be measured: {line}"))),
        None => Ok(()),
    }
}

fn failed(error: Error) -> CliError {
    CliError::new(error.to_string())
}

fn measure(args: &BenchArgs, run: RunOptions) -> Result<Report, CliError> {
    let mut out = io::stdout().lock();
    let file = args.file.clone();
    let what = match args.what {
        BenchWhat::Peers => {
            let options = PeersOptions {
                run,
                nowait: Some(nowait()?),
                servers: servers(args),
                file,
                client: match args.client {
                    Some(BenchClient::Fio) => ClientKind::Fio,
                    Some(BenchClient::Own) | None => ClientKind::Own,
                },
                connections: args.connections(),
                only: args.only.clone(),
                caching: args.caching.map(|caching| match caching {
                    BenchCaching::Direct => Caching::Direct,
                    BenchCaching::Cached => Caching::PageCache,
                }),
                transport: args.transport.map(|transport| match transport {
                    BenchTransport::Plain => Transport::Plain,
                    BenchTransport::Tls => Transport::Tls,
                    BenchTransport::Tcp => Transport::Tcp,
                    BenchTransport::VhostUser => Transport::VhostUser,
                }),
            };
            return run_peers(&options, &mut out).map_err(failed);
        }
        BenchWhat::Copy => {
            let (directory, bytes) = (args.directory.clone(), args.size());
            let options = CopyOptions { run, nowait: nowait()?, directory, bytes };
            return run_copies(&options, &mut out).map_err(failed);
        }
        BenchWhat::Images => {
            let (servers, only) = (servers(args), args.only.clone());
            let options = ImagesOptions { run, nowait: Some(nowait()?), servers, only };
            return run_images(&options, &mut out).map_err(failed);
        }
        BenchWhat::Isolation => {
            let options = IsolationOptions { run, nowait: nowait()?, only: args.only.clone() };
            return run_isolation(&options, &mut out).map_err(failed);
        }
        BenchWhat::Nowait if !args.device.is_empty() => {
            let options = DevicesOptions {
                run,
                devices: args.device.clone(),
                discard: args.discard,
                jobs: args.jobs(),
                depth: args.depth(),
                block_bytes: args.block_bytes(),
                only: args.only.clone(),
            };
            return run_devices(&options, &mut out).map_err(failed);
        }
        what => selection(what),
    };
    let only = args.only.clone();
    let mut options = EngineOptions { run, what, file, only, ..EngineOptions::default() };
    if !args.latency.is_empty() {
        options.latency.clone_from(&args.latency);
    }
    run_engine(&options, &mut out).map_err(failed)
}

/// The engine's tables that `what` names; all for another one.
fn selection(what: BenchWhat) -> TableSelection {
    match what {
        BenchWhat::Simple => TableSelection::Simple,
        BenchWhat::Completion => TableSelection::Completion,
        BenchWhat::Vectored => TableSelection::Vectored,
        BenchWhat::Pool => TableSelection::Pool,
        BenchWhat::Merge => TableSelection::Merge,
        BenchWhat::Nowait => TableSelection::Nowait,
        BenchWhat::Durable => TableSelection::Durable,
        BenchWhat::Log => TableSelection::Log,
        BenchWhat::Engines => TableSelection::Engines,
        BenchWhat::All
        | BenchWhat::Peers
        | BenchWhat::Copy
        | BenchWhat::Images
        | BenchWhat::Isolation => TableSelection::All,
    }
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
