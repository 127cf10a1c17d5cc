//! Certificates and keys for TLS, in the files that qemu-nbd and nbdkit look for.
//!
//! Invariant: what was loaded fits together (the key is that of the certificate), so that a client
//! is never told of TLS that cannot work.
//! Knows: nothing. Known by: tls, mod, the command.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{InconsistentKeys, RootCertStore, ServerConfig};

/// What a client's certificate must come from, where clients are verified.
const CA_CERT: &str = "ca-cert.pem";
/// What those who gave the certificates have taken back; may be absent.
const CA_CRL: &str = "ca-crl.pem";
/// What the server shows to its clients; the certificates between it and the root may follow.
const SERVER_CERT: &str = "server-cert.pem";
const SERVER_KEY: &str = "server-key.pem";

/// Whether a connection may be, or must be, encrypted (NBD proto.md, "TLS support").
#[derive(Clone, Debug, Default)]
pub enum Tls {
    /// It is not ("NOTLS").
    #[default]
    Off,
    /// It is where the client asks for it ("SELECTIVETLS", with no export that needs it).
    Offered(Credentials),
    /// A client gets nothing without ("FORCEDTLS").
    Required(Credentials),
}

impl Tls {
    /// What encrypted connections begin with.
    pub(crate) fn credentials(&self) -> Option<&Credentials> {
        match self {
            Self::Off => None,
            Self::Offered(credentials) | Self::Required(credentials) => Some(credentials),
        }
    }
}

/// Whose clients' TLS handshakes succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// Everybody's.
    Any,
    /// Theirs who show a certificate that `ca-cert.pem` vouches for and `ca-crl.pem` does not name.
    Verified,
}

/// What a server proves who it is with, and by what it knows its clients.
#[derive(Clone, Debug)]
pub struct Credentials(Arc<ServerConfig>);

impl Credentials {
    /// Reads `server-cert.pem` and `server-key.pem` in `directory`; for [`Clients::Verified`] also
    /// `ca-cert.pem` and, if it is there, `ca-crl.pem`. TLS 1.2 and 1.3 are spoken.
    ///
    /// # Errors
    /// A file is missing, cannot be read or is not what its name says, or the files do not fit
    /// together; the error says which and why.
    pub fn load(directory: &Path, clients: Clients) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let (cert, key) = (directory.join(SERVER_CERT), directory.join(SERVER_KEY));
        let chain = all_of::<CertificateDer<'_>>(&cert, "certificate")?;
        let private = match PrivateKeyDer::from_pem_slice(&bytes_of(&key)?) {
            Ok(private) => private,
            Err(pem::Error::NoItemsFound) => {
                return Err(TlsError::at(key, "there is no unencrypted private key (PEM) in it"));
            }
            Err(error) => return Err(TlsError::at(key, error)),
        };
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::at(directory.into(), error))?;
        let builder = match clients {
            Clients::Any => builder.with_no_client_auth(),
            Clients::Verified => builder.with_client_cert_verifier(verifier(directory, &provider)?),
        };
        let mut config = builder.with_single_cert(chain, private).map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                TlsError::at(key, format!("it is not the key of {SERVER_CERT}"))
            }
            rustls::Error::InvalidCertificate(error) => {
                TlsError::at(cert, format!("the certificate cannot be used: {error}"))
            }
            error => TlsError::at(key, format!("the key cannot be used: {error}")),
        })?;
        // Connections last for hours: what would be remembered is never asked for again.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self(Arc::new(config)))
    }

    pub(crate) fn config(&self) -> &Arc<ServerConfig> {
        &self.0
    }
}

