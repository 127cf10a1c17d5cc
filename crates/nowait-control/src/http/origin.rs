//! Pages of other sites, which a browser lets send requests with what the browser's user has.
//!
//! Invariant: a request that a browser sends for another site's page is refused before it is looked at.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::http::refusal::refuse;

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

/// Has a request on a Unix socket answered unless it names a host of the network: then a browser
/// was led here by a name server of another site (DNS rebinding), through a tunnel of its user.
pub(crate) async fn local_host_first(request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST);
    match host.is_none_or(|host| host.to_str().is_ok_and(is_local)) {
        true => next.run(request).await,
        false => refuse(
            StatusCode::FORBIDDEN,
            "the host of a request here is localhost, or a loopback address",
        ),
    }
}

/// Whether `host` (with a port or not) is a name without dots or a loopback address.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    match name.parse::<IpAddr>() {
        Ok(address) => address.is_loopback(),
        Err(_) => !name.contains('.'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_host_is_a_loopback_address_or_a_name_that_no_name_server_has() {
        for host in ["", "localhost", "localhost:9000", "127.0.0.1:9000", "[::1]:9000", "a"] {
            assert!(is_local(host), "{host}");
        }
        for host in ["other.example", "other.example:9000", "192.0.2.1", "[2001:db8::1]:9000", "a."]
        {
            assert!(!is_local(host), "{host}");
        }
    }
}
