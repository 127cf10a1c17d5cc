//! Bytes of a client of the control interface: the first byte selects whether it needs a token.
//!
//! Checked: each answer is HTTP, a refusal says why in one line of JSON; what is answered and what
//! the server is asked to do does not depend on how the bytes are split, until the connection closes.

use std::sync::Arc;

use nowait_control::{Token, fuzz};
use nowait_testkit::recording_server::RecordingServer;

use crate::split::cut;
use crate::target::{Check, Target};

const TOKEN: &str = "0123456789abcdef";

pub(crate) const TARGET: Target = Target {
    name: "control",
    about: "HTTP requests to the control interface, and their JSON",
    prepare: || Ok(Box::new(check) as Check),
    seeds,
    words: &[
        b"GET ",
        b"POST ",
        b"PATCH ",
        b"DELETE ",
        b"HEAD ",
        b" HTTP/1.1\r\nhost: a\r\n",
        b" HTTP/1.0\r\n",
        b"content-length: ",
        b"transfer-encoding: chunked\r\n",
        b"expect: 100-continue\r\n",
        b"connection: close\r\n",
        b"origin: http://a",
        b"authorization: Bearer 0123456789abcdef\r\n",
        b"\r\n\r\n",
        b"/v1/exports/@3",
        b"/snapshot",
        b"/bitmaps/a",
        b"/backup",
        b"/move",
        b"/replicate",
        b"?mode=hard",
        b"%2F",
        b"%00",
        b"{\"size_bytes\": 18446744073709551615}",
        b"\"refill_time\": 0",
        b"\\n",
        b"\\u0000",
        b"{",
        b"[",
    ],
    longest: 4096,
    memory: 16 << 20,
};

/// The statuses that were answered with the lengths of their bodies, and what was asked for.
type Outcome = (Vec<(u16, usize)>, Vec<String>);

fn check(input: &[u8]) -> Result<(), String> {
    let Some((&first, bytes)) = input.split_first() else { return Ok(()) };
    let token = Token::parse(TOKEN).ok().filter(|_| first % 2 == 1);
    let is_open = token.is_none() || has(bytes, TOKEN.as_bytes());
    let whole = outcome(token.clone(), [bytes])?;
    if !is_open && !whole.1.is_empty() {
        return Err(format!("without the token it does {:?}", whole.1));
    }
    let pieces = outcome(token, cut(bytes, 16))?;
    // A request that is refused before its body is there closes the connection: what follows in the
    // same piece is answered, and what follows later is not.
    if !(agree(&pieces.0, &whole.0) && agree(&pieces.1, &whole.1)) {
        return Err(format!("cut it ends as {pieces:?}, whole as {whole:?}"));
    }
    Ok(())
}

/// Whether one list is the beginning of the other.
fn agree<T: PartialEq>(one: &[T], other: &[T]) -> bool {
    one.iter().zip(other).all(|(one, other)| one == other)
}

fn outcome<'a>(
    token: Option<Token>,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Result<Outcome, String> {
    let server = Arc::new(RecordingServer::default());
    let answers = fuzz::converse(server.clone(), token, pieces);
    let asked = server.take_notes();
    let mut answers = answers_in(&answers)?;
    // Bytes that are not HTTP close the connection, where the library can with an empty answer.
    if answers.last().is_some_and(|&(status, length)| status >= 400 && length == 0) {
        answers.pop();
    }
    Ok((answers, asked))
}

/// The answers, each with a head that ends, and a body as long as that says.
fn answers_in(mut rest: &[u8]) -> Result<Vec<(u16, usize)>, String> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        let end = position(rest, b"\r\n\r\n").ok_or("a head does not end")?;
        let head = String::from_utf8_lossy(rest.get(..end).unwrap_or_default()).to_lowercase();
        rest = rest.get(end + 4..).unwrap_or_default();
        let status = head.strip_prefix("http/1.").and_then(|line| line.get(2..5));
        let status = status.and_then(|status| status.parse::<u16>().ok());
        let status = status.ok_or_else(|| format!("this is not an answer: {head}"))?;
        if head.contains("transfer-encoding: chunked") || head.contains("text/event-stream") {
            // Only events are sent so; they have no end.
            all.push((status, 0));
            break;
        }
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.and_then(|length| length.parse().ok()).unwrap_or_default();
        // The answer to HEAD has a length and no body.
        let is_head = rest.is_empty() || rest.starts_with(b"HTTP/1.");
        let body = match is_head {
            true => &[],
            false => rest.get(..length).ok_or("a body is cut off")?,
        };
        rest = rest.get(body.len()..).unwrap_or_default();
        if status >= 400 && !body.is_empty() {
            says_why(status, body)?;
        }
        all.push((status, length));
    }
    Ok(all)
}

