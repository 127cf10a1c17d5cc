//! The address that an NBD server listens on, and the URIs of exports there.
//!
//! Invariant: a URI made of an address is read as the same address; it has no character that the
//! generic syntax reserves for something else.

use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The port that IANA has assigned to NBD.
pub const DEFAULT_PORT: u16 = 10809;
/// The longest path of a Unix socket in bytes: `sun_path` of unix(7) less its final NUL.
/// Beyond it: the path is refused.
pub const MAX_SOCKET_PATH_BYTES: usize = 107;

/// The address that an NBD server listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// The path of a Unix socket.
    Unix(PathBuf),
    /// A TCP address.
    Tcp {
        /// A name or an address, IPv6 without brackets.
        host: String,
        /// For a server that is to be started, 0 stands for any free port.
        port: u16,
    },
}

impl Address {
    /// The URI of `export` at this address (NBD uri.md); `tls` if clients must use TLS. A relative
    /// path is made absolute, so that the URI is valid in every directory.
    #[must_use]
    pub fn uri(&self, export: &str, tls: bool) -> String {
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

    fn unix(path: &str) -> Address {
        Address::Unix(path.into())
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.into(), port }
    }

    #[test]
    fn the_uri_of_a_unix_socket_encodes_path_and_export() {
        assert_eq!(unix("/run/a.sock").uri("", false), "nbd+unix:///?socket=/run/a.sock");
        assert_eq!(
            unix("/tmp/a b&c?#%.sock").uri("vm/disk 1", false),
            "nbd+unix:///vm%2Fdisk%201?socket=/tmp/a%20b%26c%3F%23%25.sock"
        );
        let latin1 = Address::Unix(OsStr::from_bytes(b"/\xe9").into());
        assert_eq!(latin1.uri("\u{e9}", false), "nbd+unix:///%C3%A9?socket=/%E9");
    }

    #[test]
    fn a_uri_says_whether_tls_is_required() {
        assert_eq!(unix("/a").uri("", true), "nbds+unix:///?socket=/a");
        assert_eq!(tcp("a", 1).uri("", true), "nbds://a:1/");
        assert_eq!(tcp("::1", 1).uri("", true), "nbds://[::1]:1/");
    }

    #[test]
    fn the_uri_of_a_relative_socket_is_absolute() {
        let uri = unix("a.sock").uri("", false);
        assert!(uri.starts_with("nbd+unix:///?socket=/") && uri.ends_with("/a.sock"), "{uri}");
    }

    #[test]
    fn the_uri_of_a_tcp_address_has_brackets_around_ipv6() {
        assert_eq!(tcp("disk.example", 10809).uri("a", false), "nbd://disk.example:10809/a");
        assert_eq!(tcp("::1", 10809).uri("", false), "nbd://[::1]:10809/");
        assert_eq!(tcp("fe80::1%eth0", 1).uri("", false), "nbd://[fe80::1%25eth0]:1/");
    }
}
