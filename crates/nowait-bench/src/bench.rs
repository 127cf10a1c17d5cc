//! One run of the program: the command line, the program to measure, and what cancels it.

use std::path::{Path, PathBuf};

use crate::args::BenchArgs;
use crate::cancel::CancelFlag;
use crate::error::Error;

/// A benchmark: what is measured and how, by the command line.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The command line.
    pub args: BenchArgs,
    /// The nowait program to measure; `None` measures the others alone.
    pub nowait: Option<PathBuf>,
    /// Ends the measurement early; the finished tables are reported.
    pub stop: CancelFlag,
}

impl Bench {
    /// The nowait program, where nothing is measured without it.
    pub(crate) fn nowait(&self) -> Result<&Path, Error> {
        self.nowait.as_deref().ok_or(Error::NoServer)
    }

    /// The line of a report about the rounds, each of `what` in turns.
    pub(crate) fn rounds(&self, what: &str) -> String {
        let (rounds, seconds) = (self.args.rounds, self.args.duration().as_secs_f64());
        format!("{rounds} rounds of {seconds} s for each{what}, in turns")
    }

    /// A benchmark with these words of the command line, of other servers alone.
    #[cfg(test)]
    pub(crate) fn of(words: &str) -> Self {
        let line = std::iter::once("nowait-bench").chain(words.split(' '));
        let args = <BenchArgs as clap::Parser>::parse_from(line);
        Self { args, nowait: None, stop: CancelFlag::default() }
    }
}
