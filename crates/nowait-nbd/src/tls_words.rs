//! Errors of TLS, of certificates and of PEM files in plain words.
//!
//! Invariant: no name of a type or of a field of Rust is in the words, and each is one line.

use std::fmt::Debug;

use rustls::pki_types::pem;
use rustls::{CertificateError, Error};

/// The message for a certificate of version 1, which `openssl x509 -req` makes where it is given no
/// extensions.
const VERSION_1: &str = "is of version 1, and TLS needs version 3 (make it with \
                         'openssl x509 -req -extfile FILE'; docs/operating.md#tls)";

/// The message for a certificate of an authority that a server or client shows, as `openssl req -x509`
/// makes it.
const CA_AS_PEER: &str = "is that of an authority, and not of a server or client (make it with \
                          'openssl req -x509 -addext basicConstraints=critical,CA:FALSE -addext \
                          subjectAltName=DNS:HOST')";

/// The fault of a certificate, as the rest of a sentence that begins with the certificate.
#[must_use]
pub fn certificate_fault(error: &CertificateError) -> String {
    use CertificateError as E;
    let words = match error {
        E::Expired | E::ExpiredContext { .. } => "has expired",
        E::NotValidYet | E::NotValidYetContext { .. } => {
            "is not valid yet (is the clock of this host right?)"
        }
        E::Revoked => "is revoked",
        E::UnknownRevocationStatus => "may be revoked: no list says",
        E::ExpiredRevocationList | E::ExpiredRevocationListContext { .. } => {
            "cannot be checked: the list of revoked certificates has expired"
        }
        E::UnknownIssuer => "is signed by an authority that is not trusted here",
        E::BadEncoding => "is damaged",
        E::BadSignature => "has a wrong signature",
        E::UnsupportedSignatureAlgorithmContext { .. }
        | E::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "is signed by an algorithm that is not supported"
        }
        E::NotValidForName => "is for another host",
        E::NotValidForNameContext { expected, presented } => {
            let names: Vec<String> = presented.iter().map(|name| quoted(name)).collect();
            let names = if names.is_empty() { "no host".into() } else { names.join(", ") };
            return format!("is for {names}, not for {}", expected.to_str());
        }
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => {
            "is made for another purpose (extended key usage: a server's has serverAuth, a \
             client's clientAuth)"
        }
        E::UnhandledCriticalExtension => "has a critical extension that is not known",
        // Other errors of webpki have names only; its types are not those of a dependency here.
        E::Other(other) => return other_fault(&other.to_string()),
        other => return format!("cannot be used ({})", spaced(other)),
    };
    words.to_owned()
}

fn other_fault(name: &str) -> String {
    match name {
        "UnsupportedCertVersion" => VERSION_1.to_owned(),
        "CaUsedAsEndEntity" => CA_AS_PEER.to_owned(),
        "EndEntityUsedAsCa" => "is signed by a certificate that is not an authority's".to_owned(),
        name => format!("cannot be used ({})", spaced_name(name)),
    }
}

/// Why TLS with `peer` ("the client", "the server") has failed.
#[must_use]
pub fn tls_message(error: &Error, peer: &str) -> String {
    match error {
        Error::InvalidCertificate(error) => {
            format!("the certificate of {peer} {}", certificate_fault(error))
        }
        Error::NoCertificatesPresented => format!("{peer} has sent no certificate"),
        Error::AlertReceived(alert) => {
            format!("{peer} has closed TLS ({})", alert_words(&spaced(alert)))
        }
        Error::InvalidMessage(_) => format!("what {peer} sends is not TLS"),
        Error::PeerIncompatible(why) => {
            format!("{peer} and this program have no way of TLS in common ({})", spaced(why))
        }
        Error::PeerMisbehaved(why) => format!("{peer} breaks the rules of TLS ({})", spaced(why)),
        Error::InappropriateMessage { .. } | Error::InappropriateHandshakeMessage { .. } => {
            format!("{peer} breaks the rules of TLS (a message that is not due)")
        }
        Error::DecryptError => format!("what {peer} has sent cannot be decrypted"),
        Error::InvalidCertRevocationList(why) => {
            format!("the list of revoked certificates cannot be used ({})", spaced(why))
        }
        Error::General(words) => words.clone(),
        other => spaced(other),
    }
}

