//! HTTP requests: hyper and rustls behind the interface of the object-store library.
//!
//! Invariant: an answer that is not a success is an error that says its status and the store's code, and
//! no more; no request that was to be encrypted is sent in the clear.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, HeaderMap, HeaderName,
    HeaderValue, LOCATION, PROXY_AUTHORIZATION, RANGE, TRANSFER_ENCODING,
};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode, Uri};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Error as ClientError;
use hyper_util::client::legacy::connect::HttpConnector as TcpConnector;
use nowait_nbd::tls_words::tls_message;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use rustls::RootCertStore;
use rustls::crypto::ring;
use url::Url;

use crate::object::fault::BadAnswer;
use crate::object::http_auth::HttpAuth;
use crate::object::http_versions::{Clients, Connections, innermost, says_no_http1};
use crate::object::proxy::{Proxies, ProxyConnector};
use crate::object::redirect_ports;
use crate::object::resolver::Resolver;

/// The most bytes of an error's body that are looked at, and the most of its code that is told.
const ERROR_BYTES: usize = 16 << 10;
const CODE_BYTES: usize = 64;
/// Maximum bytes of an answer with credentials, which is not a part of an object.
const ANSWER_BYTES: usize = 1 << 20;
/// The most digits of a number in a store's `Content-Range`: such a number is less than `i64::MAX`.
/// Beyond it: the read fails with `EIO`.
const MAX_DIGITS: usize = 18;
/// The encoding of bytes that are as they are.
const IDENTITY: &str = "identity";
/// The most places that one request to a web server is led to.
/// Beyond it: the request fails.
const MAX_REDIRECTS: usize = 5;
/// The versions of HTTP by their names in TLS (ALPN).
const HTTP1: &[u8] = b"http/1.1";
const HTTP2: &[u8] = b"h2";
/// The longest time until a connection is made.
const CONNECT: Duration = Duration::from_secs(10);
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Makes requests, on the runtime of its caller.
#[derive(Clone, Debug)]
pub(super) struct Connector<C = HttpsConnector<ProxyConnector>> {
    clients: Clients<C>,
    /// Whether answers that lead elsewhere are followed, as with a web server.
    follows: bool,
    /// The longest time until the headers of an answer have come.
    timeout: Duration,
    auth: Option<Arc<HttpAuth>>,
    proxies: Proxies,
    /// Bytes that its connections have sent.
    pub(super) sent: Arc<AtomicU64>,
}

impl Connector {
    /// # Errors
    /// A message of one line: TLS cannot be used, or the environment names a proxy that cannot.
    pub(super) fn new(
        follows: bool,
        timeout: Duration,
        auth: Option<HttpAuth>,
    ) -> Result<Self, String> {
        let mut roots = RootCertStore::empty();
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        if let Some(error) = found.errors.first().filter(|_| roots.is_empty()) {
            tracing::warn!("no certificates of authorities: {error}");
        }
        Self::trusting(roots, follows, timeout, auth)
    }

    /// Like [`Connector::new`], with the authorities in `roots`.
    pub(super) fn trusting(
        roots: RootCertStore,
        follows: bool,
        timeout: Duration,
        auth: Option<HttpAuth>,
    ) -> Result<Self, String> {
        let mut tls =
            rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|error| error.to_string())?
                .with_root_certificates(roots)
                .with_no_client_auth();
        tls.alpn_protocols = vec![HTTP1.to_vec()];
        let mut tcp = TcpConnector::new_with_resolver(Resolver::default());
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT.min(timeout / 2)));
        tcp.set_keepalive(Some(KEEPALIVE));
        let proxies = Proxies::of_environment()?;
        let to_proxy = HttpsConnector::from((tcp.clone(), tls.clone()));
        let sent = Arc::<AtomicU64>::default();
        let connections =
            ProxyConnector { tcp, to_proxy, proxies: proxies.clone(), sent: sent.clone() };
        let mut http2 = tls.clone();
        http2.alpn_protocols.insert(0, HTTP2.to_vec());
        let http2 = HttpsConnector::from((connections.clone(), http2));
        let clients = Clients::new(HttpsConnector::from((connections, tls)), Some(http2));
        Ok(Self { clients, follows, timeout, auth: auth.map(Arc::new), proxies, sent })
    }
}

impl<C: Connections> Connector<C> {
    /// Makes requests on connections of `connections`.
    #[cfg(feature = "fuzz")]
    pub(super) fn over(connections: C, follows: bool, timeout: Duration) -> Self {
        let clients = Clients::new(connections, None);
        Self {
            clients,
            follows,
            timeout,
            auth: None,
            proxies: Proxies::none(),
            sent: Arc::default(),
        }
    }

