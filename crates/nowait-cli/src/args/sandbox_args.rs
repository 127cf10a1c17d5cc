//! The command-line option for the sandbox of a server.

use clap::{Args, ValueEnum};

use crate::sandbox::Mode;

/// What a server gives up when it is ready.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sandbox")]
pub(crate) struct SandboxArgs {
    /// Whether the server gives up what it does not need when it begins to serve
    ///
    /// It can then open no files but each IMAGE, those in the directories of --allow-dir and the
    /// like, execute no program, connect by TCP nowhere, and make no system call but those that a
    /// server makes (landlock and seccomp; docs/operating.md says more).
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    sandbox: When,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum When {
    /// As far as the kernel can do it
    Auto,
    /// Or nothing is served: the kernel has to have landlock and seccomp
    On,
    /// Not at all, for debuggers and profilers
    Off,
}

impl SandboxArgs {
    /// Whether the process is confined; `None`: it is not.
    pub(crate) fn mode(&self) -> Option<Mode> {
        match self.sandbox {
            When::Auto => Some(Mode::Auto),
            When::On => Some(Mode::On),
            When::Off => None,
        }
    }
}
