//! The `nowait` command: parse, compose, print.
//!
//! Invariant: success is exit status 0, a failure is one line on standard error and 1, a wrong
//! command line is 2.
//! Knows: every module here. Known by: nobody.

mod error;
mod size;
mod export;
mod tls_args;
mod listen;
mod log;
mod args;
mod default_image;
mod create;
mod info;
mod serve;
mod bench;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(args) => {
            let exports = args.exports().unwrap_or_else(|usage| usage.exit());
            args.tls.check().unwrap_or_else(|usage| usage.exit());
            log::start(args.verbose);
            serve::run(&args, exports)
        }
        Command::Create(args) => create::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Bench(args) => bench::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not eprintln!, which panics where standard error is closed.
            let _ = writeln!(io::stderr(), "nowait: {error}");
            ExitCode::FAILURE
        }
    }
}
