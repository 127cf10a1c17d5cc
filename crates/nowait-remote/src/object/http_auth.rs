//! The headers that a web server wants of a user, from a file: a token, a password, or any other.
//!
//! Invariant: a value of the file is in no log and no error, and is sent to no other origin than that of
//! the URL that the user has named.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::Uri;
use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderMap,
    HeaderName, HeaderValue, RANGE, TE, TRANSFER_ENCODING, UPGRADE,
};
use url::Url;

use crate::object::secret_text;

/// The longest file with passwords of web servers, in bytes.
/// Beyond it: the file is refused.
const MAX_BYTES: u64 = 64 << 10;
/// The headers that only the client itself sends, beside those of conditions.
const OWN: [HeaderName; 9] = [
    ACCEPT_ENCODING,
    CONNECTION,
    CONTENT_LENGTH,
    EXPECT,
    HOST,
    RANGE,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];
/// The error of a file that does not exist, as the system has it.
const ABSENT: &str = "No such file or directory";
/// The permission bits of others than the owner.
const OTHERS: u32 = 0o077;

/// The headers for one server.
pub(super) struct HttpAuth {
    path: PathBuf,
    /// Without a path.
    server: Url,
    headers: Mutex<Arc<HeaderMap>>,
    /// The log has a line of why the file cannot be read again.
    told: AtomicBool,
}

impl fmt::Debug for HttpAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpAuth({:?})", self.path)
    }
}

impl HttpAuth {
    /// The headers for `server` in the file at `path`.
    ///
    /// # Errors
    /// One line: the file cannot be read, is another user's, or is wrong in a line that is told.
    pub(super) fn open(path: &Path, server: &Url) -> Result<Self, String> {
        let (headers, is_open_to_others) = read(path, server)?;
        if is_open_to_others {
            tracing::warn!("{}: other users may read it (chmod 600 it)", path.display());
        }
        let auth = Self {
            path: path.to_owned(),
            server: server.clone(),
            headers: Mutex::new(Arc::new(headers)),
            told: AtomicBool::new(false),
        };
        let is_local = match server.host() {
            Some(url::Host::Domain(name)) => name == "localhost",
            Some(url::Host::Ipv4(address)) => address.is_loopback(),
            Some(url::Host::Ipv6(address)) => address.is_loopback(),
            None => false,
        };
        if server.scheme() == "http" && !is_local && !auth.headers().is_empty() {
            let (path, server) = (path.display(), server.host_str().unwrap_or_default());
            tracing::warn!("{path}: its headers are sent to {server} in the clear (http)");
        }
        Ok(auth)
    }

    /// Whether `uri` is of the server that the headers are for.
    pub(super) fn is_for(&self, uri: &Uri) -> bool {
        Url::parse(&uri.to_string()).is_ok_and(|url| url.origin() == self.server.origin())
    }

    /// The headers as they were read last.
    pub(super) fn headers(&self) -> Arc<HeaderMap> {
        self.headers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again. Returns its headers, if they are others than those that were `sent`.
    pub(super) async fn renewed(self: &Arc<Self>, sent: &HeaderMap) -> Option<Arc<HeaderMap>> {
        let auth = self.clone();
        let again = tokio::task::spawn_blocking(move || read(&auth.path, &auth.server));
        let new = match again.await.ok()? {
            Ok((new, _)) => Arc::new(new),
            Err(why) => {
                if !self.told.swap(true, Ordering::Relaxed) {
                    tracing::warn!("{why}; the token or password that was read before is kept");
                }
                return None;
            }
        };
        self.told.store(false, Ordering::Relaxed);
        *self.headers.lock().unwrap_or_else(PoisonError::into_inner) = new.clone();
        (*new != *sent).then_some(new)
    }
}

/// The headers for `server` in the file at `path`, and whether other users may read it.
fn read(path: &Path, server: &Url) -> Result<(HeaderMap, bool), String> {
    let wrong = |why: &str| format!("{}: {why}", path.display());
    let read = secret_text::read(path, MAX_BYTES, "a file of tokens")?;
    let (text, found) = read.ok_or_else(|| wrong(ABSENT))?;
    let headers = parse(&text, server).map_err(|why| wrong(&why))?;
    Ok((headers, found.mode() & OTHERS != 0))
}

/// The headers for `server` in the `text` of a file.
fn parse(text: &str, server: &Url) -> Result<HeaderMap, String> {
    let host = server.host_str().unwrap_or_default();
    let with_port = format!("{host}:{}", server.port_or_known_default().unwrap_or_default());
    let (mut headers, mut is_for_server, mut is_empty) = (HeaderMap::new(), true, true);
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (word, rest) = line.split_once([' ', '\t']).unwrap_or((line, ""));
        let rest = rest.trim();
        if word.eq_ignore_ascii_case("host") && !rest.is_empty() {
            is_for_server = [host, &with_port].iter().any(|name| name.eq_ignore_ascii_case(rest));
            continue;
        }
        let header = header(word, rest).map_err(|why| format!("line {number} {why}"))?;
        is_empty = false;
        if is_for_server {
            headers.append(header.0, header.1);
        }
    }
    match is_empty {
        true => Err("it has no token, password or header".into()),
        false => Ok(headers),
    }
}

