//! Web servers whose certificates are right or wrong.
//!
//! Invariant: nothing is read from a server whose certificate is wrong.

use std::fs;
use std::path::Path;

use nowait_testkit::certificates::{
    Authority, Flaw, Role, self_signed, self_signed_authority, server_of,
};
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Finished, KIB, Random, Scratch, seed};

use crate::common::{NOWAIT, Server, refusal_under, text, tool};

/// NBD's EIO.
const EIO: u32 = 5;
const OBJECT_BYTES: u64 = 512 * KIB;

/// A web server whose certificate has `flaw`, its URL, and the command prefix by which the authority
/// of the directory is trusted.
struct Site {
    scratch: Scratch,
    authority: Authority,
    object: Vec<u8>,
    server: WebServer,
    url: String,
    trust: String,
}

impl Site {
    fn new(flaw: Flaw) -> Self {
        let scratch = Scratch::new();
        let authority = Authority::new("one");
        authority.trusted_in(scratch.path());
        let object = Random::from_seed(seed()).bytes(OBJECT_BYTES as usize);
        let server = WebServer::start(object.clone(), "/disk.img");
        let url = server.url().replace("http://", "https://");
        let trust = format!("SSL_CERT_FILE={}", text(&scratch.join("ca-cert.pem")));
        let site = Self { scratch, authority, object, server, url, trust };
        site.shows(flaw);
        site
    }

    /// From now on new connections are shown a certificate with `flaw`.
    fn shows(&self, flaw: Flaw) {
        self.authority.certify(self.scratch.path(), Role::Server, flaw);
        self.server.script().tls = Some(server_of(self.scratch.path()));
    }

    fn environment(&self) -> [&str; 2] {
        ["env", &self.trust]
    }

    /// The one line by which the server is refused.
    fn refusal(&self, url: &str) -> String {
        let refused = refusal_under(&self.environment(), &["info", url]);
        assert_eq!(refused.error.trim_end().lines().count(), 1, "{}", refused.error);
        refused.error
    }
}

#[test]
fn a_server_is_read_whose_authority_the_user_trusts() {
    let site = Site::new(Flaw::None);
    let info = tool("env").arg(&site.trust).args([NOWAIT, "info", &site.url]).succeeds();
    assert!(info.contains("web server"), "{info}");
    let server = Server::start_under(&site.environment(), Path::new(&site.url), &["--read-only"]);
    assert!(server.connect().read(0, OBJECT_BYTES as u32).expect("a read") == site.object);
    server.stop();
}

#[test]
fn a_certificate_of_another_authority_is_refused_in_words() {
    let site = Site::new(Flaw::None);
    Authority::new("two").trusted_in(site.scratch.path());
    let error = site.refusal(&site.url);
    assert!(error.contains("signed by no authority that this host trusts"), "{error}");
    assert!(site.server.script().ranges.is_empty(), "nothing was asked");
}

#[test]
fn an_expired_certificate_is_refused_in_words() {
    let site = Site::new(Flaw::Expired);
    let error = site.refusal(&site.url);
    assert!(error.contains("has expired"), "{error}");
}

#[test]
fn a_certificate_of_another_host_is_refused_in_words() {
    let site = Site::new(Flaw::Elsewhere);
    let error = site.refusal(&site.url);
    assert!(error.contains("is for elsewhere.example, not for"), "{error}");
}

#[test]
fn a_certificate_that_signs_itself_is_taken_and_that_of_an_authority_refused_in_words() {
    let site = Site::new(Flaw::None);
    let shows = || site.server.script().tls = Some(server_of(site.scratch.path()));
    self_signed_authority(site.scratch.path());
    shows();
    let error = site.refusal(&site.url);
    assert!(error.contains("is that of an authority, and not of a server"), "{error}");
    assert!(error.contains("openssl req -x509 -addext basicConstraints"), "{error}");
    self_signed(site.scratch.path());
    shows();
    fs::copy(site.scratch.join("server-cert.pem"), site.scratch.join("ca-cert.pem"))
        .expect("a copy");
    let url = site.url.replace("127.0.0.1", "localhost");
    tool("env").arg(&site.trust).args([NOWAIT, "info", &url]).succeeds();
}

#[test]
fn a_server_without_tls_at_an_https_url_is_refused() {
    let site = Site::new(Flaw::None);
    site.server.script().tls = None;
    let refused = refusal_under(
        &site.environment(),
        &["serve", &site.url, "--read-only", "--reconnect", "0"],
    );
    assert!(refused.error.contains("cannot connect"), "{}", refused.error);
}

#[test]
fn a_certificate_that_becomes_wrong_is_an_error_of_reads_until_it_is_right_again() {
    let site = Site::new(Flaw::None);
    let options = ["--read-only", "--reconnect", "1"];
    let server = Server::start_under(&site.environment(), Path::new(&site.url), &options);
    let mut client = server.connect();
    assert!(client.read(0, 4096).expect("a read") == site.object[..4096]);
    site.shows(Flaw::Expired);
    // The connection that there is ends.
    site.server.script().lies.push_back(Lie::HangUp);
    assert_eq!(client.read(256 << 10, 4096).expect_err("a wrong certificate"), EIO);
    assert!(server.log().contains("the certificate of the server has expired"), "{}", server.log());
    site.shows(Flaw::None);
    let data = client.read(256 << 10, 4096).expect("a read");
    assert!(data == site.object[256 << 10..][..4096]);
    server.stop();
}
