//! Credentials of a role by a single sign-on (IAM Identity Center), with the token that `aws sso login`
//! leaves in its cache.
//!
//! Invariant: the token is sent only to the service of the region that the profile names, or to the
//! endpoint of the environment; neither it nor a credential is in a log or an error.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use hyper::Request;
use hyper::header::HeaderValue;
use nowait_nbd::secret_file;
use object_store::CredentialProvider;
use object_store::aws::AwsCredential;
use object_store::client::{HttpClient, HttpRequestBody};
use ring::digest;
use serde_json::Value;
use tokio::sync::Mutex;
use url::Url;

use crate::object::fault::BadAnswer;
use crate::object::secret_text::is_plain;

/// The longest file or answer about an SSO login, in bytes.
/// Beyond it: the file or the answer is refused.
const MAX_BYTES: u64 = 64 << 10;
/// Credentials are replaced so long before they expire.
const BEFORE_END: Duration = Duration::from_secs(300);
const TOKEN_HEADER: &str = "x-amz-sso_bearer_token";

/// The role that a profile names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SsoRole {
    profile: String,
    account: String,
    role: String,
    region: String,
    /// The file with the token.
    token: PathBuf,
}

impl SsoRole {
    /// The role in the settings of `profile`, with those of its session in `sections`; `None`: it has no
    /// single sign-on.
    ///
    /// # Errors
    /// One line: a setting is missing or wrong.
    pub(super) fn of(
        profile: &str,
        settings: &HashMap<String, String>,
        session: Option<&HashMap<String, String>>,
        home: Option<&Path>,
    ) -> Result<Option<Self>, String> {
        let get = |name: &str| settings.get(name).or_else(|| session?.get(name)).cloned();
        let name = settings.get("sso_session").cloned().or_else(|| get("sso_start_url"));
        let Some(name) = name else { return Ok(None) };
        let wanted = |setting: &str| {
            get(setting).ok_or_else(|| format!("the profile '{profile}' has no {setting}"))
        };
        let region = wanted("sso_region")?;
        if !region.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Err(format!("the profile '{profile}' has an sso_region that is none"));
        }
        let name = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, name.as_bytes());
        let name: String = name.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let home = home.ok_or("HOME is not set, below which 'aws sso login' has its tokens")?;
        Ok(Some(Self {
            profile: profile.to_owned(),
            account: wanted("sso_account_id")?,
            role: wanted("sso_role_name")?,
            region,
            token: home.join(".aws/sso/cache").join(name + ".json"),
        }))
    }

    /// The file with the token.
    pub(super) fn token_file(&self) -> &Path {
        &self.token
    }

    fn url(&self) -> Result<Url, String> {
        let endpoint = std::env::var("AWS_ENDPOINT_URL_SSO").ok().filter(|it| !it.is_empty());
        let domain =
            if self.region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
        let usual = || format!("https://portal.sso.{}.{domain}", self.region);
        let endpoint = endpoint.unwrap_or_else(usual);
        let url = format!("{}/federation/credentials", endpoint.trim_end_matches('/'));
        let mut url = Url::parse(&url).map_err(|_| "AWS_ENDPOINT_URL_SSO is not a URL")?;
        url.query_pairs_mut()
            .append_pair("role_name", &self.role)
            .append_pair("account_id", &self.account);
        Ok(url)
    }

    /// The error of a token that is not there or not accepted.
    fn signed_out(&self) -> BadAnswer {
        BadAnswer::SignedOut(self.profile.clone())
    }

    /// The token in the cache.
    fn token(&self) -> Option<HeaderValue> {
        let (bytes, _) = secret_file::read(&self.token, MAX_BYTES).ok()?;
        let cached: Value = serde_json::from_slice(&bytes).ok()?;
        let mut token = HeaderValue::from_str(cached["accessToken"].as_str()?).ok()?;
        token.set_sensitive(true);
        Some(token)
    }
}

/// Credentials, and when they expire.
type Known = Option<(SystemTime, Arc<AwsCredential>)>;

/// Asks for the credentials of a role when there are none, or soon will be none.
pub(super) struct SsoCredentials {
    role: SsoRole,
    client: HttpClient,
    known: Mutex<Known>,
}

impl fmt::Debug for SsoCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SsoCredentials({:?})", self.role)
    }
}

impl SsoCredentials {
    pub(super) fn new(role: SsoRole, client: HttpClient) -> Self {
        Self { role, client, known: Mutex::default() }
    }

