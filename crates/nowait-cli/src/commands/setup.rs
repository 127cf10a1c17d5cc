//! `nowait completions` and `nowait man`: shell completions and manual pages, made from the
//! definition of the command line.
//!
//! Invariant: both name every command and option that --help names, and no others; a page is of a
//! command, or of a command of a command, as `nowait-export-add.1`.

use std::fs;
use std::io;

use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use crate::args::Cli;
use crate::args::setup_args::{CompletionsArgs, ManArgs};
use crate::output;
use nowait_daemon::error::{CliError, os_message, plain};

/// The most values of an option that a synopsis lists.
const MAX_VALUES: usize = 6;

/// Prints a shell's completions.
///
/// # Errors
/// Standard output cannot be written to.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), CliError> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "nowait", &mut text);
    output::print(&text)
}

/// Writes the manual pages, and prints their paths.
///
/// # Errors
/// The directory, a page or standard output cannot be written.
pub(crate) fn man(args: &ManArgs) -> Result<(), CliError> {
    let directory = &args.directory;
    let cannot = |error: &io::Error| format!("cannot write: {}", os_message(error));
    fs::create_dir_all(directory).map_err(|error| CliError::at(directory, cannot(&error)))?;
    for (name, page) in pages() {
        let path = directory.join(name);
        let written = page.and_then(|page| fs::write(&path, page));
        written.map_err(|error| CliError::at(&path, cannot(&error)))?;
        output::print(format!("wrote {}\n", plain(&path.display().to_string())))?;
    }
    Ok(())
}

/// Every page, with the name of its file.
fn pages() -> Vec<(String, io::Result<Vec<u8>>)> {
    let mut all = Cli::command().disable_help_subcommand(true);
    // Sets each command's full name, which its page has.
    all.build();
    let mut pages = Vec::new();
    add_pages(&all, None, &mut pages);
    pages
}

/// Adds the page of `command`, which is one of `parent`, and those of its own commands.
fn add_pages(
    command: &clap::Command,
    parent: Option<&clap::Command>,
    pages: &mut Vec<(String, io::Result<Vec<u8>>)>,
) {
    let rendered = page(command, parent);
    pages.push((format!("{}.1", page_name(command)), rendered));
    command.get_subcommands().for_each(|child| add_pages(child, Some(command), pages));
}

/// The name of a command's page, without its section.
fn page_name(command: &clap::Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

fn page(command: &clap::Command, parent: Option<&clap::Command>) -> io::Result<Vec<u8>> {
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let man = Man::new(command.clone()).manual("nowait");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    synopsis(command).to_writer(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    sections(&after).to_writer(&mut page)?;
    see_also(command, parent).to_writer(&mut page)?;
    Ok(page)
}

/// How the command is called: each option with its value, or the values that it can have.
fn synopsis(command: &clap::Command) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]);
    let mut line = vec![bold(command.get_bin_name().unwrap_or(command.get_name()))];
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
    for option in shown.filter(|argument| !argument.is_positional()) {
        line.extend([roman(" ["), bold(spelling(option))]);
        if option.get_action().takes_values() {
            let optional = option.get_num_args().is_some_and(|count| count.min_values() == 0);
            line.push(roman(if optional { "[=" } else { " " }));
            line.push(value_of(option));
            line.push(roman(if optional { "]" } else { "" }));
        }
        line.push(roman("]"));
    }
    for argument in command.get_positionals().filter(|argument| !argument.is_hide_set()) {
        let many = argument.get_num_args().is_some_and(|count| count.max_values() > 1);
        let (open, close) = if argument.is_required_set() { (" ", "") } else { (" [", "]") };
        line.extend([roman(open), value_of(argument), roman(close)]);
        line.push(roman(if many { " ..." } else { "" }));
    }
    if command.has_subcommands() {
        line.extend([roman(" "), italic("COMMAND")]);
    }
    // Long words cannot be spread over a line.
    roff.control("ad", ["l"]).control("nh", []).text(line).control("hy", []).control("ad", ["b"]);
    roff
}

/// An option's short and long name.
fn spelling(option: &clap::Arg) -> String {
    match (option.get_short(), option.get_long()) {
        (Some(short), Some(long)) => format!("-{short}|--{long}"),
        (Some(short), None) => format!("-{short}"),
        (None, long) => format!("--{}", long.unwrap_or_default()),
    }
}