/// What tells whether a client's certificate is good. As with the peers, a list of revoked ones
/// that is out of date lets nobody in, and says nothing of whoever it is not about.
fn verifier(
    directory: &Path,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let (ca, revoked) = (directory.join(CA_CERT), directory.join(CA_CRL));
    let mut roots = RootCertStore::empty();
    for root in all_of(&ca, "certificate")? {
        roots.add(root).map_err(|error| TlsError::at(ca.clone(), error))?;
    }
    let mut builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    if revoked.exists() {
        builder = builder
            .with_crls(all_of::<CertificateRevocationListDer<'_>>(&revoked, "revocation list")?)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration();
    }
    builder.build().map_err(|error| match &error {
        VerifierBuilderError::InvalidCrl(_) => TlsError::at(revoked, error),
        _ => TlsError::at(ca, error),
    })
}

/// Every item of a kind in a PEM file, at least one; `what` is the kind.
fn all_of<T: PemObject>(path: &Path, what: &str) -> Result<Vec<T>, TlsError> {
    let items: Vec<T> = T::pem_slice_iter(&bytes_of(path)?)
        .collect::<Result<_, _>>()
        .map_err(|error| TlsError::at(path.into(), error))?;
    if items.is_empty() {
        return Err(TlsError::at(path.into(), format!("there is no {what} (PEM) in it")));
    }
    Ok(items)
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => TlsError::at(path.into(), "there is no such file"),
        kind => TlsError::at(path.into(), format!("cannot read: {kind}")),
    })
}

/// Why TLS is not possible with the files that were given.
#[derive(Debug)]
pub struct TlsError {
    path: PathBuf,
    what: String,
}

impl TlsError {
    fn at(path: PathBuf, what: impl fmt::Display) -> Self {
        Self { path, what: what.to_string() }
    }
}

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.what)
    }
}

impl std::error::Error for TlsError {}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// A directory with a certificate for everything, and its key.
    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let cert = CertificateParams::new(["localhost".into()]).unwrap().self_signed(&key).unwrap();
        for name in [CA_CERT, SERVER_CERT] {
            fs::write(directory.path().join(name), cert.pem()).unwrap();
        }
        fs::write(directory.path().join(SERVER_KEY), key.serialize_pem()).unwrap();
        directory
    }

    fn refusal(directory: &Path, clients: Clients) -> String {
        Credentials::load(directory, clients).unwrap_err().to_string()
    }

    #[test]
    fn a_file_that_is_missing_is_named_and_the_authority_is_asked_for_only_to_verify_clients() {
        for name in [SERVER_CERT, SERVER_KEY, CA_CERT] {
            let directory = directory();
            let path = directory.path().join(name);
            fs::remove_file(&path).unwrap();
            let error = refusal(directory.path(), Clients::Verified);
            assert_eq!(error, format!("{}: there is no such file", path.display()));
            let unverified = Credentials::load(directory.path(), Clients::Any);
            assert_eq!(unverified.is_ok(), name == CA_CERT);
        }
    }

    #[test]
    fn a_file_without_what_it_is_for_is_named() {
        for name in [SERVER_CERT, SERVER_KEY, CA_CERT, CA_CRL] {
            for text in ["", "rubbish", "-----BEGIN X-----\nAA==\n-----END X-----\n"] {
                let directory = directory();
                let path = directory.path().join(name);
                fs::write(&path, text).unwrap();
                let error = refusal(directory.path(), Clients::Verified);
                assert!(error.starts_with(&format!("{}: there is no ", path.display())), "{error}");
                assert_eq!(error.lines().count(), 1);
            }
        }
    }

    #[test]
    fn a_file_that_is_cut_short_or_is_no_certificate_inside_is_named() {
        for name in [SERVER_CERT, SERVER_KEY, CA_CERT] {
            let directory = directory();
            let path = directory.path().join(name);
            let text = fs::read_to_string(&path).unwrap();
            for bad in [text[..text.len() / 2].to_owned(), text.replace("MII", "AAA")] {
                let bad = if bad == text { text.replace("MIG", "AAA") } else { bad };
                fs::write(&path, bad).unwrap();
                let error = refusal(directory.path(), Clients::Verified);
                assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
                assert_eq!(error.lines().count(), 1);
            }
        }
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let directory = directory();
        let key = directory.path().join(SERVER_KEY);
        fs::write(&key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
        let error = refusal(directory.path(), Clients::Any);
        assert_eq!(error, format!("{}: it is not the key of server-cert.pem", key.display()));
    }
}
