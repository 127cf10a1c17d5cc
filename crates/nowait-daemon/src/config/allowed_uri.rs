//! The URIs that a control request may name: those of `--allow-uri`.
//!
//! Invariant: what a request adds to an allowed prefix is a plain name: never a host, an option, a
//! socket or a file of this host, and it leads to no other directory.

use std::ffi::OsString;

use nowait_remote::Location;

/// A URI, or one that ends with a slash and stands for all names behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedUri(String);

impl AllowedUri {
    /// Parses the argument of `--allow-uri`.
    ///
    /// # Errors
    /// A message that says what is wrong with it.
    pub fn parse(text: &OsString) -> Result<Self, String> {
        let uri = text.to_str().ok_or("it is not text")?;
        let names_no_server = uri.split_once("://").is_some_and(|(_, rest)| !rest.contains('/'));
        if uri.ends_with('/') && names_no_server {
            return Err("it names no server (as in nbd://HOST/ and s3://BUCKET/)".into());
        }
        let allowed = Self(uri.to_owned());
        match allowed.location()? {
            Location::File(_) => Err("it is not a URI (--allow-dir is for files)".into()),
            _ => Ok(allowed),
        }
    }

    /// Its text.
    pub fn text(&self) -> String {
        self.0.clone()
    }

    /// A location that it allows.
    ///
    /// # Errors
    /// Like [`Location::parse`].
    pub fn location(&self) -> Result<Location, String> {
        let Self(text) = self;
        let name = if text.ends_with('/') { "name" } else { "" };
        Location::parse(&format!("{text}{name}").into())
    }

    /// Whether it allows `uri`.
    pub fn allows(&self, uri: &str) -> bool {
        let Self(text) = self;
        let name = uri.strip_prefix(text).filter(|_| text.ends_with('/'));
        uri == text || name.is_some_and(is_plain)
    }
}

/// Whether `name` has no character with a meaning in a URI, and no part that is empty or has only dots.
fn is_plain(name: &str) -> bool {
    let is_special = |c: char| c.is_control() || "?#%:;&=\\".contains(c);
    let leads_elsewhere = |part: &str| part.trim_matches('.').is_empty();
    !name.contains(is_special) && !name.split('/').any(leads_elsewhere)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "object-stores")]
    #[test]
    fn a_prefix_allows_plain_names_behind_it_and_nothing_else() {
        for (prefix, allowed) in [
            ("nbd://storage.example/", "nbd://storage.example/vm1"),
            ("nbd://storage.example/", "nbd://storage.example/"),
            ("nbd://storage.example:10810/a/", "nbd://storage.example:10810/a/vm1"),
            ("s3://bucket/", "s3://bucket/some dir/base..1.qcow2"),
            ("https://images.example/debian/", "https://images.example/debian/13/disk.qcow2"),
            ("rbd:rbd/", "rbd:rbd/space/vm1@monday"),
        ] {
            assert!(AllowedUri::parse(&prefix.into()).unwrap().allows(allowed), "{allowed}");
        }
        let nbd = AllowedUri::parse(&"nbd://h/a/".into()).unwrap();
        for refused in [
            "nbd://h/a",
            "nbd://h/ab",
            "nbd://h/a/../b",
            "nbd://h/a/./b",
            "nbd://h/a//b",
            "nbd://h/a/b/",
            "nbd://h/a/%2e%2e/b",
            "nbd://h/a/b?socket=/run/s",
            "nbd://h/a/b?tls-certificates=/srv",
            "nbd://h/a/b#c",
            "nbds://h/a/b",
            "NBD://h/a/b",
            "nbd://h.example/a/b",
            "/h/a/b",
            "",
        ] {
            assert!(!nbd.allows(refused), "{refused}");
        }
        let rbd = AllowedUri::parse(&"rbd:pool/".into()).unwrap();
        assert!(!rbd.allows("rbd:pool/image:conf=/srv/ceph.conf"));
        assert!(!rbd.allows("rbd:pool2/image"));
    }

    #[test]
    fn a_uri_without_a_slash_at_its_end_allows_itself_only() {
        let text = "nbd+unix:///vm1?socket=/run/s.sock";
        let one = AllowedUri::parse(&text.into()).unwrap();
        assert!(one.allows(text));
        assert!(!one.allows("nbd+unix:///vm1?socket=/run/s.sock2"));
        assert!(!one.allows("nbd+unix:///vm2?socket=/run/s.sock"));
    }

    #[test]
    fn what_names_no_server_or_is_no_uri_cannot_be_allowed() {
        for wrong in
            ["nbd://", "s3://", "https://", "nbd+unix:///", "/srv/images/", "rbd:", "rbd:/", ""]
        {
            assert!(AllowedUri::parse(&wrong.into()).is_err(), "{wrong}");
        }
    }
}
