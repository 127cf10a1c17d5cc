//! A configuration of a server as TOML.
//!
//! Invariant: the text of a configuration is read as the same; nothing is ignored that a file says; a file is read whole
//! or not at all.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use crate::config::ServeConfig;
use crate::error::{open_message, os_message};

/// The longest configuration file, in bytes.
/// Beyond it: the file is refused.
const MAX_BYTES: u64 = 1 << 20;

/// The keys that are an option's other spelling on the command line, each with what stands in a file.
const OTHER_SPELLINGS: [(&str, &str); 8] = [
    ("socket", "nbd = [\"unix:PATH\"]"),
    ("port", "nbd = [\"tcp:HOST:PORT\"]"),
    ("bind", "nbd = [\"tcp:HOST:PORT\"]"),
    ("description", "it belongs in [[export]]"),
    ("image", "it belongs in [[export]]"),
    ("name", "it belongs in [[export]]"),
    ("queues", "threads"),
    ("shared", "max-connections"),
];

/// Reads the configuration in the file at `path`, which must be a regular one of at most 1 MiB.
///
/// # Errors
/// One line with the file and, where that is known, the line and the key.
pub fn read(path: &Path) -> Result<ServeConfig, String> {
    let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    // A pipe would let the program wait that reads it again for an upgrade.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(path).map_err(|e| failed(&open_message(path, "open it", &e)))?;
    let is_file = file.metadata().is_ok_and(|meta| meta.is_file());
    if !is_file {
        return Err(failed(&"it is not a regular file (an upgrade reads it again)"));
    }
    let text = text_of(file).map_err(|why| failed(&why))?;
    parse(&text).map_err(|(line, why)| format!("{}:{line}: {why}", path.display()))
}

fn text_of(file: File) -> Result<String, String> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| os_message(&error))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err("it has more than 1 MiB".into());
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".into())
}

/// Checks that a server with `config`, if it is confined, cannot change the file at `path` from which it came: the program
/// that takes over from it reads that again.
///
/// # Errors
/// A message for the user.
pub fn check_place(path: &Path, config: &ServeConfig) -> Result<(), String> {
    match config.may_change(path) {
        true => Err(format!(
            "{}: it is in a directory whose files this server may change (move it, or start the server with --sandbox \
             off)",
            path.display(),
        )),
        false => Ok(()),
    }
}

/// Parses `text`.
///
/// # Errors
/// The number of the line, from 1 on, and a message that names the key.
pub fn parse(text: &str) -> Result<ServeConfig, (usize, String)> {
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start).min(text.len());
        let line = text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1;
        (line, why(error.message(), &key_at(text, at)))
    })
}

/// The message about `key` in one line.
fn why(message: &str, key: &str) -> String {
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some(rest) = message.strip_prefix("unknown field `") {
        let (unknown, known) = rest.split_once('`').unwrap_or((rest, ""));
        return format!("there is no key {unknown}{}", meant(unknown, known));
    }
    if message.starts_with("duplicate key") {
        return format!("{key} is given twice");
    }
    match key {
        "" => message,
        key => format!("{key}: {message}"),
    }
}

/// The key that is likely to be meant by the `unknown` one, where serde lists the `known` ones.
fn meant(unknown: &str, known: &str) -> String {
    if let Some((_, instead)) = OTHER_SPELLINGS.iter().find(|(name, _)| *name == unknown) {
        return format!(" (instead: {instead})");
    }
    let plain = unknown.replace('_', "-");
    let names = known.split('`').skip(1).step_by(2);
    let near = names.map(|name| (strsim::osa_distance(&plain, name), name)).min();
    match near {
        Some((distance, name)) if distance <= 2 && distance < name.len().div_ceil(2) => {
            format!(" (there is {name})")
        }
        _ => String::new(),
    }
}

/// The key whose value stands at byte `at` of `text`, with those above it; empty if it is not known.
fn key_at(text: &str, at: usize) -> String {
    let (table, _) = DeTable::parse_recoverable(text);
    let mut names = Vec::new();
    find(table.get_ref(), at, &mut names);
    if names.is_empty() {
        let before = text[..at].rfind('\n').map_or(0, |end| end + 1);
        let line = text[before..].lines().next().unwrap_or_default();
        return line.split_once('=').map_or_else(String::new, |(key, _)| key.trim().to_owned());
    }
    names.join(".")
}

fn find(table: &DeTable<'_>, at: usize, names: &mut Vec<String>) {
    for (key, value) in table {
        let span = value.span();
        if at < key.span().start.min(span.start) || at >= span.end.max(key.span().end) {
            // A table of an array may be behind its header.
            if !matches!(value.get_ref(), DeValue::Array(_)) {
                continue;
            }
        }
        let deeper = match value.get_ref() {
            DeValue::Table(inner) => {
                names.push(key.get_ref().to_string());
                find(inner, at, names);
                return;
            }
            DeValue::Array(items) => items.iter().find(|item| {
                let span = item.span();
                (span.start..span.end).contains(&at)
                    || matches!(item.get_ref(), DeValue::Table(inner) if has(inner, at))
            }),
            _ => None,
        };
        if let Some(item) = deeper {
            names.push(key.get_ref().to_string());
            if let DeValue::Table(inner) = item.get_ref() {
                find(inner, at, names);
            }
            return;
        }
        if (key.span().start..span.end).contains(&at) {
            names.push(key.get_ref().to_string());
            return;
        }
    }
}

