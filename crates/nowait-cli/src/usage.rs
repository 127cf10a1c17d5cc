//! Reports wrong command lines and chooses the exit status.
//!
//! Invariant: the message is one line on standard error, whatever the arguments contain; a
//! suggested alternative exists.

use std::error::Error as _;
use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};
use tracing::Level;

use crate::args::{CHECK_USAGE_STATUS, Cli, Command, USAGE_STATUS};
use crate::{habits, output};
use nowait_daemon::process::log;

/// The limit of typing errors up to which an option is suggested, and the number of letters that an
/// option must have for each.
const MAX_TYPOS: usize = 2;
const LETTERS_PER_TYPO: usize = 4;
/// Parses the command line. The error is the exit status: help was requested and printed, or the
/// command line was wrong and the message was printed.
pub(crate) fn parse() -> Result<Cli, u8> {
    Cli::try_parse().map_err(|error| end(&error, command_named(std::env::args_os().skip(1))))
}

/// Reports that the command line of `command` is wrong in a way that parsing does not detect.
pub(crate) fn refuse(command: &Command, why: &str) -> u8 {
    let name = command.name();
    print(why, name);
    status(name)
}

fn status(command: &str) -> u8 {
    if command == "check" { CHECK_USAGE_STATUS } else { USAGE_STATUS }
}

/// The command that `arguments` begin with, as `export backup start`; empty if they begin with none.
fn command_named(arguments: impl Iterator<Item = OsString>) -> String {
    let root = Cli::command();
    let (mut known, mut names) = (&root, Vec::new());
    for argument in arguments {
        let Some(command) = argument.to_str().and_then(|name| known.find_subcommand(name)) else {
            break;
        };
        names.push(command.get_name());
        known = command;
    }
    names.join(" ")
}

fn end(error: &clap::Error, command: String) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match error.print() {
            Ok(()) => 0,
            Err(error) => {
                let failure = output::print_failure(&error);
                if !failure.is_silent() {
                    log::write_line(Level::ERROR, &failure);
                }
                failure.status()
            }
        },
        // Without any argument, the help is printed.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            USAGE_STATUS
        }
        _ => {
            print(&words(error, &command), &command);
            status(&command)
        }
    }
}

fn print(why: &str, command: &str) {
    let manual = if command.is_empty() { "nowait".to_owned() } else { format!("nowait {command}") };
    log::write_line(Level::ERROR, format_args!("{why} (see '{manual} --help')"));
}

/// The message in one sentence, without the help lines that clap adds.
fn words(error: &clap::Error, command: &str) -> String {
    let get = |kind| text_of(error, kind);
    let argument = names_of(error, ContextKind::InvalidArg);
    let value = get(ContextKind::InvalidValue);
    match error.kind() {
        ErrorKind::InvalidValue if value.is_empty() => format!("{argument} needs a value"),
        ErrorKind::InvalidValue => {
            let valid = get(ContextKind::ValidValue);
            format!("'{value}' is not a value for {argument}, which is one of: {valid}")
        }
        ErrorKind::ValueValidation if !argument.is_empty() => {
            let why = error.source().map_or("it is not valid".into(), ToString::to_string);
            format!("'{value}' is not a value for {argument}: {}", number_words(&why))
        }
        ErrorKind::UnknownArgument => unknown_argument(error, command, &argument),
        ErrorKind::InvalidSubcommand => unknown_command(error, command),
        ErrorKind::ArgumentConflict => match names_of(error, ContextKind::PriorArg) {
            prior if prior == argument => format!("{argument} is given twice"),
            prior if prior.is_empty() => format!("{argument} does not go with the others"),
            prior => format!("{argument} does not go with {prior}"),
        },
        ErrorKind::MissingRequiredArgument => match argument.rsplit_once(", ") {
            Some((others, last)) => format!("{others} and {last} are missing"),
            None => format!("{argument} is missing"),
        },
        ErrorKind::TooManyValues => format!("{argument} takes no value, and got '{value}'"),
        ErrorKind::InvalidUtf8 => "an argument is not UTF-8, and not a path".into(),
        // Other kinds come from definitions that are not used here, and keep clap's message.
        _ => {
            let all = error.render().to_string();
            let first = all.trim_start_matches("error: ").split("\n\n").next();
            first.unwrap_or_default().to_owned()
        }
    }
}

