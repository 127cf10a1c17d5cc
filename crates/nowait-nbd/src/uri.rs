//! The URI of an export: `nbd://HOST:PORT/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`; with TLS
//! `nbds://` or `nbds+unix://` (NBD uri.md).
//!
//! Invariant: the address and the export of a `NbdUri` are valid: no NUL in either, no part still
//! percent-encoded; it is displayed as it was given.

use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::address::{Address, DEFAULT_PORT, MAX_SOCKET_PATH_BYTES};
use crate::constants::MAX_STRING_BYTES;

/// An export of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Where the server listens.
    pub address: Address,
    /// Whether the connection uses TLS.
    pub security: TlsParams,
    /// The export's name; empty for the server's default.
    pub export: String,
    text: String,
}

/// Whether a connection uses TLS. The parameters are libnbd's (nbd_connect_uri(3)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsParams {
    /// It does not.
    Plain,
    /// It does.
    Tls {
        /// `tls-certificates`: a directory.
        certificates: Option<PathBuf>,
        /// `tls-hostname`: the name that the server's certificate must be for.
        name: Option<String>,
    },
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl FromStr for NbdUri {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or("a URI has :// in it")?;
        let rest = rest.split('#').next().unwrap_or_default();
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let export = String::from_utf8(decoded(path)?)
            .map_err(|_| "the name of the export is not UTF-8".to_owned())?;
        if export.len() > MAX_STRING_BYTES || export.contains('\0') {
            return Err(format!("the name of an export has at most {MAX_STRING_BYTES} bytes"));
        }
        let address = match scheme {
            "nbd" | "nbds" => tcp(authority)?,
            "nbd+unix" | "nbds+unix" => unix(authority, query)?,
            _ => return Err(format!("the scheme '{scheme}' is neither nbd(s) nor nbd(s)+unix")),
        };
        let security = match scheme {
            "nbds" | "nbds+unix" => tls(query)?,
            _ => TlsParams::Plain,
        };
        Ok(Self { address, security, export, text: text.to_owned() })
    }
}

/// The value of the parameter `name`, which ends with =.
fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').find_map(|parameter| parameter.strip_prefix(name))
}

fn tls(query: &str) -> Result<TlsParams, String> {
    if parameter(query, "tls-psk-file=").is_some() {
        return Err("keys agreed upon beforehand (PSK) are not known, only certificates".into());
    }
    let certificates = parameter(query, "tls-certificates=").map(decoded).transpose()?;
    let name = parameter(query, "tls-hostname=").map(decoded).transpose()?;
    let name = name.map(String::from_utf8).transpose().map_err(|_| "tls-hostname is not UTF-8")?;
    let certificates = certificates.map(|path| PathBuf::from(OsString::from_vec(path)));
    Ok(TlsParams::Tls { certificates, name })
}

fn unix(authority: &str, query: &str) -> Result<Address, String> {
    if !authority.is_empty() {
        return Err("nbd+unix has three slashes: nbd+unix:///EXPORT?socket=PATH".into());
    }
    let socket = parameter(query, "socket=");
    let socket = decoded(socket.ok_or("the socket is missing: nbd+unix:///EXPORT?socket=PATH")?)?;
    if socket.is_empty() || socket.len() > MAX_SOCKET_PATH_BYTES || socket.contains(&0) {
        return Err(format!("the path of a socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes"));
    }
    Ok(Address::Unix(OsString::from_vec(socket).into()))
}

fn tcp(authority: &str) -> Result<Address, String> {
    if authority.contains('@') {
        return Err("an NBD address has no user and no password".into());
    }
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or("a ] is missing after the address")?;
            (host, port.strip_prefix(':'))
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port {
        Some(text) => text.parse().map_err(|_| format!("'{text}' is not a port"))?,
        None => DEFAULT_PORT,
    };
    let host = String::from_utf8(decoded(host)?).map_err(|_| "the host is not UTF-8".to_owned())?;
    if host.is_empty() || port == 0 {
        return Err("the host is missing: nbd://HOST:PORT/EXPORT".into());
    }
    Ok(Address::Tcp { host, port })
}

