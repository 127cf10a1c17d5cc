//! TLS credentials: verifies the server's certificate and presents the client's, from the file
//! names that libnbd and QEMU use.
//!
//! Invariant: a server is accepted only if `ca-cert.pem` verifies its certificate. Over TCP the
//! certificate must also be for the name of the URI; on a Unix socket, only if a name was given.

use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    Resumption, UnbufferedClientConnection, VerifierBuilderError, WebPkiServerVerifier,
};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{self, cipher_suite::TLS13_AES_256_GCM_SHA384};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use crate::address::Address;
use crate::secret_file;
use crate::tls_words::{certificate_fault, pem_fault, spaced, tls_message};
use crate::uri::{NbdUri, TlsParams};

/// The trusted certificate authorities, and their revocation lists, which may be absent.
const CA_CERT: &str = "ca-cert.pem";
const CA_CRL: &str = "ca-crl.pem";
/// The client's certificate and key, for servers that ask for them; both may be absent.
const CLIENT_CERT: &str = "client-cert.pem";
const CLIENT_KEY: &str = "client-key.pem";
/// Bytes of the file of a client's key that are looked at.
/// Beyond it: the file is refused.
const MAX_KEY_BYTES: u64 = 1 << 20;
/// The refusal of a URI with TLS where no directory is known.
const NO_DIRECTORY: &str =
    "TLS needs certificates (give their directory with --tls-certs, or ?tls-certificates=DIR)";
/// The server name where none is known.
const NO_NAME: &str = "localhost";

/// The cipher suites that a client offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CipherSuites {
    /// All that the cryptography has, of TLS 1.2 and 1.3.
    #[default]
    All,
    /// `TLS_AES_256_GCM_SHA384` of TLS 1.3, so that no server has a cheaper one.
    Tls13Aes256,
}

/// Which file of the credentials cannot be used, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialsError(String);

impl fmt::Display for CredentialsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for CredentialsError {}

impl From<String> for CredentialsError {
    fn from(words: String) -> Self {
        Self(words)
    }
}

