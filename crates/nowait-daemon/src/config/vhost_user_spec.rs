//! Parses the vhost-user sockets of the command line: `[EXPORT=]PATH`, `[EXPORT=]fd:N` or
//! `[EXPORT=]connect:PATH`.
//!
//! Invariant: each socket belongs to one of the exports, and no two have the same path.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nowait_nbd::Address;

use crate::config::device_options::DeviceOptions;
use crate::config::export_spec::{ExportIndices, NamedExport};
use crate::config::listen_address;

/// Prefix of a path at which VMMs listen.
const CONNECT: &str = "connect:";

/// A socket of virtual machines, one of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserSpec {
    export: Option<String>,
    /// The place.
    pub socket: DevicePlace,
}

/// Where virtual machines connect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DevicePlace {
    /// At this path.
    Path(PathBuf),
    /// They listen at this path, and are connected to.
    ConnectsTo(PathBuf),
    /// One has connected already, by this descriptor that the process has inherited.
    Descriptor(i32),
}

impl fmt::Display for DevicePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::ConnectsTo(path) => write!(f, "{CONNECT}{}", path.display()),
            Self::Descriptor(number) => write!(f, "fd:{number}"),
        }
    }
}

impl VhostUserSpec {
    /// The part before the first `=` is the name of an export, unless the text begins with `/`,
    /// `./`, `../` or `connect:`: then all of it is a place.
    ///
    /// # Errors
    /// A message that says what is missing.
    pub fn parse(text: OsString) -> Result<Self, String> {
        const FORM: &str = "as in EXPORT=/run/disk.sock";
        let bytes = text.as_bytes();
        let is_path = [&b"/"[..], b"./", b"../", CONNECT.as_bytes()]
            .iter()
            .any(|start| bytes.starts_with(start));
        let at = bytes.iter().position(|&byte| byte == b'=').filter(|_| !is_path);
        let (export, path) = match at {
            Some(at) => {
                let name = std::str::from_utf8(&bytes[..at]);
                let name = name.map_err(|_| format!("its export is not text ({FORM})"))?;
                (Some(name.to_owned()), &bytes[at + 1..])
            }
            None => (None, bytes),
        };
        if let Some(number) = path.strip_prefix(b"fd:") {
            let number = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
            let number = number.filter(|number| *number > 2);
            let number =
                number.ok_or("fd: needs the number of a descriptor above 2, as in fd:3")?;
            return Ok(Self { export, socket: DevicePlace::Descriptor(number) });
        }
        let (place, path): (fn(PathBuf) -> DevicePlace, _) =
            match path.strip_prefix(CONNECT.as_bytes()) {
                Some(path) => (DevicePlace::ConnectsTo, path),
                None => (DevicePlace::Path, path),
            };
        match listen_address::unix(OsStr::from_bytes(path).into())? {
            Address::Unix(path) => Ok(Self { export, socket: place(path) }),
            Address::Tcp { .. } => Err(format!("it is not a path ({FORM})")),
        }
    }

    /// The text from which it is parsed.
    ///
    /// # Errors
    /// Its path is not UTF-8.
    pub fn text(&self) -> Result<String, String> {
        if let DevicePlace::Path(path) | DevicePlace::ConnectsTo(path) = &self.socket
            && path.to_str().is_none()
        {
            return Err(format!("the path {} is not UTF-8", path.display()));
        }
        let export = self.export.as_ref().map(|export| format!("{export}=")).unwrap_or_default();
        Ok(format!("{export}{}", self.socket))
    }

    /// The index of its export in `exports`; the first without a name. There is at least one.
    ///
    /// # Errors
    /// A message for the user: there is none of that name.
    pub fn export_of(&self, exports: &ExportIndices<'_>) -> Result<usize, String> {
        let Some(name) = &self.export else { return Ok(0) };
        exports.get(name).ok_or_else(|| {
            let socket = &self.socket;
            format!("--vhost-user {name}={socket}: no image has the name '{name}' (give it NAME=)")
        })
    }
}

