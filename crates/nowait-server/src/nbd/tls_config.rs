//! Certificates and keys for TLS, in the files that qemu-nbd and nbdkit use.
//!
//! Invariant: the loaded files fit together (the key is that of the certificate), so that a client
//! is never offered TLS that cannot work.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::{fmt, fs, io};

use nowait_image::open_message;
use nowait_nbd::secret_file;
use nowait_nbd::tls_words::{certificate_fault, pem_fault, spaced, tls_message};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{InconsistentKeys, RootCertStore, ServerConfig};

use crate::locking::lock;

/// The root certificates of client certificates, if clients are verified.
const CA_CERT: &str = "ca-cert.pem";
/// Certificates that their issuers have revoked; may be absent.
const CA_CRL: &str = "ca-crl.pem";
/// The server's certificate; the certificates between it and the root may follow.
const SERVER_CERT: &str = "server-cert.pem";
const SERVER_KEY: &str = "server-key.pem";
/// Bytes of the file of the server's key that are looked at.
/// Beyond it: the file is refused.
const MAX_KEY_BYTES: u64 = 1 << 20;
/// Error message for a key that the cryptography does not take.
const KEYS: &str = "it is not a key that can be used: RSA keys need 2048, 3072 or 4096 bits, ECDSA keys \
                    the curve P-256 or P-384; Ed25519 keys are taken too";
/// Permission bits of other users in a file's mode.
const OTHERS: u32 = 0o007;

/// Whether connections are encrypted (NBD proto.md, "TLS support").
#[derive(Clone, Debug, Default)]
pub enum Tls {
    /// Never ("NOTLS").
    #[default]
    Off,
    /// If the client asks for it ("SELECTIVETLS", with no export that needs it).
    Offered(Credentials),
    /// Always: without TLS a client gets nothing ("FORCEDTLS").
    Required(Credentials),
}

impl Tls {
    /// The credentials of encrypted connections.
    pub(crate) fn credentials(&self) -> Option<&Credentials> {
        match self {
            Self::Off => None,
            Self::Offered(credentials) | Self::Required(credentials) => Some(credentials),
        }
    }
}

/// Which clients' TLS handshakes succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAuth {
    /// All.
    Any,
    /// Those with a certificate that `ca-cert.pem` vouches for and `ca-crl.pem` does not name.
    Verified,
}

/// The server's certificate and key, and the rule by which it verifies its clients. Clones share
/// them, also when they are replaced.
#[derive(Clone, Debug)]
pub struct Credentials(Arc<Mutex<Arc<ServerConfig>>>);

impl Credentials {
    /// Reads `server-cert.pem` and `server-key.pem` in `directory`; for [`ClientAuth::Verified`]
    /// also `ca-cert.pem` and, if it is there, `ca-crl.pem`. Allows TLS 1.2 and 1.3.
    ///
    /// # Errors
    /// A file is missing, cannot be read or has other contents than its name says, or the files do
    /// not fit together; the error names the file and the reason.
    pub fn load(directory: &Path, clients: ClientAuth) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let (cert, key) = (directory.join(SERVER_CERT), directory.join(SERVER_KEY));
        let chain = all_of::<CertificateDer<'_>>(&cert, "certificate")?;
        let (bytes, found) = secret_file::read(&key, MAX_KEY_BYTES)
            .map_err(|error| TlsError::at(key.clone(), open_message(&key, "read", &error)))?;
        let private = match PrivateKeyDer::from_pem_slice(&bytes) {
            Ok(private) => private,
            Err(pem::Error::NoItemsFound) => {
                return Err(TlsError::at(key, "there is no unencrypted private key (PEM) in it"));
            }
            Err(error) => return Err(TlsError::at(key, pem_fault(&error))),
        };
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::at(directory.into(), tls_message(&error, "a client")))?;
        let builder = match clients {
            ClientAuth::Any => builder.with_no_client_auth(),
            ClientAuth::Verified => {
                builder.with_client_cert_verifier(verifier(directory, &provider)?)
            }
        };
        let mut config = builder.with_single_cert(chain, private).map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                TlsError::at(key, format!("it is not the key of {SERVER_CERT}"))
            }
            rustls::Error::InvalidCertificate(error) => {
                TlsError::at(cert, format!("the certificate {}", certificate_fault(&error)))
            }
            _ => TlsError::at(key, KEYS),
        })?;
        // After all errors, so that a refusal is a single line of output.
        warn_if_open(&directory.join(SERVER_KEY), &found);
        // Connections last for hours: sessions are never resumed.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Self(Arc::new(Mutex::new(Arc::new(config)))))
    }

    /// From now on TLS sessions begin with what `new` has. Those that have begun go on with what
    /// they had.
    pub fn replace(&self, new: &Self) {
        let config = new.config();
        *lock(&self.0) = config;
    }

    /// The configuration that a session begins with now.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        lock(&self.0).clone()
    }
}

