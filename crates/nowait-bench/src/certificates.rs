//! The certificates of the servers in the tables over TLS, created for one measurement.
//!
//! Invariant: all servers get the same files, in the layout that each of them expects; the keys are
//! removed after the measurement.

use std::path::Path;
use std::{fs, io};

use nowait_nbd::client::{CipherSuites, Credentials};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use tempfile::TempDir;

/// The subject of the certificate.
const NAME: &str = "localhost";
/// The offered cipher suite, as shown in reports: the one that clients with GnuTLS (libnbd, QEMU)
/// prefer.
pub(crate) const SUITE: &str = "TLS 1.3 with TLS_AES_256_GCM_SHA384";

/// A directory with `ca-cert.pem`, `server-cert.pem` and `server-key.pem`; removed on drop.
pub(crate) struct Certificates {
    directory: TempDir,
    /// The client's credentials; it trusts the authority.
    credentials: Credentials,
}

impl Certificates {
    /// Creates an authority and a server certificate that it signs, with new keys (ECDSA on P-256).
    pub(crate) fn make() -> io::Result<Certificates> {
        let directory = TempDir::with_prefix("nowait-bench-tls-")?;
        let write = |name: &str, pem: String| fs::write(directory.path().join(name), pem);

        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "nowait bench");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let root = params.self_signed(&key).map_err(io::Error::other)?;
        write("ca-cert.pem", root.pem())?;
        let issuer = Issuer::new(params, key);

        let mut params = CertificateParams::new([NAME.to_owned()]).map_err(io::Error::other)?;
        params.distinguished_name.push(DnType::CommonName, NAME);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let server = params.signed_by(&key, &issuer).map_err(io::Error::other)?;
        write("server-cert.pem", server.pem())?;
        write("server-key.pem", key.serialize_pem())?;
        // One cipher suite is offered, so that no server is measured with a cheaper one than another.
        let suites = CipherSuites::Tls13Aes256;
        let credentials =
            Credentials::load(directory.path(), Some(NAME), suites).map_err(io::Error::other)?;
        Ok(Certificates { directory, credentials })
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The client's side: the name of the server is verified.
    pub(crate) fn credentials(&self) -> &Credentials {
        &self.credentials
    }
}
