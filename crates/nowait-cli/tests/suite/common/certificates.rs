//! Certificates for one test, under the file names that libnbd, QEMU, nbdkit and nowait use.
//!
//! Invariant: each authority has its own key; no key outlives its test.

use std::fs;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber, date_time_ymd,
};

/// The serial number of the certificate that [`Authority::revoke`] revokes.
const REVOKED: u64 = 666;

/// The role of a certificate's owner.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A server at `localhost` or 127.0.0.1.
    Server,
    Client,
}

/// The defect of a certificate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// It ended in 2001.
    Expired,
    /// It has the number that the authority revokes.
    Revoked,
}

/// A certificate authority.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    /// An authority with a new key.
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a root").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes its own certificate into `directory` as the trusted authority.
    pub(crate) fn trusted_in(&self, directory: &Path) {
        fs::write(directory.join("ca-cert.pem"), &self.pem).expect("a file");
    }

    /// Writes a signed certificate and its key into `directory`.
    pub(crate) fn certify(&self, directory: &Path, role: Role, flaw: Flaw) {
        let (name, usage) = match role {
            Role::Server => ("server", ExtendedKeyUsagePurpose::ServerAuth),
            Role::Client => ("client", ExtendedKeyUsagePurpose::ClientAuth),
        };
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).expect("plain names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        match flaw {
            Flaw::None => {}
            Flaw::Expired => params.not_after = date_time_ymd(2001, 1, 1),
            Flaw::Revoked => params.serial_number = Some(SerialNumber::from(REVOKED)),
        }
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        fs::write(directory.join(format!("{name}-cert.pem")), cert.pem()).expect("a file");
        fs::write(directory.join(format!("{name}-key.pem")), key.serialize_pem()).expect("a file");
    }

    /// Writes its revocation list into `directory`.
    pub(crate) fn revoke(&self, directory: &Path) {
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
