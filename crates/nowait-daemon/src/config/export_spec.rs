//! The exports of a server, as the command line (`[NAME=]IMAGE...`) or a file gives them, and their names.
//!
//! Invariant: no two exports have the same name, and no name is longer than the protocol allows.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nowait_remote::Location;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

/// The longest name in bytes that the NBD protocol allows (NBD proto.md, "Values", string limit).
/// Beyond it: the name is refused.
pub const MAX_NAME_BYTES: usize = 4096;

/// An export, one of several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct ExportSpec {
    /// The name that clients ask for; without it the empty one for the first export, else that of its file.
    #[serde(deserialize_with = "some_name", skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The path or URI of the image; without it the default image, which is the only export then.
    #[serde(deserialize_with = "some_image", skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Description for clients; without it the name of the file.
    #[serde(deserialize_with = "some_name", skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

fn some_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    parse_name(&String::deserialize(from)?).map(Some).map_err(D::Error::custom)
}

fn some_image<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PathBuf>, D::Error> {
    let image = String::deserialize(from)?;
    Location::parse(&OsString::from(&image)).map_err(D::Error::custom)?;
    Ok(Some(image.into()))
}

impl ExportSpec {
    /// The part before the first `=` is the name, unless the text begins with `/`, `./` or `../`,
    /// or like a URI: then all of it is the image.
    ///
    /// # Errors
    /// A message that says what is missing.
    pub fn parse(text: OsString) -> Result<Self, String> {
        const FORM: &str = "as in NAME=IMAGE; before a path with '=' in it write ./";
        let bytes = text.as_bytes();
        let is_path = [&b"/"[..], b"./", b"../"].iter().any(|start| bytes.starts_with(start));
        let is_image = is_path || is_remote(&text)?;
        let Some(at) = bytes.iter().position(|&byte| byte == b'=').filter(|_| !is_image) else {
            return Ok(Self { image: Some(text.into()), ..Self::default() });
        };
        let (name, image) = (&bytes[..at], &bytes[at + 1..]);
        if name.is_empty() {
            return Err(format!("the name is missing ({FORM})"));
        }
        if image.is_empty() {
            return Err(format!("the image is missing ({FORM})"));
        }
        let name =
            std::str::from_utf8(name).map_err(|_| format!("its name is not text ({FORM})"))?;
        let image = OsStr::from_bytes(image);
        is_remote(image)?;
        Ok(Self { name: Some(parse_name(name)?), image: Some(image.into()), description: None })
    }
}

impl ExportSpec {
    /// The place of the image; `None` for the default image.
    pub fn location(&self) -> Option<Location> {
        Location::parse(&self.image.clone()?.into()).ok()
    }
}

impl NamedExport {
    /// The absolute path of the image, or its URI.
    pub fn full_name(&self) -> PathBuf {
        match self.is_remote() {
            true => self.image.clone(),
            false => std::path::absolute(&self.image).unwrap_or_else(|_| self.image.clone()),
        }
    }

    /// Whether the image is a URI.
    pub fn is_remote(&self) -> bool {
        is_remote(self.image.as_os_str()) == Ok(true)
    }
}

/// Whether `image` is a URI.
fn is_remote(image: &OsStr) -> Result<bool, String> {
    // A missing part before or behind an equals sign is refused with the form.
    let location = Location::parse(&image.to_owned());
    Ok(!image.is_empty() && location?.path().is_none())
}

/// The name of an export.
///
/// # Errors
/// A message with the maximum length.
pub fn parse_name(text: &str) -> Result<String, String> {
    let bytes = text.len();
    if bytes > MAX_NAME_BYTES {
        return Err(format!("it has {bytes} bytes, the protocol allows {MAX_NAME_BYTES}"));
    }
    Ok(text.to_owned())
}

/// An image and the name that clients ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedExport {
    /// The name, at most 4096 bytes.
    pub name: String,
    /// The path or URI.
    pub image: PathBuf,
}

/// Assigns a name to each of `given`: to the first its own, else the empty name; to each other its own, else the name of
/// its file. The default image is left out.
///
/// # Errors
/// A message for the user: a name is given twice, or cannot be derived from the file; the default image is one of several.
pub fn named(given: &[ExportSpec]) -> Result<Vec<NamedExport>, String> {
    let (mut all, mut named) = (Vec::new(), HashMap::new());
    for ExportSpec { name, image, .. } in given {
        let Some(image) = image else {
            return match given {
                [_] => Ok(all),
                _ => Err("an export has no image: the default image is served alone".into()),
            };
        };
        let name = match name {
            Some(name) => name.clone(),
            None if all.is_empty() => String::new(),
            None => file_name(image)?,
        };
        if let Some(other) = named.insert(name.clone(), image) {
            let (one, two) = (other.display(), image.display());
            return Err(format!("{one} and {two} have one name, '{name}' (give them NAME=)"));
        }
        all.push(NamedExport { name, image: image.clone() });
    }
    Ok(all)
}