fn says_why(status: u16, body: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(body);
    let why = text.strip_prefix("{\"error\":\"").and_then(|rest| rest.strip_suffix("\"}"));
    let why = why.ok_or_else(|| format!("{status} without a reason: {text}"))?;
    // A control character is escaped in JSON.
    let is_line = !why.is_empty()
        && !["\\n", "\\r", "\\u00"].iter().any(|it| why.replace("\\\\", "").contains(it));
    if is_line { Ok(()) } else { Err(format!("{status} with a reason that is not a line: {text}")) }
}

fn position(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

fn has(bytes: &[u8], what: &[u8]) -> bool {
    position(bytes, what).is_some()
}

fn request(head: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("{head} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

/// A request of each path, with and without the token; some in one connection.
fn seeds() -> Vec<Vec<u8>> {
    let limit = r#"{"limits": {"ops": {"size": 200, "one_time_burst": 0, "refill_time": 100}}}"#;
    let add =
        r#"{"name": "x", "path": "/y", "format": "raw", "frontends": [{"vhost_user": "/z"}]}"#;
    let requests = [
        request("GET /", ""),
        request("GET /healthz", ""),
        request("GET /metrics", ""),
        request("GET /v1/server", ""),
        request("GET /v1/events", ""),
        request("GET /v1/exports", ""),
        request("POST /v1/exports", add),
        request("GET /v1/exports/@3", ""),
        request("DELETE /v1/exports/a%2Fb%20c?mode=hard", ""),
        request("PATCH /v1/exports/@3", r#"{"size_bytes": 1048576, "read_only": true}"#),
        request("PATCH /v1/exports/@3", limit),
        request("POST /v1/exports/@3/flush", ""),
        request("POST /v1/exports/@3/snapshot", r#"{"overlay": "/y"}"#),
        request("POST /v1/exports/@3/move", r#"{"target": "/y", "max_pause_ms": 10}"#),
        request("DELETE /v1/exports/@3/move", ""),
        request("POST /v1/exports/@3/replicate", r#"{"target": "nbd://h/", "every_seconds": 1}"#),
        request("GET /v1/exports/@3/bitmaps", ""),
        request("POST /v1/exports/@3/bitmaps", r#"{"name": "a", "granularity_bytes": 512}"#),
        request("PATCH /v1/exports/@3/bitmaps/a%20b", r#"{"enabled": false}"#),
        request("POST /v1/exports/@3/bitmaps/a/merge", r#"{"sources": ["b", "c"]}"#),
        request("POST /v1/exports/@3/bitmaps/a/clear", ""),
        request("DELETE /v1/exports/@3/bitmaps/a", ""),
        request("GET /v1/connections", ""),
        request("DELETE /v1/connections/7", ""),
        request("POST /v1/upgrade", r#"{"binary": "/bin/true"}"#),
        request("PATCH /v1/exports/@3", "{\"a\\nb\": 1}"),
        request("HEAD /healthz", ""),
        request("GET /v1/exports/%ff", ""),
    ];
    let open = requests.iter().map(|request| [&[0][..], request].concat());
    let pipelined = [&[0][..], &requests.concat()].concat();
    let token = format!("HTTP/1.1\r\nauthorization: Bearer {TOKEN}");
    let with_token = requests.iter().map(|request| {
        let text = String::from_utf8_lossy(request).replacen("HTTP/1.1", &token, 1);
        [&[1][..], text.as_bytes()].concat()
    });
    let refused = [&[1][..], &request("POST /v1/upgrade", "")].concat();
    let chunked = b"\0POST /v1/upgrade HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    open.chain(with_token).chain([pipelined, refused, chunked.to_vec()]).collect()
}
