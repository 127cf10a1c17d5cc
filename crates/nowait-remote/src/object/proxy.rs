//! Connections to servers: directly, or by the proxy that the environment names.
//!
//! Invariant: through a proxy, what is encrypted for the server stays so: it passes a tunnel (CONNECT).
//! This machine, and the services that give machines in clouds their credentials, are asked directly.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use hyper::header::HeaderValue;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::{StatusCode, Uri};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector as TcpConnector};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower::Service;

use crate::object::fault::BadAnswer;
use crate::object::resolver::Resolver;

/// This machine, and the hosts that only its own network has.
const DIRECT: &str =
    "localhost,127.0.0.0/8,::1,169.254.0.0/16,fd00:ec2::/32,metadata.google.internal";

/// The proxies of the environment.
#[derive(Clone, Debug)]
pub(super) struct Proxies(Arc<Matcher>);

impl Proxies {
    /// No proxies.
    #[cfg(feature = "fuzz")]
    pub(super) fn none() -> Self {
        Self(Arc::new(Matcher::builder().build()))
    }

    /// # Errors
    /// One line: a variable names no proxy that can be used.
    pub(super) fn of_environment() -> Result<Self, String> {
        Self::of(|name| std::env::var(name).ok())
    }

    /// The proxies in the variables that `get` returns.
    fn of(get: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        // Like hyper's own reader of the environment, which takes values that it does not know for nothing.
        let variable = |name: &str| {
            let names = [name.to_owned(), name.to_ascii_lowercase()];
            names.into_iter().find_map(|name| get(&name).map(|value| (name, value)))
        };
        let proxy = |name: &str| {
            let Some((name, value)) = variable(name) else { return Ok(String::new()) };
            let probe = Matcher::builder().all(value.as_str()).build();
            let usable = probe.intercept(&Uri::from_static("http://host/")).is_some_and(|proxy| {
                proxy.uri().scheme_str().is_some_and(|scheme| scheme.starts_with("http"))
            });
            match usable || value.is_empty() {
                true => Ok(value),
                // Its value may have a password.
                false => Err(format!(
                    "{name} names no proxy that can be used (as http://HOST:PORT or https://HOST:PORT)"
                )),
            }
        };
        let (all, http, https) = (proxy("ALL_PROXY")?, proxy("HTTP_PROXY")?, proxy("HTTPS_PROXY")?);
        let direct = variable("NO_PROXY").map_or_else(String::new, |(_, hosts)| hosts);
        let builder = Matcher::builder().all(all).http(http).https(https);
        Ok(Self(Arc::new(builder.no(format!("{direct},{DIRECT}")).build())))
    }

    /// The TCP ports of the proxies.
    pub(super) fn ports(&self) -> Vec<u16> {
        let any = ["http://host.invalid/", "https://host.invalid/"].map(Uri::from_static);
        let port = |proxy: Intercept| {
            let is_encrypted = proxy.uri().scheme_str() == Some("https");
            proxy.uri().port_u16().unwrap_or(if is_encrypted { 443 } else { 80 })
        };
        any.iter().filter_map(|uri| self.0.intercept(uri)).map(port).collect()
    }

    /// The header Proxy-Authorization of a request for `uri`, if a proxy reads it.
    pub(super) fn authorization(&self, uri: &Uri) -> Option<HeaderValue> {
        let proxy = self.0.intercept(uri).filter(|_| uri.scheme_str() == Some("http"))?;
        proxy.basic_auth().cloned().map(|mut value| {
            value.set_sensitive(true);
            value
        })
    }
}

type Plain = TcpConnector<Resolver>;
type Inner = MaybeHttpsStream<TokioIo<TcpStream>>;
type BoxError = Box<dyn Error + Send + Sync>;

/// Makes connections to servers, or to their proxies.
#[derive(Clone, Debug)]
pub(super) struct ProxyConnector {
    pub(super) tcp: Plain,
    /// Also encrypts, to a proxy that wants it.
    pub(super) to_proxy: HttpsConnector<Plain>,
    pub(super) proxies: Proxies,
    /// Bytes that all its connections have sent.
    pub(super) sent: Arc<AtomicU64>,
}

