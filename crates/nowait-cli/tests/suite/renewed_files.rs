//! Credentials and certificates that are replaced while a confined server uses them.
//!
//! Invariant: the file is replaced in each way that is usual: in place, by a new file with the name, by a new link to the
//! directory that has it, as Kubernetes does it.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nowait_testkit::certificates::{Authority, Flaw, Role, server_of};
use nowait_testkit::signer::Signer;
use nowait_testkit::token_service::TokenService;
use nowait_testkit::web_server::WebServer;
use nowait_testkit::{Random, seed, wait_until};
use rustix::process::Signal;

use crate::common::{MIB, Scratch, Server, accepted, refusal, text};
use crate::daemon::NO_TERMINAL;
use crate::remote_objects::{KEY, SECRET};

/// A file with the name `NAME` in a directory of its own, in which `replace` puts another content.
struct Renewed {
    directory: Scratch,
    replace: fn(&Path, &str),
}

const NAME: &str = "token";

impl Renewed {
    /// One file with `content` for each way in which it is replaced.
    fn all(content: &str) -> [Self; 3] {
        [in_place, by_a_new_file, by_a_new_link].map(|replace: fn(&Path, &str)| {
            let directory = Scratch::new();
            replace(directory.path(), content);
            Self { directory, replace }
        })
    }

    fn path(&self) -> PathBuf {
        self.directory.join(NAME)
    }

    fn becomes(&self, content: &str) {
        (self.replace)(self.directory.path(), content);
    }
}

fn in_place(directory: &Path, content: &str) {
    fs::write(directory.join(NAME), content).expect("a file");
}

fn by_a_new_file(directory: &Path, content: &str) {
    fs::write(directory.join("new"), content).expect("a file");
    fs::rename(directory.join("new"), directory.join(NAME)).expect("another file");
}

/// Replaces a file the way a volume of Kubernetes does, with its mode: `NAME` leads to `..data/NAME`, and `..data` to the newest directory.
fn by_a_new_link(directory: &Path, content: &str) {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o1777)).expect("a mode");
    let before = fs::read_link(directory.join("..data"));
    let newest = before.as_ref().map_or("..1".into(), |it| format!("{}1", text(it)));
    fs::create_dir(directory.join(&newest)).expect("a directory");
    fs::write(directory.join(&newest).join(NAME), content).expect("a file");
    symlink(&newest, directory.join("..data_tmp")).expect("a link");
    fs::rename(directory.join("..data_tmp"), directory.join("..data")).expect("another link");
    match before {
        Ok(before) => fs::remove_dir_all(directory.join(before)).expect("the directory before"),
        Err(_) => symlink("..data/token", directory.join(NAME)).expect("a link"),
    }
}

/// Reads the object at `url` with the keys that `service` gives for the token in a file, which is replaced twice.
fn is_read_with_each_token(environment: &[String], variable: &str, url: &str, at: &TokenService) {
    for renewed in Renewed::all("1") {
        let file = format!("{variable}={}", text(&renewed.path()));
        let environment: Vec<&str> =
            ["env", &file].into_iter().chain(environment.iter().map(String::as_str)).collect();
        let extra = ["--read-only", "--reconnect", "0"];
        let server = Server::start_under(&environment, url.as_ref(), &extra);
        let mut client = server.connect();
        for (n, token) in ["1", "2", "3"].into_iter().enumerate() {
            if token != "1" {
                renewed.becomes(token);
            }
            client.read(n as u64 * MIB, 4096).unwrap_or_else(|_| panic!("{}", server.log()));
            assert_eq!(at.last_token().as_deref(), Some(token));
        }
        server.stop();
    }
}

fn object() -> Vec<u8> {
    Random::from_seed(seed()).bytes(3 << 20)
}

/// An S3 server whose keys `service` gives, and the environment that says where it is.
fn s3() -> (WebServer, TokenService, Vec<String>) {
    let store = WebServer::start(object(), "/bucket/disk.img");
    let (key, secret) = (KEY.into(), SECRET.into());
    store.script().signer = Some(Signer::Aws { key, secret, region: String::new() });
    let environment =
        vec![format!("AWS_ENDPOINT_URL={}", store.root()), "AWS_REGION=us-east-1".into()];
    (store, TokenService::start(KEY, SECRET), environment)
}

#[test]
fn a_web_identity_token_is_read_again_however_it_is_replaced() {
    let (_store, service, mut environment) = s3();
    environment.push(format!("AWS_ENDPOINT_URL_STS={}", service.root()));
    environment.push("AWS_ROLE_ARN=arn:aws:iam::1:role/test".into());
    let variable = "AWS_WEB_IDENTITY_TOKEN_FILE";
    is_read_with_each_token(&environment, variable, "s3://bucket/disk.img", &service);
}

#[test]
fn the_token_of_a_pod_is_read_again_however_it_is_replaced() {
    let (_store, service, mut environment) = s3();
    environment.push(format!("AWS_CONTAINER_CREDENTIALS_FULL_URI={}/keys", service.root()));
    let variable = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
    is_read_with_each_token(&environment, variable, "s3://bucket/disk.img", &service);
}

