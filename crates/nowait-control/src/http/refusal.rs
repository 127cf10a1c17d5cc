//! Answers that refuse a request.
//!
//! Invariant: each is JSON with one line that says why.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use crate::controlled_server::ControlError;

/// The body of an answer that says what is wrong.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ErrorInfo {
    pub(crate) error: String,
}

impl IntoResponse for ControlError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Conflict(_) => StatusCode::CONFLICT,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        refuse(status, &self.to_string())
    }
}

/// The answer with `status` that says why.
pub(crate) fn refuse(status: StatusCode, why: &str) -> Response {
    (status, axum::Json(ErrorInfo { error: one_line(why) })).into_response()
}

/// Closes the connection after `answer`.
pub(crate) fn closing(mut answer: Response) -> Response {
    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    answer
}

/// The text with its control characters escaped: it may quote what a client has sent.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for char in text.chars() {
        match char.is_control() {
            true => line.extend(char.escape_default()),
            false => line.push(char),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_quotes_a_client_stays_one_line() {
        assert_eq!(one_line("unknown field `a\nb\u{1b}é`"), "unknown field `a\\nb\\u{1b}é`");
    }
}
