//! Installation: completions that shells accept, and manual pages that man(1) shows.
//!
//! Invariant: both name every command that `nowait --help` names.

use std::fs;

use crate::common::{Finished, Scratch, accepted, refusal, require_tool, tool};

/// The commands that `nowait --help` lists.
fn commands() -> Vec<String> {
    let help = accepted(&["--help"]);
    let list = help.split("Commands:\n").nth(1).expect("a list of commands");
    let lines = list.lines().take_while(|line| !line.is_empty());
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !name.is_empty() && *name != "help").map(str::to_owned).collect()
}

#[test]
fn completions_of_each_shell_name_every_command_and_bash_accepts_them() {
    let scratch = Scratch::new();
    let commands = commands();
    assert!(commands.len() >= 11, "{commands:?}");
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let text = accepted(&["completions", shell]);
        for name in commands.iter().map(String::as_str).chain(["exit-with-last-client"]) {
            assert!(text.contains(name), "{shell} does not know {name}");
        }
        if shell == "bash" && require_tool("bash") {
            let script = scratch.join("nowait.bash");
            fs::write(&script, text).expect("a file");
            tool("bash").arg("-n").arg(&script).succeeds();
            // The state of a user's command line.
            let typed = r#". "$0"; COMP_WORDS=(nowait ser) COMP_CWORD=1; _nowait nowait ser nowait
                echo "${COMPREPLY[@]}""#;
            let printed = tool("bash").args(["-c", typed]).arg(&script).succeeds();
            assert_eq!(printed.trim(), "serve");
        }
    }
    let refused = refusal(&["completions", "tcsh"]);
    assert_eq!((refused.code, refused.error.lines().count()), (2, 1), "{}", refused.error);
}

#[test]
fn manual_pages_of_every_command_are_shown_by_man_without_a_warning() {
    let scratch = Scratch::new();
    let directory = scratch.join("man/man1");
    let directory = directory.to_str().expect("a name in UTF-8");
    accepted(&["man", directory]);
    let printed = accepted(&["man", directory]);
    let written: Vec<&str> =
        printed.lines().filter_map(|line| line.strip_prefix("wrote ")).collect();
    assert_eq!(written.len(), fs::read_dir(directory).expect("pages").count());
    assert!(written.iter().all(|path| fs::exists(path).expect("a path")), "{written:?}");
    let names: Vec<String> = commands().iter().map(|name| format!("nowait-{name}")).collect();
    for page in names.iter().map(String::as_str).chain(["nowait", "nowait-export-add"]) {
        assert!(written.contains(&format!("{directory}/{page}.1").as_str()), "{page}");
    }
    nowait_testkit::needs!(require_tool("man"));
    for name in names.iter().map(String::as_str).chain(["nowait"]) {
        let page = format!("{directory}/{name}.1");
        let mut man = tool("man");
        man.args(["--warnings", "-E", "UTF-8", "-l", &page]);
        man.envs([("MANWIDTH", "100"), ("LC_ALL", "C.UTF-8"), ("MAN_KEEP_FORMATTING", "")]);
        let output = man.output().expect("man");
        let (text, warnings) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && warnings.is_empty(), "{name}: {warnings}");
        for section in ["NAME", "SYNOPSIS", "EXAMPLES", "EXIT STATUS", "SEE ALSO"] {
            assert!(text.lines().any(|line| line == section), "{name}: no {section} in\n{text}");
        }
    }
}

#[test]
fn a_directory_that_cannot_be_written_to_is_refused_by_name() {
    let scratch = Scratch::new();
    let file = scratch.sparse("file", 1);
    refusal(&["man", file.to_str().expect("a name in UTF-8")]).says(&["file", "cannot write"]);
}