    async fn follow(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut parts, body) = request.into_parts();
        let is_get = parts.method == Method::GET;
        // A range of a compressed object does not have the bytes of that range of the object.
        parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static(IDENTITY));
        let mut ports = Vec::new();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(&parts, &body, ports.last().copied()).await?;
            let follows = self.follows && is_get && response.status().is_redirection();
            let Some(target) = response.headers().get(LOCATION).filter(|_| follows) else {
                let ranged = is_get && parts.headers.contains_key(RANGE);
                let (parts, body) = response.into_parts();
                let body = body.map_err(|e| HttpError::new(HttpErrorKind::Interrupted, e));
                let response = Response::from_parts(parts, HttpResponseBody::new(body));
                let answer = checked(response, ranged).await?;
                redirect_ports::learn(&ports);
                return Ok(answer);
            };
            parts.uri = redirected(&parts.uri, target.to_str().unwrap_or_default())?;
            ports.push(port_of(&parts.uri));
        }
        Err(refused(BadAnswer::Redirect("the server redirects again and again")))
    }

    /// The answer to a request, with the user's headers where it goes to the server that they are for.
    /// One that the server does not accept is made once more if the file has others meanwhile. `redirected_to` is the port
    /// that a redirection leads to.
    async fn send(
        &self,
        parts: &Parts,
        body: &HttpRequestBody,
        redirected_to: Option<u16>,
    ) -> Result<Response<Incoming>, HttpError> {
        let Some(auth) = self.auth.as_ref().filter(|auth| auth.is_for(&parts.uri)) else {
            return self.send_with(parts, body, HeaderMap::new(), redirected_to).await;
        };
        let headers = auth.headers();
        let answer = self.send_with(parts, body, (*headers).clone(), redirected_to).await?;
        if !matches!(answer.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            return Ok(answer);
        }
        match auth.renewed(&headers).await {
            Some(headers) => self.send_with(parts, body, (*headers).clone(), redirected_to).await,
            None => Ok(answer),
        }
    }

    async fn send_with(
        &self,
        parts: &Parts,
        body: &HttpRequestBody,
        headers: HeaderMap,
        redirected_to: Option<u16>,
    ) -> Result<Response<Incoming>, HttpError> {
        let mut parts = parts.clone();
        parts.headers.extend(headers);
        if let Some(value) = self.proxies.authorization(&parts.uri) {
            parts.headers.insert(PROXY_AUTHORIZATION, value);
        }
        let request = HttpRequest::from_parts(parts, body.clone());
        self.clients.request(request).await.map_err(|error| match redirected_to {
            Some(port) if is_forbidden(&error) => refused(BadAnswer::RedirectPort(port)),
            _ => failed(&error),
        })
    }
}

fn refused(answer: BadAnswer) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, answer)
}

fn redirected(from: &Uri, target: &str) -> Result<Uri, HttpError> {
    let wrong = || {
        refused(BadAnswer::Redirect("the server redirects to something that is not a web address"))
    };
    let from = Url::parse(&from.to_string()).map_err(|_| wrong())?;
    let target = from.join(target).map_err(|_| wrong())?;
    match (from.scheme(), target.scheme()) {
        (_, "https") | ("http", "http") => target.as_str().parse().map_err(|_| wrong()),
        ("https", "http") => {
            let why = "the server redirects from https to http, which is not followed";
            Err(refused(BadAnswer::Redirect(why)))
        }
        _ => Err(wrong()),
    }
}

/// The answer, if it is one to a request for a part of an object (`ranged`), or to another one.
async fn checked(response: HttpResponse, ranged: bool) -> Result<HttpResponse, HttpError> {
    let status = response.status();
    if status == StatusCode::OK && ranged {
        return Err(refused(BadAnswer::IgnoresRanges));
    }
    if status.is_success() {
        return if ranged { part_of_object(response) } else { Ok(response.map(bounded)) };
    }
    let header = |headers: &HeaderMap, name| {
        let value =
            headers.get(name).and_then(|value: &hyper::header::HeaderValue| value.to_str().ok());
        value.and_then(word)
    };
    let region = header(response.headers(), "x-amz-bucket-region");
    let named = header(response.headers(), "x-ms-error-code");
    let body = Limited::new(response.into_body(), ERROR_BYTES).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    let body = String::from_utf8_lossy(&body);
    let element = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        rest.split_once('<').and_then(|(value, _)| word(value))
    };
    let code = named.or_else(|| element("Code"));
    let region = region.or_else(|| element("Region")).filter(|_| {
        status.is_redirection() || code.as_deref() == Some("AuthorizationHeaderMalformed")
    });
    Err(refused(BadAnswer::Status { status, code, region }))
}

/// The body of an answer with credentials, which is an error beyond [`ANSWER_BYTES`].
fn bounded(body: HttpResponseBody) -> HttpResponseBody {
    let too_long = |error| HttpError::new_boxed(HttpErrorKind::Interrupted, error);
    HttpResponseBody::new(Limited::new(body, ANSWER_BYTES).map_err(too_long))
}

