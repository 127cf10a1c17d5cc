//! A server of one object: as web servers and S3 serve it, and with lies on demand.
//!
//! Invariant: it shares no code with the client; each connection has a thread, which ends with it. A
//! server with a key answers only requests whose AWS signature (version 4) it has computed itself.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
#[cfg(feature = "tls")]
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ring::{digest, hmac};

/// What the server does with a request instead of answering it.
#[derive(Clone, Debug)]
pub enum Lie {
    /// This status, with headers (each with its line's end), and this body.
    Status(u16, &'static str, &'static str),
    /// So many bytes of the answer, then the connection ends.
    Cut(usize),
    /// So many bytes of the answer, then nothing for a long time.
    Stall(usize),
    /// One byte of the answer after the other, with pauses.
    Drip,
    /// The whole object.
    Whole,
    /// Bytes of a range that begins so much later than the one that was asked for, and says so.
    Shift(u64),
    /// A header without an end.
    EndlessHeader,
    /// No answer at all: the connection ends.
    HangUp,
    /// The bytes of another object, with the tag of that one.
    Other(u8, &'static str),
}

/// The object and the behaviour of a server.
#[derive(Debug, Default)]
pub struct Script {
    /// The bytes of the object.
    pub object: Vec<u8>,
    /// The path that it has.
    pub path: String,
    /// Its entity tag; empty for none.
    pub tag: String,
    /// Its date; empty for none.
    pub date: String,
    /// What is done with the next requests, each once.
    pub lies: VecDeque<Lie>,
    /// What is done with all requests once `lies` is empty.
    pub always: Option<Lie>,
    /// The access key and the secret that requests have to be signed with.
    pub key: Option<(String, String)>,
    /// The ranges that were asked for, with `None` for a request without one.
    pub ranges: Vec<Option<(u64, u64)>>,
    /// Requests that were not signed as they had to be.
    pub unsigned: usize,
    /// The time before each answer.
    pub delay: Duration,
    /// What new connections are encrypted with.
    #[cfg(feature = "tls")]
    pub tls: Option<Arc<rustls::ServerConfig>>,
}

/// A running server. Its thread ends with the process.
pub struct WebServer {
    port: u16,
    script: Arc<Mutex<Script>>,
}

impl WebServer {
    /// Serves `object` at `path`, which begins with a slash, on a port of the loopback interface.
    ///
    /// # Panics
    /// There is no port.
    #[must_use]
    pub fn start(object: Vec<u8>, path: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let date = "Tue, 01 Jul 2025 10:00:00 GMT".into();
        let script =
            Script { object, path: path.into(), tag: "\"one\"".into(), date, ..Script::default() };
        let script = Arc::new(Mutex::new(script));
        let server = Self { port, script: script.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let script = script.clone();
                std::thread::spawn(move || {
                    #[cfg(feature = "tls")]
                    let Some(stream) = encrypted(stream, &script) else { return };
                    serve(stream, &script);
                });
            }
        });
        server
    }

    /// The URL without a path.
    #[must_use]
    pub fn root(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The URL of the object.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}{}", self.root(), self.script().path)
    }

    /// Looks at the script, or changes it.
    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of all ranges that were asked for.
    #[must_use]
    pub fn asked_bytes(&self) -> u64 {
        self.script().ranges.iter().flatten().map(|(start, end)| end - start).sum()
    }
}

struct Request {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    fn read(reader: &mut impl BufRead) -> Option<Self> {
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

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The range of bytes that is asked for.
    fn range(&self) -> Option<(u64, u64)> {
        let (start, last) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((start.parse().ok()?, last.parse::<u64>().ok()? + 1))
    }

    /// Whether the signature is that of `secret` (AWS Signature Version 4).
    fn is_signed(&self, key: &str, secret: &str) -> bool {
        self.signature(secret).is_some_and(|(credential, given, wanted)| {
            credential.starts_with(&format!("{key}/")) && given == wanted
        })
    }

    /// The credential, the signature that was given, and the one that `secret` makes.
    fn signature(&self, secret: &str) -> Option<(String, String, String)> {
        let text = self.header("authorization")?.strip_prefix("AWS4-HMAC-SHA256 ")?;
        let part = |name: &str| text.split(',').find_map(|it| it.trim().strip_prefix(name));
        let (credential, names) = (part("Credential=")?, part("SignedHeaders=")?);
        let given = part("Signature=")?;
        let (path, query) = self.path.split_once('?').unwrap_or((&self.path, ""));
        let mut canonical = format!("{}\n{path}\n{query}\n", self.method);
        for name in names.split(';') {
            let _ = writeln!(canonical, "{name}:{}", self.header(name)?);
        }
        let _ = write!(canonical, "\n{names}\n{}", self.header("x-amz-content-sha256")?);
        let scope = credential.split_once('/')?.1;
        let hashed = hex(digest::digest(&digest::SHA256, canonical.as_bytes()).as_ref());
        let date = self.header("x-amz-date")?;
        let to_sign = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashed}");
        let sign = |key: &[u8], text: &str| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, key);
            hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
        };
        let first = format!("AWS4{secret}").into_bytes();
        let key = scope.split('/').fold(first, |key, part| sign(&key, part));
        Some((credential.to_owned(), given.to_owned(), hex(&sign(&key, &to_sign))))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A connection, in TLS if the script says so.
