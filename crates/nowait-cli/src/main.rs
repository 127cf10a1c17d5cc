//! The `nowait` command: parse, compose, print.
//!
//! Invariant: success is exit status 0, a failure is one line on standard error and 1, a wrong
//! command line is 2; `check` tells what it found by its exit status too.
//! Knows: every module here. Known by: nobody.

mod error;
mod size;
mod export;
mod tls_args;
mod bench_args;
mod listen;
mod log;
mod image_args;
mod copy_args;
mod change_args;
mod args;
mod default_image;
mod qcow2_info;
mod info;
mod image;
mod map;
mod check;
mod service;
mod create;
mod resize;
mod commit;
mod opened;
mod serve;
mod copy;
mod bench;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    // A write beyond the limit of a file's size is to fail with EFBIG, which is reported; without a
    // handler it ends the process. Where none can be had, it does.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let result = match Cli::parse().command {
        Command::Serve(args) => {
            let exports = args.exports().unwrap_or_else(|usage| usage.exit());
            args.tls.check().unwrap_or_else(|usage| usage.exit());
            log::start(args.verbose);
            serve::run(&args, exports).map(|()| ExitCode::SUCCESS)
        }
        Command::Create(args) => create::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Info(args) => info::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Map(args) => map::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Check(args) => check::run(&args),
        Command::Copy(args) => copy::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Resize(args) => resize::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Commit(args) => commit::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            // Not eprintln!, which panics where standard error is closed.
            let _ = writeln!(io::stderr(), "nowait: {error}");
            ExitCode::FAILURE
        }
    }
}
