//! The files of `aws configure`: the credentials, the region and the endpoint of a profile.
//!
//! Invariant: the environment goes before the files, as with Amazon's own tools; no value of the files
//! but names is in a log or an error.

use std::collections::HashMap;
use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential, AwsCredentialProvider};
use object_store::client::HttpConnector;
use object_store::{ClientOptions, CredentialProvider};
use url::Url;

use crate::credential_output::CREDENTIAL_COMMAND_BYTES;
use crate::object::aws_sso::{SsoCredentials, SsoRole};
use crate::object::process_credentials::ProcessCredentials;
use crate::object::secret_text;

/// The longest file with credentials of AWS, in bytes.
/// Beyond it: the file is refused.
const MAX_BYTES: u64 = 1 << 20;
/// The files are read again, when there are requests, after this time.
const FRESH: Duration = Duration::from_secs(2);
/// The variables that say where credentials are. With one of them those of the files are not used.
const OTHER_CREDENTIALS: [&str; 4] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_SKIP_SIGNATURE",
];
/// The settings of profiles whose credentials are not in the files.
const ELSEWHERE: [(&str, &str); 2] = [("role_arn", "of a role"), ("login_session", "of a login")];
/// The setting with the command line of a program that gives credentials.
const PROGRAM: &str = "credential_process";
/// The permission bit of a file that every user may write.
const WRITABLE_BY_ALL: u32 = 0o002;
const KEYS: [&str; 3] = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"];

const NO_CREDENTIALS: &str = "there are no credentials, and the machine may not be asked for them \
                              (AWS_EC2_METADATA_DISABLED)";

type Settings = HashMap<String, String>;
type Get<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The value of a variable that is not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Where a profile is.
#[derive(Clone, Debug)]
struct AwsFiles {
    profile: String,
    credentials: PathBuf,
    config: PathBuf,
    home: Option<PathBuf>,
    /// Whether the user has named the profile: it has to be there.
    is_named: bool,
}

/// The settings of a profile.
#[derive(Debug, Default)]
struct Profile {
    settings: Settings,
    /// The endpoint for S3 in the section of its `services`.
    endpoint: Option<String>,
    /// The section of its single sign-on.
    session: Option<Settings>,
    /// One of the files, if every user may write it.
    open_to_all: Option<PathBuf>,
}

/// Where the credentials of a profile are from.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    Keys(AwsCredential),
    SignOn(SsoRole),
    /// The command line of a program.
    Program(String),
}

impl AwsFiles {
    /// `None`: neither the environment nor a home directory says where they are.
    fn of(get: Get<'_>) -> Option<Self> {
        let home = get("HOME").map(PathBuf::from);
        let path = |name: &str, usual: &str| match (get(name), &home) {
            (Some(path), home) => match (path.strip_prefix("~/"), home) {
                (Some(rest), Some(home)) => Some(home.join(rest)),
                _ => Some(path.into()),
            },
            (None, Some(home)) => Some(home.join(".aws").join(usual)),
            (None, None) => None,
        };
        let profile = get("AWS_PROFILE").or_else(|| get("AWS_DEFAULT_PROFILE"));
        Some(Self {
            credentials: path("AWS_SHARED_CREDENTIALS_FILE", "credentials")?,
            config: path("AWS_CONFIG_FILE", "config")?,
            is_named: profile.is_some(),
            home,
            profile: profile.unwrap_or_else(|| "default".into()),
        })
    }

