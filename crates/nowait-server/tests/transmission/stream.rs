//! How the bytes of a client travel: as they are, or by TLS.
//!
//! Invariant: a server is known by the certificate that it was started with, and by no other.
//! Knows: the public face of the server, rustls. Known by: client, scene.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nowait_server::{Clients, Credentials};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const NAME: &str = "localhost";

/// What a server of one test shows, and the certificate to know it by.
pub(crate) fn credentials() -> (Credentials, CertificateDer<'static>) {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new([NAME.into()]).unwrap().self_signed(&key).unwrap();
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("server-cert.pem"), cert.pem()).unwrap();
    std::fs::write(directory.path().join("server-key.pem"), key.serialize_pem()).unwrap();
    let credentials = Credentials::load(directory.path(), Clients::Any).unwrap();
    (credentials, cert.der().clone())
}

/// A client's side of a socket.
pub(crate) enum Stream {
    Plain(UnixStream),
    Tls(Box<StreamOwned<ClientConnection, UnixStream>>),
}

impl Stream {
    /// From here on all is TLS, with the server that has `cert`.
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

    /// Says that nothing more comes, in the words of TLS, and leaves the socket open.
    pub(crate) fn say_goodbye(&mut self) {
        let Self::Tls(stream) = self else { panic!("there are no words for it") };
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
