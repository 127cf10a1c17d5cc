//! `nowait bench`: hands the options to the measuring crate and prints what it says.
//!
//! Invariant: a file that exists is only written to with `--overwrite`.
//! Knows: bench_args, error. Known by: main.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use nowait_bench::{
    Caching, ClientKind, CopyOptions, EngineOptions, ImagesOptions, Output, PeersOptions, Stop,
    Transport, What, run_copies, run_engine, run_images,
};

use crate::bench_args::{BenchArgs, BenchCaching, BenchClient, BenchTransport, BenchWhat};
use crate::error::{CliError, reason};

/// Measures and prints.
///
/// # Errors
/// What could not be measured, or that it was interrupted.
pub(crate) fn run(args: &BenchArgs) -> Result<(), CliError> {
    let what = match args.what {
        BenchWhat::Peers => return peers(args),
        BenchWhat::Copy => return copies(args),
        BenchWhat::Images => return images(args),
        BenchWhat::Simple => What::Simple,
        BenchWhat::Completion => What::Completion,
        BenchWhat::Vectored => What::Vectored,
        BenchWhat::Pool => What::Pool,
        BenchWhat::Nowait => What::Nowait,
        BenchWhat::Engines => What::Engines,
        BenchWhat::All => What::All,
    };
    let mut options = EngineOptions {
        what,
        file: args.file.clone(),
        overwrite: args.overwrite,
        duration: Duration::from_secs_f64(args.seconds),
        rounds: args.rounds,
        html: args.html.clone(),
        output: output(args),
        stop: Stop::on_signal().map_err(failed)?,
        ..EngineOptions::default()
    };
    if !args.latency.is_empty() {
        options.latency.clone_from(&args.latency);
    }
    let report = run_engine(&options, &mut io::stdout().lock()).map_err(failed)?;
    if report.interrupted { Err(interrupted()) } else { Ok(()) }
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

fn this_program() -> Result<PathBuf, CliError> {
    std::env::current_exe()
        .map_err(|e| CliError::new(format!("cannot find this program: {}", reason(&e))))
}

fn copies(args: &BenchArgs) -> Result<(), CliError> {
    let options = CopyOptions {
        nowait: this_program()?,
        directory: args.directory.clone(),
        bytes: args.size,
        rounds: args.rounds,
        output: output(args),
        stop: Stop::on_signal().map_err(failed)?,
    };
    let report = run_copies(&options, &mut io::stdout().lock()).map_err(failed)?;
    match report.failures.first() {
        _ if report.interrupted => Err(interrupted()),
        Some(line) => Err(CliError::new(format!("not everything could be measured: {line}"))),
        None => Ok(()),
    }
}

fn nothing_titled(text: &str) -> CliError {
    CliError::new(format!("--only {text}: no row has this in its title"))
}

fn incomplete(problem: &str) -> CliError {
    CliError::new(format!("not everything could be measured: {problem}"))
}

fn images(args: &BenchArgs) -> Result<(), CliError> {
    if args.file.is_some() {
        return Err(CliError::new("images are made in $TMPDIR, --file cannot be given"));
    }
    let mut options = ImagesOptions {
        nowait: Some(this_program()?),
        duration: Duration::from_secs_f64(args.seconds),
        rounds: args.rounds,
        output: output(args),
        stop: Stop::on_signal().map_err(failed)?,
        ..ImagesOptions::default()
    };
    if !args.servers.is_empty() {
        options.servers.clone_from(&args.servers);
    }
    if let Some(text) = &args.only {
        options.scenes.retain(|scene| scene.workload.to_string().contains(text));
        if options.scenes.is_empty() {
            return Err(nothing_titled(text));
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
        nowait: Some(this_program()?),
        file: args.file.clone(),
        overwrite: args.overwrite,
        duration: Duration::from_secs_f64(args.seconds),
        rounds: args.rounds,
        connections: usize::from(args.connections),
        html: args.html.clone(),
        output: output(args),
        stop: Stop::on_signal().map_err(failed)?,
        ..PeersOptions::default()
    };
    if !args.servers.is_empty() {
        options.servers.clone_from(&args.servers);
    }
    if let Some(text) = &args.only {
        options.workloads.retain(|workload| workload.to_string().contains(text));
        if options.workloads.is_empty() {
            return Err(nothing_titled(text));
        }
    }
    options.tables.retain(|terms| {
        let caching = match args.caching {
            Some(BenchCaching::Direct) => terms.caching == Caching::Direct,
            Some(BenchCaching::Cached) => terms.caching == Caching::PageCache,
            None => true,
        };
        let transport = match args.transport {
            Some(BenchTransport::Plain) => terms.transport == Transport::Plain,
            Some(BenchTransport::Tls) => terms.transport == Transport::Tls,
            Some(BenchTransport::Tcp) => terms.transport == Transport::Tcp,
            None => terms.transport != Transport::Tcp,
        };
        caching && transport
    });
    if args.client == BenchClient::Fio {
        options.client = ClientKind::Fio;
        options.tables.retain(|terms| terms.transport != Transport::Tls);
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