/// Why a number is refused. The parsers of numbers in clap and Rust name types and ranges of Rust.
fn number_words(why: &str) -> String {
    let outside = why.split_once(" is not in ").and_then(|(_, range)| range.split_once(".."));
    if let Some((first, last)) = outside {
        let last = last.trim_start_matches('=');
        return match last.parse::<u64>() {
            Ok(bound) if bound >= i64::MAX as u64 => format!("the least is {first}"),
            _ => format!("it goes from {first} to {last}"),
        };
    }
    match why {
        "invalid digit found in string" => "it is not a whole number".into(),
        "number too large to fit in target type" => "it is too large".into(),
        "number too small to fit in target type" => "it is too small".into(),
        "cannot parse integer from empty string" => "a number is missing".into(),
        _ => why.to_owned(),
    }
}

fn unknown_argument(error: &clap::Error, command: &str, argument: &str) -> String {
    let unknown = format!("there is no option {argument}");
    if !argument.starts_with('-') {
        return format!("'{argument}' is one argument too many");
    }
    let elsewhere = habits::OPTIONS
        .iter()
        .find(|(of, names, _)| (of.is_empty() || *of == command) && names.contains(&argument));
    if let Some((_, _, way_out)) = elsewhere {
        return format!("{unknown}: {way_out}");
    }
    match text_of(error, ContextKind::SuggestedArg) {
        similar if is_meant(argument, &similar) => format!("{unknown}; there is {similar}"),
        _ => unknown,
    }
}

fn unknown_command(error: &clap::Error, of: &str) -> String {
    let name = text_of(error, ContextKind::InvalidSubcommand);
    let unknown = format!("there is no command '{name}'");
    // The commands of a command are others.
    if of.is_empty()
        && let Some((_, way_out)) =
            habits::COMMANDS.iter().find(|(names, _)| names.contains(&name.as_str()))
    {
        return format!("{unknown}: {way_out}");
    }
    let similar = strings_of(error, ContextKind::SuggestedSubcommand);
    match similar.iter().find(|similar| is_meant(&name, similar)) {
        Some(similar) => format!("{unknown}; there is {similar}"),
        None => unknown,
    }
}

/// Whether `given` is likely to be a mistyped `similar`: a few letters are wrong, or it is a
/// prefix. clap's own measure suggests --export for --port.
fn is_meant(given: &str, similar: &str) -> bool {
    let letters = given.trim_start_matches('-').len();
    let typos = strsim::osa_distance(given, similar);
    letters > 1
        && (similar.starts_with(given) || typos <= MAX_TYPOS.min(letters / LETTERS_PER_TYPO))
}

fn strings_of(error: &clap::Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    }
}

/// The names of the arguments, without brackets and value names.
fn names_of(error: &clap::Error, kind: ContextKind) -> String {
    let name = |text: String| match text.starts_with('-') {
        true => text.split(' ').next().unwrap_or_default().to_owned(),
        false => {
            let text = text.trim_end_matches("...");
            let inner = |open, close| text.strip_prefix(open)?.strip_suffix(close);
            inner('<', '>').or_else(|| inner('[', ']')).unwrap_or(text).to_owned()
        }
    };
    strings_of(error, kind).into_iter().map(name).collect::<Vec<_>>().join(", ")
}

