//! Pages of other sites, which a browser lets send requests with what the browser's user has.
//!
//! Invariant: a request that a browser sends for another site's page is refused before it is looked at.

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::refusal::refuse;

/// Has a request answered unless it comes from another site (RFC 6454, section 7).
pub(crate) async fn own_origin_first(request: Request, next: Next) -> Response {
    let headers = request.headers();
    let is_own = match headers.get(header::ORIGIN) {
        None => true,
        Some(origin) => {
            let origin = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
            let host = headers.get(header::HOST).map(HeaderValue::as_bytes);
            let own = origin.as_ref().and_then(Uri::authority).map(|it| it.as_str().as_bytes());
            own.is_some() && own == host
        }
    };
    match is_own {
        true => next.run(request).await,
        false => refuse(StatusCode::FORBIDDEN, "the request comes from another site's page"),
    }
}
