//! The addresses to listen on, parsed from the command line.
//!
//! Invariant: the path of an [`Address::Unix`] is not empty and fits a socket address; the host of an
//! [`Address::Tcp`] is not empty and has no brackets.

use std::path::{Path, PathBuf};

use nowait_nbd::{Address, MAX_SOCKET_PATH_BYTES};

/// The address `unix:PATH` or `tcp:HOST:PORT`.
///
/// # Errors
/// A message: neither of these forms, or a part of it that cannot be.
pub fn parse(text: &str) -> Result<Address, String> {
    match text.split_once(':') {
        Some(("unix", path)) => unix(Path::new(path).to_owned()),
        Some(("tcp", address)) if address.starts_with("//") => {
            Err("an address is not a URI: tcp:HOST:PORT, without //".into())
        }
        Some(("tcp", address)) => tcp(address),
        _ => Err("an address begins with unix: or tcp:".into()),
    }
}

/// A Unix socket at `path`.
///
/// # Errors
/// A message: the path is empty, or longer than a socket address allows.
pub fn unix(path: PathBuf) -> Result<Address, String> {
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
    Ok(Address::Unix(path))
}

/// The text that [`parse`] reads as `address`.
///
/// # Errors
/// The path is not UTF-8.
pub fn text(address: &Address) -> Result<String, String> {
    match address {
        Address::Unix(path) => match path.to_str() {
            Some(path) => Ok(format!("unix:{path}")),
            None => Err(format!("the path {} is not UTF-8", path.display())),
        },
        Address::Tcp { host, port } if host.contains(':') => Ok(format!("tcp:[{host}]:{port}")),
        Address::Tcp { host, port } => Ok(format!("tcp:{host}:{port}")),
    }
}

fn tcp(address: &str) -> Result<Address, String> {
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
    Ok(Address::Tcp { host: host.to_owned(), port })
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    fn listen(text: &str) -> Address {
        parse(text).unwrap()
    }

    fn refusal(text: &str) -> String {
        parse(text).unwrap_err()
    }

    #[test]
    fn a_unix_address_is_a_path_also_with_colons() {
        assert_eq!(listen("unix:/run/a.sock"), Address::Unix("/run/a.sock".into()));
        assert_eq!(listen("unix:a:b"), Address::Unix("a:b".into()));
    }

    #[test]
    fn a_tcp_address_is_host_and_port() {
        let tcp = |host: &str, port| Address::Tcp { host: host.into(), port };
        assert_eq!(listen("tcp:127.0.0.1:10809"), tcp("127.0.0.1", 10809));
        assert_eq!(listen("tcp:[::1]:1"), tcp("::1", 1));
        assert_eq!(listen("tcp:[localhost]:0"), tcp("localhost", 0));
    }

    #[test]
    fn the_text_of_an_address_is_read_as_the_same() {
        for text in
            ["unix:/run/a.sock", "unix:a:b", "tcp:127.0.0.1:10809", "tcp:[::1]:1", "tcp:h:0"]
        {
            assert_eq!(super::text(&listen(text)).unwrap(), text);
        }
        let latin1 = Address::Unix(std::ffi::OsStr::from_bytes(b"/d/\xe9").into());
        assert!(super::text(&latin1).unwrap_err().contains("not UTF-8"));
    }

    #[test]
    fn a_wrong_address_is_refused_with_its_reason() {
        for (text, reason) in [
            ("", "begins with unix: or tcp:"),
            ("/run/a.sock", "begins with unix: or tcp:"),
            ("udp:localhost:1", "begins with unix: or tcp:"),
            ("unix:", "path of the socket is missing"),
            ("tcp://localhost:1", "without //"),
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
        assert!(parse(&fits).is_ok());
        assert!(refusal(&(fits + "a")).contains("108 bytes, the system allows 107"));
    }
}
