//! The name of an image in a Ceph cluster: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:id=USER][:conf=FILE]`.
//!
//! Invariant: a location is displayed as it was given. No part of it has a byte that ends a string of C.

use std::fmt;
use std::str::FromStr;

/// The scheme of the locations.
const SCHEME: &str = "rbd:";

/// An image in a Ceph cluster, or a snapshot of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdLocation {
    text: String,
    pub(super) pool: String,
    /// Empty for the pool's own.
    pub(super) namespace: String,
    pub(super) image: String,
    pub(super) snapshot: Option<String>,
    /// The user of the cluster, without "client."; `None` for the one of the environment, or admin.
    pub(super) user: Option<String>,
    /// The cluster's ceph.conf; `None` for those of librados.
    pub(super) conf: Option<String>,
}

impl RbdLocation {
    /// Whether `text` is meant to be one.
    #[must_use]
    pub fn is_like(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// Whether it is a snapshot, which cannot be written to.
    #[must_use]
    pub fn is_snapshot(&self) -> bool {
        self.snapshot.is_some()
    }

    /// The image, and the snapshot.
    pub(crate) fn short_name(&self) -> String {
        let snapshot = self.snapshot.iter().flat_map(|snapshot| ["@", snapshot]);
        std::iter::once(&*self.image).chain(snapshot).collect()
    }

    /// The path of the cluster's ceph.conf, if it names one.
    #[must_use]
    pub fn conf(&self) -> Option<&str> {
        self.conf.as_deref()
    }
}

impl FromStr for RbdLocation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form =
            "it is not of the form rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:id=USER][:conf=FILE]";
        let rest = text.strip_prefix(SCHEME).ok_or(form)?;
        if rest.chars().any(char::is_control) {
            return Err("it has a control character".into());
        }
        let mut parts = rest.split(':');
        let name = parts.next().unwrap_or_default();
        let (mut user, mut conf) = (None, None);
        for option in parts {
            match option.split_once('=') {
                Some(("id", value)) if !value.is_empty() => user = Some(value.to_owned()),
                Some(("conf", value)) if !value.is_empty() => conf = Some(value.to_owned()),
                _ => {
                    return Err(format!("the option {option:?} is not known (id=USER, conf=FILE)"));
                }
            }
        }
        let (name, snapshot) = match name.split_once('@') {
            Some((name, snapshot)) => (name, Some(snapshot.to_owned())),
            None => (name, None),
        };
        let names: Vec<&str> = name.split('/').collect();
        let (pool, namespace, image) = match names[..] {
            [pool, image] => (pool, "", image),
            [pool, namespace, image] if !namespace.is_empty() => (pool, namespace, image),
            _ => return Err(form.into()),
        };
        if pool.is_empty() || image.is_empty() || snapshot.as_deref() == Some("") {
            return Err(form.into());
        }
        let [pool, namespace, image] = [pool, namespace, image].map(str::to_owned);
        Ok(Self { text: text.to_owned(), pool, namespace, image, snapshot, user, conf })
    }
}

impl fmt::Display for RbdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_names_an_image_a_snapshot_and_how_to_reach_the_cluster() {
        let text = "rbd:pool/space/image@then:id=vm:conf=/etc/other.conf";
        let location: RbdLocation = text.parse().unwrap();
        assert_eq!(location.to_string(), text);
        assert!(location.is_snapshot());
        let RbdLocation { pool, namespace, image, snapshot, user, conf, .. } = location;
        assert_eq!([pool, namespace, image], ["pool", "space", "image"]);
        assert_eq!([snapshot, user, conf].map(Option::unwrap), ["then", "vm", "/etc/other.conf"]);
        let short: RbdLocation = "rbd:rbd/a".parse().unwrap();
        assert_eq!((&*short.pool, &*short.namespace, &*short.image), ("rbd", "", "a"));
        assert!(!short.is_snapshot());
    }

    #[test]
    fn what_names_no_image_is_refused() {
        for text in [
            "rbd:",
            "rbd:a",
            "rbd:/a",
            "rbd:a/",
            "rbd:a//b",
            "rbd:a/b/c/d",
            "rbd:a/b@",
            "rbd:a/b:id=",
            "rbd:a/b:pass=x",
            "rbd:a/b\n",
        ] {
            assert!(text.parse::<RbdLocation>().is_err(), "{text}");
        }
    }
}
