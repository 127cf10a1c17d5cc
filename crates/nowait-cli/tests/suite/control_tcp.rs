//! A running server is asked and changed over TCP, by a token or by a certificate.
//!
//! Invariant: each request is made by another program than the server; each port is any free one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nowait_testkit::certificates::{Authority, Flaw, Role};
use nowait_testkit::{Finished, require_tool, tool, wait_until};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::common::{NOWAIT, Scratch, Server, accepted, refusal, text};

/// A server with its control interface on TCP, in a runtime directory of its own.
pub(crate) struct OnTcp {
    pub(crate) server: Server,
    pub(crate) port: String,
    scratch: Scratch,
}

impl OnTcp {
    pub(crate) fn start(extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let image = scratch.join("disk.img");
        accepted(&["create", text(&image), "8M"]);
        let wrapper = format!("XDG_RUNTIME_DIR={}", text(scratch.path()));
        let arguments = [&["--control", "tcp:127.0.0.1:0", "--verbose"], extra].concat();
        let server = Server::start_under(&["env", &wrapper], &image, &arguments);
        let port = |log: &str| {
            let at = log.split_once("control: tcp:127.0.0.1:")?.1;
            Some(at.split(|next: char| !next.is_ascii_digit()).next()?.to_owned())
        };
        wait_until("the port", || port(&server.log()).is_some());
        let port = port(&server.log()).expect("a port");
        Self { server, port, scratch }
    }

    pub(crate) fn token_file(&self) -> PathBuf {
        self.scratch.join("nowait").join(format!("control-{}.token", self.port))
    }

    /// The status and the body of the answer to a request, by curl with `options`.
    fn curl(&self, options: &[&str], scheme: &str, path: &str) -> (u16, String) {
        let mut curl = tool("curl");
        curl.args(["--silent", "--write-out", "\n%{http_code}"]).args(options);
        let printed = curl.arg(format!("{scheme}://127.0.0.1:{}{path}", self.port)).succeeds();
        let (body, status) = printed.rsplit_once('\n').expect("a status after the body");
        (status.parse().expect("a number"), body.to_owned())
    }

    /// `nowait` with `arguments` for this server, as a command of its user.
    fn nowait(&self, arguments: &[&str]) -> Command {
        let mut command = tool("env");
        command.arg(format!("XDG_RUNTIME_DIR={}", text(self.scratch.path()))).arg(NOWAIT);
        command.args(arguments).arg("--control").arg(format!("tcp:127.0.0.1:{}", self.port));
        command
    }
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).expect("a file").permissions().mode() & 0o777
}

#[test]
fn a_request_with_the_token_that_the_server_made_is_answered_and_no_other_one() {
    if !require_tool("curl") {
        return;
    }
    let it = OnTcp::start(&[]);
    let file = it.token_file();
    assert_eq!(mode_of(&file), 0o600);
    let token = fs::read_to_string(&file).expect("the token");
    let bearer = format!("authorization: Bearer {}", token.trim());
    let (status, body) = it.curl(&["--header", &bearer], "http", "/v1/server");
    let server: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((status, &server["pid"]), (200, &it.server.pid().into()));
    for path in ["/v1/server", "/v1/exports", "/v1/events", "/metrics", "/v1/nothing"] {
        let (status, body) = it.curl(&[], "http", path);
        assert_eq!(status, 401, "{path}: {body}");
        assert!(body.contains("the token is missing"), "{body}");
    }
    let (status, page) = it.curl(&["--include"], "http", "/");
    assert!(page.contains("content-security-policy: default-src 'none'"), "{page}");
    assert!(page.contains("connection: close"), "{page}");
    assert_eq!((status, page.contains("<title>nowait</title>")), (200, true));
    let mut wrong = bearer.clone();
    wrong.pop();
    assert_eq!(it.curl(&["--header", &wrong], "http", "/v1/server").0, 401);
    let other = ["--header", &bearer, "--header", "origin: http://other.example"];
    let (status, why) = it.curl(&other, "http", "/v1/server");
    assert_eq!(status, 403, "{why}");
    let own = format!("origin: http://127.0.0.1:{}", it.port);
    assert_eq!(it.curl(&["--header", &bearer, "--header", &own], "http", "/v1/server").0, 200);
    // The Unix socket is there, too, and needs no token.
    let socket = it.scratch.join("nowait").join(format!("control-{}.sock", it.server.pid()));
    tool(NOWAIT).args(["status", "--control", text(&socket)]).succeeds();
    it.server.stop();
    assert!(!file.exists(), "the token is left");
}