/// The configuration of a TLS session and the name of the server.
#[derive(Clone, Debug)]
pub struct Credentials {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Credentials {
    /// Loads the files in `directory`. The server's certificate must be for `name`, if one is
    /// given; `suites` are offered.
    ///
    /// # Errors
    /// A file is missing or invalid, or `name` is not a valid name.
    pub fn load(
        directory: &Path,
        name: Option<&str>,
        suites: CipherSuites,
    ) -> Result<Self, CredentialsError> {
        let mut provider = ring::default_provider();
        if suites == CipherSuites::Tls13Aes256 {
            provider.cipher_suites = vec![TLS13_AES_256_GCM_SHA384];
        }
        let provider = Arc::new(provider);
        let web_pki = verifier(directory, &provider)?;
        let verifier: Arc<dyn ServerCertVerifier> = match name {
            Some(_) => web_pki,
            None => Arc::new(AnyName(web_pki)),
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let (cert, key) = (directory.join(CLIENT_CERT), directory.join(CLIENT_KEY));
        let mut config = match is_there(&cert)? {
            false => builder.with_no_client_auth(),
            true => {
                let chain = all_of::<CertificateDer<'_>>(&cert)?;
                let bytes = secret_file::read(&key, MAX_KEY_BYTES);
                let bytes = bytes.map_err(|error| why(&key, &pem::Error::Io(error)))?.0;
                let private = PrivateKeyDer::from_pem_slice(&bytes).map_err(|e| why(&key, &e))?;
                let built = builder.with_client_auth_cert(chain, private);
                built.map_err(|error| unusable(&error, &cert, &key))?
            }
        };
        // Connections last; none is resumed.
        config.resumption = Resumption::disabled();
        config.enable_sni = name.is_some();
        let server_name = name.unwrap_or(NO_NAME);
        let name = ServerName::try_from(server_name.to_owned());
        let name = name
            .map_err(|_| format!("'{server_name}' is not a name that a certificate can be for"))?;
        Ok(Self { config: Arc::new(config), name })
    }

    /// The configuration that a session begins with, and the name that the server's certificate is for.
    #[must_use]
    pub fn config(&self) -> (Arc<ClientConfig>, ServerName<'static>) {
        (self.config.clone(), self.name.clone())
    }

    /// The credentials for the export at `uri`, if that asks for TLS. `directory` has the files where
    /// the URI names no directory. Over TCP the server's certificate must be for the URI's host, or
    /// for the name that the URI gives.
    ///
    /// # Errors
    /// Like [`Credentials::load`]; no directory is known.
    pub fn for_uri(
        uri: &NbdUri,
        directory: Option<&Path>,
    ) -> Result<Option<Self>, CredentialsError> {
        let TlsParams::Tls { certificates: own, name } = &uri.security else { return Ok(None) };
        let directory = own
            .as_deref()
            .or(directory)
            .ok_or_else(|| CredentialsError::from(NO_DIRECTORY.to_owned()))?;
        let host = match &uri.address {
            Address::Tcp { host, .. } => Some(host),
            Address::Unix(_) => None,
        };
        let name = name.as_ref().or(host).map(String::as_str);
        Self::load(directory, name, CipherSuites::All).map(Some)
    }

    /// A session before its handshake.
    pub(super) fn connection(&self) -> Result<UnbufferedClientConnection, Error> {
        UnbufferedClientConnection::new(self.config.clone(), self.name.clone())
    }
}

/// Which of the client's files cannot be used, and why.
fn unusable(error: &Error, cert: &Path, key: &Path) -> String {
    let (cert, key) = (cert.display(), key.display());
    match error {
        Error::InconsistentKeys(_) => format!("{key}: it is not the key of {CLIENT_CERT}"),
        Error::InvalidCertificate(error) => {
            format!("{cert}: the certificate {}", certificate_fault(error))
        }
        _ => format!(
            "{key}: it is not a key that can be used: RSA keys need 2048, 3072 or 4096 bits, ECDSA \
             keys the curve P-256 or P-384; Ed25519 keys are taken too"
        ),
    }
}

fn verifier(
    directory: &Path,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, String> {
    let (ca, revoked) = (directory.join(CA_CERT), directory.join(CA_CRL));
    let mut roots = RootCertStore::empty();
    for root in all_of(&ca)? {
        roots.add(root).map_err(|error| {
            format!("{}: {}", ca.display(), tls_message(&error, "the authority"))
        })?;
    }
    let mut builder =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    // A dangling symbolic link is an error: only an absent file means that no certificate is
    // revoked.
    if is_there(&revoked)? {
        builder = builder
            .with_crls(all_of::<CertificateRevocationListDer<'_>>(&revoked)?)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration();
    }
    builder.build().map_err(|error| match error {
        VerifierBuilderError::InvalidCrl(why) => {
            format!("{}: the list cannot be used ({})", revoked.display(), spaced(&why))
        }
        error => format!("{}: it cannot be used ({})", ca.display(), spaced(&error)),
    })
}

/// Whether `path` exists; a dangling symbolic link counts.
fn is_there(path: &Path) -> Result<bool, String> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(format!("cannot read {}: {error}", path.display())),
    }
}

/// Every item of a kind in a PEM file, at least one.
fn all_of<T: PemObject>(path: &Path) -> Result<Vec<T>, String> {
    let items = T::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<T>, _>>);
    match items {
        Ok(items) if items.is_empty() => Err(why(path, &pem::Error::NoItemsFound)),
        items => items.map_err(|error| why(path, &error)),
    }
}

fn why(path: &Path, error: &pem::Error) -> String {
    let path = path.display();
    match error {
        pem::Error::Io(error) if error.kind() == io::ErrorKind::NotFound => {
            format!("{path}: there is no such file")
        }
        pem::Error::Io(error) => format!("{path}: cannot read: {error}"),
        error => format!("{path}: {}", pem_fault(error)),
    }
}

/// Accepts a server with a verified certificate, whatever its name.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // The name is checked last, after all other checks have passed.
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
        {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