impl DeviceOptions for Vec<VhostUserSpec> {
    /// Each has an export, and a place of its own.
    fn check(&self, exports: &[NamedExport]) -> Result<(), String> {
        let (exports, mut places) = (ExportIndices::of(exports), HashSet::new());
        for socket in self {
            socket.export_of(&exports)?;
            if !places.insert(&socket.socket) {
                return Err(format!("--vhost-user {}: it is given twice", socket.socket));
            }
        }
        Ok(())
    }

    fn needs_process(&self) -> Option<&'static str> {
        (!self.descriptors().is_empty()).then_some("--vhost-user fd:NUMBER")
    }

    fn sockets(&self) -> Vec<&Path> {
        let all = self.iter().filter_map(|it| match &it.socket {
            DevicePlace::Path(path) => Some(path.as_path()),
            DevicePlace::ConnectsTo(_) | DevicePlace::Descriptor(_) => None,
        });
        all.collect()
    }

    fn sockets_of_clients(&self) -> Vec<&Path> {
        let all = self.iter().filter_map(|it| match &it.socket {
            DevicePlace::ConnectsTo(path) => Some(path.as_path()),
            DevicePlace::Path(_) | DevicePlace::Descriptor(_) => None,
        });
        all.collect()
    }

    fn descriptors(&self) -> Vec<i32> {
        let all = self.iter().filter_map(|it| match it.socket {
            DevicePlace::Descriptor(number) => Some(number),
            DevicePlace::Path(_) | DevicePlace::ConnectsTo(_) => None,
        });
        all.collect()
    }
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
            let socket = VhostUserSpec::parse(text.into()).unwrap();
            assert_eq!(socket.socket, DevicePlace::Path(path.into()), "{text}");
            assert_eq!(
                socket.export_of(&ExportIndices::of(&exports)).map_err(drop),
                export,
                "{text}"
            );
        }
    }

    #[test]
    fn a_descriptor_is_a_number_above_those_of_the_standard_streams() {
        let socket = VhostUserSpec::parse("data=fd:3".into()).unwrap();
        assert_eq!(socket.socket, DevicePlace::Descriptor(3));
        assert_eq!(socket.export_of(&ExportIndices::of(&[named(""), named("data")])), Ok(1));
        let path = VhostUserSpec::parse("./fd:3".into()).unwrap();
        assert_eq!(path.socket, DevicePlace::Path("./fd:3".into()));
    }

    #[test]
    fn a_socket_of_a_vmm_is_connected_to() {
        for (text, export, path) in [
            ("connect:/run/vm=1", Ok(0), "/run/vm=1"),
            ("data=connect:vm=1", Ok(1), "vm=1"),
            ("other=connect:/run/vm", Err(()), "/run/vm"),
        ] {
            let socket = VhostUserSpec::parse(text.into()).unwrap();
            assert_eq!(socket.socket, DevicePlace::ConnectsTo(path.into()), "{text}");
            assert_eq!(socket.socket.to_string(), format!("connect:{path}"));
            assert_eq!(
                socket.export_of(&ExportIndices::of(&[named(""), named("data")])).map_err(drop),
                export,
                "{text}"
            );
        }
        let path = VhostUserSpec::parse("./connect:vm".into()).unwrap();
        assert_eq!(path.socket, DevicePlace::Path("./connect:vm".into()));
    }

    #[test]
    fn a_path_that_is_missing_too_long_or_given_twice_is_refused() {
        let long = "x".repeat(200);
        let far = format!("connect:{long}");
        for text in [
            "",
            "data=",
            &long,
            "connect:",
            "data=connect:",
            &far,
            "fd:",
            "fd:2",
            "fd:-1",
            "data=fd:x",
        ] {
            assert!(VhostUserSpec::parse(text.into()).is_err(), "{text}");
        }
        let socket = |text: &str| VhostUserSpec::parse(text.into()).unwrap();
        let twice = vec![socket("/a"), socket("data=/a")];
        let refused = twice.check(&[named(""), named("data")]);
        assert!(refused.unwrap_err().contains("given twice"));
    }
}
