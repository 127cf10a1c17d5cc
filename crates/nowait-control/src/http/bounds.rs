//! How large the parts of a request may be, and how long a client may take with its body.
//!
//! Invariant: a handler begins when the whole body is there.

use std::time::Duration;

use axum::body::{self, Body};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::http::refusal::{closing, refuse};

/// The longest body of a request, in bytes.
/// Beyond it: 413.
const MAX_BODY_BYTES: usize = 64 << 10;
/// How long the body of a request may take to arrive.
/// Beyond it: 408.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest head of a request, in bytes without white space around values: the name of an export may have 4096, which
/// are three times as many when they are percent-encoded.
/// Beyond it: 431, or the connection is closed.
pub(crate) const MAX_HEAD_BYTES: usize = 32 << 10;

/// Has a request answered whose head is not too long and names one host (RFC 9112, section 3.2).
pub(crate) async fn head_first(request: Request, next: Next) -> Response {
    if head_bytes(&request) > MAX_HEAD_BYTES {
        let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        return refuse(status, "the head is longer than 32 KiB");
    }
    // `LineEndingCheck` finds the end of a body by its `content-length` only.
    if request.headers().contains_key(header::TRANSFER_ENCODING) {
        let why = "a body has its length in the header 'content-length'";
        return closing(refuse(StatusCode::LENGTH_REQUIRED, why));
    }
    let hosts = request.headers().get_all(header::HOST).iter().count();
    match hosts == 1 || hosts == 0 && request.version() == Version::HTTP_10 {
        true => next.run(request).await,
        false => refuse(StatusCode::BAD_REQUEST, "a request has one header 'host'"),
    }
}

/// The length of the head, with one space behind each colon.
fn head_bytes(request: &Request) -> usize {
    const SPACES_AND_LINE: usize = "  HTTP/1.1\r\n".len();
    const COLON_AND_LINE: usize = ": \r\n".len();
    let line = request.method().as_str().len() + request.uri().to_string().len() + SPACES_AND_LINE;
    let fields = request.headers().iter();
    let fields = fields.map(|(name, value)| name.as_str().len() + value.len() + COLON_AND_LINE);
    line + fields.sum::<usize>() + "\r\n".len()
}

/// Forbids caches and content sniffing of `answer`.
pub(crate) async fn prevent_caching(mut answer: Response) -> Response {
    let headers = answer.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// Takes the body of a request, then has it answered.
pub(crate) async fn body_first(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    match tokio::time::timeout(BODY_TIMEOUT, body::to_bytes(body, MAX_BODY_BYTES)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(head, Body::from(bytes))).await,
        Ok(Err(_)) => refuse(
            StatusCode::PAYLOAD_TOO_LARGE,
            "the body is longer than 64 KiB, or is not there in full",
        ),
        Err(_) => refuse(StatusCode::REQUEST_TIMEOUT, "the body takes too long"),
    }
}