    /// # Errors
    /// One line: a file cannot be read or is another user's, or there is no such profile.
    fn read(&self) -> Result<Profile, String> {
        let (mut config, config_is_open) = read(&self.config)?;
        let (mut credentials, is_open) = read(&self.credentials)?;
        let open_to_all = match (config_is_open, is_open) {
            (true, _) => Some(self.config.clone()),
            (false, true) => Some(self.credentials.clone()),
            (false, false) => None,
        };
        let section = format!("profile {}", self.profile);
        let named = config.remove(&section);
        let settings = match self.profile.as_str() {
            "default" => named.or_else(|| config.remove("default")),
            _ => named,
        };
        let keys = credentials.remove(&self.profile);
        if self.is_named && settings.is_none() && keys.is_none() {
            let (one, other) = (self.config.display(), self.credentials.display());
            let profile = &self.profile;
            return Err(format!("neither {one} nor {other} has the profile '{profile}'"));
        }
        let mut settings = settings.unwrap_or_default();
        let services = settings.get("services").map(|name| format!("services {name}"));
        let services = services.and_then(|name| config.remove(&name));
        let session = settings.get("sso_session").map(|name| format!("sso-session {name}"));
        let session = session.and_then(|name| config.remove(&name));
        if let Some(keys) = keys {
            // A token belongs to its key.
            KEYS.iter().for_each(|key| drop(settings.remove(*key)));
            settings.extend(keys);
        }
        let endpoint = services.and_then(|mut services| services.remove("s3.endpoint_url"));
        Ok(Profile { settings, endpoint, session, open_to_all })
    }

    /// The files that other programs renew and that are read again: these and, with a single sign-on, that of the token.
    fn renewed(&self, profile: &Profile) -> Vec<PathBuf> {
        let token = match self.source(profile) {
            Ok(Some(Source::SignOn(role))) => Some(role.token_file().to_owned()),
            _ => None,
        };
        [self.credentials.clone(), self.config.clone()].into_iter().chain(token).collect()
    }

    /// Where the credentials of the profile are from, if it has any.
    ///
    /// # Errors
    /// One line: they are not in the files.
    fn source(&self, profile: &Profile) -> Result<Option<Source>, String> {
        let name = &self.profile;
        let key = |name: &str| profile.settings.get(name).cloned();
        let [id, secret, token] = KEYS.map(key);
        let elsewhere = ELSEWHERE.iter().find(|it| profile.settings.contains_key(it.0));
        if let Some((setting, origin)) = elsewhere {
            return Err(format!(
                "the profile '{name}' has the credentials {origin} ({setting}), which nowait does not \
                 fetch: eval \"$(aws configure export-credentials --profile '{name}' --format env)\" \
                 puts them into the environment"
            ));
        }
        let (settings, session) = (&profile.settings, profile.session.as_ref());
        if let Some(role) = SsoRole::of(name, settings, session, self.home.as_deref())? {
            return Ok(Some(Source::SignOn(role)));
        }
        match (id, secret) {
            (Some(key_id), Some(secret_key)) => {
                let all = [Some(&key_id), Some(&secret_key), token.as_ref()];
                if !all.into_iter().flatten().all(|it| secret_text::is_plain(it)) {
                    let why = "keys with characters that they cannot have";
                    return Err(format!("the profile '{name}' has {why}"));
                }
                Ok(Some(Source::Keys(AwsCredential { key_id, secret_key, token })))
            }
            // A program is asked only where there are no keys.
            (None, None) => self.program(profile).map(|it| it.map(Source::Program)),
            _ => Err(format!("the profile '{name}' has only one of {} and {}", KEYS[0], KEYS[1])),
        }
    }

    /// The command line of the program that gives the credentials, if the profile has one.
    fn program(&self, profile: &Profile) -> Result<Option<String>, String> {
        let (name, command) = (&self.profile, profile.settings.get(PROGRAM));
        match (command, &profile.open_to_all) {
            (Some(_), Some(file)) => Err(format!(
                "{}: every user may write it, so its {PROGRAM} is not run (chmod o-w it)",
                file.display()
            )),
            (Some(command), None) if command.len() > CREDENTIAL_COMMAND_BYTES => {
                Err(format!("the profile '{name}' has a {PROGRAM} that is too long"))
            }
            (command, _) => Ok(command.cloned()),
        }
    }
}

/// The sections of the file at `path`, none if it does not exist, and whether every user may write it.
fn read(path: &Path) -> Result<(HashMap<String, Settings>, bool), String> {
    let read = secret_text::read(path, MAX_BYTES, "a file of 'aws configure'")?;
    let sections =
        |(text, found): (String, Metadata)| (parse(&text), found.mode() & WRITABLE_BY_ALL != 0);
    Ok(read.map_or_else(Default::default, sections))
}