/// `text` with each `%XX` replaced by its byte.
fn decoded(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        rest = behind;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digit = |at: usize| rest.get(at).and_then(|&byte| char::from(byte).to_digit(16));
        let (Some(high), Some(low)) = (digit(0), digit(1)) else {
            return Err("two hexadecimal digits follow a % (the % itself is %25)".into());
        };
        bytes.push((high * 16 + low) as u8);
        rest = rest.get(2..).unwrap_or_default();
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(text: &str) -> (Address, String) {
        let uri: NbdUri = text.parse().unwrap();
        (uri.address, uri.export)
    }

    fn tcp_at(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.into(), port }
    }

    #[test]
    fn an_address_and_an_export_are_found_in_each_form_of_a_uri() {
        for (text, address, export) in [
            ("nbd://h", tcp_at("h", 10809), ""),
            ("nbd://h:1/", tcp_at("h", 1), ""),
            ("nbd://[::1]:2/a/b", tcp_at("::1", 2), "a/b"),
            ("nbd://[fe80::1]", tcp_at("fe80::1", 10809), ""),
            ("nbd+unix:///?socket=/a", Address::Unix("/a".into()), ""),
            ("nbd+unix:///e?x=y&socket=/a/b#c", Address::Unix("/a/b".into()), "e"),
        ] {
            assert_eq!(uri(text), (address, export.to_owned()), "{text}");
        }
    }

    #[test]
    fn tls_is_in_the_scheme_and_its_files_and_name_in_the_parameters() {
        let security = |text: &str| text.parse::<NbdUri>().unwrap().security;
        let tls = |certificates: Option<&str>, name: Option<&str>| TlsParams::Tls {
            certificates: certificates.map(PathBuf::from),
            name: name.map(str::to_owned),
        };
        assert_eq!(security("nbd://h/?tls-certificates=/a"), TlsParams::Plain);
        assert_eq!(security("nbds://h/"), tls(None, None));
        assert_eq!(security("nbds://h/?tls-certificates=/a%20b"), tls(Some("/a b"), None));
        let both = "nbds+unix:///?socket=/s&tls-hostname=n&tls-certificates=/c";
        assert_eq!(security(both), tls(Some("/c"), Some("n")));
        assert_eq!(uri(both), (Address::Unix("/s".into()), String::new()));
    }

    #[test]
    fn percent_encoding_is_decoded_once() {
        let (address, export) = uri("nbd+unix:///a%20b%2525?socket=%2fr%C3%BCn%3F");
        assert_eq!((address, export.as_str()), (Address::Unix("/rün?".into()), "a b%25"));
    }

    #[test]
    fn an_invalid_uri_is_refused_with_the_form_to_use() {
        for (text, why) in [
            ("nbd+unix:///e", "socket is missing"),
            ("nbd+unix://h/e?socket=/a", "three slashes"),
            ("nbd+unix:///?socket=", "1 to 107 bytes"),
            ("nbd:///e", "host is missing"),
            ("nbd://h:x/", "'x' is not a port"),
            ("nbd://u@h/", "no user"),
            ("nbd://u:secret@h/", "an NBD address has no user and no password"),
            ("nbd://[u:secret@h/", "an NBD address has no user and no password"),
            ("nbd://[::1", "] is missing"),
            ("nbd://h/%4", "hexadecimal"),
            ("nbd://h/%zz", "hexadecimal"),
            ("nbd://h/%ff", "not UTF-8"),
            ("nbd://h/%00", "at most 4096"),
            ("nbds://h/?tls-psk-file=/k", "only certificates"),
            ("nbds://h/?tls-hostname=%ff", "not UTF-8"),
            ("nbd+vsock://1/", "neither nbd(s) nor"),
        ] {
            let refused = text.parse::<NbdUri>().unwrap_err();
            assert!(refused.contains(why), "{text}: {refused}");
        }
    }

    #[test]
    fn the_uri_of_an_address_is_read_as_that_address() {
        for address in [
            Address::Unix("/a b&c?#%/d.sock".into()),
            tcp_at("disk.example", 1),
            tcp_at("fe80::1%eth0", 10809),
        ] {
            for tls in [false, true] {
                let uri: NbdUri = address.uri("vm/disk 1", tls).parse().unwrap();
                assert_eq!((&uri.address, uri.export.as_str()), (&address, "vm/disk 1"));
                assert_eq!(uri.security != TlsParams::Plain, tls);
            }
        }
    }
}
