//! Contents and answers of a web server of these tests: as web servers and S3 do, and with lies on demand.
//!
//! Invariant: it shares no code with the client. A server with a signer answers only requests that are signed as this one
//! says.

use std::collections::VecDeque;
use std::fmt::Write as _;
#[cfg(feature = "tls")]
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::bucket::{Bucket, Found};
use crate::multipart_upload::{Call, Outcome, Uploads};
use crate::signer::Signer;
use crate::web_request::Request;

/// Treatment of a request in place of an answer.
#[derive(Clone, Debug)]
pub enum Lie {
    /// This status, with headers (each with its line's end), and this body.
    Status(u16, &'static str, &'static str),
    /// So many bytes of the answer, then the connection closes.
    Cut(usize),
    /// So many bytes of the answer, then nothing for a long time.
    Stall(usize),
    /// One byte of the answer after the other, with pauses.
    Drip,
    /// The answer, with so many bytes of the body at a time, with pauses.
    Slow(usize),
    /// The answer in chunks of so many bytes, without a length.
    Chunked(usize),
    /// The answer of HTTP/1.0 without a length: it ends with its connection, after so many bytes.
    Closed(usize),
    /// The answer with this header, or with two, each with its line's end.
    Header(&'static str),
    /// The answer with a body that is so much longer than its range.
    Longer(usize),
    /// The whole object.
    Whole,
    /// Bytes of a range that begins so much later than the one that was asked for, and says so.
    Shift(u64),
    /// A header without an end.
    EndlessHeader,
    /// No answer at all: the connection closes.
    HangUp,
    /// The bytes of another object, with the tag of that one.
    Other(u8, &'static str),
    /// By HTTP/2: the answer is reset with this code, before it begins.
    Reset(u32),
    /// By HTTP/2: the connection is shut down, and no request on it answered.
    GoAway,
    /// By HTTP/2: nothing is sent on the connection any more, nor read.
    Silence,
}

/// How a server that speaks HTTP/2 only refuses a client that does not offer it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Http1Refusal {
    /// By an alert of TLS.
    #[default]
    Alert,
    /// It closes the connection in the handshake of TLS.
    Close,
    /// It speaks HTTP/2 all the same.
    Frames,
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
    /// Older versions of the object: what names one in a query, as `versionId=1`, and its bytes.
    pub versions: Vec<(String, Vec<u8>)>,
    /// Whether queries are ignored, as by a store without versions.
    pub ignores_queries: bool,
    /// Treatments of the next requests, each once.
    pub lies: VecDeque<Lie>,
    /// Treatment of all requests once `lies` is empty.
    pub always: Option<Lie>,
    /// The object does not exist until an upload is complete.
    pub is_absent: bool,
    /// All objects, in place of the one with `path`.
    pub bucket: Option<Bucket>,
    /// The uploads.
    pub uploads: Uploads,
    /// Wrong answers to the next requests of these kinds, each once, before `lies`.
    pub upload_lies: Vec<(Call, Lie)>,
    /// How requests have to be signed.
    pub signer: Option<Signer>,
    /// The values of the header Accept-Encoding of all requests.
    pub accepted: Vec<Option<String>>,
    /// All requests, without their bodies.
    pub requests: Vec<Request>,
    /// The ranges that were asked for, with `None` for a request without one.
    pub ranges: Vec<Option<(u64, u64)>>,
    /// Requests that were not signed as they had to be.
    pub unsigned: usize,
    /// The time before each answer.
    pub delay: Duration,
    /// Encryption of new connections.
    #[cfg(feature = "tls")]
    pub tls: Option<Arc<rustls::ServerConfig>>,
    /// By HTTP/2, which is spoken where `tls` offers nothing else: the requests that a connection may have at a time, and how
    /// many one had at most.
    pub max_streams: Option<u32>,
    /// How other versions are refused then.
    pub http1_refusal: Http1Refusal,
    /// Like `max_streams` says.
    pub most_streams: usize,
    /// Connections of HTTP/2.
    pub http2_connections: usize,
}

/// The answer to `request`, in the bytes of HTTP/1.1, what is done instead, and how long it takes.
pub(crate) fn answer_of(
    request: &Request,
    script: &Mutex<Script>,
) -> (Vec<u8>, Option<Lie>, Duration) {
    let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
    script.ranges.push(request.range());
    script.requests.push(request.without_body());
    script.accepted.push(request.header("accept-encoding").map(str::to_owned));
    let call = Call::of(request);
    let place = script.upload_lies.iter().position(|(on, _)| Some(*on) == call);
    let lie = place.map(|place| script.upload_lies.remove(place).1);
    let lie = lie.or_else(|| script.lies.pop_front()).or_else(|| script.always.clone());
    (answer(request, &mut script, lie.as_ref()), lie, script.delay)
}

/// The status, headers and body of the answer to a request of an upload.
fn upload(request: &Request, script: &mut Script) -> Option<(u16, String, String)> {
    let call = Call::of(request).filter(|call| call.is_of_upload())?;
    if script.bucket.is_none() && request.plain_path() != script.path {
        return None;
    }
    let is_absent = script.bucket.as_ref().map_or(script.is_absent, |it| !it.has(request));
    let is_conditional = request.header("if-none-match").is_some();
    if script.uploads.knows_no_conditions && is_conditional {
        return Some((501, String::new(), "<Error><Code>NotImplemented</Code></Error>".into()));
    }
    if call == Call::Complete && !is_absent && is_conditional {
        let body = "<Error><Code>PreconditionFailed</Code></Error>";
        return Some((412, String::new(), body.into()));
    }
    Some(match script.uploads.answer(call, request) {
        Outcome::Status(number, more, body) => (number, more, body),
        Outcome::Completed(object, parts) => {
            let tag = format!("\"{}-{parts}\"", script.uploads.begun);
            let result = "CompleteMultipartUploadResult";
            let body = format!("<{result}><ETag>{tag}</ETag></{result}>");
            let header = format!("etag: {tag}\r\n");
            if let Some(bucket) = &mut script.bucket {
                bucket.insert(request, tag, object);
                return Some((200, header, body));
            }
            (script.object, script.tag, script.is_absent) = (object, tag, false);
            (200, header, body)
        }
    })
}

/// An answer to `request` with this status, headers, and body.
fn plain(request: &Request, status: u16, more: &str, body: &str) -> Vec<u8> {
    let len = body.len();
    let body = if request.method == "HEAD" { "" } else { body };
    format!("HTTP/1.1 {status} Status\r\ncontent-length: {len}\r\n{more}\r\n{body}").into_bytes()
}

/// The answer to `request`, in bytes.
fn answer(request: &Request, script: &mut Script, lie: Option<&Lie>) -> Vec<u8> {
    let status = |number, more: &str, body: &str| plain(request, number, more, body);
    if let Some(Lie::Status(number, more, body)) = lie {
        return status(*number, more, body);
    }
    if let Some((number, more, body)) = script.signer.as_ref().and_then(|it| it.refusal(request)) {
        script.unsigned += 1;
        return status(number, more, &body);
    }
    if let Some((number, more, body)) = upload(request, script) {
        return status(number, &more, &body);
    }
    if let Some(bucket) = &mut script.bucket {
        return match bucket.answer(request, script.uploads.knows_no_conditions) {
            Found::Status(number, more, body) => status(number, &more, &body),
            Found::Object(object) => {
                let date = object.date();
                let said = (object.tag.as_str(), date.as_str(), object.bytes.as_slice());
                object_answer(request, said, String::new(), lie)
            }
        };
    }
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    let query = if script.ignores_queries { "" } else { query };
    let version = script.versions.iter().find(|(name, _)| name == query);
    if path != script.path || script.is_absent || !query.is_empty() && version.is_none() {
        return status(404, "", "<Error><Code>NoSuchKey</Code></Error>");
    }
    let (mut tag, mut object) = (script.tag.as_str(), script.object.as_slice());
    let mut more = String::new();
    if let Some((name, bytes)) = version {
        (tag, object) = ("\"old\"", bytes);
        let id = name.split_once('=').map_or("", |(_, id)| id);
        for header in ["x-amz-version-id", "x-goog-generation", "x-ms-version-id"] {
            let _ = write!(more, "{header}: {id}\r\n");
        }
    }
    object_answer(request, (tag, &script.date, object), more, lie)
}

/// The answer to a request for an object with this tag, date and content.
fn object_answer(
    request: &Request,
    (mut tag, date, object): (&str, &str, &[u8]),
    mut more: String,
    lie: Option<&Lie>,
) -> Vec<u8> {
    let status = |number, more: &str, body: &str| plain(request, number, more, body);
    if let Some(Lie::Other(_, other)) = lie {
        tag = other;
    } else if request.header("if-match").is_some_and(|wanted| wanted != tag)
        || request.header("if-unmodified-since").is_some_and(|wanted| wanted != date)
    {
        return status(412, "", "");
    }
    for (name, value) in [("etag", tag), ("last-modified", date)] {
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
        _ => (200, object),
    };
    match lie {
        Some(Lie::Other(byte, _)) => framed(request, number, more, &vec![*byte; body.len()], lie),
        _ => framed(request, number, more, body, lie),
    }
}

/// The answer with this status, the headers `more` and `body`.
fn framed(
    request: &Request,
    number: u16,
    mut more: String,
    body: &[u8],
    lie: Option<&Lie>,
) -> Vec<u8> {
    let longer = if let Some(Lie::Longer(bytes)) = lie { *bytes } else { 0 };
    let body = [body, &vec![b'x'; longer]].concat();
    let length = format!("content-length: {}\r\n", body.len());
    let (version, framing) = match lie {
        Some(Lie::Chunked(_)) => (1, "transfer-encoding: chunked\r\n"),
        Some(Lie::Closed(_)) => (0, ""),
        Some(Lie::Header(header)) => {
            more.push_str(header);
            (1, length.as_str())
        }
        _ => (1, length.as_str()),
    };
    let mut answer = format!("HTTP/1.{version} {number} OK\r\n{framing}{more}\r\n").into_bytes();
    match lie {
        _ if request.method == "HEAD" => {}
        Some(Lie::Chunked(bytes)) => {
            for chunk in body.chunks((*bytes).max(1)) {
                answer.extend(format!("{:x}\r\n", chunk.len()).bytes());
                answer.extend(chunk);
                answer.extend(b"\r\n");
            }
            answer.extend(b"0\r\n\r\n");
        }
        _ => answer.extend(body),
    }
    answer
}