/// The values that an argument can have, or the name of its value.
fn value_of(argument: &clap::Arg) -> Inline {
    let possible = argument.get_possible_values();
    let known: Vec<&str> = possible
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| value.get_name())
        .collect();
    if (1..=MAX_VALUES).contains(&known.len()) {
        return bold(known.join("|"));
    }
    let named = argument.get_value_names().and_then(|names| names.first());
    italic(named.map_or_else(|| argument.get_id().to_string(), ToString::to_string))
}

/// The pages of the commands beside, above and below the command.
fn see_also(command: &clap::Command, parent: Option<&clap::Command>) -> Roff {
    let beside = parent.into_iter().flat_map(clap::Command::get_subcommands);
    let others = parent.into_iter().chain(command.get_subcommands()).chain(beside);
    let own = page_name(command);
    let mut line = Vec::new();
    for name in others.map(page_name).filter(|name| *name != own) {
        line.extend([roman(if line.is_empty() { "" } else { ", " }), bold(name), roman("(1)")]);
    }
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    roff.text(line);
    roff
}

/// Formats the text after the options: headings end with a colon; other lines are kept as they are.
fn sections(text: &str) -> Roff {
    let mut roff = Roff::new();
    for line in text.lines() {
        match line.strip_suffix(':').filter(|line| !line.starts_with(' ')) {
            Some(heading) => {
                let (heading, rest) = heading.split_once(" (").unwrap_or((heading, ""));
                roff.control("SH", [heading.to_uppercase().as_str()]);
                if !rest.is_empty() {
                    roff.text([roman(format!("({rest}:"))]);
                }
                roff.control("nf", []);
            }
            None if line.is_empty() => {
                roff.control("sp", []);
            }
            None if line.starts_with(' ') => {
                roff.text([roman(line)]);
            }
            None => {
                roff.control("fi", []);
                roff.text([roman(line)] as [Inline; 1]);
            }
        }
    }
    roff.control("fi", []);
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each command's long options that --help shows.
    fn options(command: &clap::Command) -> Vec<String> {
        let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
        shown.filter_map(|argument| argument.get_long().map(str::to_owned)).collect()
    }

    /// The commands below `command`, at any depth.
    fn all_below(command: &clap::Command) -> Vec<&clap::Command> {
        let below = |it| std::iter::once(it).chain(all_below(it));
        command.get_subcommands().flat_map(below).collect()
    }

    #[test]
    fn each_command_has_a_page_with_all_its_options_and_its_exit_statuses() {
        let pages = pages();
        let mut commands = Cli::command().disable_help_subcommand(true);
        commands.build();
        let all = all_below(&commands);
        assert_eq!(pages.len(), 1 + all.len());
        for command in all {
            let name = format!("{}.1", page_name(command));
            let (_, page) = pages.iter().find(|(file, _)| *file == name).expect("its page");
            let page = String::from_utf8(page.as_ref().unwrap().clone()).unwrap();
            for option in options(command) {
                let escaped = option.replace('-', "\\-");
                assert!(page.contains(&format!("\\-\\-{escaped}")), "{name}: --{option}");
            }
            for section in [".SH NAME", ".SH SYNOPSIS", ".SH \"SEE ALSO\""] {
                assert!(page.contains(section), "{name}: {section}");
            }
            let is_nested =
                command.get_bin_name().is_some_and(|name| name.matches(' ').count() > 1);
            for section in [".SH \"EXIT STATUS\"", ".SH EXAMPLES"] {
                assert!(is_nested || page.contains(section), "{name}: {section}");
            }
        }
    }

    #[test]
    fn a_synopsis_has_the_values_that_an_option_can_have() {
        let pages = pages();
        let (_, page) = pages.iter().find(|(name, _)| name == "nowait-serve.1").unwrap();
        let page = String::from_utf8(page.as_ref().unwrap().clone()).unwrap();
        let synopsis = page.split(".SH").nth(2).unwrap();
        for option in [
            "\\-\\-read\\-only\\fR]",
            "sandbox\\fR \\fBauto|on|off\\fR",
            "backing\\-dir\\fR \\fIDIR\\fR",
        ] {
            assert!(synopsis.contains(option), "{synopsis}");
        }
    }
}
