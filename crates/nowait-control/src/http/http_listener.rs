//! The sockets at which the interface listens, and how clients prove who they are.
//!
//! Invariant: there is no connection without a proof: on a Unix socket the user is this process's or
//! root, on TCP each request has the token, or the client has a certificate.

use std::io;
use std::net::TcpListener as StdTcpListener;
use std::os::unix::net::UnixListener as StdUnixListener;
use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use axum::middleware;
use nowait_nbd::tls_words::tls_message;
use nowait_server::Credentials;
use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use crate::http::connection_slots::ConnectionSlot;
use crate::http::origin::local_host_first;
use crate::http::token::{Token, token_first};

/// How long a client may take to show its token, which is in the head of its first request.
/// Beyond it: the connection is closed.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a TLS handshake may take.
/// Beyond it: the connection is closed.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may leave an answer unread.
/// Beyond it: the connection is closed.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a machine may leave what was sent without an acknowledgement, in milliseconds.
/// Beyond it: the kernel closes the connection.
const ACKNOWLEDGE_TIMEOUT: u32 = 30_000;

/// A bound socket, and which clients are served.
pub enum HttpListener {
    /// The user of this process, and root.
    Unix(StdUnixListener),
    /// Clients whose requests have the token. It is sent in the clear: the address must be a
    /// loopback one.
    Token(StdTcpListener, Token),
    /// Clients with a certificate: the credentials must verify them.
    Certificate(StdTcpListener, Credentials),
}

/// A socket that the runtime watches.
pub(crate) enum Acceptor {
    Unix(UnixListener),
    Tcp(TcpListener, Option<Credentials>),
}

/// An accepted connection, before its TLS handshake if it needs one.
pub(crate) enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream, Option<Credentials>),
}

/// The bytes of a client.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send {}

impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

impl HttpListener {
    /// Has the runtime watch it, inside of which this is called. Also returns what its clients are
    /// answered by.
    pub(crate) fn accept_by(self, router: &Router) -> io::Result<(Acceptor, Router)> {
        match self {
            Self::Unix(listener) => {
                listener.set_nonblocking(true)?;
                let checked = middleware::from_fn(local_host_first);
                let router = router.clone().layer(checked);
                Ok((Acceptor::Unix(UnixListener::from_std(listener)?), router))
            }
            Self::Token(listener, token) => {
                let checked = middleware::from_fn_with_state(token, token_first);
                Ok((Acceptor::tcp(listener, None)?, router.clone().layer(checked)))
            }
            Self::Certificate(listener, credentials) => {
                Ok((Acceptor::tcp(listener, Some(credentials))?, router.clone()))
            }
        }
    }
}

impl Acceptor {
    fn tcp(listener: StdTcpListener, credentials: Option<Credentials>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self::Tcp(TcpListener::from_std(listener)?, credentials))
    }

    /// How long a client may take to authenticate; `None` if it is authenticated when it is accepted.
    pub(crate) fn authentication_timeout(&self) -> Option<Duration> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(_, None) => Some(TOKEN_TIMEOUT),
            Self::Tcp(_, Some(_)) => Some(HANDSHAKE_TIMEOUT),
        }
    }

    /// The next connection.
    ///
    /// # Errors
    /// Those of accept(2); `PermissionDenied`: it was another user's, and is closed.
    pub(crate) async fn accept(&self) -> io::Result<Accepted> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                match is_allowed(&stream) {
                    true => Ok(Accepted::Unix(stream)),
                    false => Err(io::ErrorKind::PermissionDenied.into()),
                }
            }
            Self::Tcp(listener, credentials) => {
                let (stream, _) = listener.accept().await?;
                // Without it a machine that is gone is noticed later.
                let _ = set_tcp_user_timeout(&stream, ACKNOWLEDGE_TIMEOUT);
                Ok(Accepted::Tcp(stream, credentials.clone()))
            }
        }
    }
}

impl Accepted {
    /// Its bytes; `None` if it has no certificate, takes too long to show it, or finds no `slot` then.
    pub(crate) async fn stream(self, slot: &ConnectionSlot) -> Option<Pin<Box<dyn Stream>>> {
        match self {
            Self::Unix(stream) => Some(Box::pin(bounded(stream))),
            Self::Tcp(stream, None) => Some(Box::pin(bounded(stream))),
            Self::Tcp(stream, Some(credentials)) => {
                let handshake =
                    TlsAcceptor::from(credentials.config()).accept(Box::pin(bounded(stream)));
                match handshake.await {
                    Ok(stream) if slot.authenticate() => Some(Box::pin(stream)),
                    Ok(_) => None,
                    Err(error) => {
                        let tls = error.get_ref().and_then(|inner| inner.downcast_ref());
                        let words = |tls| tls_message(tls, "the client");
                        let why = tls.map_or_else(|| error.to_string(), words);
                        tracing::debug!("control: a client is refused: {why}");
                        None
                    }
                }
            }
        }
    }
}

fn bounded<S: AsyncRead + AsyncWrite>(stream: S) -> TimeoutStream<S> {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    stream
}

/// Whether the client is the user of this process, or root.
fn is_allowed(stream: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    stream.peer_cred().is_ok_and(|peer| peer.uid() == own || peer.uid() == 0)
}