/// The header of a line, which begins with `word`.
fn header(word: &str, rest: &str) -> Result<(HeaderName, HeaderValue), &'static str> {
    let is_token =
        |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._~+/=".contains(&b));
    let (name, value) = match word.to_ascii_lowercase().as_str() {
        "bearer" if !rest.is_empty() => (AUTHORIZATION, format!("Bearer {rest}")),
        "basic" if rest.contains(':') => {
            (AUTHORIZATION, format!("Basic {}", BASE64_STANDARD.encode(rest)))
        }
        _ if rest.is_empty() && is_token(word) => (AUTHORIZATION, format!("Bearer {word}")),
        name => {
            let name = name.strip_suffix(':').filter(|_| !rest.is_empty());
            let name = name.and_then(|name| HeaderName::from_bytes(name.as_bytes()).ok());
            let why = "is none of 'bearer TOKEN', 'basic USER:PASSWORD', 'NAME: VALUE', \
                       'host HOST' and a token alone";
            (name.ok_or(why)?, rest.to_owned())
        }
    };
    if OWN.contains(&name) || name.as_str().starts_with("if-") {
        return Err("has a header that only nowait itself sends");
    }
    let mut value =
        HeaderValue::from_str(&value).map_err(|_| "has a character that a header cannot have")?;
    value.set_sensitive(true);
    Ok((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<(String, String)>, String> {
        let headers = parse(text, &Url::parse("https://host:8443").unwrap())?;
        let text = |(name, value): (&HeaderName, &HeaderValue)| {
            assert!(value.is_sensitive());
            (name.to_string(), value.to_str().unwrap().to_owned())
        };
        Ok(headers.iter().map(text).collect())
    }

    #[test]
    fn a_line_is_a_token_a_password_or_a_header_and_may_be_for_one_host() {
        let is = |text: &str, name: &str, value: &str| {
            assert_eq!(parsed(text), Ok(vec![(name.into(), value.into())]), "{text}");
        };
        is("eyJ.a-b_c=\n", "authorization", "Bearer eyJ.a-b_c=");
        is("# of the build\n\nbearer  to:ken \n", "authorization", "Bearer to:ken");
        is("Basic Aladdin:open sesame", "authorization", "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        is("PRIVATE-TOKEN: a: b", "private-token", "a: b");
        is("host other\nbearer a\nhost HOST\nbearer b", "authorization", "Bearer b");
        is("host host:8443\nx: b\nhost host:443\nx: c", "x", "b");
        assert_eq!(parsed("host other\nbearer a"), Ok(vec![]));
    }

    #[test]
    fn a_wrong_line_is_told_by_its_number_and_never_quoted() {
        for text in [
            "user:secret",
            "basic secret",
            "x y secret",
            "secret:",
            "x:secret",
            "bearer \u{7f}secret",
        ] {
            let why = parsed(&format!("# comment\n{text}")).unwrap_err();
            assert!(why.contains("line 2") && !why.contains("secret"), "{why}");
        }
        for name in ["Host", "range", "If-Match", "If-None-Match", "Accept-Encoding", "te"] {
            assert!(parsed(&format!("{name}: x")).unwrap_err().contains("itself"), "{name}");
        }
        assert!(parsed("# nothing\n").is_err());
    }
}
