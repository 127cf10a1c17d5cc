//! How stores have their requests signed, and what they answer to others.
//!
//! Invariant: it shares no code with the client: a signature is computed again, or checked with the
//! public key.

use std::fmt::Write as _;

use ring::{digest, hmac, signature};

use crate::web_request::Request;

/// The signatures of a kind of store.
#[derive(Clone, Debug)]
pub enum Signer {
    /// S3 (AWS Signature Version 4).
    Aws {
        /// The access key.
        key: String,
        /// The secret.
        secret: String,
        /// The region of the bucket; empty for any.
        region: String,
    },
    /// A web server that wants one header.
    Header(&'static str, String),
    /// Azure (Shared Key).
    Azure {
        /// The name of the account.
        account: String,
        /// Its key, in base64.
        key: String,
    },
    /// Google Cloud Storage: a token that the owner of a service account has signed itself (RFC 7523).
    Google {
        /// The account.
        email: String,
        /// Its public key (RSAPublicKey of PKCS #1, in DER).
        public_key: Vec<u8>,
    },
}

/// A status, headers, each with its line's end, and a body.
pub(crate) type Refusal = (u16, &'static str, String);

impl Signer {
    /// The answer to a request that is not signed as it has to be.
    pub(crate) fn refusal(&self, request: &Request) -> Option<Refusal> {
        match self {
            Self::Aws { key, secret, region } => {
                let named = aws_credential(request).and_then(|it| it.split('/').nth(2));
                if !is_signed_for_aws(request, key, secret) {
                    let body = "<Error><Code>SignatureDoesNotMatch</Code></Error>";
                    return Some((403, "", body.into()));
                }
                let is_right = region.is_empty() || named == Some(region);
                let code = "<Code>AuthorizationHeaderMalformed</Code>";
                let body = format!("<Error>{code}<Region>{region}</Region></Error>");
                (!is_right).then_some((400, "", body))
            }
            Self::Header(name, value) => {
                (request.header(name) != Some(value)).then(|| (401, "", String::new()))
            }
            Self::Azure { account, key } => {
                let is_signed = is_signed_for_azure(request, account, key) == Some(true);
                let code = "x-ms-error-code: AuthenticationFailed\r\n";
                (!is_signed).then_some((403, code, String::new()))
            }
            Self::Google { email, public_key } => {
                let is_signed = is_signed_for_google(request, email, public_key) == Some(true);
                let body = "<Error><Code>AuthenticationRequired</Code></Error>";
                (!is_signed).then_some((401, "", body.into()))
            }
        }
    }
}

/// The key, and what it is for.
fn aws_credential(request: &Request) -> Option<&str> {
    let (_, rest) = request.header("authorization")?.split_once("Credential=")?;
    rest.split(',').next()
}

fn is_signed_for_aws(request: &Request, key: &str, secret: &str) -> bool {
    aws_signature(request, secret).is_some_and(|(credential, given, wanted)| {
        credential.starts_with(&format!("{key}/")) && given == wanted
    })
}

/// The credential, the signature that was given, and the one that `secret` makes.
fn aws_signature(request: &Request, secret: &str) -> Option<(String, String, String)> {
    let text = request.header("authorization")?.strip_prefix("AWS4-HMAC-SHA256 ")?;
    let part = |name: &str| text.split(',').find_map(|it| it.trim().strip_prefix(name));
    let (credential, names) = (part("Credential=")?, part("SignedHeaders=")?);
    let given = part("Signature=")?;
    let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
    let mut canonical = format!("{}\n{path}\n{query}\n", request.method);
    for name in names.split(';') {
        let _ = writeln!(canonical, "{name}:{}", request.header(name)?);
    }
    let _ = write!(canonical, "\n{names}\n{}", request.header("x-amz-content-sha256")?);
    let scope = credential.split_once('/')?.1;
    let hashed = hex(digest::digest(&digest::SHA256, canonical.as_bytes()).as_ref());
    let date = request.header("x-amz-date")?;
    let to_sign = format!("AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashed}");
    let sign = |key: &[u8], text: &str| {
        let key = hmac::Key::new(hmac::HMAC_SHA256, key);
        hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
    };
    let first = format!("AWS4{secret}").into_bytes();
    let key = scope.split('/').fold(first, |key, part| sign(&key, part));
    Some((credential.to_owned(), given.to_owned(), hex(&sign(&key, &to_sign))))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// By the string to sign of version 2015-02-21 and later.
fn is_signed_for_azure(request: &Request, account: &str, key: &str) -> Option<bool> {
    const SIGNED: [&str; 11] = [
        "content-encoding",
        "content-language",
        "content-length",
        "content-md5",
        "content-type",
        "date",
        "if-modified-since",
        "if-match",
        "if-none-match",
        "if-unmodified-since",
        "range",
    ];
    let given = request.header("authorization")?.strip_prefix(&format!("SharedKey {account}:"))?;
    let mut text = format!("{}\n", request.method);
    for name in SIGNED {
        let value = request.header(name).filter(|&it| name != "content-length" || it != "0");
        let _ = writeln!(text, "{}", value.unwrap_or_default());
    }
    let mut own: Vec<_> =
        request.headers.iter().filter(|(name, _)| name.starts_with("x-ms-")).collect();
    own.sort_unstable();
    own.iter().for_each(|(name, value)| _ = writeln!(text, "{name}:{value}"));
    let _ = write!(text, "/{account}{}", request.plain_path());
    let mut query: Vec<_> =
        request.query().split('&').filter_map(|it| it.split_once('=')).collect();
    query.sort_unstable();
    for (name, value) in query {
        let _ = write!(text, "\n{name}:{}", value.replace("%3D", "="));
    }
    let key = hmac::Key::new(hmac::HMAC_SHA256, &base64(key)?);
    Some(hmac::verify(&key, text.as_bytes(), &base64(given)?).is_ok())
}

fn is_signed_for_google(request: &Request, email: &str, public_key: &[u8]) -> Option<bool> {
    let token = request.header("authorization")?.strip_prefix("Bearer ")?;
    let (message, given) = token.rsplit_once('.')?;
    let claims = String::from_utf8(base64(message.split_once('.')?.1)?).ok()?;
    let key = signature::UnparsedPublicKey::new(&signature::RSA_PKCS1_2048_8192_SHA256, public_key);
    let is_signed = key.verify(message.as_bytes(), &base64(given)?).is_ok();
    Some(is_signed && claims.contains(&format!("\"iss\":\"{email}\"")) && claims.contains("scope"))
}

/// The bytes of `text` in base64, in the alphabet of RFC 4648 or that for URLs.
fn base64(text: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for letter in text.trim_end_matches('=').bytes() {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        (bits, count) = ((bits << 6 | u32::from(value)) & 0xffff, count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}
