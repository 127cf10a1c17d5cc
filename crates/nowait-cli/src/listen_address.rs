//! The addresses to listen on: parses them from the command line and formats them as URIs for
//! clients.
//!
//! Invariant: the path of a `ListenAddress::Unix` is not empty and fits a socket address; the host of a
//! `ListenAddress::Tcp` is not empty and has no brackets.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The longest path of a Unix socket in bytes: `sun_path` of unix(7) less its final NUL.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// An address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListenAddress {
    /// The path of a Unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp {
        /// A name or an address, IPv6 without brackets.
        host: String,
        /// 0 stands for any free port.
        port: u16,
    },
}

impl ListenAddress {
    /// A Unix socket at `path`.
    ///
    /// # Errors
    /// A message: the path is empty, or longer than a socket address allows.
    pub(crate) fn unix(path: PathBuf) -> Result<Self, String> {
        let bytes = path.as_os_str().len();
        if bytes == 0 {
            return Err("the path of the socket is missing (as in unix:/run/disk.sock)".into());
        }
        if bytes > MAX_SOCKET_PATH_BYTES {
            return Err(format!(
                "the path of the socket has {bytes} bytes, the system allows \
                 {MAX_SOCKET_PATH_BYTES} (take a shorter one, as in unix:/run/disk.sock)"
            ));
        }
        Ok(Self::Unix(path))
    }

    fn tcp(address: &str) -> Result<Self, String> {
        const FORM: &str = "as in tcp:127.0.0.1:10809 or tcp:[::1]:10809";
        let (host, port) =
            address.rsplit_once(':').ok_or_else(|| format!("the port is missing ({FORM})"))?;
        let port = port.parse().map_err(|_| format!("'{port}' is not a port ({FORM})"))?;
        let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let host = bracketed.unwrap_or(host);
        if host.is_empty() {
            return Err(format!("the host is missing ({FORM}; 0.0.0.0 for all of IPv4)"));
        }
        if host.contains(['[', ']']) || (bracketed.is_none() && host.contains(':')) {
            return Err(format!("an IPv6 address goes into brackets ({FORM})"));
        }
        Ok(Self::Tcp { host: host.to_owned(), port })
    }

    /// The URI of `export` at this address (NBD uri.md); `tls` if clients must use TLS. A relative
    /// path is made absolute, so that the URI is valid in every directory.
    pub(crate) fn uri(&self, export: &str, tls: bool) -> String {
        let scheme = if tls { "nbds" } else { "nbd" };
        let export = percent_encoded(export.as_bytes(), "");
        match self {
            Self::Unix(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                let path = percent_encoded(path.as_os_str().as_bytes(), "/");
                format!("{scheme}+unix:///{export}?socket={path}")
            }
            Self::Tcp { host, port } if host.contains(':') => {
                format!("{scheme}://[{}]:{port}/{export}", percent_encoded(host.as_bytes(), ":"))
            }
            Self::Tcp { host, port } => {
                format!("{scheme}://{}:{port}/{export}", percent_encoded(host.as_bytes(), ""))
            }
        }
    }
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) => Self::unix(Path::new(path).to_owned()),
            Some(("tcp", address)) => Self::tcp(address),
            _ => Err("an address begins with unix: or tcp:".into()),
        }
    }
}

