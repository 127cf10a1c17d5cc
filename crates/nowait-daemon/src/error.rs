//! The error of a command: a message of one line, made where the failure is detected.
//!
//! Invariant: the message names the object concerned first, then what is wrong, then, where the
//! user can do something about it, what to do; names are escaped by [`plain`], so that it stays one
//! line.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::{fmt, io};

use nowait_image::ImageError;
use nowait_nbd::Address;

pub use nowait_image::{create_message, open_message, os_message, plain};

/// The exit status of most failures. (A wrong command line, which is detected before any work, has
/// another one.)
const FAILURE: u8 = 1;

/// The exit status that a shell gives a program that SIGPIPE has killed, as it kills most programs whose reader has left.
const SIGPIPE_STATUS: u8 = 128 + 13;

/// A failure that ends the command.
#[derive(Debug)]
pub struct CliError {
    message: String,
    status: u8,
}

impl CliError {
    /// A failure with a message.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), status: FAILURE }
    }

    /// A failure that concerns `path`; `what` is wrong with it.
    pub fn at(path: &Path, what: impl fmt::Display) -> Self {
        Self::new(format!("{}: {what}", path.display()))
    }

    /// A failure that concerns an image.
    pub fn of_image(error: &ImageError) -> Self {
        Self::new(error.to_string())
    }

    /// A failure without a message: the reader of standard output has left, as in `nowait map disk.img | head`.
    pub fn broken_pipe() -> Self {
        Self { message: String::new(), status: SIGPIPE_STATUS }
    }

    /// Whether there is nothing to print about it.
    pub fn is_silent(&self) -> bool {
        self.message.is_empty()
    }

    /// This failure with another exit status.
    pub fn with_status(self, status: u8) -> Self {
        Self { status, ..self }
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        self.status
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&plain(&self.message))
    }
}

/// Whether the `query` of a URL is the version of an object and nothing else.
fn names_version(scheme: &str, query: &str) -> bool {
    let version = match scheme {
        "s3" => query.strip_prefix("?versionId="),
        "gs" => query.strip_prefix("?generation="),
        "az" => query.strip_prefix("?versionid="),
        _ => None,
    };
    version.is_some_and(|id| id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~:".contains(&b)))
}

/// `text` without what may be a secret in the URLs in it: users and passwords, and what follows `?` or
/// `#`, such as a signature. The options of NBD URIs, which are paths, stay.
pub fn without_secrets(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        let scheme = before.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '+');
        let scheme = before.get(scheme.map_or(0, |at| at + 1)..).unwrap_or_default();
        let ends = |c: char| c.is_whitespace() || "'\"<>".contains(c);
        let (url, later) = after.split_at(after.find(ends).unwrap_or(after.len()));
        shown.extend([before, "://"]);
        let (authority, path) = url.split_at(url.find(['/', '?', '#']).unwrap_or(url.len()));
        match authority.rsplit_once('@') {
            Some((_, host)) => shown.extend(["…@", host]),
            None => shown.push_str(authority),
        }
        match path.find(['?', '#']).filter(|_| !scheme.starts_with("nbd")) {
            Some(at) if names_version(scheme, path.get(at..).unwrap_or_default()) => {
                shown.push_str(path);
            }
            Some(at) => {
                shown.extend([path.get(..=at).unwrap_or_default(), "…"]);
                shown.extend(path.ends_with(':').then_some(':'));
            }
            None => shown.push_str(path),
        }
        rest = later;
    }
    shown + rest
}

/// Why nothing can listen at an address.
pub(crate) fn bind_failure(listen: &Address, error: &io::Error) -> CliError {
    let (at, hint) = match listen {
        Address::Unix(path) => (path.display().to_string(), "another path"),
        Address::Tcp { host, port } => (format!("{host}:{port}"), "another port"),
    };
    if let Address::Unix(path) = listen
        && let Ok(there) = std::fs::symlink_metadata(path)
        && !there.file_type().is_socket()
    {
        let what = if there.is_dir() { "a directory" } else { "a file, not a socket" };
        return CliError::new(format!("{at}: it is {what} (give {hint})"));
    }
    if error.kind() == io::ErrorKind::AddrInUse {
        return CliError::new(format!("{at}: the address is in use (give {hint})"));
    }
    CliError::new(format!("{at}: {}", create_message("listen", error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_message_has_a_password_or_a_signature_of_a_url() {
        for (text, shown) in [
            ("'https://u:p@h/a' is wrong", "'https://…@h/a' is wrong"),
            ("a=https://h/a?X-Amz-Signature=1&b#c: no", "a=https://h/a?…: no"),
            ("s3://b/k#part 's3://b/k?sig=1'", "s3://b/k#… 's3://b/k?…'"),
            ("s3://b/k?versionId=a-b: no", "s3://b/k?versionId=a-b: no"),
            ("s3://b/k?versionId=a&sig=1", "s3://b/k?…"),
            ("https://h/k?versionId=a", "https://h/k?…"),
            ("nbd://u:p@@h/e?tls-certificates=/d", "nbd://…@h/e?tls-certificates=/d"),
            ("nbd+unix:///?socket=/dir/s is a disk", "nbd+unix:///?socket=/dir/s is a disk"),
            ("a://b c://d?e", "a://b c://d?…"),
            ("no URL with '?' or '#' @", "no URL with '?' or '#' @"),
            ("://", "://"),
        ] {
            assert_eq!(without_secrets(text), shown);
        }
    }

    #[test]
    fn a_failure_is_one_line_without_control_characters_for_any_file_name() {
        let error = CliError::at(Path::new("a\nb\x1b[2J\u{202e}é.img"), "gone");
        assert_eq!(error.to_string(), r"a\nb\u{1b}[2J\u{202e}é.img: gone");
    }
}
