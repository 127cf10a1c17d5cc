//! The URI of an NBD export that a name describes otherwise.
//!
//! Invariant: a URI has only characters that need no encoding in it (NBD uri.md, RFC 3986).

use std::fmt::Write;

use crate::backing_name::Place;

/// The port of NBD (NBD proto.md, "TCP port").
const DEFAULT_PORT: u16 = 10809;

/// The server of an export.
pub(super) enum Server<'a> {
    Tcp {
        host: &'a str,
        port: &'a str,
    },
    /// The path of a socket.
    Unix(&'a str),
}

/// Parses QEMU's older form without its `nbd:`: `HOST:PORT[:exportname=NAME]` or
/// `unix:PATH[:exportname=NAME]`.
pub(super) fn parse(text: &str) -> Result<Place, String> {
    let (server, export) = text.split_once(":exportname=").unwrap_or((text, ""));
    let server = match server.strip_prefix("unix:") {
        Some(path) => Server::Unix(path),
        None => {
            let (host, port) = server.rsplit_once(':').ok_or("names no server")?;
            let host =
                host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            Server::Tcp { host, port }
        }
    };
    server.export(export)
}

impl Server<'_> {
    /// The export of this name at the server; an empty one is its default.
    ///
    /// # Errors
    /// The reason, in words to follow the name of the backing file.
    pub(super) fn export(&self, export: &str) -> Result<Place, String> {
        let export = encoded(export, "");
        match *self {
            Self::Tcp { host: "", .. } | Self::Unix("") => Err("names no server".into()),
            Self::Unix(path) => {
                Ok(Place::Url(vec![format!("nbd+unix:///{export}?socket={}", encoded(path, "/"))]))
            }
            Self::Tcp { host, port } => {
                let is_port = |port: &u16| *port > 0;
                let number = port.parse().ok().filter(is_port);
                let port = number.ok_or_else(|| format!("is wrong: '{port}' is not a port"))?;
                let host = match host.contains(':') {
                    true => format!("[{}]", encoded(host, ":")),
                    false => encoded(host, ""),
                };
                let short = (port == DEFAULT_PORT).then(|| host.clone());
                let servers = short.into_iter().chain([format!("{host}:{port}")]);
                // Without an export the slash may be left out.
                let ends = if export.is_empty() { &["/", ""][..] } else { &["/"] };
                let spellings = servers
                    .flat_map(|server| ends.iter().map(move |end| format!("nbd://{server}{end}")));
                Ok(Place::Url(spellings.map(|uri| uri + &export).collect()))
            }
        }
    }
}

/// `text`, percent-encoded but for unreserved characters (RFC 3986, section 2.3) and those in `also`.
fn encoded(text: &str, also: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "-._~".contains(c) || also.contains(c) {
            encoded.push(c);
        } else {
            // Writing to a String cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}