/// The reason of an alert whose name is `name`.
fn alert_words(name: &str) -> &str {
    match name {
        "certificate required" | "handshake failure" => "it may want a client's certificate",
        "unknown ca" => "it does not trust the authority of the certificate from here",
        "certificate expired" => "the certificate from here has expired",
        "certificate revoked" => "the certificate from here is revoked",
        "bad certificate" | "certificate unknown" | "unsupported certificate" => {
            "it does not accept the certificate from here"
        }
        "protocol version" => "it speaks another version of TLS",
        name => name,
    }
}

/// Why a PEM file cannot be used, except that it cannot be read.
#[must_use]
pub fn pem_fault(error: &pem::Error) -> String {
    match error {
        pem::Error::MissingSectionEnd { .. } => "it is cut short: an END line is missing".into(),
        pem::Error::IllegalSectionStart { .. } => "it is damaged: a BEGIN line is wrong".into(),
        pem::Error::Base64Decode(_) => "it is damaged: what is in it is not base64".into(),
        pem::Error::NoItemsFound => "it holds nothing of what its name says (PEM)".into(),
        pem::Error::SectionTooLarge => "it is too large".into(),
        other => spaced(other),
    }
}

/// The name of a variant of an enum as words, without what is in it: `BadDer` is "bad der".
#[must_use]
pub fn spaced(variant: &impl Debug) -> String {
    spaced_name(&format!("{variant:?}"))
}

fn spaced_name(name: &str) -> String {
    let mut words = String::new();
    let mut after_small = false;
    for letter in name.chars().take_while(|letter| letter.is_alphanumeric()) {
        if after_small && letter.is_uppercase() {
            words.push(' ');
        }
        after_small = letter.is_lowercase() || letter.is_numeric();
        words.extend(letter.to_lowercase());
    }
    words
}

/// The name in a name of a certificate as webpki formats it: `DnsName("localhost")`.
fn quoted(name: &str) -> String {
    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')')).unwrap_or(name);
    inner.trim_matches('"').chars().filter(|letter| !letter.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::{AlertDescription, InvalidMessage, OtherError, PeerIncompatible};

    use super::*;

    #[test]
    fn errors_of_tls_are_words() {
        let version_1 = OtherError(Arc::new(std::io::Error::other("UnsupportedCertVersion")));
        for (error, words) in [
            (
                Error::InvalidCertificate(CertificateError::UnknownIssuer),
                "the certificate of the client is signed by an authority that is not trusted here",
            ),
            (
                Error::InvalidCertificate(CertificateError::Other(version_1)),
                "the certificate of the client is of version 1, and TLS needs version 3 (make it \
                 with 'openssl x509 -req -extfile FILE'; docs/operating.md#tls)",
            ),
            (
                Error::AlertReceived(AlertDescription::UnknownCA),
                "the client has closed TLS (it does not trust the authority of the certificate \
                 from here)",
            ),
            (
                Error::AlertReceived(AlertDescription::NoRenegotiation),
                "the client has closed TLS (no renegotiation)",
            ),
            (
                Error::PeerIncompatible(PeerIncompatible::NoCipherSuitesInCommon),
                "the client and this program have no way of TLS in common (no cipher suites in \
                 common)",
            ),
            (
                Error::InvalidMessage(InvalidMessage::InvalidContentType),
                "what the client sends is not TLS",
            ),
        ] {
            assert_eq!(tls_message(&error, "the client"), words);
        }
    }

    #[test]
    fn a_certificate_of_an_authority_is_said_to_be_one_with_the_way_to_make_another() {
        let ca = OtherError(Arc::new(std::io::Error::other("CaUsedAsEndEntity")));
        let words = certificate_fault(&CertificateError::Other(ca));
        assert!(words.starts_with("is that of an authority"), "{words}");
        assert!(words.contains("-addext basicConstraints=critical,CA:FALSE -addext"), "{words}");
    }

    #[test]
    fn a_certificate_of_another_host_is_said_to_be_for_whom_it_is() {
        let expected = "other.example".try_into().unwrap();
        let presented = vec!["DnsName(\"localhost\")".into(), "IpAddress(127.0.0.1)".into()];
        let error = CertificateError::NotValidForNameContext { expected, presented };
        assert_eq!(certificate_fault(&error), "is for localhost, 127.0.0.1, not for other.example");
    }
}
