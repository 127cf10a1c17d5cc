//! Certificates for one test, under the file names that libnbd, QEMU, nbdkit and nowait use.
//!
//! Invariant: each authority has its own key; no key outlives its test.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, SupportedProtocolVersion,
};

/// The name of every server here.
const LOCALHOST: &str = "localhost";
/// The serial number of the certificate that [`Authority::revoke`] revokes.
const REVOKED: u64 = 666;

/// The role of a certificate's owner.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A server at `localhost` or 127.0.0.1.
    Server,
    /// A client, called `client`.
    Client,
}

/// The defect of a certificate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// It is good.
    None,
    /// It ended in 2001.
    Expired,
    /// It has the number that the authority revokes.
    Revoked,
    /// It is that of another host.
    Elsewhere,
}

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// An authority with a new key.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a root").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes its own certificate into `directory` as the trusted authority.
    pub fn trusted_in(&self, directory: &Path) {
        fs::write(directory.join("ca-cert.pem"), &self.pem).expect("a file");
    }

    /// Writes a signed certificate and its key into `directory`.
    pub fn certify(&self, directory: &Path, role: Role, flaw: Flaw) {
        let (name, usage) = match role {
            Role::Server => ("server", ExtendedKeyUsagePurpose::ServerAuth),
            Role::Client => ("client", ExtendedKeyUsagePurpose::ClientAuth),
        };
        let names = match flaw {
            Flaw::Elsewhere => vec!["elsewhere.example".to_owned()],
            _ => vec![LOCALHOST.to_owned(), "127.0.0.1".to_owned()],
        };
        let mut params = CertificateParams::new(names).expect("plain names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        match flaw {
            Flaw::None | Flaw::Elsewhere => {}
            Flaw::Expired => params.not_after = date_time_ymd(2001, 1, 1),
            Flaw::Revoked => params.serial_number = Some(SerialNumber::from(REVOKED)),
        }
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        fs::write(directory.join(format!("{name}-cert.pem")), cert.pem()).expect("a file");
        fs::write(directory.join(format!("{name}-key.pem")), key.serialize_pem()).expect("a file");
    }

    /// Writes its revocation list into `directory`.
    pub fn revoke(&self, directory: &Path) {
        let revoked = RevokedCertParams {
            serial_number: SerialNumber::from(REVOKED),
            revocation_time: date_time_ymd(2002, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: date_time_ymd(2002, 1, 1),
            next_update: date_time_ymd(2999, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: vec![revoked],
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(&self.issuer).expect("a list").pem().expect("PEM");
        fs::write(directory.join("ca-crl.pem"), list).expect("a file");
    }
}

/// A server that shows the certificate in `directory`, and asks for none.
pub fn server_of(directory: &Path) -> Arc<ServerConfig> {
    let pem = |name: &str| directory.join(name);
    let chain = CertificateDer::pem_file_iter(pem("server-cert.pem")).expect("a certificate");
    let chain = chain.collect::<Result<_, _>>().expect("PEM");
    let key = PrivateKeyDer::from_pem_file(pem("server-key.pem")).expect("a key");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain, key);
    Arc::new(config.expect("a pair"))
}

/// Writes a certificate of `localhost` that signs itself, and its key, into `directory`, as a
/// server's.
pub fn self_signed(directory: &Path) -> CertificateDer<'static> {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new([LOCALHOST.to_owned()]).expect("a plain name");
    let cert = params.self_signed(&key).expect("a certificate");
    fs::write(directory.join("server-cert.pem"), cert.pem()).expect("a file");
    fs::write(directory.join("server-key.pem"), key.serialize_pem()).expect("a file");
    cert.der().clone()
}

/// Writes a certificate of `localhost` that signs itself as an authority's, and its key, into
/// `directory`, as a server's and as that of the trusted authority: as `openssl req -x509` makes it.
pub fn self_signed_authority(directory: &Path) {
    let key = KeyPair::generate().expect("a key");
    let names = [LOCALHOST.to_owned(), "127.0.0.1".to_owned()];
    let mut params = CertificateParams::new(names).expect("plain names");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).expect("a certificate").pem();
    fs::write(directory.join("server-cert.pem"), &pem).expect("a file");
    fs::write(directory.join("ca-cert.pem"), &pem).expect("a file");
    fs::write(directory.join("server-key.pem"), key.serialize_pem()).expect("a file");
}

/// A client without a certificate, for a server at `localhost` that `root` has certified; it speaks
/// only `versions` of TLS.
pub fn client_of(
    root: CertificateDer<'static>,
    versions: &[&'static SupportedProtocolVersion],
) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(root).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(LOCALHOST).expect("a name");
    ClientConnection::new(Arc::new(config), name).expect("a client")
}
