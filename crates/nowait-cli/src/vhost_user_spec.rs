//! Parses the vhost-user sockets of the command line: `[EXPORT=]PATH`.
//!
//! Invariant: each socket belongs to one of the exports, and no two have the same path.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use nowait_nbd::Address;

use crate::export_spec::NamedExport;
use crate::listen_address;

/// `[EXPORT=]PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VhostUserArg {
    export: Option<String>,
    /// The path of the socket.
    pub(crate) path: PathBuf,
}

impl VhostUserArg {
    /// The part before the first `=` is the name of an export, unless the text begins with `/`,
    /// `./` or `../`: then all of it is a path.
    ///
    /// # Errors
    /// A message that says what is missing.
    pub(crate) fn parse(text: OsString) -> Result<Self, String> {
        const FORM: &str = "as in EXPORT=/run/disk.sock";
        let bytes = text.as_bytes();
        let is_path = [&b"/"[..], b"./", b"../"].iter().any(|start| bytes.starts_with(start));
        let at = bytes.iter().position(|&byte| byte == b'=').filter(|_| !is_path);
        let (export, path) = match at {
            Some(at) => {
                let name = std::str::from_utf8(&bytes[..at]);
                let name = name.map_err(|_| format!("its export is no text ({FORM})"))?;
                (Some(name.to_owned()), &bytes[at + 1..])
            }
            None => (None, bytes),
        };
        match listen_address::unix(OsStr::from_bytes(path).into())? {
            Address::Unix(path) => Ok(Self { export, path }),
            Address::Tcp { .. } => Err(format!("it is no path ({FORM})")),
        }
    }

    /// The index of its export in `exports`; the first without a name. There is at least one.
    ///
    /// # Errors
    /// A message for the user: there is none of that name.
    pub(crate) fn export_of(&self, exports: &[NamedExport]) -> Result<usize, String> {
        let Some(name) = &self.export else { return Ok(0) };
        exports.iter().position(|export| export.name == *name).ok_or_else(|| {
            let path = self.path.display();
            format!("--vhost-user {name}={path}: no image has the name '{name}' (give it NAME=)")
        })
    }
}

/// Checks that each of `sockets` has an export, and a path of its own.
///
/// # Errors
/// A message for the user.
pub(crate) fn check(sockets: &[VhostUserArg], exports: &[NamedExport]) -> Result<(), String> {
    for (n, socket) in sockets.iter().enumerate() {
        socket.export_of(exports)?;
        if sockets[..n].iter().any(|other| other.path == socket.path) {
            return Err(format!("--vhost-user {}: it is given twice", socket.path.display()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> NamedExport {
        NamedExport { name: name.into(), image: "disk.img".into() }
    }

    #[test]
    fn a_socket_belongs_to_the_export_that_is_named_or_to_the_first() {
        let exports = [named(""), named("data")];
        for (text, export, path) in [
            ("/run/a.sock", Ok(0), "/run/a.sock"),
            ("data=/run/a=b.sock", Ok(1), "/run/a=b.sock"),
            ("=a.sock", Ok(0), "a.sock"),
            ("./data=a.sock", Ok(0), "./data=a.sock"),
            ("other=a.sock", Err(()), "a.sock"),
        ] {
            let socket = VhostUserArg::parse(text.into()).unwrap();
            assert_eq!(socket.path, PathBuf::from(path), "{text}");
            assert_eq!(socket.export_of(&exports).map_err(drop), export, "{text}");
        }
    }

    #[test]
    fn a_path_that_is_missing_too_long_or_given_twice_is_refused() {
        let long = "x".repeat(200);
        for text in ["", "data=", &long] {
            assert!(VhostUserArg::parse(text.into()).is_err(), "{text}");
        }
        let socket = |text: &str| VhostUserArg::parse(text.into()).unwrap();
        let twice = [socket("/a"), socket("data=/a")];
        let refused = check(&twice, &[named(""), named("data")]);
        assert!(refused.unwrap_err().contains("given twice"));
    }
}