/// Whether a key of `table`, or its value, stands at byte `at`.
fn has(table: &DeTable<'_>, at: usize) -> bool {
    table.iter().any(|(key, value)| (key.span().start..value.span().end).contains(&at))
}

/// The text of `config`: all that has a value.
///
/// # Errors
/// A message: a path is not UTF-8.
pub fn text(config: &ServeConfig) -> Result<String, String> {
    toml::to_string(config).map_err(|error| error.to_string().trim().replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_is_told_with_its_line_and_its_key() {
        for (text, line, why) in [
            ("json = true\ncolour = 1", 2, "there is no key colour"),
            ("tls_certs = 'd'", 1, "there is no key tls_certs (there is tls-certs)"),
            ("\nport = 1", 2, "there is no key port (instead: nbd = "),
            (
                "[[export]]\nimage = 'a'\n\n[[export]]\nimgae = 'b'",
                5,
                "there is no key imgae (there is image)",
            ),
            ("threads = 257", 1, "threads: it goes from 1 to 256"),
            ("threads = 0", 1, "threads: it goes from 1 to 256"),
            ("\n\nthreads = '2'", 3, "threads: invalid type"),
            ("limit-iops = 0", 1, "limit-iops: the least is 1"),
            ("reconnect = 86401", 1, "reconnect: it goes from 0 to 86400"),
            ("max-connections = -1", 1, "max-connections: "),
            ("limit-bandwidth = '10X'", 1, "limit-bandwidth: unknown unit"),
            ("remote-memory = '7M'", 1, "remote-memory: at least 8 MiB"),
            ("slow-requests = '1h'", 1, "slow-requests: a whole number of ms"),
            ("nbd = [\n'unix:/a',\n'udp:h']", 1, "nbd: an address begins with"),
            ("nbd = 'unix:/a'", 1, "nbd: invalid type"),
            ("sandbox = 'maybe'", 1, "sandbox: unknown variant"),
            ("off = ['all']", 1, "off: unknown variant"),
            ("block-size = '1K'", 1, "block-size: a block has"),
            ("json = true\njson = true", 2, "json is given twice"),
            ("json = ", 1, "json: "),
            ("= 1", 1, ""),
            ("[[export]]\nimage = ''", 2, "export.image: an empty name"),
            (
                "[[export]]\nimage = 'a'\n[[export]]\nname = 7\nimage = 'b'",
                4,
                "export.name: invalid type",
            ),
        ] {
            let (at, message) = parse(text).unwrap_err();
            assert!(message.starts_with(why), "{text}: {message}");
            assert!(at == line && !message.contains('\n'), "{text}: line {at}: {message}");
        }
    }

    #[test]
    fn a_name_in_a_file_is_as_long_as_the_protocol_allows_and_no_longer() {
        let export =
            |bytes| parse(&format!("[[export]]\nname = '{}'\nimage = 'a'", "x".repeat(bytes)));
        assert!(export(4096).is_ok());
        assert!(export(4097).unwrap_err().1.contains("the protocol allows 4096"));
    }

    #[test]
    fn a_file_is_a_regular_one_of_bounded_size() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("nowait.toml");
        assert!(read(&path).unwrap_err().contains("no such file"));
        assert!(read(directory.path()).unwrap_err().contains("not a regular file"));
        assert!(read(Path::new("/dev/zero")).unwrap_err().contains("not a regular file"));
        std::fs::write(&path, " ".repeat(1 << 20)).unwrap();
        assert_eq!(read(&path), Ok(ServeConfig::default()));
        std::fs::write(&path, " ".repeat((1 << 20) + 1)).unwrap();
        assert!(read(&path).unwrap_err().ends_with("it has more than 1 MiB"));
        std::fs::write(&path, b"pid-file = '\xe9'").unwrap();
        assert!(read(&path).unwrap_err().ends_with("it is not UTF-8"));
        std::fs::write(&path, "\ncolor = 1").unwrap();
        assert!(read(&path).unwrap_err().contains("nowait.toml:2: there is no key color"));
    }

    #[test]
    fn what_no_text_can_say_is_not_printed() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        use std::path::PathBuf;
        let path = PathBuf::from(OsStr::from_bytes(b"/d/\xe9"));
        for config in [
            ServeConfig { pid_file: Some(path.clone()), ..ServeConfig::default() },
            ServeConfig { nbd: vec![nowait_nbd::Address::Unix(path)], ..ServeConfig::default() },
        ] {
            let why = text(&config).unwrap_err();
            assert!(why.contains("UTF-8") && !why.contains('\n'), "{why}");
        }
    }
}
