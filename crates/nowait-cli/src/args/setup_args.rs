//! The command lines of `nowait completions` and `man`, for installation.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// Print the script by which a shell completes nowait's commands and options
///
/// It goes to standard output, and from there to where the shell looks for it.
#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS_AFTER_HELP)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// Write the manual pages
///
/// They are nowait.1, nowait-COMMAND.1 for each command and nowait-export-add.1 and others for the
/// commands of a command, and say what --help says. Older ones in DIR are written over. The path of
/// each is printed.
#[derive(Debug, Args)]
#[command(after_help = MAN_AFTER_HELP)]
pub(crate) struct ManArgs {
    /// The directory to write them to; it is made if it is not there
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) directory: PathBuf,
}

const COMPLETIONS_AFTER_HELP: &str = "\
Examples:
  nowait completions bash > ~/.local/share/bash-completion/completions/nowait
  nowait completions zsh > ~/.zfunc/_nowait              # a directory of $fpath
  nowait completions fish > ~/.config/fish/completions/nowait.fish

Exit status:
  0   success
  1   standard output cannot be written to
  2   wrong command line";

const MAN_AFTER_HELP: &str = "\
Examples:
  nowait man ~/.local/share/man/man1
  man nowait-serve

Exit status:
  0   success
  1   a page cannot be written
  2   wrong command line";
