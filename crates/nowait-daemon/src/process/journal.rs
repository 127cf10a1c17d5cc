//! The journal of systemd, by its native protocol: a datagram of fields for each message.
//!
//! Invariant: a value is one line without control characters, so that each field is written as
//! `NAME=VALUE`.

use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use tracing::Level;

use crate::error::plain;

/// Where the journal receives messages.
pub(crate) const SOCKET: &str = "/run/systemd/journal/socket";
/// The longest value of a field of the journal, in bytes; a datagram holds several.
/// Beyond it: the value is cut.
const MAX_VALUE_BYTES: usize = 8192;

/// A connection to the journal.
pub(crate) struct Journal(UnixDatagram);

impl Journal {
    /// Connects to the journal at `path`.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn connect(path: impl AsRef<Path>) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        Ok(Self(socket))
    }

    /// Sends a message with its fields.
    ///
    /// # Errors
    /// The journal has gone, or takes no messages.
    pub(crate) fn send(
        &self,
        level: Level,
        message: &str,
        fields: &[(&str, String)],
    ) -> io::Result<()> {
        self.0.send(encode(level, message, fields).as_bytes()).map(|_| ())
    }
}

/// The priority of `level` (syslog(3)).
pub(crate) fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// The datagram; the fields of an event get names of their own, but for `errno`, which the journal
/// knows (systemd.journal-fields(7)).
fn encode(level: Level, message: &str, fields: &[(&str, String)]) -> String {
    let mut datagram = format!("PRIORITY={}\nSYSLOG_IDENTIFIER=nowait\n", priority(level));
    let mut add = |name: &str, value: &str| {
        let value = plain(value);
        let mut ends = (0..=value.len().min(MAX_VALUE_BYTES)).rev();
        let end = ends.find(|end| value.is_char_boundary(*end)).unwrap_or_default();
        datagram.extend([name, "=", value.get(..end).unwrap_or_default(), "\n"]);
    };
    add("MESSAGE", message);
    for (name, value) in fields {
        match *name {
            "errno" => add("ERRNO", value),
            name => add(&format!("NOWAIT_{}", name.to_uppercase()), value),
        }
    }
    datagram
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_one_line_each_whatever_is_in_them() {
        let directory = tempfile::tempdir().unwrap();
        let receiver = UnixDatagram::bind(directory.path().join("socket")).unwrap();
        let journal = Journal::connect(directory.path().join("socket")).unwrap();
        let fields = [("export", "a\nPRIORITY=0\u{1b}".to_owned()), ("errno", "5".to_owned())];
        journal.send(Level::ERROR, "it has\nfailed", &fields).unwrap();
        let mut datagram = [0; 4096];
        let len = receiver.recv(&mut datagram).unwrap();
        let expected = "PRIORITY=3\nSYSLOG_IDENTIFIER=nowait\nMESSAGE=it has\\nfailed\n\
                        NOWAIT_EXPORT=a\\nPRIORITY=0\\u{1b}\nERRNO=5\n";
        assert_eq!(std::str::from_utf8(&datagram[..len]).unwrap(), expected);
        let long = encode(Level::INFO, &"\u{e9}".repeat(MAX_VALUE_BYTES), &[]);
        assert!(long.len() < MAX_VALUE_BYTES + 100);
    }
}