fn file_name(image: &Path) -> Result<String, String> {
    let is_path = Location::parse(&image.into()).is_ok_and(|location| location.path().is_some());
    let name = image.file_name().and_then(OsStr::to_str).filter(|_| is_path);
    let name = name.ok_or_else(|| format!("{} needs a name: NAME=IMAGE", image.display()))?;
    parse_name(name)
}

/// The indices of exports by their names.
pub struct ExportIndices<'a>(HashMap<&'a str, usize>);

impl<'a> ExportIndices<'a> {
    /// Indices in `exports`; of several with one name it is that of the first.
    pub fn of(exports: impl IntoIterator<Item = &'a NamedExport>) -> Self {
        let mut indices = HashMap::new();
        for (at, export) in exports.into_iter().enumerate() {
            indices.entry(&*export.name).or_insert(at);
        }
        Self(indices)
    }

    /// The index of the export called `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<usize> {
        self.0.get(name).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(text: &str) -> ExportSpec {
        ExportSpec::parse(text.into()).unwrap()
    }

    fn names(list: &[&str]) -> Result<Vec<String>, String> {
        let list: Vec<ExportSpec> = list.iter().map(|text| given(text)).collect();
        Ok(named(&list)?.into_iter().map(|named| named.name).collect())
    }

    fn unnamed(image: impl Into<PathBuf>) -> ExportSpec {
        ExportSpec { image: Some(image.into()), ..ExportSpec::default() }
    }

    fn with(name: &str, image: &str) -> ExportSpec {
        ExportSpec { name: Some(name.into()), ..unnamed(image) }
    }

    #[test]
    fn the_name_precedes_the_first_equals_sign() {
        assert_eq!(given("a=b.img"), with("a", "b.img"));
        assert_eq!(given("vm/a=/d/b=c.img"), with("vm/a", "/d/b=c.img"));
    }

    #[test]
    fn a_text_that_begins_like_a_path_has_no_name() {
        for path in ["b.img", "/d/a=b.img", "./a=b.img", "../a=b.img"] {
            assert_eq!(given(path), unnamed(path));
        }
        let latin1 = OsString::from(OsStr::from_bytes(b"/d/\xe9=.img"));
        assert_eq!(ExportSpec::parse(latin1.clone()).unwrap(), unnamed(latin1));
    }

    #[test]
    fn a_uri_is_an_image_and_may_have_a_name_before_it() {
        let uri = "nbd+unix:///disk?socket=/run/a=b.sock";
        assert_eq!(given(uri), unnamed(uri));
        assert_eq!(given(&format!("a={uri}")), with("a", uri));
        assert!(names(&["a.img", "nbd://h/disk"]).unwrap_err().contains("needs a name"));
        assert!(ExportSpec::parse("a=nbd+unix:///disk".into()).unwrap_err().contains("socket"));
    }

    #[test]
    fn a_name_or_an_image_that_is_missing_is_refused_with_the_form() {
        let latin1 = OsString::from(OsStr::from_bytes(b"\xe9=a.img"));
        for (text, why) in [
            ("=a.img".into(), "the name is missing"),
            ("a=".into(), "the image is missing"),
            (latin1, "not text"),
        ] {
            let error = ExportSpec::parse(text).unwrap_err();
            assert!(error.contains(why) && error.contains("NAME=IMAGE"), "{error}");
        }
    }

    #[test]
    fn a_name_is_as_long_as_the_protocol_allows_and_no_longer() {
        assert_eq!(parse_name(&"x".repeat(4096)).unwrap().len(), 4096);
        assert!(parse_name(&"x".repeat(4097)).unwrap_err().contains("4096"));
        let given = ExportSpec::parse(format!("{}=a.img", "x".repeat(4097)).into());
        assert!(given.unwrap_err().contains("4096"));
    }

    #[test]
    fn the_first_has_the_empty_name_and_the_others_the_names_of_their_files() {
        let all = names(&["a.img", "d/b.img", "c=e.img"]).unwrap();
        assert_eq!(all, ["", "b.img", "c"]);
        assert_eq!(names(&["a=a.img", "b=b.img"]).unwrap(), ["a", "b"]);
    }

    #[test]
    fn the_default_image_is_served_alone() {
        let default = ExportSpec { name: Some("x".into()), ..ExportSpec::default() };
        assert_eq!(named(std::slice::from_ref(&default)), Ok(Vec::new()));
        assert!(named(&[default, given("a")]).unwrap_err().contains("alone"));
    }

    #[test]
    fn a_name_leads_to_the_first_export_that_has_it() {
        let named = |name: &str| NamedExport { name: name.into(), image: "disk.img".into() };
        let exports = ["", "data", "other", "data"].map(named);
        let indices = ExportIndices::of(&exports);
        assert_eq!(
            ["", "data", "other", "none"].map(|name| indices.get(name)),
            [Some(0), Some(1), Some(2), None]
        );
    }

    #[test]
    fn two_exports_of_one_name_are_refused() {
        for list in [["a=b", "a=c"], ["b.img=a", "b.img"]] {
            assert!(names(&list).unwrap_err().contains("have one name"));
        }
        assert!(names(&["a", ".."]).unwrap_err().contains("needs a name"));
    }
}
