//! The transport of a client: plain or TLS.
//!
//! Invariant: the client accepts only the certificate that the server was started with.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use nowait_server::{ClientAuth, Credentials};
use nowait_testkit::Scratch;
use nowait_testkit::certificates::{client_of, self_signed};
use rustls::pki_types::CertificateDer;
use rustls::{ALL_VERSIONS, ClientConnection, StreamOwned};

/// The credentials of a test's server, and its certificate.
pub(crate) fn credentials() -> (Credentials, CertificateDer<'static>) {
    let directory = Scratch::new();
    let cert = self_signed(directory.path());
    (Credentials::load(directory.path(), ClientAuth::Any).unwrap(), cert)
}

/// A client's side of a socket.
pub(crate) enum Stream {
    Plain(UnixStream),
    Tls(Box<StreamOwned<ClientConnection, UnixStream>>),
}

impl Stream {
    /// Switches to TLS with the server whose certificate is `cert`.
    pub(crate) fn encrypted(self, cert: &CertificateDer<'static>) -> Self {
        let Self::Plain(socket) = self else { panic!("it is encrypted already") };
        let tls = client_of(cert.clone(), ALL_VERSIONS);
        Self::Tls(Box::new(StreamOwned::new(tls, socket)))
    }

    /// The socket itself.
    pub(crate) fn socket(&mut self) -> &mut UnixStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => &mut stream.sock,
        }
    }

    /// Sends close_notify and leaves the socket open.
    pub(crate) fn send_close_notify(&mut self) {
        let Self::Tls(stream) = self else { panic!("only TLS has close_notify") };
        stream.conn.send_close_notify();
        stream.flush().unwrap();
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(bytes),
            Self::Tls(stream) => stream.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(bytes),
            Self::Tls(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.flush(),
            Self::Tls(stream) => stream.flush(),
        }
    }
}
