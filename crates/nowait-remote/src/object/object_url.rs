//! The URL of an object: `https://HOST/PATH`, `s3://BUCKET/KEY`, `gs://BUCKET/KEY` or
//! `az://CONTAINER/KEY`.
//!
//! Invariant: a URL has no secret in it, so that it may be in logs; no part of its path is
//! `.` or `..`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use object_store::path::Path;
use url::Url;

use crate::object::aws_files;
use crate::object::proxy::Proxies;

const HTTPS_PORT: u16 = 443;
/// The longest name of a version of an object in bytes, as of S3.
/// Beyond it: the object is refused.
const MAX_VERSION: usize = 1024;
/// Also that of the service that gives a virtual machine in a cloud its credentials.
const HTTP_PORT: u16 = 80;
/// The variables that one of is set where there are credentials, or none are needed.
const S3_CREDENTIALS: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
];
const GCS_CREDENTIALS: [&str; 5] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SKIP_SIGNATURE",
];

/// How the variables end that name files with credentials.
const CREDENTIAL_FILES: [&str; 4] =
    ["_FILE", "_CREDENTIALS", "_SERVICE_ACCOUNT", "_SERVICE_ACCOUNT_PATH"];

/// The kind of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A web server: its URL without a path.
    Web(Url),
    /// The name of a bucket.
    S3(String),
    Gcs(String),
    /// The name of a container.
    Azure(String),
}

/// A URL of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectUrl {
    text: String,
    pub(super) place: Place,
    pub(super) path: Path,
    /// The version that is named, in the words of the store.
    pub(super) version: Option<String>,
}

impl ObjectUrl {
    /// Whether `text` begins with a scheme of such a URL.
    #[must_use]
    pub fn is_like(text: &str) -> bool {
        const SCHEMES: [&str; 5] = ["https://", "http://", "s3://", "gs://", "az://"];
        SCHEMES.iter().any(|scheme| text.starts_with(scheme))
    }

    pub(super) const fn is_web(&self) -> bool {
        matches!(self.place, Place::Web(_))
    }

    /// The object `name` in the folder that has the name of this one.
    #[must_use]
    pub fn within(&self, name: &str) -> Self {
        let text = format!("{self}/{name}");
        Self { text, place: self.place.clone(), path: self.path.clone().join(name), version: None }
    }

    /// The last part of its path.
    pub(crate) fn short_name(&self) -> String {
        self.path.filename().unwrap_or("object").to_owned()
    }

    /// The server as a user knows it.
    pub(crate) fn server(&self) -> String {
        match &self.place {
            Place::Web(url) => {
                let port = url.port_or_known_default().unwrap_or(HTTPS_PORT);
                format!("{}:{port}", url.host_str().unwrap_or_default())
            }
            _ => format!("{} ({self})", self.kind()),
        }
    }

