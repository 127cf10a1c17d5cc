//! The location of a disk: a path, an NBD URI, the URL of an object or an image of a Ceph cluster.
//!
//! Invariant: a `Location` is displayed as it was given.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use nowait_nbd::{Address, NbdUri, TlsParams};

use crate::object::ObjectUrl;
use crate::rbd::RbdLocation;

/// The place of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A file or a block device.
    File(PathBuf),
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// An object of an object store, or a file of a web server.
    Object(ObjectUrl),
    /// An image of a Ceph cluster.
    Rbd(Box<RbdLocation>),
}

impl Location {
    /// The path, if it is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Nbd(_) | Self::Object(_) | Self::Rbd(_) => None,
        }
    }

    /// Its last part: the name of a file, an export, an object or an image, which clients may learn.
    #[must_use]
    pub fn short_name(&self) -> String {
        match self {
            Self::File(path) => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            Self::Nbd(uri) if uri.export.is_empty() => "nbd".into(),
            Self::Nbd(uri) => uri.export.clone(),
            Self::Object(url) => url.short_name(),
            Self::Rbd(location) => location.short_name(),
        }
    }

    /// The server that has it, as a user knows it; `None` for a file.
    #[must_use]
    pub fn server(&self) -> Option<String> {
        match self {
            Self::File(_) => None,
            Self::Nbd(NbdUri { address: Address::Tcp { host, port }, .. }) => {
                let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
                Some(format!("{host}:{port}"))
            }
            Self::Nbd(NbdUri { address: Address::Unix(path), .. }) => {
                Some(path.display().to_string())
            }
            Self::Object(url) => Some(url.server()),
            Self::Rbd(location) => Some(format!("the Ceph cluster of {location}")),
        }
    }

    /// Whether it is an NBD URI with TLS.
    #[must_use]
    pub fn asks_for_tls(&self) -> bool {
        matches!(self, Self::Nbd(NbdUri { security: TlsParams::Tls { .. }, .. }))
    }

    /// Parses a command-line argument: a URI if it begins with the scheme of one, else a path.
    ///
    /// # Errors
    /// A message that says what is wrong with a URI, or with an empty path.
    pub fn parse(text: &OsString) -> Result<Self, String> {
        if let Some(url) = text.to_str().filter(|text| ObjectUrl::is_like(text)) {
            return url.parse().map(Self::Object);
        }
        if let Some(name) = text.to_str().filter(|text| RbdLocation::is_like(text)) {
            return name.parse().map(|location| Self::Rbd(Box::new(location)));
        }
        let uri = text.to_str().filter(|text| text.starts_with("nbd"));
        match uri.and_then(|text| text.split_once("://")) {
            Some((scheme, _)) if scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'+') => {
                uri.unwrap_or_default().parse().map(Self::Nbd)
            }
            _ if text.is_empty() => Err("an empty name is not a file".into()),
            _ => Ok(Self::File(PathBuf::from(text))),
        }
    }

    /// Whether `text` begins as a location does that this build does not have.
    pub(crate) fn is_left_out(text: &str) -> bool {
        cfg!(not(feature = "object-stores")) && ObjectUrl::is_like(text)
            || cfg!(not(feature = "ceph")) && RbdLocation::is_like(text)
    }

    /// Like [`Location::parse`], for the name of a backing file as headers have it: QEMU's other forms of
    /// an NBD export (`nbd:HOST:PORT`, `json:{…}`) are its URI.
    ///
    /// # Errors
    /// Like [`Location::parse`].
    pub fn parse_backing(name: &OsString) -> Result<Self, String> {
        let url = nowait_image::url_of_backing(name).map(OsString::from);
        Self::parse(url.as_ref().unwrap_or(name))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Nbd(uri) => uri.fmt(f),
            Self::Object(url) => url.fmt(f),
            Self::Rbd(location) => location.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_that_this_build_leaves_out_is_refused_with_the_name_of_its_feature() {
        for (text, feature, is_there) in [
            ("s3://b/key", "object-stores", cfg!(feature = "object-stores")),
            ("https://h/a", "object-stores", cfg!(feature = "object-stores")),
            ("rbd:p/i", "ceph", cfg!(feature = "ceph")),
        ] {
            let refused = Location::parse(&text.into()).map(drop);
            assert_eq!(refused.is_ok(), is_there, "{text}");
            assert_eq!(Location::is_left_out(text), !is_there, "{text}");
            let why = refused.err().unwrap_or_default();
            assert!(is_there || why.contains(&format!("feature \"{feature}\"")), "{why}");
        }
        assert!(!Location::is_left_out("nbd://h/") && !Location::is_left_out("s3"));
    }

    #[cfg(all(feature = "object-stores", feature = "ceph"))]
    #[test]
    fn every_text_that_does_not_begin_like_a_uri_is_a_path() {
        for text in ["disk.img", "/a/nbd://", "ftp://h/", "s3", "nbd", "nbd.img", "nbd-disks://a"] {
            let location = Location::parse(&text.into()).unwrap();
            assert_eq!(location, Location::File(text.into()));
        }
        assert!(matches!(Location::parse(&"nbd://h/".into()), Ok(Location::Nbd(_))));
        assert!(matches!(Location::parse(&"s3://b/key".into()), Ok(Location::Object(_))));
        assert!(matches!(Location::parse(&"rbd:pool/a".into()), Ok(Location::Rbd(_))));
        for (text, name) in [
            ("/dir/disk.img", "disk.img"),
            ("nbd://h/export", "export"),
            ("nbd+unix:///?socket=/dir/s", "nbd"),
            ("s3://bucket/dir/key.img", "key.img"),
            ("rbd:pool/space/image@then:conf=/dir/ceph.conf", "image@then"),
        ] {
            assert_eq!(Location::parse(&text.into()).unwrap().short_name(), name);
        }
        assert!(Location::parse(&"".into()).is_err());
        for (name, url) in [
            ("nbd:h:1:exportname=e", "nbd://h:1/e"),
            (r#"json:{"driver":"nbd","path":"/s"}"#, "nbd+unix:///?socket=/s"),
            ("s3://b/key", "s3://b/key"),
        ] {
            assert_eq!(Location::parse_backing(&name.into()).unwrap().to_string(), url);
        }
        let base = Location::parse_backing(&"base.img".into()).unwrap();
        assert_eq!(base, Location::File("base.img".into()));
        for (text, server) in [
            ("disk.img", None),
            ("nbd://[::1]/export", Some("[::1]:10809")),
            ("nbd+unix:///?socket=/dir/s", Some("/dir/s")),
            ("https://host/disk.img", Some("host:443")),
            ("https://127.0.0.1:8443/disk.img", Some("127.0.0.1:8443")),
            ("s3://bucket/key", Some("S3 (s3://bucket/key)")),
        ] {
            assert_eq!(Location::parse(&text.into()).unwrap().server().as_deref(), server);
        }
    }
}