/// The verifier of client certificates. As in qemu-nbd and nbdkit, an expired revocation list
/// rejects all clients of its issuer; a client of an issuer without a list is accepted.
fn verifier(
    directory: &Path,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let (ca, revoked) = (directory.join(CA_CERT), directory.join(CA_CRL));
    let mut roots = RootCertStore::empty();
    for root in all_of(&ca, "certificate")? {
        let added = roots.add(root);
        added.map_err(|why| TlsError::at(ca.clone(), tls_message(&why, "the authority")))?;
    }
    let mut builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    if is_there(&revoked)? {
        builder = builder
            .with_crls(all_of::<CertificateRevocationListDer<'_>>(&revoked, "revocation list")?)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration();
    }
    builder.build().map_err(|error| match error {
        VerifierBuilderError::InvalidCrl(why) => {
            TlsError::at(revoked, format!("the list cannot be used ({})", spaced(&why)))
        }
        error => TlsError::at(ca, format!("it cannot be used ({})", spaced(&error))),
    })
}

/// Whether `path` exists, if only as a dangling link. An absent revocation list counts as empty
/// only if there is no such name.
fn is_there(path: &Path) -> Result<bool, TlsError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(TlsError::at(path.into(), open_message(path, "read", &error))),
    }
}

/// Warns about a private key that every user of this host may read or change.
fn warn_if_open(key: &Path, found: &fs::Metadata) {
    if found.mode() & OTHERS != 0 {
        tracing::warn!("{}: this private key is open to every user (chmod o= it)", key.display());
    }
}

/// All items of a kind in a PEM file, at least one; `what` names the kind.
fn all_of<T: PemObject>(path: &Path, what: &str) -> Result<Vec<T>, TlsError> {
    let items: Vec<T> = T::pem_slice_iter(&bytes_of(path)?)
        .collect::<Result<_, _>>()
        .map_err(|error| TlsError::at(path.into(), pem_fault(&error)))?;
    if items.is_empty() {
        return Err(TlsError::at(path.into(), format!("there is no {what} (PEM) in it")));
    }
    Ok(items)
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|error| TlsError::at(path.into(), open_message(path, "read", &error)))
}

/// Why TLS is not possible with the given files.
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
    use std::os::unix::fs::{lchown, symlink};

    use nowait_testkit::certificates::self_signed;

    use super::*;

    /// A key on a curve that ring does not have.
    const P521_KEY: &str = "-----BEGIN PRIVATE KEY-----
