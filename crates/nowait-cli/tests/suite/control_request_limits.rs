//! Bounds of a request to the control interface, from both sides.
//!
//! Invariant: requests are written byte by byte, as no client would send most of them.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use nowait_testkit::BOUND;

use crate::control::Controlled;
use crate::control_tcp::OnTcp;

/// The head of the first answer to `request`.
fn answer(it: &Controlled, request: &str) -> String {
    let mut stream = UnixStream::connect(&it.socket).expect("the control socket");
    stream.set_read_timeout(Some(BOUND)).expect("a timeout");
    // It may be answered and closed before all of it is sent.
    let _ = stream.write_all(request.as_bytes());
    let (mut answer, mut byte) = (Vec::new(), [0]);
    while !answer.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
        answer.push(byte[0]);
    }
    String::from_utf8(answer).expect("text")
}

/// The status of the answer.
fn status(it: &Controlled, request: &str) -> u16 {
    let answer = answer(it, request);
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    status.unwrap_or_else(|| panic!("{answer:?} to {:.200?}", request))
}

#[test]
fn a_request_names_one_host_and_its_lines_end_as_they_must() {
    let it = Controlled::start();
    for (request, expected) in [
        ("GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n", 200),
        ("GET /healthz HTTP/1.0\r\n\r\n", 200),
        ("GET /healthz HTTP/1.1\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400),
        ("GET /healthz HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\nhost: a\r\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nhost: a\n\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nhost: a\r\n\n", 400),
        ("POST /v1/exports/@0/flush HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n\n", 204),
        (
            "POST /v1/exports/@0/flush HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            411,
        ),
    ] {
        assert_eq!(status(&it, request), expected, "{request:?}");
    }
    it.server.stop();
}

#[test]
fn a_body_is_an_object_and_has_64_kib_at_most() {
    let it = Controlled::start();
    let patch = |body: &str| {
        let length = body.len();
        let head = "PATCH /v1/exports/@0 HTTP/1.1\r\nhost: a\r\ncontent-length:";
        status(&it, &format!("{head} {length}\r\n\r\n{body}"))
    };
    for (body, expected) in [
        ("{}", 200),
        (" \n{}\n", 200),
        ("[]", 400),
        ("[null, true]", 400),
        ("null", 400),
        ("", 400),
    ] {
        assert_eq!(patch(body), expected, "{body:?}");
    }
    assert_eq!(patch(&format!("{{{}}}", " ".repeat((64 << 10) - 2))), 200);
    assert_eq!(patch(&format!("{{{}}}", " ".repeat((64 << 10) - 1))), 413);
    it.server.stop();
}

#[test]
fn a_head_has_32_kib_at_most() {
    let it = Controlled::start();
    let of_bytes = |bytes: usize| {
        let mut head = "GET /healthz HTTP/1.1\r\nhost: a\r\n".to_owned();
        let name = "x: ";
        let rest = bytes - head.len() - name.len() - "\r\n\r\n".len();
        write!(head, "{name}{}\r\n\r\n", "a".repeat(rest)).expect("text");
        assert_eq!(head.len(), bytes);
        head
    };
    assert_eq!(status(&it, &of_bytes(32 << 10)), 200);
    for bytes in [(32 << 10) + 1, 40_000, 1 << 20] {
        let mut stream = UnixStream::connect(&it.socket).expect("the control socket");
        stream.set_read_timeout(Some(BOUND)).expect("a timeout");
        // It may be answered and closed before all of it is sent.
        let _ = stream.write_all(of_bytes(bytes).as_bytes());
        let mut answer = [0; 12];
        if stream.read_exact(&mut answer).is_ok() {
            assert_eq!(&answer, b"HTTP/1.1 431", "{bytes}");
        } else {
            assert!(bytes > 40_000, "no answer to {bytes} bytes");
        }
    }
    it.server.stop();
}

#[test]
fn nothing_keeps_an_answer_or_takes_it_for_another_text() {
    let it = Controlled::start();
    for path in ["/", "/metrics", "/v1/exports", "/v1/nothing", "/healthz"] {
        let answer = answer(&it, &format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n"));
        for header in ["cache-control: no-store\r\n", "x-content-type-options: nosniff\r\n"] {
            assert_eq!(answer.matches(header).count(), 1, "{path}: {answer}");
        }
    }
    it.server.stop();
}

#[test]
fn connections_without_a_proof_keep_nobody_out() {
    let it = OnTcp::start(&[]);
    let token = fs::read_to_string(it.token_file()).expect("the token");
    let connect = || {
        let stream = TcpStream::connect(format!("127.0.0.1:{}", it.port)).expect("a connection");
        stream.set_read_timeout(Some(BOUND)).expect("a timeout");
        stream
    };
    let request = |path: &str| {
        format!("GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {}\r\n\r\n", token.trim())
    };
    // A known client keeps its connection.
    let mut known = connect();
    let ask = |known: &mut TcpStream| {
        known.write_all(request("/healthz").as_bytes()).expect("a request");
        let mut answer = [0; 15];
        known.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
        let mut rest = Vec::new();
        while !rest.ends_with(b"\r\n\r\nok\n") {
            let mut byte = [0];
            known.read_exact(&mut byte).expect("the rest");
            rest.push(byte[0]);
        }
    };
    ask(&mut known);
    let idle: Vec<TcpStream> = (0..300).map(|_| connect()).collect();
    let mut scrape = connect();
    ask(&mut scrape);
    ask(&mut known);
    // Those that said nothing have been closed, the last ones after a while.
    for mut stream in idle {
        assert_eq!(stream.read(&mut [0]).expect("its end"), 0);
    }
    ask(&mut known);
    it.server.stop();
}