/// The sections of `text`. A setting in lines that are indented has the name of the one above it before
/// its own, as in `s3.endpoint_url`.
fn parse(text: &str) -> HashMap<String, Settings> {
    let mut sections: HashMap<String, Settings> = HashMap::new();
    let (mut section, mut parent) = (None, String::new());
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[') {
            let name = name.split(']').next().unwrap_or_default();
            let words: Vec<_> =
                name.split_whitespace().map(|word| word.trim_matches('"')).collect();
            section = Some(words.join(" "));
            sections.entry(words.join(" ")).or_default();
            continue;
        }
        let (Some(section), Some((name, value))) = (&section, trimmed.split_once('=')) else {
            continue;
        };
        let mut name = name.trim().to_ascii_lowercase();
        match line.starts_with([' ', '\t']) {
            true => name = format!("{parent}.{name}"),
            false => parent.clone_from(&name),
        }
        // A command line has its own rules.
        let comment = value.find(" #").or_else(|| value.find(" ;")).filter(|_| name != PROGRAM);
        let value = value.get(..comment.unwrap_or(value.len())).unwrap_or_default().trim();
        if let Some(settings) = sections.get_mut(section).filter(|_| !value.is_empty()) {
            settings.insert(name, value.to_owned());
        }
    }
    sections
}

/// Credentials that are read from the files again and again: other programs renew them there.
struct FileCredentials {
    files: AwsFiles,
    known: Mutex<(Instant, Arc<AwsCredential>)>,
    /// The log has a line of why they cannot be read.
    told: AtomicBool,
}

impl fmt::Debug for FileCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileCredentials({:?})", self.files)
    }
}

#[async_trait]
impl CredentialProvider for FileCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (since, credential) = known().clone();
        if since.elapsed() < FRESH {
            return Ok(credential);
        }
        let files = self.files.clone();
        let again = move || files.read().and_then(|profile| files.source(&profile));
        match tokio::task::spawn_blocking(again).await {
            Ok(Ok(Some(Source::Keys(new)))) => {
                self.told.store(false, Ordering::Relaxed);
                let new = Arc::new(new);
                *known() = (Instant::now(), new.clone());
                Ok(new)
            }
            other => {
                if !self.told.swap(true, Ordering::Relaxed) {
                    let why = other.ok().and_then(Result::err);
                    let why = why.unwrap_or_else(|| "its credentials are gone".into());
                    let profile = &self.files.profile;
                    tracing::warn!("the profile '{profile}': {why}; those that were read are kept");
                }
                known().0 = Instant::now();
                Ok(credential)
            }
        }
    }
}

/// An S3 client with the settings of the environment, and for others those of the profile, which makes
/// its requests by `connector`. Returns also whether its credentials are renewed by files.
///
/// # Errors
/// One line: a file is wrong, or the credentials of the profile are not in it.
pub(super) fn builder(connector: &impl HttpConnector) -> Result<(AmazonS3Builder, bool), String> {
    let mut builder = AmazonS3Builder::from_env();
    if let Some(endpoint) = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT") {
        let endpoint = endpoint.trim_end_matches('/');
        builder = builder.with_config(AmazonS3ConfigKey::MetadataEndpoint, endpoint);
    }
    let Some((files, profile)) = found()? else { return Ok((builder, false)) };
    if let Some(region) = profile.settings.get("region").filter(|_| wants_region()) {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = profile_endpoint(&profile) {
        builder = builder.with_endpoint(endpoint);
    }
    if !wants_credentials() {
        return Ok((builder, false));
    }
    let provider: AwsCredentialProvider = match files.source(&profile)? {
        Some(Source::Keys(credential)) => {
            let known = Mutex::new((Instant::now(), Arc::new(credential)));
            Arc::new(FileCredentials { files, known, told: AtomicBool::new(false) })
        }
        Some(Source::SignOn(role)) => {
            let client = connector.connect(&ClientOptions::default());
            Arc::new(SsoCredentials::new(role, client.map_err(|error| error.to_string())?))
        }
        Some(Source::Program(command)) => {
            Arc::new(ProcessCredentials::open(&files.profile, &command)?)
        }
        None if asks_machine() => return Ok((builder, false)),
        None => return Err(NO_CREDENTIALS.into()),
    };
    Ok((builder.with_credentials(provider), true))
}

