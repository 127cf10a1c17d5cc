//! Faults of an answer of a store, or with there being none.
//!
//! Invariant: the text of a fault is one line without a secret: no URL and no header is in it.

use std::error::Error as _;
use std::fmt;

use hyper::StatusCode;
use nowait_nbd::tls_words::certificate_fault;
use rustls::CertificateError;

/// Why a request to a store has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It may succeed later.
    Transient(String),
    /// It may succeed later, if fewer requests are made.
    Busy(String),
    /// The object is not what it was when it was opened.
    Changed(String),
    /// The store refuses it, and would again.
    Refused(String),
}

impl Fault {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Transient(text)
            | Self::Busy(text)
            | Self::Changed(text)
            | Self::Refused(text) => text,
        }
    }

    /// The fault behind an error of the library in answer to the first request: there is no object yet
    /// that could have changed, and no server that was trusted before.
    pub(super) fn at_open(error: &object_store::Error) -> Self {
        use BadAnswer::{Certificate, NoHttp, OtherLength, RedirectPort};
        match (Self::of(error), bad_answer(error)) {
            (Self::Changed(text), _)
            | (
                Self::Transient(text),
                Some(Certificate(_) | NoHttp | OtherLength | RedirectPort(_)),
            ) => Self::Refused(text),
            (fault, _) => fault,
        }
    }

    /// Like [`Fault::of`], for the read of an object that was opened. Credentials that have expired and are
    /// `renewable` may be replaced soon.
    pub(super) fn of_read(error: &object_store::Error, renewable: bool) -> Self {
        match bad_answer(error) {
            Some(answer) if renewable && answer.says_expired() => {
                Self::Transient(answer.to_string())
            }
            _ => Self::of(error),
        }
    }

    /// The fault behind an error of the library.
    pub(super) fn of(error: &object_store::Error) -> Self {
        if let Some(answer) = bad_answer(error) {
            return answer.fault();
        }
        let mut innermost = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            innermost = cause.to_string();
            source = cause.source();
        }
        let text = nowait_image::plain(&innermost);
        match error {
            object_store::Error::Generic { .. } => Self::Transient(text),
            _ => Self::Refused(text),
        }
    }
}

/// A failed request: its fault, and the status of the answer, if there was one.
pub(super) struct Failure {
    pub(super) fault: Fault,
    pub(super) status: Option<u16>,
}

impl From<object_store::Error> for Failure {
    fn from(error: object_store::Error) -> Self {
        Self { fault: Fault::of(&error), status: status_of(&error) }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self { fault, status: None }
    }
}

impl Failure {
    pub(super) fn refused(text: impl Into<String>) -> Self {
        Fault::Refused(text.into()).into()
    }
}

/// The status of the answer that `error` is about, if it is about one.
pub(super) fn status_of(error: &object_store::Error) -> Option<u16> {
    match bad_answer(error)? {
        BadAnswer::Status { status, .. } => Some(status.as_u16()),
        _ => None,
    }
}

/// The answer that an error of the library is about.
fn bad_answer(error: &object_store::Error) -> Option<&BadAnswer> {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(answer) = cause.downcast_ref() {
            return Some(answer);
        }
        source = cause.source();
    }
    None
}

/// An answer that is not the one that was asked for.
#[derive(Clone, Debug)]
pub(super) enum BadAnswer {
    /// With the store's own code of the error, and the region that it says the bucket is in.
    Status { status: StatusCode, code: Option<String>, region: Option<String> },
    /// All of the object in answer to a request for a part of it.
    IgnoresRanges,
    /// A range that no object has.
    NoRange,
    /// Bytes that are not the object's as they are, but in this encoding, if that is a short word.
    Encoded(String),
    /// A body that is longer or shorter than the range that it has.
    OtherLength,
    /// The server speaks other versions of HTTP only.
    NoHttp,
    /// It leads to a place that is not gone to.
    Redirect(&'static str),
    /// It leads to a port that this process may not connect to. Another answer may lead elsewhere.
    RedirectPort(u16),
    /// The single sign-on of this profile has ended, or has not begun.
    SignedOut(String),
    /// The program that was to give the credentials has given none, for this reason.
    NoCredentials(String),
    /// The certificate of the server is not accepted. It may have a better one later.
    Certificate(CertificateError),
}

impl BadAnswer {
    /// Whether it may be that the credentials have expired.
    fn says_expired(&self) -> bool {
        let Self::Status { status, code, .. } = self else {
            return matches!(self, Self::SignedOut(_) | Self::NoCredentials(_));
        };
        let codes = ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken"];
        *status == StatusCode::UNAUTHORIZED
            || code.as_deref().is_some_and(|code| codes.contains(&code))
    }