/// `bytes`, percent-encoded except for the unreserved characters of RFC 3986 (section 2.3) and
/// those in `also_plain`.
fn percent_encoded(bytes: &[u8], also_plain: &str) -> String {
    let mut encoded = String::with_capacity(bytes.len());
    for &byte in bytes {
        let plain = byte.is_ascii_alphanumeric()
            || b"-._~".contains(&byte)
            || also_plain.as_bytes().contains(&byte);
        if plain {
            encoded.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    fn listen(text: &str) -> ListenAddress {
        text.parse().unwrap()
    }

    fn refusal(text: &str) -> String {
        text.parse::<ListenAddress>().unwrap_err()
    }

    #[test]
    fn a_unix_address_is_a_path_also_with_colons() {
        assert_eq!(listen("unix:/run/a.sock"), ListenAddress::Unix("/run/a.sock".into()));
        assert_eq!(listen("unix:a:b"), ListenAddress::Unix("a:b".into()));
    }

    #[test]
    fn a_tcp_address_is_host_and_port() {
        let tcp = |host: &str, port| ListenAddress::Tcp { host: host.into(), port };
        assert_eq!(listen("tcp:127.0.0.1:10809"), tcp("127.0.0.1", 10809));
        assert_eq!(listen("tcp:[::1]:1"), tcp("::1", 1));
        assert_eq!(listen("tcp:[localhost]:0"), tcp("localhost", 0));
    }

    #[test]
    fn a_wrong_address_is_refused_with_its_reason() {
        for (text, reason) in [
            ("", "begins with unix: or tcp:"),
            ("/run/a.sock", "begins with unix: or tcp:"),
            ("udp:localhost:1", "begins with unix: or tcp:"),
            ("unix:", "path of the socket is missing"),
            ("tcp:localhost", "port is missing"),
            ("tcp:localhost:", "'' is not a port"),
            ("tcp:localhost:nbd", "'nbd' is not a port"),
            ("tcp:localhost:65536", "'65536' is not a port"),
            ("tcp::10809", "host is missing"),
            ("tcp:[]:10809", "host is missing"),
            ("tcp:::1:10809", "goes into brackets"),
            ("tcp:[::1:10809", "goes into brackets"),
        ] {
            assert!(refusal(text).contains(reason), "{text}: {}", refusal(text));
        }
    }

    #[test]
    fn a_socket_path_has_at_most_107_bytes() {
        let fits = format!("unix:/{}", "a".repeat(106));
        assert!(fits.parse::<ListenAddress>().is_ok());
        assert!(refusal(&(fits + "a")).contains("108 bytes, the system allows 107"));
    }

    #[test]
    fn the_uri_of_a_unix_socket_encodes_path_and_export() {
        assert_eq!(listen("unix:/run/a.sock").uri("", false), "nbd+unix:///?socket=/run/a.sock");
        assert_eq!(
            listen("unix:/tmp/a b&c?#%.sock").uri("vm/disk 1", false),
            "nbd+unix:///vm%2Fdisk%201?socket=/tmp/a%20b%26c%3F%23%25.sock"
        );
        let latin1 =
            ListenAddress::unix(Path::new(OsStr::from_bytes(b"/\xe9")).to_owned()).unwrap();
        assert_eq!(latin1.uri("\u{e9}", false), "nbd+unix:///%C3%A9?socket=/%E9");
    }

    #[test]
    fn a_uri_says_whether_tls_is_required() {
        assert_eq!(listen("unix:/a").uri("", true), "nbds+unix:///?socket=/a");
        assert_eq!(listen("tcp:a:1").uri("", true), "nbds://a:1/");
        assert_eq!(listen("tcp:[::1]:1").uri("", true), "nbds://[::1]:1/");
    }

    #[test]
    fn the_uri_of_a_relative_socket_is_absolute() {
        let uri = listen("unix:a.sock").uri("", false);
        assert!(uri.starts_with("nbd+unix:///?socket=/") && uri.ends_with("/a.sock"), "{uri}");
    }

    #[test]
    fn the_uri_of_a_tcp_address_has_brackets_around_ipv6() {
        assert_eq!(listen("tcp:disk.example:10809").uri("a", false), "nbd://disk.example:10809/a");
        assert_eq!(listen("tcp:[::1]:10809").uri("", false), "nbd://[::1]:10809/");
        assert_eq!(listen("tcp:[fe80::1%eth0]:1").uri("", false), "nbd://[fe80::1%25eth0]:1/");
    }
}