    /// The store in words.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self.place {
            Place::Web(_) => "web server",
            Place::S3(_) => "S3",
            Place::Gcs(_) => "Google Cloud Storage",
            Place::Azure(_) => "Azure Blob Storage",
        }
    }

    /// The rest of an error message: variables that a user may have to set, if the environment has no credentials.
    pub(super) fn hint(&self) -> &'static str {
        let has = |names: &[&str]| names.iter().any(|name| std::env::var_os(name).is_some());
        match self.place {
            Place::S3(_) if !has(&S3_CREDENTIALS) && !aws_files::has_credentials() => {
                "; the environment has no AWS_ACCESS_KEY_ID, nor has ~/.aws/credentials (for a public bucket: \
                 AWS_SKIP_SIGNATURE=true)"
            }
            Place::Gcs(_) if !has(&GCS_CREDENTIALS) => {
                "; the environment has no GOOGLE_APPLICATION_CREDENTIALS (for a public bucket: \
                 GOOGLE_SKIP_SIGNATURE=true)"
            }
            Place::Azure(_) if !has(&["AZURE_STORAGE_ACCOUNT_NAME"]) => {
                "; the environment has no AZURE_STORAGE_ACCOUNT_NAME"
            }
            _ => "",
        }
    }

    /// The TCP ports that requests may go to, also those of proxies, and the files with credentials that
    /// are read again later, as the environment has them.
    #[must_use]
    pub fn needs(&self) -> (Vec<u16>, Vec<PathBuf>) {
        let (mut ports, files) = self.own_needs();
        ports.extend(Proxies::of_environment().map_or_else(|_| Vec::new(), |it| it.ports()));
        (ports, files)
    }

    fn own_needs(&self) -> (Vec<u16>, Vec<PathBuf>) {
        let mut ports = vec![HTTPS_PORT, HTTP_PORT];
        let prefix = match &self.place {
            Place::Web(server) => {
                ports.extend(server.port());
                // A server that cannot encrypt is led to by none that does.
                ports.retain(|&port| port != HTTP_PORT || server.scheme() == "http");
                return (ports, Vec::new());
            }
            Place::S3(_) => "AWS_",
            Place::Gcs(_) => "GOOGLE_",
            Place::Azure(_) => "AZURE_",
        };
        let mut files = Vec::new();
        if let Place::S3(_) = self.place {
            let (port, directories) = aws_files::needs();
            ports.extend(port);
            files.extend(directories);
        }
        for (name, value) in std::env::vars_os() {
            let Some(name) = name.to_str().filter(|name| name.starts_with(prefix)) else {
                continue;
            };
            if CREDENTIAL_FILES.iter().any(|end| name.ends_with(end)) {
                files.push(PathBuf::from(&value));
            }
            let url = value.to_str().filter(|value| value.starts_with("http"));
            ports.extend(url.and_then(|url| Url::parse(url).ok()?.port()));
        }
        (ports, files)
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for ObjectUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").ok_or("it is not a URL")?;
        let (rest, version) = match version_parameter(scheme) {
            Some(parameter) => with_version(rest, parameter)?,
            None => (rest, None),
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() || path.is_empty() || path.ends_with('/') {
            return Err(format!("the URL names no file (as in {scheme}://{})", form(scheme)));
        }
        let bucket = || match host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        {
            true => Ok(host.to_owned()),
            false => {
                Err("the name of the bucket has other characters than letters, digits and -._")
            }
        };
        let (place, path) = match scheme {
            "http" | "https" => web(text, path)?,
            "s3" => (Place::S3(bucket()?), of_key(path)?),
            "gs" => (Place::Gcs(bucket()?), of_key(path)?),
            "az" => (Place::Azure(bucket()?), of_key(path)?),
            _ => return Err("its scheme is none of https, http, s3, gs and az".into()),
        };
        Ok(Self { text: text.to_owned(), place, path, version })
    }
}

fn form(scheme: &str) -> &'static str {
    match scheme {
        "http" | "https" => "HOST/PATH",
        "az" => "CONTAINER/KEY",
        _ => "BUCKET/KEY",
    }
}

/// The parameter by which stores of URLs with this scheme name a version; `None` for web servers.
fn version_parameter(scheme: &str) -> Option<&'static str> {
    match scheme {
        "s3" => Some("versionId"),
        "gs" => Some("generation"),
        "az" => Some("versionid"),
        _ => None,
    }
}

/// `rest` of a URL without its query, and the version that is named there by `parameter`.
fn with_version<'a>(rest: &'a str, parameter: &str) -> Result<(&'a str, Option<String>), String> {
    let Some((path, query)) = rest.split_once('?') else { return Ok((rest, None)) };
    let version = query.split_once('=').filter(|(name, _)| *name == parameter);
    let version = version.map(|(_, version)| version);
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~:".contains(&b);
    match version.filter(|it| !it.is_empty() && it.bytes().all(is_plain)) {
        Some(version) if version.len() <= MAX_VERSION => Ok((path, Some(version.to_owned()))),
        // Another one may be a secret.
        _ => Err(format!(
            "after the '?' of such a URL only a version is understood, as in ?{parameter}=ID (a key \
             with a '?' cannot be named)"
        )),
    }
}

