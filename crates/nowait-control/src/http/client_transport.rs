//! Requests of a client to the control interface, which block.
//!
//! Invariant: a server that does not answer costs at most [`TIMEOUT`]; an answer is at most
//! [`MAX_ANSWER_BYTES`] long.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, header};
use hyper_util::rt::TokioIo;
use nowait_nbd::client::Credentials;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsConnector;

use crate::client_error::ClientError;
use crate::http::http_listener::Stream;
use crate::http::refusal::ErrorInfo;
use crate::http::token::Token;
use crate::verb::Verb;

/// How long an answer may take that a command waits for; opening an image, or a flush, may take its time.
/// Beyond it: the command fails.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The longest answer that a command reads, in bytes.
/// Beyond it: the command fails.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Bytes that stand for themselves in a path (RFC 3986, section 2.3).
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// How a client on TCP shows that it may.
#[derive(Clone)]
pub enum Proof {
    /// By a token, which is sent in the clear.
    Token(Token),
    /// By a certificate.
    Certificate(Credentials),
}

/// A server's control socket.
pub(crate) struct ClientTransport {
    place: Place,
    runtime: Runtime,
}

enum Place {
    Unix(PathBuf),
    /// Host and port, the same as in a URI, and the proof.
    Tcp(String, u16, PathBuf, Proof),
}

impl ClientTransport {
    /// A client of the server at `socket`. Nothing is sent yet.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`: there is no descriptor for it.
    pub(crate) fn new(socket: &Path) -> io::Result<Self> {
        Self::of(Place::Unix(socket.to_owned()))
    }

    /// A client of the server at `port` of `host`. Nothing is sent yet.
    ///
    /// # Errors
    /// Like [`ClientTransport::new`].
    pub(crate) fn tcp(host: &str, port: u16, proof: Proof) -> io::Result<Self> {
        let authority = match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        Self::of(Place::Tcp(host.to_owned(), port, authority.into(), proof))
    }

    fn of(place: Place) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { place, runtime })
    }

    /// The path of the socket, or host and port.
    pub(crate) fn place(&self) -> &Path {
        match &self.place {
            Place::Unix(path) | Place::Tcp(_, _, path, _) => path,
        }
    }

    /// Sends a request for what is at `path`, below `/v1`. Returns its answer.
    ///
    /// # Errors
    /// Any [`ClientError`].
    pub(crate) fn ask<T: DeserializeOwned>(
        &self,
        verb: Verb,
        path: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        let answer = self.send(verb, path, body)?;
        // An answer that says nothing more is empty.
        let answer = if answer.is_empty() { b"null" } else { &answer[..] };
        serde_json::from_slice(answer).map_err(|error| ClientError::Answer(error.to_string()))
    }

    /// Sends a request. Returns the body of its answer.
    fn send(
        &self,
        verb: Verb,
        path: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<Bytes, ClientError> {
        let body = body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|error| ClientError::Answer(error.to_string()))?;
        let (method, query) = match verb {
            Verb::Get => (Method::GET, ""),
            Verb::Post => (Method::POST, ""),
            Verb::Patch => (Method::PATCH, ""),
            Verb::Delete(query) => (Method::DELETE, query),
        };
        let (host, token) = match &self.place {
            Place::Unix(_) => ("localhost".into(), None),
            Place::Tcp(_, _, authority, Proof::Token(token)) => {
                (authority.to_string_lossy(), Some(token.header()))
            }
            Place::Tcp(_, _, authority, _) => (authority.to_string_lossy(), None),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(path_of(path) + query)
            .header(header::HOST, &*host)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let request = request
            .body(Full::new(body.unwrap_or_default().into()))
            .map_err(|error| ClientError::Answer(error.to_string()))?;
        let late = |_| ClientError::Unreachable(io::ErrorKind::TimedOut.into());
        self.runtime.block_on(async {
            tokio::time::timeout(TIMEOUT, self.exchange(request)).await.map_err(late)?
        })
    }

    async fn connect(&self) -> io::Result<Pin<Box<dyn Stream>>> {
        match &self.place {
            Place::Unix(path) => Ok(Box::pin(UnixStream::connect(path).await?)),
            Place::Tcp(host, port, _, proof) => {
                let stream = TcpStream::connect((&**host, *port)).await?;
                let Proof::Certificate(credentials) = proof else { return Ok(Box::pin(stream)) };
                let (config, name) = credentials.config();
                Ok(Box::pin(TlsConnector::from(config).connect(name, stream).await?))
            }
        }
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Bytes, ClientError> {
        let lost = |error: hyper::Error| ClientError::Answer(error.to_string());
        let stream = self.connect().await.map_err(ClientError::Unreachable)?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(lost)?;
        let connection = tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(lost)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| ClientError::Answer(error.to_string()))?.to_bytes();
        connection.abort();
        if status.is_success() {
            return Ok(body);
        }
        let why = serde_json::from_slice::<ErrorInfo>(&body).map(|info| info.error);
        Err(ClientError::Refused(why.unwrap_or_else(|_| status.to_string())))
    }
}

/// The path of `parts`, escaped. An export without a name is the default one, as for clients of NBD.
fn path_of(parts: &[&str]) -> String {
    let escaped = |part: &&str| match *part {
        "" => "/@0".to_owned(),
        part => format!("/{}", utf8_percent_encode(part, PLAIN)),
    };
    std::iter::once("/v1".to_owned()).chain(parts.iter().map(escaped)).collect()
}
