//! The name of a backing file in a header: a file name, a URL, or one of QEMU's other forms for a file
//! or an NBD export (`json:{…}`, `nbd:HOST:PORT`).
//!
//! Invariant: every form leads to a file under the rules for file names, or to a storage that the user
//! has given. A part of a name that has no meaning here is refused: it might change which bytes a guest
//! sees.

mod nbd;
mod json;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::error::{ImageError, argument, plain};
use crate::file_name::plain_name;
use crate::formats::format::Format;
use crate::image_file::{ImageFile, Opening};
use crate::named_storages::NamedStorages;
use crate::path_policy::PathPolicy;
use crate::snapshot_name;

/// A parsed name.
#[derive(Debug, PartialEq, Eq)]
struct ParsedName {
    place: Place,
    /// The format, if the name tells it.
    format: Option<Format>,
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// A file name by the rules for headers.
    File(OsString),
    /// The spellings of a URL, the shortest one first.
    Url(Vec<String>),
}

impl ParsedName {
    /// Parses `name`.
    ///
    /// # Errors
    /// The reason, in words to follow the name.
    fn parse(name: &OsStr) -> Result<Self, String> {
        let json = name.to_str().and_then(|text| text.strip_prefix("json:"));
        json.map_or_else(|| Ok(Self { place: Place::parse(name)?, format: None }), json::parse)
    }
}

impl Place {
    /// Parses a name that does not begin with `json:`.
    fn parse(name: &OsStr) -> Result<Self, String> {
        if plain_name(name).is_some() {
            return Ok(Self::File(name.to_owned()));
        }
        let text = name.to_str().ok_or("is not a file name")?;
        match text.strip_prefix("nbd:").filter(|rest| !rest.starts_with("//")) {
            Some(rest) => nbd::parse(rest),
            None => Ok(Self::Url(vec![text.to_owned()])),
        }
    }
}

/// The URL that `name` in a header stands for, where that is not a file: as it is, or for QEMU's other
/// forms of an NBD export its URI. `None` for a file, and for a name that is not supported.
#[must_use]
pub fn url_of_backing(name: &OsStr) -> Option<String> {
    match ParsedName::parse(name).ok()?.place {
        Place::File(_) => None,
        Place::Url(urls) => urls.into_iter().next(),
    }
}

/// A backing file that was opened.
pub(crate) struct OpenedBacking {
    pub(crate) file: ImageFile,
    /// Whether it is a storage that the user has given.
    pub(crate) is_storage: bool,
    /// The internal snapshot of it that is meant.
    pub(crate) snapshot: Option<OsString>,
    /// The format, if the name tells it.
    format: Option<Format>,
}

impl OpenedBacking {
    /// Opens what the header of `image` calls `name`.
    ///
    /// # Errors
    /// A refusal by the path policy, of a storage that was not given, and of a name that is not
    /// supported; the errno of a failed system call.
    pub(crate) fn open(
        image: &Path,
        name: &OsStr,
        opening: Opening,
        policy: &PathPolicy,
        storages: &NamedStorages,
    ) -> Result<Self, ImageError> {
        let refused = |why: &str| {
            let shown = plain(&name.to_string_lossy());
            Err(ImageError::refused(image, format!("its backing file '{shown}' {why}")))
        };
        let ParsedName { place, format } = match ParsedName::parse(name) {
            Ok(parsed) => parsed,
            Err(why) => return refused(&why),
        };
        let urls = match place {
            Place::File(name) => {
                let directory = image.parent().unwrap_or(Path::new(""));
                let plain = plain_name(&name).map_or(&*name, Path::as_os_str);
                let (name, snapshot) = match snapshot_name::split(plain, directory) {
                    Some((file, snapshot)) => (file, Some(snapshot.to_owned())),
                    None => (&*name, None),
                };
                let file = policy.backing_file(image, name, opening)?;
                return Ok(Self { file, is_storage: false, snapshot, format });
            }
            Place::Url(urls) => urls,
        };
        if opening == Opening::ReadOnly
            && let Some((url, storage)) =
                urls.iter().find_map(|url| Some((url, storages.get(url)?)))
        {
            let file = ImageFile::on_storage(PathBuf::from(url), storage.clone());
            return Ok(Self { file, is_storage: true, snapshot: None, format });
        }
        let can_be_given = urls.iter().find(|url| storages.can_be_given(url));
        let advised = can_be_given.and_then(|url| argument(OsStr::new(url)));
        match (advised, opening) {
            (None, _) => refused("is neither a file nor a URL that can be opened"),
            (Some(url), Opening::ReadOnly) => refused(&format!(
                "is not a file name, and a URL is opened only by leave (allow it with --backing {url})"
            )),
            (Some(url), _) => refused(&format!(
                "is not a file name, and nothing else is written to (nowait copy --backing {url} \
                 makes one image of both)"
            )),
        }
    }