#[test]
fn the_commands_take_the_token_from_the_server_a_file_or_the_environment() {
    let it = OnTcp::start(&[]);
    assert!(it.nowait(&["status"]).succeeds().contains(&format!("server {}", it.server.pid())));
    it.nowait(&["export", "read-only", "@0", "on"]).succeeds();
    assert!(it.nowait(&["connections"]).succeeds().contains("frontend"));
    let copy = it.scratch.join("copy");
    fs::copy(it.token_file(), &copy).expect("a copy");
    let address = format!("tcp:127.0.0.1:{}", it.port);
    let status = ["status", "--control", &address];
    let elsewhere = || {
        let mut command = tool("env");
        command.args(["-u", "XDG_RUNTIME_DIR", "TMPDIR=/nowhere"]);
        command
    };
    let why = elsewhere().arg(NOWAIT).args(status).fails();
    assert!(why.starts_with("nowait: there is no token for port"), "{why}");
    let given = ["--control-token", text(&copy)];
    elsewhere().arg(NOWAIT).args(status).args(given).succeeds();
    let token = fs::read_to_string(&copy).expect("the token");
    let variable = format!("NOWAIT_CONTROL_TOKEN={}", token.trim());
    elsewhere().arg(variable).arg(NOWAIT).args(status).succeeds();
    let why =
        elsewhere().arg("NOWAIT_CONTROL_TOKEN=0123456789abcdef").arg(NOWAIT).args(status).fails();
    assert_eq!(why, "nowait: the token is missing, or another one\n");
    fs::set_permissions(&copy, PermissionsExt::from_mode(0o644)).expect("a mode");
    let why = elsewhere().arg(NOWAIT).args(status).args(given).fails();
    assert!(why.contains("other users may read this token"), "{why}");
    let why = tool(NOWAIT).args(["status", "--control", "tcp:0.0.0.0:1"]).fails();
    assert!(why.contains("a token is sent to this host only"), "{why}");
    it.server.stop();
}

#[test]
fn a_token_is_not_for_networks_and_its_file_not_for_others() {
    let scratch = Scratch::new();
    let (image, token) = (scratch.join("disk.img"), scratch.join("token"));
    accepted(&["create", text(&image), "1M"]);
    let refused = |extra: &[&str], words: &[&str]| {
        refusal(&[&["serve", text(&image)], extra].concat()).says(words);
    };
    refused(&["--control", "tcp:0.0.0.0:0"], &["other machines could read the token"]);
    fs::write(&token, "0123456789abcdef").expect("a file");
    fs::set_permissions(&token, PermissionsExt::from_mode(0o640)).expect("a mode");
    let with = ["--control", "tcp:127.0.0.1:0", "--control-token", text(&token)];
    refused(&with, &[text(&token), "other users may read"]);
    fs::set_permissions(&token, PermissionsExt::from_mode(0o600)).expect("a mode");
    fs::write(&token, "short").expect("a file");
    refused(&with, &[text(&token), "a token has 16 to 512"]);
    fs::remove_file(&token).expect("a file");
    refused(&with, &[text(&token)]);
}

#[test]
fn only_a_client_with_a_certificate_is_answered_where_certificates_are_given() {
    if !require_tool("curl") {
        return;
    }
    let (authority, certs, client) =
        (Authority::new("the operators"), Scratch::new(), Scratch::new());
    for (directory, role) in [(certs.path(), Role::Server), (client.path(), Role::Client)] {
        authority.trusted_in(directory);
        authority.certify(directory, role, Flaw::None);
    }
    let it = OnTcp::start(&["--control-tls-certs", text(certs.path())]);
    assert!(!it.token_file().exists(), "there is a token");
    let [ca, cert, key] =
        ["ca-cert.pem", "client-cert.pem", "client-key.pem"].map(|name| client.join(name));
    let trusted = ["--cacert", text(&ca)];
    let known = [&trusted[..], &["--cert", text(&cert), "--key", text(&key)]].concat();
    assert_eq!(it.curl(&known, "https", "/healthz"), (200, "ok\n".into()));
    let nobody = ["--cacert", text(&ca), "--silent"];
    tool("curl").args(nobody).arg(format!("https://127.0.0.1:{}/healthz", it.port)).fails();
    tool("curl").arg("--silent").arg(format!("http://127.0.0.1:{}/healthz", it.port)).fails();
    let with = ["status", "--control-tls-certs", text(client.path())];
    assert!(it.nowait(&with).succeeds().contains(&format!("server {}", it.server.pid())));
    // A reload reads them again.
    it.server.signal(Signal::HUP);
    wait_until("the reload", || it.server.log().contains("read again: the TLS files"));
    assert_eq!(it.curl(&known, "https", "/healthz").0, 200);
    it.server.stop();
}

#[test]
fn an_upgrade_keeps_the_port_and_the_token() {
    let mut it = OnTcp::start(&[]);
    let token = fs::read_to_string(it.token_file()).expect("the token");
    let report = it.nowait(&["upgrade", "--json"]).succeeds();
    let report: Value = serde_json::from_str(&report).expect("JSON");
    let process =
        Pid::from_raw(report["pid"].as_i64().expect("a number") as i32).expect("a process");
    assert!(it.server.wait().success(), "{}", it.server.log());
    assert_eq!(fs::read_to_string(it.token_file()).expect("the token"), token);
    let printed = it.nowait(&["status"]).succeeds();
    assert!(printed.starts_with(&format!("server {}", process.as_raw_nonzero())), "{printed}");
    kill_process(process, Signal::TERM).expect("a server to end");
    wait_until("its end", || test_kill_process(process).is_err());
    assert!(!it.token_file().exists(), "the token is left");
}