    async fn fetch(&self) -> object_store::Result<(SystemTime, Arc<AwsCredential>)> {
        type BoxError = Box<dyn std::error::Error + Send + Sync>;
        let failed = |source: BoxError| object_store::Error::Generic { store: "S3", source };
        let role = self.role.clone();
        let token = tokio::task::spawn_blocking(move || role.token()).await.ok().flatten();
        let token = token.ok_or_else(|| failed(self.role.signed_out().into()))?;
        let url = self.role.url().map_err(|why| failed(why.into()))?;
        let request = Request::get(url.as_str()).header(TOKEN_HEADER, token);
        let request = request.body(HttpRequestBody::empty()).map_err(|it| failed(it.into()))?;
        let answer = self.client.execute(request).await.map_err(|error| {
            let source = std::error::Error::source(&error).and_then(|it| it.downcast_ref());
            match source {
                Some(BadAnswer::Status { status, .. }) if status.as_u16() == 401 => {
                    failed(self.role.signed_out().into())
                }
                _ => failed(error.into()),
            }
        })?;
        let body = Limited::new(answer.into_body(), MAX_BYTES as usize).collect().await;
        let body = body.map_err(failed)?.to_bytes();
        let wrong =
            || failed("the service of the single sign-on answers with no credentials".into());
        parse(&body).ok_or_else(wrong)
    }
}

/// The credentials in an answer of the service.
fn parse(body: &[u8]) -> Option<(SystemTime, Arc<AwsCredential>)> {
    let answer: Value = serde_json::from_slice(body).ok()?;
    let given = &answer["roleCredentials"];
    let text = |name: &str| given[name].as_str().filter(|it| is_plain(it)).map(str::to_owned);
    let end = Duration::from_millis(given["expiration"].as_u64()?);
    let credential = AwsCredential {
        key_id: text("accessKeyId")?,
        secret_key: text("secretAccessKey")?,
        token: text("sessionToken"),
    };
    Some((SystemTime::UNIX_EPOCH.checked_add(end)?, Arc::new(credential)))
}

#[async_trait]
impl CredentialProvider for SsoCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let mut known = self.known.lock().await;
        let is_fresh = |(end, _): &&(SystemTime, _)| *end > SystemTime::now() + BEFORE_END;
        if let Some((_, credential)) = known.as_ref().filter(is_fresh) {
            return Ok(credential.clone());
        }
        match self.fetch().await {
            Ok((end, credential)) => {
                *known = Some((end, credential.clone()));
                Ok(credential)
            }
            // Those that are there may still be good.
            Err(error) => match known.as_ref().filter(|(end, _)| *end > SystemTime::now()) {
                Some((_, credential)) => Ok(credential.clone()),
                None => Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(of: &[(&str, &str)]) -> HashMap<String, String> {
        of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_role_has_the_settings_of_its_profile_and_of_its_session() {
        let profile = settings(&[
            ("sso_session", "corp"),
            ("sso_account_id", "123"),
            ("sso_role_name", "a&b"),
        ]);
        let session = settings(&[("sso_region", "eu-west-1"), ("sso_start_url", "https://x")]);
        let of = |profile, session| SsoRole::of("work", profile, session, Some(Path::new("/h")));
        let role = of(&profile, Some(&session)).unwrap().unwrap();
        // echo -n corp | sha1sum
        let name = "/h/.aws/sso/cache/ee0bfd2552fbd840c02cc48b6e823320543c450f.json";
        assert_eq!(role.token.to_str(), Some(name));
        assert_eq!(
            role.url().unwrap().as_str(),
            "https://portal.sso.eu-west-1.amazonaws.com/federation/credentials?role_name=a%26b&account_id=123"
        );
        assert!(of(&profile, None).unwrap_err().contains("no sso_region"));
        let other = settings(&[("sso_region", "x.example/")]);
        assert!(of(&profile, Some(&other)).unwrap_err().contains("sso_region"));
        assert_eq!(of(&settings(&[]), None), Ok(None));
    }

    #[test]
    fn an_answer_without_credentials_or_an_end_is_none() {
        let right = r#"{"roleCredentials":{"accessKeyId":"A","secretAccessKey":"B",
                        "sessionToken":"C","expiration":1000}}"#;
        let (end, credential) = parse(right.as_bytes()).unwrap();
        assert_eq!(end, SystemTime::UNIX_EPOCH + Duration::from_secs(1));
        assert_eq!(credential.token.as_deref(), Some("C"));
        for wrong in ["", "[]", "{}", r#"{"roleCredentials":{"accessKeyId":"A"}}"#] {
            assert!(parse(wrong.as_bytes()).is_none(), "{wrong}");
        }
        assert!(parse(right.replace("\"B\"", "\"\\n\"").as_bytes()).is_none());
        assert!(parse(right.replace("1000", "-1").as_bytes()).is_none());
    }
}