fn text_of(error: &clap::Error, kind: ContextKind) -> String {
    strings_of(error, kind).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(line: &str) -> String {
        let command = command_named(line.split(' ').skip(1).map(OsString::from));
        words(&Cli::try_parse_from(line.split(' ')).unwrap_err(), &command)
    }

    #[test]
    fn a_wrong_command_line_is_reported_in_one_sentence() {
        for (line, sentence) in [
            (
                "nowait serve --queue aio",
                "'aio' is not a value for --queue, which is one of: uring, threads",
            ),
            (
                "nowait create a -",
                "'-' is not a value for SIZE: this is not a size (give bytes, or a whole number with K, M, G or T, as in 512M or 10G)",
            ),
            ("nowait create a", "SIZE is missing"),
            ("nowait info", "IMAGE is missing"),
            ("nowait create", "IMAGE and SIZE are missing"),
            ("nowait info a b", "'b' is one argument too many"),
            ("nowait serve --nbd", "--nbd needs a value"),
            ("nowait serve --json=1", "--json takes no value, and got '1'"),
            ("nowait info a --json --json", "--json is given twice"),
        ] {
            assert_eq!(message(line), sentence, "{line}");
        }
    }

    #[test]
    fn only_an_option_that_is_likely_to_be_meant_is_suggested() {
        for (line, similar) in [
            ("nowait serve --read_only", "; there is --read-only"),
            ("nowait serve --verbos", "; there is --verbose"),
            ("nowait serv", "; there is serve"),
            ("nowait create a 1G --cluster", "; there is --cluster-size"),
        ] {
            assert!(message(line).ends_with(similar), "{line}: {}", message(line));
        }
        for line in ["nowait serve --expire", "nowait serve --direction", "nowait create a 1G -x"] {
            assert!(!message(line).contains(';'), "{line}: {}", message(line));
        }
    }

    #[test]
    fn an_option_of_another_program_is_answered_with_the_alternative() {
        for (line, way_out) in [
            ("nowait serve -c /dev/nbd0", "nbd-client -unix"),
            ("nowait serve -d /dev/nbd0", "nbd-client -d"),
            ("nowait info a --output=json", "'--json'"),
            ("nowait stop", "'nowait status'"),
            ("nowait serve a --listen :1", "'--nbd tcp:HOST:PORT'"),
            ("nowait copy a b -S 4k", "'--sparse 4K'"),
            ("nowait info a --backing-chain", "names its backing image"),
            ("nowait create a --size 1G", "'nowait create IMAGE 10G'"),
            ("nowait -v", "'nowait --version'"),
            ("nowait check a -r all", "--repair"),
            ("nowait convert a b", "nowait copy"),
            ("nowait snapshot a", "qemu-img"),
        ] {
            assert!(message(line).contains(way_out), "{line}: {}", message(line));
        }
    }

    /// The command lines of nowait that stand in quotes in `advice`; an option goes to `command`.
    fn quoted(advice: &str, command: &str) -> Vec<String> {
        let arguments = match command {
            "copy" => "a b",
            "create" | "resize" => "a 1G",
            _ => "a",
        };
        let command = if command.is_empty() { "info" } else { command };
        let lines =
            advice.split('\'').skip(1).step_by(2).map(|line| match line.strip_prefix("nowait ") {
                Some(_) => line.to_owned(),
                None => format!("nowait {command} {arguments} {line}").replace("1G +1G", "+1G"),
            });
        lines.map(|line| line.replace("PORT", "10809")).collect()
    }

    fn assert_that_it_works(advice: &str, command: &str) {
        let outside: String = advice.split('\'').step_by(2).collect();
        let other = ["nbd-client", "nbdinfo"].iter().any(|program| advice.contains(program));
        assert!(other || !outside.contains("--"), "an option that is not tried: {advice}");
        for line in quoted(advice, command) {
            match Cli::try_parse_from(line.split(' ')) {
                Ok(cli) => assert_eq!(cli.command.check(), Ok(()), "{line}"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::DisplayVersion, "{line}"),
            }
        }
    }

    #[test]
    fn the_manual_of_a_command_of_a_command_is_named() {
        for (line, command) in [
            ("export backup start a --only-dirty", "export backup start"),
            ("export backup", "export backup"),
            ("backup a list", "backup"),
            ("--version serve", ""),
        ] {
            assert_eq!(command_named(line.split(' ').map(OsString::from)), command, "{line}");
        }
    }

    #[test]
    fn the_commands_of_a_command_are_not_those_of_nowait() {
        assert_eq!(message("nowait ublk remove"), "there is no command 'remove'");
    }

    #[test]
    fn each_advice_is_given_and_works() {
        for (of, names, advice) in habits::OPTIONS {
            for name in *names {
                let command = if of.is_empty() { "ublk" } else { of };
                let line = format!("nowait {command} {name}");
                // Another command has the option, and is where the advice is not given.
                assert!(message(&line).ends_with(advice), "{line}: {}", message(&line));
            }
            assert_that_it_works(advice, of);
        }
        for (names, advice) in habits::COMMANDS {
            for name in *names {
                assert!(message(&format!("nowait {name}")).ends_with(advice), "{name}");
            }
            assert_that_it_works(advice, "");
        }
    }

    #[cfg(feature = "object-stores")]
    #[test]
    fn a_cache_mode_of_qemu_is_answered_with_what_does_it_here() {
        for word in ["none", "writeback", "writethrough", "directsync", "unsafe"] {
            let answer = message(&format!("nowait serve a --cache={word}"));
            assert!(answer.contains("'--direct o"), "{answer}");
            assert_that_it_works(answer.split_once("objects; ").unwrap().1, "serve");
            let directory = format!("nowait serve a --cache=./{word}");
            assert!(Cli::try_parse_from(directory.split(' ')).is_ok(), "{directory}");
        }
    }

    #[test]
    fn a_number_out_of_range_is_answered_in_words() {
        for (line, why) in [
            (
                "nowait serve a --limit-iops 0",
                "'0' is not a value for --limit-iops: the least is 1",
            ),
            (
                "nowait serve a --threads 300",
                "'300' is not a value for --threads: it goes from 1 to 256",
            ),
            (
                "nowait serve a --threads x",
                "'x' is not a value for --threads: it is not a whole number",
            ),
        ] {
            assert!(message(line).contains(why), "{line}: {}", message(line));
        }
    }

    #[test]
    fn options_that_do_not_apply_are_refused_instead_of_ignored() {
        let check = |line: &str| Cli::try_parse_from(line.split(' ')).unwrap().command.check();
        for (line, why) in [
            ("nowait copy a -", "nbdcopy URI -"),
            ("nowait copy - a", "put it into a file first"),
            ("nowait copy a b --cluster-size 64K", "say -O qcow2"),
            ("nowait copy a b --connections 2", "neither FROM nor TO is a URI"),
            ("nowait copy nbd://h/ b --tls-certs d", "is for nbds://"),
            ("nowait copy nbd://h/ b --from-format qcow2", "--from-format"),
            ("nowait copy nbd://h/ b --backing-dir d", "--backing-dir"),
            ("nowait copy a b --from-format raw --data-file d", "--data-file"),
            ("nowait serve a -f raw --backing-dir d", "--backing-dir"),
            ("nowait map a -f raw --backing-dir d", "--backing-dir"),
            ("nowait check a -f raw --data-file d", "--data-file"),
            ("nowait serve --tls off --tls-certs d", "--tls off"),
            ("nowait serve --tls on", "--tls-certs is missing"),
            ("nowait serve --tls-verify-peer", "--tls-certs is missing"),
            ("nowait serve --fork --exit-with-parent", "--exit-with-parent"),
            ("nowait serve --poll --queue uring", "does not go with --queue"),
        ] {
            let refused = check(line).unwrap_err();
            assert!(refused.contains(why), "{line}: {refused}");
        }
        for line in [
            "nowait copy ./- b",
            "nowait copy nbd://h/ b --from-format raw",
            "nowait copy a b.qcow2 --cluster-size 64K",
            "nowait copy nbds://h/ b --tls-certs d --connections 2",
            "nowait copy a nbd://h/ --backing-dir d",
            "nowait serve a -f qcow2 --backing-dir d",
            "nowait serve a --backing-dir d",
            "nowait map a --json",
        ] {
            assert_eq!(check(line), Ok(()), "{line}");
        }
    }
}
