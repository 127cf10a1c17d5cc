//! Objects of S3 servers, with the credentials of `aws configure`'s files and of a machine's service.
//!
//! Invariant: the S3 server of these tests answers only what is signed as it has to be.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nowait_testkit::signer::Signer;
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Finished, Random, Scratch, seed, wait_until};

use crate::common::{MIB, NOWAIT, Server, refusal_under, text, tool};
use crate::remote_objects::{KEY, SECRET};

const URL: &str = "s3://bucket/base.img";

/// An S3 server of an object in the region `local`.
fn store() -> (WebServer, Vec<u8>) {
    let object = Random::from_seed(seed()).bytes(3 * MIB as usize);
    let server = WebServer::start(object.clone(), "/bucket/base.img");
    accepts(&server, KEY);
    (server, object)
}

fn accepts(store: &WebServer, key: &str) {
    let (key, secret, region) = (key.into(), SECRET.into(), "local".into());
    store.script().signer = Some(Signer::Aws { key, secret, region });
}

/// A home directory with the files of `aws configure`, and the assignment that names it.
fn home(scratch: &Scratch, config: &str, credentials: &str) -> String {
    let directory = scratch.join(".aws");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("config"), config).unwrap();
    replace(&directory.join("credentials"), credentials);
    format!("HOME={}", text(scratch.path()))
}

fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
    fs::rename(&new, path).unwrap();
}

fn keys(profile: &str, key: &str) -> String {
    format!("[{profile}]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")
}

#[test]
fn a_profile_gives_keys_region_and_endpoint_and_renewed_keys_cost_no_error() {
    let (store, object) = store();
    let scratch = Scratch::new();
    let config = format!("[profile lab]\nregion = local\nendpoint_url = {}\n", store.root());
    let home = home(&scratch, &config, &keys("lab", KEY));
    let environment = ["env", &home, "AWS_PROFILE=lab"];
    let server = Server::start_under(&environment, Path::new(URL), &["--read-only"]);
    let mut client = server.connect();
    assert!(client.read(0, 4096).unwrap()[..] == object[..4096]);
    let expired = "<Error><Code>ExpiredToken</Code></Error>";
    store.script().always = Some(Lie::Status(400, "", expired));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let asked = store.script().requests.len();
            wait_until("the store refuses", || store.script().requests.len() > asked);
            replace(&scratch.join(".aws/credentials"), &keys("lab", "RENEWED"));
            wait_until("the new key", || {
                let script = store.script();
                let sent = script.requests.last().and_then(|it| it.header("authorization"));
                sent.is_some_and(|sent| sent.contains("RENEWED/"))
            });
            accepts(&store, "RENEWED");
            store.script().always = None;
        });
        assert!(client.read(2 * MIB, 4096).unwrap()[..] == object[2 << 20..][..4096]);
    });
    server.stop();
    assert_eq!(store.script().unsigned, 0);
}

#[test]
fn the_environment_goes_before_the_files() {
    let (store, _) = store();
    let scratch = Scratch::new();
    let config = "[default]\nregion = elsewhere\nendpoint_url = http://127.0.0.1:1\n";
    let home = home(&scratch, config, &keys("default", "OTHER"));
    let [endpoint, key, secret] = [
        format!("AWS_ENDPOINT_URL_S3={}", store.root()),
        format!("AWS_ACCESS_KEY_ID={KEY}"),
        format!("AWS_SECRET_ACCESS_KEY={SECRET}"),
    ];
    let variables = [&home, &endpoint, &key, &secret, "AWS_REGION=local"];
    let more = ["AWS_REQUEST_PAYER=requester", NOWAIT, "info", URL];
    tool("env").args(variables).args(more).succeeds();
    let script = store.script();
    let payer = |it: &nowait_testkit::web_request::Request| {
        it.header("x-amz-request-payer") == Some("requester")
    };
    assert!(script.unsigned == 0 && script.requests.iter().all(payer), "{:?}", script.requests);
}

#[test]
fn the_bucket_is_in_the_name_of_the_host_where_the_environment_says_so() {
    let (store, _) = store();
    store.script().path = "/base.img".into();
    let scratch = Scratch::new();
    let home = home(&scratch, "[default]\nregion = local\n", &keys("default", KEY));
    let endpoint = format!("AWS_ENDPOINT_URL={}", store.root());
    let style = "AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true";
    tool("env").args([&home, &endpoint, style, NOWAIT, "info", URL]).succeeds();
    assert_eq!(store.script().unsigned, 0);
}

