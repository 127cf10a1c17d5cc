//! A request of HTTP/1.1 without a body, as the web server of these tests reads it.
//!
//! Invariant: names of headers are in lower case.

use std::io::BufRead;

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// As `GET`.
    pub method: String,
    /// With its query.
    pub path: String,
    /// Names and values.
    pub headers: Vec<(String, String)>,
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
        Some(Self { method, path, headers })
    }

    /// The value of the first header with this name in lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The range of bytes that is asked for.
    pub(crate) fn range(&self) -> Option<(u64, u64)> {
        let (start, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse().ok()?, last.parse::<u64>().ok()? + 1))
    }
}