impl ProxyConnector {
    async fn connect(mut self, uri: Uri) -> Result<ProxyStream, BoxError> {
        let Some(proxy) = self.proxies.0.intercept(&uri) else {
            let stream = MaybeHttpsStream::Http(self.tcp.call(uri).await?);
            return Ok(ProxyStream { stream, reads_requests: false, sent: self.sent });
        };
        let failed = |error: BoxError| -> BoxError {
            let mut reason: &dyn Error = &*error;
            while let Some(source) = reason.source() {
                reason = source;
            }
            let name = proxy.uri().authority().map_or("", |name| name.as_str());
            // The library's type of these is private.
            let text = match reason.to_string().as_str() {
                "tunnel error: proxy authorization required" => {
                    let status = StatusCode::PROXY_AUTHENTICATION_REQUIRED;
                    return BadAnswer::Status { status, code: None, region: None }.into();
                }
                "tunnel error: unsuccessful" => "it refuses to connect".to_owned(),
                text => text.replace("tunnel error: ", ""),
            };
            io::Error::other(format!("by the proxy {name}: {text}")).into()
        };
        if uri.scheme_str() == Some("http") {
            let stream = self.to_proxy.call(proxy.uri().clone()).await;
            let stream = stream.map_err(failed)?;
            return Ok(ProxyStream { stream, reads_requests: true, sent: self.sent });
        }
        let mut tunnel = Tunnel::new(proxy.uri().clone(), self.to_proxy);
        if let Some(value) = proxy.basic_auth() {
            tunnel = tunnel.with_auth(value.clone());
        }
        let stream = tunnel.call(uri).await.map_err(|error| failed(error.into()))?;
        Ok(ProxyStream { stream, reads_requests: false, sent: self.sent })
    }
}

impl Service<Uri> for ProxyConnector {
    type Response = ProxyStream;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<ProxyStream, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

/// A connection to a server, or one to a proxy.
pub(super) struct ProxyStream {
    stream: Inner,
    /// Whether the other end is a proxy that reads the requests: they name the server then.
    reads_requests: bool,
    sent: Arc<AtomicU64>,
}

impl Connection for ProxyStream {
    fn connected(&self) -> Connected {
        self.stream.connected().proxy(self.reads_requests)
    }
}

impl Read for ProxyStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl Write for ProxyStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, data);
        if let Poll::Ready(Ok(bytes)) = &written {
            self.sent.fetch_add(*bytes as u64, Ordering::Relaxed);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Result<Proxies, String> {
        let get = |name: &str| variables.iter().find(|it| it.0 == name).map(|it| it.1.to_owned());
        Proxies::of(get)
    }

    fn proxy_of(proxies: &Proxies, uri: &'static str) -> Option<String> {
        let found = proxies.0.intercept(&Uri::from_static(uri))?;
        Some(found.uri().authority()?.to_string())
    }

    #[test]
    fn the_proxy_of_the_scheme_is_used_except_for_hosts_that_are_asked_directly() {
        let some = proxies(&[
            ("https_proxy", "http://u:p@a:3128"),
            ("ALL_PROXY", "b"),
            ("NO_PROXY", "near.example,10.0.0.0/8"),
        ]);
        let some = some.unwrap();
        assert_eq!(proxy_of(&some, "https://far.example/x").unwrap(), "a:3128");
        assert_eq!(proxy_of(&some, "http://far.example/x").unwrap(), "b");
        assert_eq!(some.ports(), [80, 3128]);
        for direct in [
            "https://near.example/",
            "https://s3.near.example:8443/",
            "http://10.1.2.3/",
            "http://127.0.0.1:1/",
            "http://[::1]:1/",
            "https://localhost/",
            "http://169.254.169.254/latest/api/token",
            "http://[fd00:ec2::254]/",
            "http://metadata.google.internal/",
        ] {
            assert_eq!(proxy_of(&some, direct), None, "{direct}");
        }
        assert!(!format!("{some:?}").contains("u:p"));
        let none = proxies(&[("HTTPS_PROXY", "http://a"), ("no_proxy", "*")]).unwrap();
        assert!(none.ports().is_empty());
        assert!(proxies(&[("HTTP_PROXY", "")]).unwrap().ports().is_empty());
    }

    #[test]
    fn a_proxy_that_cannot_be_used_is_told_without_its_password() {
        for value in ["socks5://u:secret@a:1080", "u:secret@a:b:c", "ftp://secret", "a b"] {
            let why = proxies(&[("ALL_PROXY", value)]).unwrap_err();
            assert!(why.contains("ALL_PROXY") && !why.contains("secret"), "{why}");
        }
    }
}