#[test]
fn a_federated_token_of_azure_is_read_again_however_it_is_replaced() {
    let store = WebServer::start(object(), "/images/disk.img");
    let service = TokenService::start("", "");
    let environment = [
        format!("AZURE_STORAGE_ENDPOINT={}", store.root()),
        "AZURE_STORAGE_ACCOUNT_NAME=account".into(),
        format!("AZURE_AUTHORITY_HOST={}", service.root()),
        "AZURE_CLIENT_ID=client".into(),
        "AZURE_TENANT_ID=tenant".into(),
    ];
    let variable = "AZURE_FEDERATED_TOKEN_FILE";
    is_read_with_each_token(&environment, variable, "az://images/disk.img", &service);
}

/// The files of a server in `directory`, whose clients trust `authority`.
fn make_certificates(directory: &Path, authority: &Authority) {
    fs::create_dir(directory).expect("a directory");
    authority.trusted_in(directory);
    authority.certify(directory, Role::Server, Flaw::None);
    authority.revoke(directory);
}

/// `link` leads to `target` from now on.
fn leads_to(link: &Path, target: &str) {
    let new = link.with_file_name("new");
    symlink(target, &new).expect("a link");
    fs::rename(&new, link).expect("another link");
}

#[test]
fn certificates_and_revocation_lists_are_read_again_however_their_links_are_replaced() {
    const NAMES: [&str; 4] = ["server-cert.pem", "server-key.pem", "ca-cert.pem", "ca-crl.pem"];
    let links = |directory: &Path, to: &str| {
        NAMES.iter().for_each(|name| leads_to(&directory.join(name), &format!("{to}/{name}")));
    };
    // The directory that is given is a link; its files are links to a link beside them, or elsewhere.
    for layout in ["a link", "beside", "elsewhere"] {
        let scratch = Scratch::new();
        let (given, elsewhere) = (scratch.join("given"), scratch.join("elsewhere"));
        fs::create_dir(&elsewhere).expect("a directory");
        let authorities = ["one", "two", "three"].map(Authority::new);
        let becomes = |authority: &Authority, version: &str| match layout {
            "a link" => {
                make_certificates(&elsewhere.join(version), authority);
                leads_to(&given, &format!("elsewhere/{version}"));
            }
            "beside" => {
                make_certificates(&given.join(format!("..{version}")), authority);
                leads_to(&given.join("..data"), &format!("..{version}"));
                links(&given, "..data");
            }
            _ => {
                make_certificates(&elsewhere.join(version), authority);
                leads_to(&elsewhere.join("current"), version);
                links(&given, "../elsewhere/current");
            }
        };
        if layout != "a link" {
            fs::create_dir(&given).expect("a directory");
        }
        becomes(&authorities[0], "v0");
        let image = scratch.sparse("disk.img", MIB);
        let options = ["--tls-certs", text(&given), "--verbose"];
        let server = Server::start_under(&NO_TERMINAL, &image, &options);
        for (n, authority) in authorities.iter().enumerate() {
            if n > 0 {
                becomes(authority, &format!("v{n}"));
                server.signal(Signal::HUP);
                let reloads = || server.log().matches("read again: the TLS files").count();
                wait_until("the reload", || reloads() == n);
            }
            let client = Scratch::new();
            authority.trusted_in(client.path());
            let uri = |trusted: &Scratch| {
                format!("{}&tls-certificates={}", server.uri(), text(trusted.path()))
            };
            accepted(&["info", &uri(&client)]);
            Authority::new("another").trusted_in(client.path());
            refusal(&["info", &uri(&client)]);
        }
        assert!(!server.log().contains("stay in use"), "{}", server.log());
        server.stop();
    }
}

#[test]
fn the_authorities_of_stores_are_read_again_however_their_file_is_replaced() {
    let certificates = Scratch::new();
    let store = WebServer::start(object(), "/disk.img");
    let becomes = |authority: &Authority| {
        authority.certify(certificates.path(), Role::Server, Flaw::None);
        store.script().tls = Some(server_of(certificates.path()));
        authority.trusted_in(certificates.path());
        fs::read_to_string(certificates.join("ca-cert.pem")).expect("a certificate")
    };
    let url = store.url().replace("http://", "https://");
    let authorities = ["one", "two", "three"].map(Authority::new);
    for file in Renewed::all(&becomes(&authorities[0])) {
        let scratch = Scratch::new();
        let own = scratch.sparse("own.img", MIB);
        let (trust, socket) =
            (format!("SSL_CERT_FILE={}", text(&file.path())), scratch.join("control"));
        let control = format!("unix:{}", text(&socket));
        let options = ["--control", &control, "--allow-uri", &url];
        let server = Server::start_under(&["env", &trust], &own, &options);
        for authority in &authorities {
            file.becomes(&becomes(authority));
            let to = ["--read-only", "--control", text(&socket)];
            accepted(&[&["export", "add", "added", &url], &to[..]].concat());
            accepted(&["export", "remove", "added", "--control", text(&socket)]);
        }
        server.stop();
    }
}
