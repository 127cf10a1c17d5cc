//! How long a client may take with the body of a request and how large that may be.
//!
//! Invariant: a handler begins when the whole body is there.

use std::time::Duration;

use axum::body::{self, Body};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;

use crate::refusal::refuse;

/// The longest body of a request, in bytes.
const MAX_BODY_BYTES: usize = 64 << 10;
/// How long it may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

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
