//! One HTTP request at a control socket.
//!
//! Invariant: it has no code in common with the server, and a wait is bounded.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nowait_testkit::BOUND;

/// The status and the body of the answer to a request; `None` if there was none.
pub(crate) fn ask(control: &Path, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
    let mut stream = UnixStream::connect(control).ok()?;
    stream.set_read_timeout(Some(BOUND)).expect("a timeout");
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, body.to_owned()))
}
