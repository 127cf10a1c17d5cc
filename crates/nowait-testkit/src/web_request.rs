//! A request of HTTP/1.1, as the web server of these tests reads it.
//!
//! Invariant: names of headers are in lower case; a body has at most `BODY_BYTES`.

use std::io::BufRead;

/// The longest body in bytes.
const BODY_BYTES: usize = 64 << 20;

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Like `GET`.
    pub method: String,
    /// With its query.
    pub path: String,
    /// Names and values.
    pub headers: Vec<(String, String)>,
    /// Its length is that of `content-length`.
    pub body: Vec<u8>,
}

impl Request {
    pub(crate) fn read(reader: &mut impl BufRead) -> Option<Self> {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|&len| len > 0)?;
        let mut words = line.split_whitespace().map(str::to_owned);
        let (method, path) = (words.next()?, words.next()?);
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut request = Self { method, path, headers, body: Vec::new() };
        let len = request.header("content-length").and_then(|it| it.parse().ok()).unwrap_or(0);
        request.body = vec![0; Some(len).filter(|len| *len <= BODY_BYTES)?];
        reader.read_exact(&mut request.body).ok()?;
        Some(request)
    }

    pub(crate) fn without_body(&self) -> Self {
        let (method, path, headers) =
            (self.method.clone(), self.path.clone(), self.headers.clone());
        Self { method, path, headers, body: Vec::new() }
    }

    /// The path without the query.
    pub(crate) fn plain_path(&self) -> &str {
        self.path.split('?').next().unwrap_or_default()
    }

    pub(crate) fn query(&self) -> &str {
        self.path.split_once('?').map_or("", |(_, query)| query)
    }

    /// The value of the first header with this name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The range of bytes that is asked for.
    pub(crate) fn range(&self) -> Option<(u64, u64)> {
        let (start, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse().ok()?, last.parse::<u64>().ok()? + 1))
    }
}
