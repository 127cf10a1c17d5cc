//! The address of a chain: a directory, or a folder of an object store.
//!
//! Invariant: it is displayed as it was given.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};

use nowait_remote::ObjectUrl;

/// The address of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChainPlace {
    /// A directory.
    Directory(PathBuf),
    /// A folder of an object store: an object would have this URL.
    Store(ObjectUrl),
}

impl ChainPlace {
    /// Parses an argument: `s3://BUCKET/FOLDER`, `gs://BUCKET/FOLDER` or `az://CONTAINER/FOLDER`, else a directory.
    ///
    /// # Errors
    /// A message that says what is wrong with a URL, that the build has no object stores, or that it is empty.
    pub fn parse(text: &OsStr) -> Result<Self, String> {
        match text.to_str().filter(|text| ObjectUrl::is_like(text)) {
            Some(url) => url.strip_suffix('/').unwrap_or(url).parse().map(Self::Store),
            None if text.is_empty() => Err("an empty name is not a directory".into()),
            None => Ok(Self::Directory(text.into())),
        }
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for ChainPlace {
    fn from(path: &P) -> Self {
        Self::Directory(path.as_ref().to_owned())
    }
}

impl fmt::Display for ChainPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Store(url) => url.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_a_folder_of_a_store_and_everything_else_a_directory() {
        for path in ["points", "/srv/s3:", "s3:/a/b", "nbd://h/a", "points@1"] {
            assert_eq!(ChainPlace::parse(path.as_ref()), Ok(path.into()));
        }
        assert!(ChainPlace::parse("".as_ref()).is_err());
        for url in ["s3://bucket/a/b", "gs://bucket/a", "az://box/a"] {
            let place = ChainPlace::parse(url.as_ref());
            assert_eq!(place.is_ok(), cfg!(feature = "object-stores"), "{url}");
            match place {
                Ok(place) => {
                    assert_eq!(place.to_string(), url);
                    let same = ChainPlace::parse(format!("{url}/").as_ref());
                    assert_eq!(same.map(|it| it.to_string()), Ok(url.into()));
                }
                Err(why) => assert!(why.contains("feature \"object-stores\""), "{why}"),
            }
        }
        for url in ["s3://bucket", "s3://bucket/", "s3://bucket/a//", "s3:///a"] {
            assert!(ChainPlace::parse(url.as_ref()).is_err(), "{url}");
        }
    }
}