    fn fault(&self) -> Fault {
        let text = self.to_string();
        match self {
            Self::Status { status, .. } => match status.as_u16() {
                412 | 416 => Fault::Changed(text),
                429 | 503 => Fault::Busy(text),
                408 | 425 | 500..=599 => Fault::Transient(text),
                _ => Fault::Refused(text),
            },
            Self::IgnoresRanges
            | Self::NoRange
            | Self::Encoded(_)
            | Self::Redirect(_)
            | Self::SignedOut(_)
            | Self::NoCredentials(_) => Fault::Refused(text),
            Self::Certificate(_) | Self::NoHttp | Self::OtherLength | Self::RedirectPort(_) => {
                Fault::Transient(text)
            }
        }
    }
}

impl fmt::Display for BadAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (status, code, region) = match self {
            Self::Status { status, code, region } => (status, code, region),
            Self::Redirect(why) => return f.write_str(why),
            Self::NoCredentials(why) => return f.write_str(why),
            Self::RedirectPort(port) => {
                return write!(
                    f,
                    "the server redirects to port {port}, which the sandbox does not allow: no server \
                     did so when this one was started (restart it, or give --sandbox off)"
                );
            }
            Self::SignedOut(profile) => {
                return write!(
                    f,
                    "the single sign-on of the profile '{profile}' has expired or was not made (aws \
                     sso login --profile '{profile}')"
                );
            }
            Self::NoRange => return f.write_str("the server sends a range that no object has"),
            Self::IgnoresRanges => {
                return f.write_str(
                    "the server sends the whole object in answer to a request for a part of it, \
                     so it cannot be read from there (a proxy or a server without byte ranges)",
                );
            }
            Self::Encoded(encoding) => {
                let encoding = if encoding.is_empty() { "an encoding" } else { encoding };
                return write!(
                    f,
                    "the server sends the object encoded ({encoding}), so the bytes are not the \
                     disk's (store it without Content-Encoding; a proxy must not compress it)"
                );
            }
            Self::OtherLength => {
                return f.write_str("the length of the answer is not that of the range in it");
            }
            Self::NoHttp => {
                return f.write_str(
                    "cannot connect: the server speaks neither HTTP/1.1 nor HTTP/2 on this port",
                );
            }
            Self::Certificate(error) => return write_certificate_error(f, error),
        };
        let what = match status.as_u16() {
            301 | 307 | 308 | 400 if region.is_some() => "the bucket is in another region",
            401 => "the store does not accept the credentials",
            403 => "the store refuses access",
            404 if code.as_deref() == Some("NoSuchBucket") => "there is no such bucket",
            404 if code.as_deref() == Some("ContainerNotFound") => "there is no such container",
            404 if code.as_deref() == Some("NoSuchUpload") => "there is no such upload any more",
            404 => "there is no such object",
            407 => "the proxy does not accept the user and the password, or wants both",
            412 => "the object has changed since it was opened",
            416 => "the store has no bytes in the range that was asked for",
            429 | 503 => "the store asks to come back later",
            500..=599 => "the store has an error",
            300..=399 => "the store redirects (is the region right?)",
            _ => "the store refuses the request",
        };
        write!(f, "{what} ({}", status.as_u16())?;
        code.iter().try_for_each(|code| write!(f, " {code}"))?;
        region.iter().try_for_each(|region| write!(f, "; AWS_REGION={region}"))?;
        f.write_str(")")
    }
}

fn write_certificate_error(f: &mut fmt::Formatter<'_>, error: &CertificateError) -> fmt::Result {
    f.write_str("cannot connect: the certificate of the server ")?;
    match error {
        CertificateError::UnknownIssuer => f.write_str(
            "is signed by no authority that this host trusts (SSL_CERT_FILE names another one)",
        ),
        other => f.write_str(&certificate_fault(other)),
    }
}

impl std::error::Error for BadAnswer {}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, region: Option<&str>) -> BadAnswer {
        let status = StatusCode::from_u16(status).unwrap();
        BadAnswer::Status { status, code: Some("Code".into()), region: region.map(Into::into) }
    }

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let is_transient =
            |status| matches!(answer(status, None).fault(), Fault::Transient(_) | Fault::Busy(_));
        let transient: Vec<_> = (300..600).filter(|&status| is_transient(status)).collect();
        let wanted: Vec<_> = [408, 425, 429].into_iter().chain(500..600).collect();
        assert_eq!(transient, wanted);
    }

    #[test]
    fn the_region_of_a_bucket_is_told() {
        let text = answer(301, Some("eu-west-1")).to_string();
        assert_eq!(text, "the bucket is in another region (301 Code; AWS_REGION=eu-west-1)");
    }
}