/// The server of a web URL, and the path in it.
fn web(text: &str, path: &str) -> Result<(Place, Path), String> {
    if path.contains(['?', '#']) {
        return Err("a URL with '?' or '#' is not opened: what follows may be a signature, and \
                    would be in logs (encode the characters of a name as %3F and %23)"
            .into());
    }
    let mut url = Url::parse(text).map_err(|error| format!("the URL is wrong: {error}"))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err("a URL with a user or a password is not opened: it would be in logs".into());
    }
    let decoded = percent_encoding::percent_decode_str(path).decode_utf8();
    let path = of_key(&decoded.map_err(|_| "the path of the URL is not UTF-8")?)?;
    url.set_path("");
    Ok((Place::Web(url), path))
}

fn of_key(key: &str) -> Result<Path, String> {
    if key.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
        return Err("a part of its path is empty, '.' or '..', which is not supported".into());
    }
    let wrong = |_| "a part of its path has a character that is not supported".to_owned();
    Path::parse(key).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Result<String, String> {
        text.parse::<ObjectUrl>().map(|url| url.path.to_string())
    }

    #[test]
    fn a_key_is_taken_as_it_is_and_a_web_path_is_decoded() {
        assert_eq!(path("s3://bucket/a b%20/c+d").unwrap(), "a b%20/c+d");
        assert_eq!(path("https://host:81/a%20b/c d.img").unwrap(), "a b/c d.img");
        assert_eq!(path("az://box/k").unwrap(), "k");
        assert_eq!(path("gs://box/k").unwrap(), "k");
    }

    #[test]
    fn what_is_no_name_of_an_object_is_refused() {
        for text in ["s3://", "s3://b", "s3://b/", "https://h/", "s3://b/dir/", "https:///a"] {
            assert!(path(text).is_err(), "{text}");
        }
        for text in ["s3://b/../a", "https://h/a/../b", "https://h/a/%2e%2E/b", "s3://b/a//b"] {
            assert!(path(text).unwrap_err().contains("'..'"), "{text}");
        }
        assert!(path("s3://b@c/key").unwrap_err().contains("bucket"));
        assert!(path("s3://b/a\nb").unwrap_err().contains("character"));
    }

    #[test]
    fn a_version_is_named_in_the_words_of_the_store_and_nothing_else_is() {
        for (text, version) in [
            ("s3://b/a/k?versionId=L4kqtJ.-_lcpXro", Some("L4kqtJ.-_lcpXro")),
            ("gs://b/a/k?generation=1360887697105000", Some("1360887697105000")),
            (
                "az://b/a/k?versionid=2026-11-26T01:02:03.0000000Z",
                Some("2026-11-26T01:02:03.0000000Z"),
            ),
            ("s3://b/a/k", None),
        ] {
            let url: ObjectUrl = text.parse().unwrap();
            assert_eq!((url.path.as_ref(), url.version.as_deref()), ("a/k", version));
            assert_eq!(url.to_string(), text);
        }
        for query in [
            "",
            "versionId=",
            "versionId",
            "versionId=a&b=secret",
            "X-Amz-Signature=secret",
            "generation=1",
        ] {
            let why = path(&format!("s3://b/k?{query}")).unwrap_err();
            assert!(why.contains("?versionId=ID") && !why.contains("secret"), "{why}");
        }
        assert!(path("gs://b/k?versionId=1").unwrap_err().contains("?generation=ID"));
    }

    #[test]
    fn no_url_with_a_secret_is_accepted() {
        for text in
            ["https://u:p@h/a", "https://u@h/a", "https://h/a?X-Amz-Signature=1", "https://h/a#b"]
        {
            assert!(path(text).unwrap_err().contains("in logs"), "{text}");
        }
    }
}
