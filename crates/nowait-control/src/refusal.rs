//! Answers that refuse a request.
//!
//! Invariant: each is JSON with one line that says why.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::api::ErrorInfo;
use crate::controlled_server::ControlError;

impl IntoResponse for ControlError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status()).unwrap_or(StatusCode::BAD_REQUEST);
        refuse(status, &self.to_string())
    }
}

/// The answer with `status` that says why.
pub(crate) fn refuse(status: StatusCode, why: &str) -> Response {
    (status, axum::Json(ErrorInfo { error: why.to_owned() })).into_response()
}