#[test]
fn a_profile_that_is_not_there_or_has_no_keys_is_one_line_that_says_what_helps() {
    let scratch = Scratch::new();
    let config = "[profile role]\nrole_arn = arn:a\n[profile lab]\nregion = local\n";
    let home = home(&scratch, config, "");
    for (variable, words) in [
        ("AWS_PROFILE=role", ["of a role (role_arn)", "aws configure export-credentials"]),
        ("AWS_PROFILE=none", [".aws/credentials has the profile 'none'", "neither"]),
        ("AWS_PROFILE=lab", ["there are no credentials", "AWS_ACCESS_KEY_ID"]),
    ] {
        let environment = ["env", &home, variable, "AWS_EC2_METADATA_DISABLED=true"];
        refusal_under(&environment, &["info", URL]).says(&words);
    }
}

#[test]
fn a_confined_server_gets_credentials_by_the_token_of_a_single_sign_on() {
    let (store, object) = store();
    let scratch = Scratch::new();
    let service = WebServer::start(Vec::new(), "/none");
    let config = format!(
        "[profile work]\nsso_session = corp\nsso_account_id = 12\nsso_role_name = reader\nregion = local\n\
         endpoint_url = {}\n[sso-session corp]\nsso_region = eu-west-1\n",
        store.root()
    );
    let home = home(&scratch, &config, "");
    let portal = format!("AWS_ENDPOINT_URL_SSO={}", service.root());
    let environment = ["env", &home, &portal, "AWS_PROFILE=work"];
    let says = ["single sign-on of the profile 'work'", "aws sso login --profile 'work'"];
    refusal_under(&environment, &["info", URL]).says(&says);
    let cache = scratch.join(".aws/sso/cache");
    fs::create_dir_all(&cache).unwrap();
    // The SHA-1 of `corp`.
    let token = cache.join("ee0bfd2552fbd840c02cc48b6e823320543c450f.json");
    replace(&token, r#"{"accessToken":"old-secret"}"#);
    service.script().lies.push_back(Lie::Status(401, "", ""));
    let refused = refusal_under(&environment, &["info", URL]);
    refused.says(&says);
    assert!(!refused.error.contains("secret"), "{}", refused.error);
    let gives = |expiration: u64| {
        let given = format!(
            r#"{{"roleCredentials":{{"accessKeyId":"{KEY}","secretAccessKey":"{SECRET}",
                "sessionToken":"of a session","expiration":{expiration}}}}}"#
        );
        service.script().always = Some(Lie::Status(200, "", given.leak()));
    };
    // These have expired already: the next request needs others.
    gives(0);
    let server = Server::start_under(&environment, Path::new(URL), &["--read-only"]);
    replace(&token, r#"{"accessToken":"new"}"#);
    gives(4_000_000_000_000);
    assert!(server.connect().read(0, 3 * MIB as u32).unwrap() == object);
    server.stop();
    assert_eq!(store.script().unsigned, 0);
    let script = service.script();
    let sent = script.requests.iter().map(|it| it.header("x-amz-sso_bearer_token").unwrap());
    let sent: Vec<_> = sent.collect();
    let news = sent.iter().filter(|it| **it == "new").count();
    assert!(sent[0] == "old-secret" && sent.last() == Some(&"new") && news == 1, "{sent:?}");
    let path = "/federation/credentials?role_name=reader&account_id=12";
    assert!(script.requests.iter().all(|it| it.path == path), "{:?}", script.requests);
}

#[test]
fn a_confined_server_gets_credentials_from_the_service_of_its_machine() {
    let (store, object) = store();
    let scratch = Scratch::new();
    let service = WebServer::start(Vec::new(), "/none");
    let given = format!(
        r#"{{"AccessKeyId":"{KEY}","SecretAccessKey":"{SECRET}","Token":"of a session",
            "Expiration":"2099-01-01T00:00:00Z"}}"#
    );
    let answers = ["a token", "a-role", given.leak()];
    service.script().lies.extend(answers.map(|body| Lie::Status(200, "", body)));
    let [home, endpoint, metadata] = [
        home(&scratch, "", ""),
        format!("AWS_ENDPOINT_URL={}", store.root()),
        format!("AWS_EC2_METADATA_SERVICE_ENDPOINT={}/", service.root()),
    ];
    let environment = ["env", &home, &endpoint, &metadata, "AWS_REGION=local"];
    let server = Server::start_under(&environment, Path::new(URL), &["--read-only"]);
    assert!(server.connect().read(0, 3 * MIB as u32).unwrap() == object);
    server.stop();
    assert_eq!(store.script().unsigned, 0);
    let script = store.script();
    let session = script.requests.last().and_then(|it| it.header("x-amz-security-token"));
    assert_eq!(session, Some("of a session"));
    // Version 2 of the service: a token is asked for first.
    let script = service.script();
    let asked: Vec<_> = script
        .requests
        .iter()
        .map(|it| (it.method.as_str(), it.path.as_str(), it.header("x-aws-ec2-metadata-token")))
        .collect();
    let roles = "/latest/meta-data/iam/security-credentials/";
    assert_eq!(
        asked,
        [
            ("PUT", "/latest/api/token", None),
            ("GET", roles, Some("a token")),
            ("GET", &format!("{roles}a-role"), Some("a token")),
        ]
    );
}
