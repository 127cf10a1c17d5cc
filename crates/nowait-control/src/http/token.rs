//! The secret by which a client on the loopback network shows that it may use the interface.
//!
//! Invariant: how long a comparison takes says nothing about the secret but its length; the secret
//! appears in no message.

use std::fmt;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use subtle::ConstantTimeEq;

use crate::http::connection_slots::ConnectionSlot;
use crate::http::refusal::{closing, refuse};

/// The shortest and the longest token, in bytes.
const BYTES: std::ops::RangeInclusive<usize> = 16..=512;

/// A token: 16 to 512 printable ASCII characters without spaces.
#[derive(Clone)]
pub struct Token(Arc<str>);

impl Token {
    /// The token in `text`; white space around it does not count.
    ///
    /// # Errors
    /// A message: it is none.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if !BYTES.contains(&text.len()) || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("a token has 16 to 512 printable ASCII characters, and no spaces".into());
        }
        Ok(Self(text.into()))
    }

    /// The value of a request's header `authorization` (RFC 6750, section 2.1).
    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }

    fn is_in(&self, request: &Request) -> bool {
        let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        given.and_then(|value| value.split_first_chunk()).is_some_and(
            |(scheme, given): (&[u8; 7], &[u8])| {
                scheme.eq_ignore_ascii_case(b"bearer ") && given.ct_eq(self.0.as_bytes()).into()
            },
        )
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Has a request answered if it has the token. Without it the connection ends, and its place is free.
pub(crate) async fn token_first(
    State(token): State<Token>,
    request: Request,
    next: Next,
) -> Response {
    if token.is_in(&request) {
        let has_slot = request
            .extensions()
            .get::<Arc<ConnectionSlot>>()
            .is_none_or(|slot| slot.authenticate());
        return match has_slot {
            true => next.run(request).await,
            false => closing(refuse(StatusCode::SERVICE_UNAVAILABLE, "too many connections")),
        };
    }
    // The page is the same for all; what it asks for is not.
    let is_page = request.uri().path() == "/";
    let mut answer = closing(match is_page {
        true => next.run(request).await,
        false => refuse(StatusCode::UNAUTHORIZED, "the token is missing, or another one"),
    });
    if !is_page {
        let bearer = HeaderValue::from_static("Bearer");
        answer.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_token_as_a_bearer_is_it() {
        let token = Token::parse(" 0123456789abcdef\n").unwrap();
        let is = |value: &str| {
            let request = Request::builder().header("authorization", value);
            token.is_in(&request.body(axum::body::Body::empty()).unwrap())
        };
        assert!(is("Bearer 0123456789abcdef") && is("bearer 0123456789abcdef"));
        for wrong in [
            "",
            "Bearer ",
            "0123456789abcdef",
            "Basic 0123456789abcdef",
            "Bearer 0123456789abcde",
            "Bearer 0123456789abcdeg",
            "Bearer 0123456789abcdef0",
        ] {
            assert!(!is(wrong), "{wrong}");
        }
        assert!(!token.is_in(&Request::new(axum::body::Body::empty())));
    }

    #[test]
    fn what_is_no_token_is_refused() {
        for wrong in ["", "short", "0123456789 abcdef", "0123456789abcdé0"] {
            assert!(Token::parse(wrong).is_err(), "{wrong}");
        }
        assert!(Token::parse(&"a".repeat(513)).is_err());
        let shown = format!("{:?}", Token::parse("0123456789abcdef").unwrap());
        assert!(!shown.contains("0123"), "{shown}");
    }
}
