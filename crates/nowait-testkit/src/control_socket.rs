//! HTTP requests at a control socket.
//!
//! Invariant: they have no code in common with the server, and a wait is bounded.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use serde_json::Value;

use crate::wait::BOUND;

/// The control socket of a server.
pub struct ControlSocket {
    /// Its path.
    pub socket: PathBuf,
}

impl ControlSocket {
    /// The status and the body of the answer to a request with any `body`; `None` if there was none.
    ///
    /// # Panics
    /// The socket takes no timeout.
    pub fn send(&self, method: &str, path: &str, body: &str) -> Option<(u16, String)> {
        let mut stream = UnixStream::connect(&self.socket).ok()?;
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

    /// The status and the body of the answer to a request.
    ///
    /// # Panics
    /// There is no answer.
    pub fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, String) {
        let body = body.map_or_else(String::new, |body| body.to_string());
        self.send(method, path, &body).expect("an answer")
    }

    /// The JSON of the answer to a request that is to succeed with `status`.
    ///
    /// # Panics
    /// It has another one.
    pub fn json(&self, method: &str, path: &str, body: Option<Value>, status: u16) -> Value {
        let (got, text) = self.ask(method, path, body);
        assert_eq!(got, status, "{method} {path}: {text}");
        if text.is_empty() { Value::Null } else { serde_json::from_str(&text).expect("JSON") }
    }

    /// The one line that refuses a request with `status`.
    ///
    /// # Panics
    /// It has another status, or is not one line.
    pub fn refusal(&self, method: &str, path: &str, body: Option<Value>, status: u16) -> String {
        let answer = self.json(method, path, body, status);
        let why = answer["error"].as_str().expect("why").to_owned();
        assert!(!why.is_empty() && !why.contains('\n'), "{why:?}");
        why
    }
}
