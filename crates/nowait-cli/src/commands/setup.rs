//! `nowait completions` and `nowait man`: shell completions and manual pages, made from the
//! definition of the command line.
//!
//! Invariant: both name every command and option that --help names, and no others.

use std::fs;
use std::io;

use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, roman};

use crate::args::Cli;
use crate::args::setup_args::{CompletionsArgs, ManArgs};
use crate::output;
use nowait_cli::error::{CliError, os_message};

/// Prints a shell's completions.
///
/// # Errors
/// Standard output cannot be written to.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), CliError> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "nowait", &mut text);
    output::print(&text)
}

/// Writes the manual pages.
///
/// # Errors
/// The directory or a page cannot be written.
pub(crate) fn man(args: &ManArgs) -> Result<(), CliError> {
    let directory = &args.directory;
    let cannot = |error: &io::Error| format!("cannot write: {}", os_message(error));
    fs::create_dir_all(directory).map_err(|error| CliError::at(directory, cannot(&error)))?;
    for (name, page) in pages() {
        let path = directory.join(name);
        let written = page.and_then(|page| fs::write(&path, page));
        written.map_err(|error| CliError::at(&path, cannot(&error)))?;
    }
    Ok(())
}

/// Every page, with the name of its file.
fn pages() -> Vec<(String, io::Result<Vec<u8>>)> {
    let mut all = Cli::command().disable_help_subcommand(true);
    // Sets each command's full name, which its page has.
    all.build();
    let each = all.get_subcommands().cloned();
    let each = std::iter::once(all.clone()).chain(each).map(page);
    each.collect()
}

fn page(command: clap::Command) -> (String, io::Result<Vec<u8>>) {
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let has_commands = command.has_subcommands();
    let man = Man::new(command).manual("nowait");
    let mut page = Vec::new();
    let rendered = man.render_title(&mut page).and_then(|()| {
        man.render_name_section(&mut page)?;
        man.render_synopsis_section(&mut page)?;
        man.render_description_section(&mut page)?;
        man.render_options_section(&mut page)?;
        if has_commands {
            man.render_subcommands_section(&mut page)?;
        }
        sections(&after).to_writer(&mut page)
    });
    (man.get_filename(), rendered.map(|()| page))
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

    #[test]
    fn each_command_has_a_page_with_all_its_options_and_its_exit_statuses() {
        let pages = pages();
        let mut commands = Cli::command().disable_help_subcommand(true);
        commands.build();
        assert_eq!(pages.len(), 1 + commands.get_subcommands().count());
        for command in commands.get_subcommands() {
            let name = format!("nowait-{}.1", command.get_name());
            let (_, page) = pages.iter().find(|(file, _)| *file == name).expect("its page");
            let page = String::from_utf8(page.as_ref().unwrap().clone()).unwrap();
            for option in options(command) {
                let escaped = option.replace('-', "\\-");
                assert!(page.contains(&format!("\\-\\-{escaped}")), "{name}: --{option}");
            }
            for section in [".SH NAME", ".SH SYNOPSIS", ".SH \"EXIT STATUS\"", ".SH EXAMPLES"] {
                assert!(page.contains(section), "{name}: {section}");
            }
        }
    }
}