MIHuAgEAMBAGByqGSM49AgEGBSuBBAAjBIHWMIHTAgEBBEIBxYWnGk6ruScgK3Cs
E60n8vPJaWZ6NgybHLS3F2x/XK1YXpLPydrlJktfZd9Hjf07YlRjoCy2xUeWM7Xo
Vy5is1ihgYkDgYYABAEY/+ib7YCl9d5SoS8fyVXM05QIJKrLEgi69eJwKvegln8T
8OjPkrMFim3W+NC41CKFB+UmyN8ra+BxwPdlEEnd4AA7XNxBWfjfd7KVyiSxXWPF
1gZFEUG5hze4e5KWhBdh1Nkp607UG4upHDaUWSezNoJ8uv0CxKHfAVWhi+O1i0ec
oQ==
-----END PRIVATE KEY-----
";

    /// A directory with a self-signed certificate for both roles, and its key.
    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        self_signed(directory.path());
        fs::copy(directory.path().join(SERVER_CERT), directory.path().join(CA_CERT)).unwrap();
        directory
    }

    fn refusal(directory: &Path, clients: ClientAuth) -> String {
        Credentials::load(directory, clients).unwrap_err().to_string()
    }

    #[test]
    fn a_missing_file_is_named_and_the_ca_certificate_is_needed_only_to_verify_clients() {
        for name in [SERVER_CERT, SERVER_KEY, CA_CERT] {
            let directory = directory();
            let path = directory.path().join(name);
            fs::remove_file(&path).unwrap();
            let error = refusal(directory.path(), ClientAuth::Verified);
            assert_eq!(error, format!("{}: there is no such file", path.display()));
            let unverified = Credentials::load(directory.path(), ClientAuth::Any);
            assert_eq!(unverified.is_ok(), name == CA_CERT);
        }
    }

    #[test]
    fn a_file_without_its_expected_contents_is_named() {
        for name in [SERVER_CERT, SERVER_KEY, CA_CERT, CA_CRL] {
            for text in ["", "rubbish", "-----BEGIN X-----\nAA==\n-----END X-----\n"] {
                let directory = directory();
                let path = directory.path().join(name);
                fs::write(&path, text).unwrap();
                let error = refusal(directory.path(), ClientAuth::Verified);
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
                let error = refusal(directory.path(), ClientAuth::Verified);
                assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
                assert_eq!(error.lines().count(), 1);
            }
        }
    }

    #[test]
    fn a_revocation_list_that_is_a_link_to_nothing_is_an_error_and_not_an_empty_list() {
        let directory = directory();
        let path = directory.path().join(CA_CRL);
        std::os::unix::fs::symlink("/nonexistent/crl.pem", &path).unwrap();
        let error = refusal(directory.path(), ClientAuth::Verified);
        let words = "it is a link to a file that is not there";
        assert_eq!(error, format!("{}: {words}", path.display()));
    }

    #[test]
    fn an_unsupported_key_is_refused_with_a_list_of_the_supported_kinds() {
        let directory = directory();
        let key = directory.path().join(SERVER_KEY);
        fs::write(&key, P521_KEY).unwrap();
        let error = refusal(directory.path(), ClientAuth::Any);
        assert_eq!(error, format!("{}: {KEYS}", key.display()));
    }

    #[test]
    fn a_key_by_a_link_is_taken_and_one_of_another_user_or_in_a_pipe_is_not() {
        let directory = directory();
        let (key, file) = (directory.path().join(SERVER_KEY), directory.path().join("file"));
        fs::rename(&key, &file).unwrap();
        symlink("file", &key).unwrap();
        Credentials::load(directory.path(), ClientAuth::Any).unwrap();
        match lchown(&key, Some(1), None) {
            Ok(()) => {
                let error = refusal(directory.path(), ClientAuth::Any);
                assert!(error.contains("a link of another user"), "{error}");
                fs::rename(&file, &key).unwrap();
                lchown(&key, Some(1), None).unwrap();
                let error = refusal(directory.path(), ClientAuth::Any);
                assert!(error.contains("another user's"), "{error}");
            }
            Err(_) => nowait_testkit::say_skipped("needs root: to give a file to another user"),
        }
        fs::remove_file(&key).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &key, rustix::fs::Mode::RUSR).unwrap();
        let error = refusal(directory.path(), ClientAuth::Any);
        assert!(error.contains("not a regular file"), "{error}");
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let directory = directory();
        let key = directory.path().join(SERVER_KEY);
        fs::copy(self::directory().path().join(SERVER_KEY), &key).unwrap();
        let error = refusal(directory.path(), ClientAuth::Any);
        assert_eq!(error, format!("{}: it is not the key of server-cert.pem", key.display()));
    }
}
