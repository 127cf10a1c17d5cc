//! The program `nowait-bench`, which `nowait bench` executes: runs the measurements of the bench crate
//! and prints their tables.
//!
//! Invariant: a file that exists, or a device, is only written to with `--overwrite`.

mod args;

use std::path::PathBuf;
use std::{env, io};

use crate::args::{BenchArgs, What};
use nowait_bench::{
    CancelFlag, ClientKind, CopyOptions, DevicesOptions, EngineOptions, Error, ImagesOptions,
    IsolationOptions, Output, PeersOptions, Report, RunOptions, ServerKind, TableSelection,
    run_copies, run_devices, run_engine, run_images, run_isolation, run_peers,
};
use nowait_daemon::error::{CliError, os_message};
use nowait_daemon::process::{self, log};

fn main() {
    process::set_up();
    let ended = BenchArgs::of_this_process().and_then(|args| {
        run(&args).map_err(|error| {
            log::write_line(tracing::Level::ERROR, &error);
            error.status()
        })
    });
    process::end(ended.err().unwrap_or_default());
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
        What::Peers => {
            let options = PeersOptions {
                run,
                nowait: Some(nowait()?),
                servers: servers(args),
                file,
                client: args.client.unwrap_or(ClientKind::Own),
                connections: args.connections(),
                only: args.only.clone(),
                caching: args.caching,
                transport: args.transport,
            };
            return run_peers(&options, &mut out).map_err(failed);
        }
        What::Copy => {
            let (directory, bytes) = (args.directory.clone(), args.size());
            let options = CopyOptions { run, nowait: nowait()?, directory, bytes };
            return run_copies(&options, &mut out).map_err(failed);
        }
        What::Images => {
            let (servers, only) = (servers(args), args.only.clone());
            let options = ImagesOptions { run, nowait: Some(nowait()?), servers, only };
            return run_images(&options, &mut out).map_err(failed);
        }
        What::Isolation => {
            let options = IsolationOptions { run, nowait: nowait()?, only: args.only.clone() };
            return run_isolation(&options, &mut out).map_err(failed);
        }
        What::Nowait if !args.device.is_empty() => {
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
fn selection(what: What) -> TableSelection {
    match what {
        What::Simple => TableSelection::Simple,
        What::Completion => TableSelection::Completion,
        What::Vectored => TableSelection::Vectored,
        What::Pool => TableSelection::Pool,
        What::Merge => TableSelection::Merge,
        What::Nowait => TableSelection::Nowait,
        What::Durable => TableSelection::Durable,
        What::Log => TableSelection::Log,
        What::Engines => TableSelection::Engines,
        What::All | What::Peers | What::Copy | What::Images | What::Isolation => {
            TableSelection::All
        }
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
    if args.servers.is_empty() { ServerKind::ALL.to_vec() } else { args.servers.clone() }
}
