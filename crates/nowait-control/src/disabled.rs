//! The control interface in a build without it.
//!
//! Invariant: no server, client or token has a value, so nothing is sent or answered.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use nowait_server::Credentials;
use serde::Serialize;

use crate::client_error::ClientError;
use crate::controlled_server::ControlledServer;
use crate::verb::Verb;

const REFUSAL: &str =
    "this nowait was built without the control interface (it is the cargo feature \"control\")";

/// The reason why this build has no control interface.
pub const DISABLED: Option<&str> = Some(REFUSAL);

/// The secret of a client on the loopback network.
#[derive(Clone, Debug)]
pub struct Token(Infallible);

impl Token {
    /// Takes no token.
    ///
    /// # Errors
    /// Always.
    pub fn parse(_: &str) -> Result<Self, String> {
        Err(REFUSAL.into())
    }
}

/// How a client on TCP shows that it may.
#[derive(Clone)]
pub enum Proof {
    /// By a token.
    Token(Token),
    /// By a certificate.
    Certificate(nowait_nbd::client::Credentials),
}

/// A socket of the interface.
pub enum HttpListener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A TCP socket for clients with the token.
    Token(TcpListener, Token),
    /// A TCP socket for clients with a certificate.
    Certificate(TcpListener, Credentials),
}

/// The running control interface of a server.
pub struct HttpServer(Infallible);

impl HttpServer {
    /// Starts none.
    ///
    /// # Errors
    /// Always: [`DISABLED`].
    pub fn start(_: Vec<HttpListener>, _: Arc<dyn ControlledServer>) -> io::Result<Self> {
        Err(io::Error::other(REFUSAL))
    }

    /// Accepts no more connections.
    pub const fn finish(self) {
        match self.0 {}
    }
}

/// A server's control socket.
pub(crate) struct ClientTransport(Infallible);

impl ClientTransport {
    /// Makes no client.
    ///
    /// # Errors
    /// Always: [`DISABLED`].
    pub(crate) fn new(_: &Path) -> io::Result<Self> {
        Err(io::Error::other(REFUSAL))
    }

    /// Like [`ClientTransport::new`].
    ///
    /// # Errors
    /// Always: [`DISABLED`].
    pub(crate) fn tcp(_: &str, _: u16, _: Proof) -> io::Result<Self> {
        Err(io::Error::other(REFUSAL))
    }

    /// The path of the socket, or host and port.
    pub(crate) const fn place(&self) -> &Path {
        match self.0 {}
    }

    pub(crate) fn ask<T>(
        &self,
        _: Verb,
        _: &[&str],
        _: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        match self.0 {}
    }
}
