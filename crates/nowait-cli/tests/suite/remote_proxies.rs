//! Objects that are read through a proxy.
//!
//! Invariant: no name of these tests has an address, so only a proxy can reach it.

use std::path::Path;

use nowait_testkit::certificates::{Authority, Flaw, Role, server_of};
use nowait_testkit::web_proxy::WebProxy;
use nowait_testkit::web_server::WebServer;
use nowait_testkit::{Random, Scratch, seed};

use crate::common::{MIB, Server, refusal_under, text};

/// `user:secret`, as the header has it.
const PASSWORD: &str = "Basic dXNlcjpzZWNyZXQ=";

/// A web server with TLS, whose certificate is for `localhost`, behind a proxy with a password; and the
/// environment that names both.
fn behind_a_proxy(scratch: &Scratch) -> (WebServer, WebProxy, [String; 2]) {
    let authority = Authority::new("one");
    authority.trusted_in(scratch.path());
    authority.certify(scratch.path(), Role::Server, Flaw::Elsewhere);
    let server = WebServer::start(Random::from_seed(seed()).bytes(2 * MIB as usize), "/disk.img");
    server.script().tls = Some(server_of(scratch.path()));
    let port = server.root().rsplit(':').next().unwrap().parse().unwrap();
    let proxy = WebProxy::start(port, Some(PASSWORD));
    let named = format!("https_proxy=http://user:secret@{}", proxy.address());
    let trust = format!("SSL_CERT_FILE={}", text(&scratch.join("ca-cert.pem")));
    (server, proxy, [named, trust])
}

#[test]
fn a_confined_server_reads_through_a_tunnel_what_is_encrypted() {
    let scratch = Scratch::new();
    let (store, proxy, environment) = behind_a_proxy(&scratch);
    let environment = ["env", &environment[0], &environment[1]];
    let url = "https://elsewhere.example/disk.img";
    let server = Server::start_under(&environment, Path::new(url), &["--read-only"]);
    let object = store.script().object.clone();
    assert!(server.connect().read(0, 2 * MIB as u32).unwrap() == object);
    server.stop();
    for (asked, password) in proxy.asked() {
        assert_eq!(asked, "CONNECT elsewhere.example:443");
        assert_eq!(password.as_deref(), Some(PASSWORD));
    }
    assert!(!proxy.asked().is_empty());
}

#[test]
fn the_proxy_of_a_request_in_the_clear_reads_it() {
    let url = "http://store.example/disk.img";
    let object = Random::from_seed(seed()).bytes(2 * MIB as usize);
    // A proxy gets the whole URL, with the name of the server.
    let proxy = WebServer::start(object.clone(), url);
    let named = format!("ALL_PROXY={}", proxy.root());
    let server = Server::start_under(&["env", &named], Path::new(url), &["--read-only"]);
    assert!(server.connect().read(0, 2 * MIB as u32).unwrap() == object);
    server.stop();
    let direct = ["env", &named, "NO_PROXY=other.example,.store.example"];
    let asked = proxy.script().requests.len();
    let refused = refusal_under(&direct, &["info", "http://x.store.example:1/disk.img"]);
    assert!(refused.error.contains("cannot connect"), "{}", refused.error);
    assert_eq!(proxy.script().requests.len(), asked);
}

#[test]
fn a_proxy_that_refuses_is_not_there_or_is_none_is_an_error_without_its_password() {
    let scratch = Scratch::new();
    let (_store, proxy, environment) = behind_a_proxy(&scratch);
    let url = "https://elsewhere.example/disk.img";
    let other = format!("HTTPS_PROXY=http://user:other-secret@{}", proxy.address());
    let closed = "HTTPS_PROXY=http://user:secret@127.0.0.1:1".to_owned();
    let socks = "ALL_PROXY=socks5://user:secret@127.0.0.1:1".to_owned();
    for (variable, words) in [
        (&other, "the proxy does not accept the user and the password, or wants both (407)"),
        (&closed, "cannot connect: by the proxy 127.0.0.1:1: Connection refused"),
        (&socks, "ALL_PROXY names no proxy that can be used"),
    ] {
        let refused = refusal_under(&["env", variable, &environment[1]], &["info", url]);
        assert!(refused.error.contains(words), "{}", refused.error);
        assert!(!refused.error.contains("secret"), "{}", refused.error);
    }
}
