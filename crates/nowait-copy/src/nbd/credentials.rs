//! By what a server is known, and what is shown to it: the files that libnbd and QEMU look for.
//!
//! Invariant: no server is believed that `ca-cert.pem` does not vouch for. Over TCP it must have the
//! name that it was asked for by, too; on a Unix socket, only if a name was given.
//! Knows: nothing. Known by: session, nbd_port.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error, RootCertStore,
    SignatureScheme,
};

/// Whom to believe, and what they have taken back; the latter may be absent.
const CA_CERT: &str = "ca-cert.pem";
const CA_CRL: &str = "ca-crl.pem";
/// What servers are shown that ask for it; both may be absent.
const CLIENT_CERT: &str = "client-cert.pem";
const CLIENT_KEY: &str = "client-key.pem";
/// What a server is called that no name is known of.
const NO_NAME: &str = "localhost";

/// Everything that a session is begun with.
#[derive(Clone, Debug)]
pub(super) struct Credentials {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Credentials {
    /// From the files in `directory`. The server's certificate must be for `name`, if one is given.
    ///
    /// # Errors
    /// Words that say which file is missing, or wrong, and why; or that `name` is none.
    pub(super) fn load(directory: &Path, name: Option<&str>) -> Result<Self, String> {
        let provider = Arc::new(ring::default_provider());
        let known = verifier(directory, &provider)?;
        let verifier: Arc<dyn ServerCertVerifier> = match name {
            Some(_) => known,
            None => Arc::new(AnyName(known)),
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let (cert, key) = (directory.join(CLIENT_CERT), directory.join(CLIENT_KEY));
        let mut config = match cert.exists() {
            false => builder.with_no_client_auth(),
            true => {
                let chain = all_of::<CertificateDer<'_>>(&cert)?;
                let private = PrivateKeyDer::from_pem_file(&key).map_err(|e| why(&key, &e))?;
                let built = builder.with_client_auth_cert(chain, private);
                built.map_err(|error| format!("{}: {error}", key.display()))?
            }
        };
        // A copy is one session for each connection, and none is taken up again.
        config.resumption = Resumption::disabled();
        config.enable_sni = name.is_some();
        let called = name.unwrap_or(NO_NAME);
        let name = ServerName::try_from(called.to_owned());
        let name =
            name.map_err(|_| format!("'{called}' is no name that a certificate can be for"))?;
        Ok(Self { config: Arc::new(config), name })
    }

    /// A session that has not begun.
    pub(super) fn connection(&self) -> Result<ClientConnection, Error> {
        ClientConnection::new(self.config.clone(), self.name.clone())
    }
}

fn verifier(
    directory: &Path,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, String> {
    let (ca, revoked) = (directory.join(CA_CERT), directory.join(CA_CRL));
    let said = |error: &dyn std::fmt::Display| format!("{}: {error}", ca.display());
    let mut roots = RootCertStore::empty();
    for root in all_of(&ca)? {
        roots.add(root).map_err(|error| said(&error))?;
    }
    let mut builder =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    if revoked.exists() {
        builder = builder
            .with_crls(all_of::<CertificateRevocationListDer<'_>>(&revoked)?)
            .allow_unknown_revocation_status()
            .enforce_revocation_expiration();
    }
    builder.build().map_err(|error| said(&error))
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
        pem::Error::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
            format!("there is no file {path}")
        }
        pem::Error::Io(error) => format!("cannot read {path}: {}", crate::error::words(error)),
        pem::Error::NoItemsFound => format!("{path}: it holds nothing of what its name says (PEM)"),
        error => format!("{path}: {error}"),
    }
}

/// Believes a server that is vouched for, whatever its name.
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
        // The name is looked at last, when all else was found to be good.
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