    /// The format of the backing file of `image`: that of its name and the one `told` otherwise, which
    /// must not be another.
    ///
    /// # Errors
    /// A refusal of two formats.
    pub(crate) fn format(
        &self,
        image: &Path,
        told: Option<Format>,
    ) -> Result<Option<Format>, ImageError> {
        match (self.format, told) {
            (Some(named), Some(told)) if named != told => {
                let (named, told) = (named.name(), told.name());
                let why = format!("its backing file is {named} by its name, and {told} otherwise");
                Err(ImageError::refused(image, why))
            }
            (named, told) => Ok(named.or(told)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, format: Option<Format>) -> ParsedName {
        ParsedName { place: Place::File(name.into()), format }
    }

    fn urls(urls: &[&str], format: Option<Format>) -> ParsedName {
        let urls = urls.iter().map(|&url| url.to_owned()).collect();
        ParsedName { place: Place::Url(urls), format }
    }

    fn parse(name: &str) -> Result<ParsedName, String> {
        ParsedName::parse(OsStr::new(name))
    }

    #[test]
    fn a_file_has_the_same_name_in_each_form() {
        let (raw, qcow2) = (Some(Format::Raw), Some(Format::Qcow2));
        for (name, expected) in [
            ("base.raw", file("base.raw", None)),
            ("file:../base", file("file:../base", None)),
            (r#"json:{"driver":"file","filename":"/a/b"}"#, file("/a/b", None)),
            (r#"json:{"driver":"host_device","filename":"/dev/b"}"#, file("/dev/b", None)),
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"b"}}"#,
                file("b", qcow2),
            ),
            (r#"json:{"file.filename":"b","file.driver":"file","driver":"raw"}"#, file("b", raw)),
            (
                r#"json:{"driver":"raw","file":{"driver":"file"},"file.filename":"b"}"#,
                file("b", raw),
            ),
            (r#"json:{"driver":"qcow2","file":{"filename":"b"}}"#, file("b", qcow2)),
            (r#"json:{"file":{"filename":"b","driver":"file"}}"#, file("b", None)),
            // In a file's own options a colon has no meaning.
            (r#"json:{"driver":"file","filename":"nbd:a:1"}"#, file("./nbd:a:1", None)),
            (r#"json:{"driver":"file","filename":"json:{}"}"#, file("./json:{}", None)),
            (r#"json:{"driver":"file","filename":"file:b"}"#, file("./file:b", None)),
            (r#"json:{"driver":"file","filename":"/a/nbd:b"}"#, file("/a/nbd:b", None)),
            (
                r#"json:{"driver":"qcow2","node-name":"n","read-only":true,"cache":{"direct":true},
                   "file":{"driver":"file","filename":"b","aio":"native","discard":"unmap"}}"#,
                file("b", qcow2),
            ),
        ] {
            assert_eq!(parse(name), Ok(expected), "{name}");
        }
    }

    #[test]
    fn an_export_is_its_uri_in_each_form() {
        let at_h = ["nbd://h/e", "nbd://h:10809/e"];
        let no_export = ["nbd://h/", "nbd://h", "nbd://h:10809/", "nbd://h:10809"];
        let at_s = ["nbd+unix:///e%20f?socket=/a/s%3F"];
        for (name, expected) in [
            ("nbd://h:1/x", urls(&["nbd://h:1/x"], None)),
            ("https://h/a?b", urls(&["https://h/a?b"], None)),
            ("nbd:h:10809:exportname=e", urls(&at_h, None)),
            ("nbd:h:10809", urls(&no_export, None)),
            ("nbd:[::1]:2:exportname=a/b", urls(&["nbd://[::1]:2/a%2Fb"], None)),
            ("nbd:unix:/a/s?:exportname=e f", urls(&at_s, None)),
            (r#"json:{"driver":"nbd","host":"h","export":"e"}"#, urls(&at_h, None)),
            (r#"json:{"driver":"nbd","host":"h","port":10809,"export":"e"}"#, urls(&at_h, None)),
            (
                r#"json:{"driver":"raw","file":{"driver":"nbd","export":"e","server":
                   {"type":"inet","host":"h","port":"10809"}}}"#,
                urls(&at_h, Some(Format::Raw)),
            ),
            (
                r#"json:{"driver":"qcow2","file.driver":"nbd","file.export":"e f",
                   "file.server.type":"unix","file.server.path":"/a/s?"}"#,
                urls(&at_s, Some(Format::Qcow2)),
            ),
            (r#"json:{"driver":"nbd","path":"/a/s?","export":"e f"}"#, urls(&at_s, None)),
            (
                r#"json:{"driver":"raw","file":{"filename":"s3://b/k"}}"#,
                urls(&["s3://b/k"], Some(Format::Raw)),
            ),
        ] {
            assert_eq!(parse(name), Ok(expected), "{name}");
        }
    }

    #[test]
    fn every_other_description_is_refused_in_words_that_follow_the_name() {
        let deep = format!("json:{}1{}", r#"{"a":"#.repeat(150), "}".repeat(150));
        let long = format!(r#"json:{{"driver":"file","filename":"{}"}}"#, "b".repeat(1100));
        for (name, why) in [
            ("json:", "is not a JSON object"),
            ("json:[]", "is not a JSON object"),
            (r#"json:{"driver":"file""#, "is not a JSON object"),
            (r"json:{'driver':'file'}", "is not a JSON object"),
            ("json:{}", "names no file"),
            (r#"json:{"driver":"file"}"#, "names no file"),
            (r#"json:{"driver":"file","filename":""}"#, "names no file"),
            (r#"json:{"driver":"file","filename":"a\u0000b"}"#, "names no file"),
            (r#"json:{"driver":"file","filename":["b"]}"#, "the option 'filename'"),
            (r#"json:{"driver":"file","filename":null}"#, "the option 'filename'"),
            (r#"json:{"driver":"ssh","host":"h","path":"/a"}"#, "the driver 'ssh'"),
            (r#"json:{"driver":"qcow2","file":{"driver":"https","url":"u"}}"#, "driver 'https'"),
            (r#"json:{"driver":"vdi","file":{"filename":"b"}}"#, "the driver 'vdi'"),
            (r#"json:{"driver":"raw","file":"node"}"#, "the option 'file'"),
            (r#"json:{"driver":"raw","offset":512,"file.filename":"b"}"#, "the option 'offset'"),
            (
                r#"json:{"driver":"qcow2","backing":{"driver":"file","filename":"c"},"file.filename":"b"}"#,
                "the option 'backing.driver'",
            ),
            (
                r#"json:{"driver":"raw","file":{"driver":"qcow2","file":{"filename":"b"}}}"#,
                "the driver 'qcow2'",
            ),
            (
                r#"json:{"file":{"filename":"json:{\"driver\":\"file\"}"}}"#,
                "a description in a description",
            ),
            (
                r#"json:{"file":{"filename":"b"},"file.filename":"c"}"#,
                "the option 'file.filename' twice",
            ),
            (r#"json:{"driver":"nbd","export":"e"}"#, "names no server"),
            (r#"json:{"driver":"nbd","host":"h","path":"/s"}"#, "names two servers"),
            (r#"json:{"driver":"nbd","host":"h","port":"x"}"#, "'x' is not a port"),
            (r#"json:{"driver":"nbd","host":"h","port":0}"#, "'0' is not a port"),
            (r#"json:{"driver":"nbd","host":"h","tls-creds":"t"}"#, "the option 'tls-creds'"),
            (
                r#"json:{"driver":"nbd","server":{"type":"vsock","cid":"1"}}"#,
                "the option 'server.cid'",
            ),
            (
                r#"json:{"driver":"nbd","server":{"type":"unix","host":"h"}}"#,
                "server of type 'unix'",
            ),
            ("nbd:", "names no server"),
            ("nbd:h", "names no server"),
            ("nbd:h:x", "'x' is not a port"),
            ("nbd:unix:", "names no server"),
            (&deep, "is not a JSON object"),
            (r#"json:{"a":{"b":{"c":{"d":{"e":1}}}}}"#, "the option 'a.b.c.d'"),
            (&long, "is too long"),
        ] {
            let refused = parse(name).unwrap_err();
            assert!(refused.contains(why), "{name}: {refused}");
            assert!(!refused.contains("--"), "{refused}");
        }
    }
}