/// The profile and where it is; `None`: there are no files.
fn found() -> Result<Option<(AwsFiles, Profile)>, String> {
    let Some(files) = AwsFiles::of(&variable) else { return Ok(None) };
    match files.read() {
        Ok(profile) => Ok(Some((files, profile))),
        // The environment has what is needed.
        Err(why) if !wants_credentials() && !files.is_named => {
            tracing::warn!("{why}; it is not used");
            Ok(None)
        }
        Err(why) => Err(why),
    }
}

/// Whether the local metadata service (EC2, ECS) may be asked for credentials.
fn asks_machine() -> bool {
    const CONTAINER: [&str; 2] =
        ["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"];
    let is_disabled = variable("AWS_EC2_METADATA_DISABLED")
        .is_some_and(|value| value.eq_ignore_ascii_case("true"));
    !is_disabled || CONTAINER.iter().any(|name| variable(name).is_some())
}

fn wants_credentials() -> bool {
    OTHER_CREDENTIALS.iter().all(|name| variable(name).is_none())
}

fn wants_region() -> bool {
    ["AWS_REGION", "AWS_DEFAULT_REGION"].iter().all(|name| variable(name).is_none())
}

/// The endpoint of the profile, unless the environment has one.
fn profile_endpoint(profile: &Profile) -> Option<&String> {
    const OTHERS: [&str; 3] = ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"];
    let is_ignored = variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
        .is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let is_free = OTHERS.iter().all(|name| variable(name).is_none()) && !is_ignored;
    let endpoint = profile.endpoint.as_ref().or_else(|| profile.settings.get("endpoint_url"));
    endpoint.filter(|_| is_free)
}

/// Whether the files have credentials, or there is an error that tells why they have none.
pub(super) fn has_credentials() -> bool {
    let keys = found().and_then(|found| match found {
        Some((files, profile)) => files.source(&profile),
        None => Ok(None),
    });
    !matches!(keys, Ok(None))
}

/// The command line of the program that the profile of the environment names for its credentials. `None`: there is none, or
/// the credentials come from somewhere else.
#[must_use]
pub fn credential_command() -> Option<String> {
    let (files, profile) = found().ok().flatten().filter(|_| wants_credentials())?;
    match files.source(&profile) {
        Ok(Some(Source::Program(command))) => Some(command),
        _ => None,
    }
}

