//! The transport of a client: plain or TLS.
//!
//! Invariant: the client accepts only the certificate that the server was started with.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nowait_server::{ClientAuth, Credentials};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const NAME: &str = "localhost";

/// The credentials of a test's server, and its certificate.
pub(crate) fn credentials() -> (Credentials, CertificateDer<'static>) {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new([NAME.into()]).unwrap().self_signed(&key).unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("server-cert.pem"), cert.pem()).unwrap();
    std::fs::write(directory.path().join("server-key.pem"), key.serialize_pem()).unwrap();
    let credentials = Credentials::load(directory.path(), ClientAuth::Any).unwrap();
    (credentials, cert.der().clone())
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
        let mut roots = RootCertStore::empty();
        roots.add(cert.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(NAME).unwrap();
        let tls = ClientConnection::new(Arc::new(config), name).unwrap();
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