/// The answer, which is to a request for a part of an object, if it has the bytes of the object as they
/// are. Its length is that of its range: neither an answer in chunks nor one that ends with its
/// connection tells another one.
fn part_of_object(mut response: HttpResponse) -> Result<HttpResponse, HttpError> {
    let headers = response.headers();
    let foreign = |name: HeaderName, plain: &'static str| {
        let values = headers.get_all(name).into_iter().map(HeaderValue::as_bytes);
        let mut words =
            values.flat_map(|value| value.split(|&b| b == b',')).map(<[u8]>::trim_ascii);
        let foreign = words.find(|it| !it.is_empty() && !it.eq_ignore_ascii_case(plain.as_bytes()));
        foreign.map(|it| str::from_utf8(it).ok().and_then(word).unwrap_or_default())
    };
    let encoding = foreign(CONTENT_ENCODING, IDENTITY);
    if let Some(encoding) = encoding.or_else(|| foreign(TRANSFER_ENCODING, "chunked")) {
        return Err(refused(BadAnswer::Encoded(encoding)));
    }
    let range = headers.get(CONTENT_RANGE).map_or(&[][..], |range| range.as_bytes());
    let is_digit = |b: &u8| !b.is_ascii_digit();
    // The library counts on with the end of the range.
    if range.split(is_digit).any(|digits| digits.len() > MAX_DIGITS) {
        return Err(refused(BadAnswer::NoRange));
    }
    let numbers =
        range.split(is_digit).filter_map(|digits| str::from_utf8(digits).ok()?.parse().ok());
    let numbers: Vec<u64> = numbers.collect();
    // The library says what is wrong with another one.
    if let [first, last, _] = numbers[..]
        && let Some(len) = last.checked_sub(first)
    {
        let len = HeaderValue::from(len + 1);
        if headers.get(CONTENT_LENGTH).is_some_and(|told| *told != len) {
            return Err(refused(BadAnswer::OtherLength));
        }
        response.headers_mut().insert(CONTENT_LENGTH, len);
    }
    Ok(response)
}

/// `text`, if it is a short word.
pub(super) fn word(text: &str) -> Option<String> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let is_word = !text.is_empty() && text.len() <= CODE_BYTES && text.bytes().all(plain);
    is_word.then(|| text.to_owned())
}

/// The port of a web address.
fn port_of(uri: &Uri) -> u16 {
    uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 })
}

/// Whether this process may not make the connection, as one that is confined.
fn is_forbidden(error: &ClientError) -> bool {
    let io = innermost(error).downcast_ref::<std::io::Error>();
    error.is_connect() && io.is_some_and(|io| io.kind() == std::io::ErrorKind::PermissionDenied)
}

/// Without the URL, and with the innermost reason.
fn failed(error: &ClientError) -> HttpError {
    let reason = innermost(error);
    if let Some(answer) = reason.downcast_ref::<BadAnswer>() {
        return HttpError::new(HttpErrorKind::Connect, answer.clone());
    }
    let tls = reason.downcast_ref();
    if let Some(rustls::Error::InvalidCertificate(error)) = tls {
        return HttpError::new(HttpErrorKind::Connect, BadAnswer::Certificate(error.clone()));
    }
    if says_no_http1(error) {
        return HttpError::new(HttpErrorKind::Connect, BadAnswer::NoHttp);
    }
    let what = if error.is_connect() { "cannot connect: " } else { "" };
    let kind = if error.is_connect() { HttpErrorKind::Connect } else { HttpErrorKind::Interrupted };
    let ended = |io: &std::io::Error| io.kind() == std::io::ErrorKind::UnexpectedEof;
    let reason = match reason.downcast_ref().is_some_and(ended) {
        // The words of TLS for it have the address of a manual.
        true => "the server has closed the connection".to_owned(),
        false => tls.map_or_else(|| reason.to_string(), |error| tls_message(error, "the server")),
    };
    // The words without the number, like everywhere in this crate.
    let words = reason.split_once(" (os error").map_or(reason.as_str(), |(words, _)| words);
    HttpError::new(kind, std::io::Error::other(format!("{what}{words}")))
}

impl<C: Connections> HttpConnector for Connector<C> {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl<C: Connections> HttpService for Connector<C> {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let late = |_| {
            let seconds = self.timeout.as_secs_f32();
            let what = format!("the server has not answered for {seconds} s");
            HttpError::new(HttpErrorKind::Timeout, std::io::Error::other(what))
        };
        tokio::time::timeout(self.timeout, self.follow(request)).await.map_err(late)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_with_credentials_is_bounded() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let read = |bytes| {
            let body = bounded(HttpResponseBody::from(vec![0; bytes]));
            runtime.block_on(body.bytes()).map(|it| it.len()).ok()
        };
        assert_eq!(read(ANSWER_BYTES), Some(ANSWER_BYTES));
        assert_eq!(read(ANSWER_BYTES + 1), None);
    }

    #[test]
    fn a_redirection_leads_to_web_servers_only_and_never_from_https_to_http() {
        let to = |from: &'static str, to| redirected(&Uri::from_static(from), to);
        assert_eq!(to("http://a/b/c", "d?e=f").unwrap().to_string(), "http://a/b/d?e=f");
        assert_eq!(to("http://a/b", "https://c/d").unwrap().to_string(), "https://c/d");
        for (from, target) in [("https://a/b", "http://a/b"), ("http://a/b", "file:///etc/passwd")]
        {
            assert!(to(from, target).is_err(), "{target}");
        }
    }
}