/// The TCP port of the endpoint of the profile, and the files that are read again, whether they are there or not.
pub(super) fn needs() -> (Option<u16>, Vec<PathBuf>) {
    let Ok(Some((files, profile))) = found() else { return (None, Vec::new()) };
    let port = profile_endpoint(&profile).and_then(|url| Url::parse(url).ok()?.port());
    let renewed = if wants_credentials() { files.renewed(&profile) } else { Vec::new() };
    (port, renewed)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const CONFIG: &str = "\
[default]
region = eu-west-1 # Ireland
s3 =
  addressing_style = path
output = json

[profile \"minio\"]
region=local
services = mine
aws_session_token = stale
[profile sso]
sso_session = corp
sso_account_id = 1
sso_role_name = reader
[sso-session corp]
sso_region = eu-west-1
[profile role]
role_arn = arn:aws:iam::1:role/x
source_profile = default
[profile half]
aws_access_key_id = A
[profile program]
credential_process = '/bin/of secrets' --a ; b #c
[profile role-of-program]
role_arn = arn:a
credential_process = /bin/secret
[profile keys-and-program]
aws_access_key_id = A
aws_secret_access_key = \u{e9}
credential_process = /bin/secret
[profile long]
credential_process = LONG
[services mine]
s3 =
    endpoint_url = http://127.0.0.1:9000
sqs =
    endpoint_url = http://127.0.0.1:1
";
    const CREDENTIALS: &str = "\
# made by hand
aws_access_key_id = no section
[default]
aws_access_key_id=AKIA
aws_secret_access_key = a/b+c=
aws_session_token = token

[minio]
AWS_ACCESS_KEY_ID = minio
aws_secret_access_key = secret
";

    fn files(directory: &Path, profile: Option<&str>) -> AwsFiles {
        let long = "x".repeat(CREDENTIAL_COMMAND_BYTES + 1);
        std::fs::write(directory.join("config"), CONFIG.replace("LONG", &long)).unwrap();
        std::fs::write(directory.join("keys"), CREDENTIALS).unwrap();
        let get = |name: &str| match name {
            "HOME" => Some(directory.to_str().unwrap().to_owned()),
            "AWS_SHARED_CREDENTIALS_FILE" => Some("~/keys".into()),
            "AWS_CONFIG_FILE" => Some(directory.join("config").to_str().unwrap().to_owned()),
            "AWS_PROFILE" => profile.map(str::to_owned),
            _ => None,
        };
        AwsFiles::of(&get).unwrap()
    }

    #[test]
    fn a_profile_has_its_keys_its_region_and_its_endpoint() {
        let directory = tempfile::tempdir().unwrap();
        let of = |profile| {
            let files = files(directory.path(), profile);
            let profile = files.read().unwrap();
            match files.source(&profile).unwrap().unwrap() {
                Source::Keys(credential) => (credential, profile),
                other => panic!("{other:?}"),
            }
        };
        let key = |id: &str, secret: &str, token: Option<&str>| AwsCredential {
            key_id: id.into(),
            secret_key: secret.into(),
            token: token.map(Into::into),
        };
        let (credential, profile) = of(None);
        assert_eq!(credential, key("AKIA", "a/b+c=", Some("token")));
        let renewed = files(directory.path(), None).renewed(&profile);
        assert_eq!(renewed, ["keys", "config"].map(|name| directory.path().join(name)));
        assert_eq!(profile.settings["region"], "eu-west-1");
        assert_eq!(profile.settings["output"], "json");
        assert_eq!(profile.endpoint, None);
        let (credential, profile) = of(Some("minio"));
        assert_eq!(credential, key("minio", "secret", None));
        assert_eq!(profile.endpoint.as_deref(), Some("http://127.0.0.1:9000"));
    }

    #[test]
    fn a_profile_whose_credentials_are_not_in_the_files_is_refused_with_what_gets_them() {
        let directory = tempfile::tempdir().unwrap();
        let of = |profile| {
            let files = files(directory.path(), Some(profile));
            files.source(&files.read()?).map(|it| it.is_some())
        };
        for profile in ["role", "role-of-program"] {
            let why = of(profile).unwrap_err();
            let way = format!("export-credentials --profile '{profile}' --format env");
            let says = ["of a role (role_arn)", &way].iter().all(|words| why.contains(words));
            assert!(says && !why.contains("secret"), "{why}");
        }
        let why = of("keys-and-program").unwrap_err();
        assert!(why.contains("characters") && !why.contains('\u{e9}'), "{why}");
        assert_eq!(of("sso"), Ok(true));
        let files = files(directory.path(), Some("sso"));
        let renewed = files.renewed(&files.read().unwrap());
        let token = renewed.last().unwrap();
        assert_eq!(token.parent(), Some(&*directory.path().join(".aws/sso/cache")));
        assert!(of("half").unwrap_err().contains("only one of aws_access_key_id"));
        assert!(of("none").unwrap_err().contains("has the profile 'none'"));
        assert_eq!(AwsFiles::of(&|_| None).map(|_| ()), None);
    }
    #[test]
    fn the_program_of_a_profile_is_named_by_a_file_that_not_every_user_may_write() {
        let directory = tempfile::tempdir().unwrap();
        let files = files(directory.path(), Some("program"));
        let source = || files.source(&files.read().unwrap());
        let command = "'/bin/of secrets' --a ; b #c";
        assert_eq!(source(), Ok(Some(Source::Program(command.into()))));
        let long = AwsFiles { profile: "long".into(), ..files.clone() };
        assert!(long.source(&long.read().unwrap()).unwrap_err().contains("too long"));
        for (name, mode) in [("config", 0o664), ("keys", 0o666), ("config", 0o646)] {
            let file = directory.path().join(name);
            std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            assert_eq!(source().is_err(), mode & WRITABLE_BY_ALL != 0, "{mode:o}");
            std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        }
    }
}