#[cfg(feature = "tls")]
fn encrypted(stream: TcpStream, script: &Mutex<Script>) -> Option<Box<dyn ReadWrite>> {
    let config = script.lock().unwrap_or_else(PoisonError::into_inner).tls.clone();
    let Some(config) = config else { return Some(Box::new(stream)) };
    let session = rustls::ServerConnection::new(config).ok()?;
    Some(Box::new(rustls::StreamOwned::new(session, stream)))
}

/// What a connection is read from and written to.
trait ReadWrite: Read + Write {}
impl<S: Read + Write> ReadWrite for S {}

/// Answers the requests of one connection.
fn serve(stream: impl ReadWrite, script: &Mutex<Script>) {
    let mut reader = BufReader::new(stream);
    while let Some(request) = Request::read(&mut reader) {
        let (answer, lie, delay) = {
            let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
            script.ranges.push(request.range());
            let lie = script.lies.pop_front().or_else(|| script.always.clone());
            (answer(&request, &mut script, lie.as_ref()), lie, script.delay)
        };
        std::thread::sleep(delay);
        let stream = reader.get_mut();
        let sent = match lie {
            Some(Lie::HangUp) => return,
            Some(Lie::Cut(bytes)) => {
                let _ = stream.write_all(&answer[..bytes.min(answer.len())]);
                return;
            }
            Some(Lie::Stall(bytes)) => {
                let _ = stream.write_all(&answer[..bytes.min(answer.len())]);
                std::thread::sleep(Duration::from_secs(60));
                return;
            }
            Some(Lie::Drip) => answer.iter().try_for_each(|byte| {
                std::thread::sleep(Duration::from_millis(50));
                stream.write_all(&[*byte])
            }),
            Some(Lie::EndlessHeader) => loop {
                if stream.write_all(&[b'a'; 4096]).is_err() {
                    return;
                }
            },
            _ => stream.write_all(&answer),
        };
        if sent.is_err() {
            return;
        }
    }
}

/// The answer to `request`, in bytes.
fn answer(request: &Request, script: &mut Script, lie: Option<&Lie>) -> Vec<u8> {
    let status = |status: u16, more: &str, body: &str| {
        let len = body.len();
        format!("HTTP/1.1 {status} Status\r\ncontent-length: {len}\r\n{more}\r\n{body}")
            .into_bytes()
    };
    if let Some(Lie::Status(number, more, body)) = lie {
        return status(*number, more, body);
    }
    if let Some((key, secret)) = &script.key
        && !request.is_signed(key, secret)
    {
        script.unsigned += 1;
        return status(403, "", "<Error><Code>SignatureDoesNotMatch</Code></Error>");
    }
    if request.path != script.path {
        return status(404, "", "<Error><Code>NoSuchKey</Code></Error>");
    }
    let (mut tag, mut object) = (script.tag.as_str(), script.object.clone());
    if let Some(Lie::Other(byte, other)) = lie {
        object.fill(*byte);
        tag = other;
    } else if request.header("if-match").is_some_and(|wanted| wanted != tag)
        || request.header("if-unmodified-since").is_some_and(|wanted| wanted != script.date)
    {
        return status(412, "", "");
    }
    let mut more = String::new();
    for (name, value) in [("etag", tag), ("last-modified", &script.date)] {
        if !value.is_empty() {
            let _ = write!(more, "{name}: {value}\r\n");
        }
    }
    let size = object.len() as u64;
    let (number, body) = match request.range() {
        Some((start, _)) if start >= size => return status(416, "", ""),
        Some((start, end)) if !matches!(lie, Some(Lie::Whole)) => {
            let shift = if let Some(Lie::Shift(bytes)) = lie { *bytes } else { 0 };
            let (start, end) = ((start + shift).min(size - 1), (end + shift).min(size));
            let _ = write!(more, "content-range: bytes {start}-{}/{size}\r\n", end - 1);
            (206, object.get(start as usize..end as usize).unwrap_or_default())
        }
        _ => (200, object.as_slice()),
    };
    let len = body.len();
    let head = format!("HTTP/1.1 {number} OK\r\ncontent-length: {len}\r\n{more}\r\n");
    let mut answer = head.into_bytes();
    if request.method != "HEAD" {
        answer.extend_from_slice(body);
    }
    answer
}
