//! Stores and web servers that speak HTTP/2 only.
//!
//! Invariant: what such a server does costs no more than what one of HTTP/1.1 does.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use nowait_testkit::certificates::{Authority, Flaw, Role, server_of};
use nowait_testkit::multipart_upload::Call;
use nowait_testkit::signer::Signer;
use nowait_testkit::web_proxy::WebProxy;
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Finished, Random, Scratch, seed};

use crate::common::{KIB, MIB, NOWAIT, Server, refusal_under, text, tool};
use crate::remote_objects::{KEY, SECRET};

/// A server that speaks only the version of HTTP with the name `protocol`, and what it is trusted by.
struct Site {
    scratch: Scratch,
    authority: Authority,
    server: WebServer,
    object: Vec<u8>,
    trust: String,
}

impl Site {
    fn new(protocol: &str, path: &str) -> Self {
        let scratch = Scratch::new();
        let authority = Authority::new("one");
        authority.trusted_in(scratch.path());
        let object = Random::from_seed(seed()).bytes(3 * MIB as usize);
        let server = WebServer::start(object.clone(), path);
        let trust = format!("SSL_CERT_FILE={}", text(&scratch.join("ca-cert.pem")));
        let site = Self { scratch, authority, server, object, trust };
        site.shows(Flaw::None, protocol);
        site
    }

    /// From now on new connections speak `protocol`, and are shown a certificate with `flaw`.
    fn shows(&self, flaw: Flaw, protocol: &str) {
        self.authority.certify(self.scratch.path(), Role::Server, flaw);
        let mut tls = Arc::unwrap_or_clone(server_of(self.scratch.path()));
        tls.alpn_protocols = vec![protocol.into()];
        self.server.script().tls = Some(Arc::new(tls));
    }

    fn root(&self) -> String {
        self.server.root().replace("http://", "https://")
    }
}

#[test]
fn a_confined_server_reads_from_a_store_that_speaks_http_2_only_through_its_faults() {
    let site = Site::new("h2", "/disk.img");
    site.server.script().max_streams = Some(2);
    let url = format!("{}/disk.img", site.root());
    let server = Server::start_under(
        &["env", &site.trust],
        Path::new(&url),
        &["--read-only", "--reconnect", "60"],
    );
    let mut client = server.connect();
    let lies = [
        Lie::GoAway,
        Lie::HangUp,
        Lie::Reset(7),
        Lie::Cut(5000),
        Lie::Status(503, "", ""),
        Lie::Header("content-length: 7\r\n"),
    ];
    for (n, lie) in (0..).zip(lies) {
        site.server.script().lies.push_back(lie.clone());
        let pos = n * 448 * KIB;
        let data = client.read(pos, 64 << 10).unwrap_or_else(|_| panic!("{lie:?}"));
        assert!(data == site.object[pos as usize..][..64 << 10], "{lie:?}");
    }
    assert!(client.read(0, 3 * MIB as u32).expect("a read") == site.object);
    server.stop();
    let script = site.server.script();
    assert!(script.lies.is_empty() && script.most_streams <= 2, "{}", script.most_streams);
    assert!(script.http2_connections > 0);
}

#[test]
fn a_disk_is_uploaded_to_a_store_that_speaks_http_2_only_and_read_from_it() {
    let site = Site::new("h2", "/bucket/disk.img");
    let (key, secret, region) = (KEY.into(), SECRET.into(), String::new());
    site.server.script().signer = Some(Signer::Aws { key, secret, region });
    site.server.script().is_absent = true;
    site.server.script().upload_lies.push((Call::Part, Lie::Reset(7)));
    let variables = [
        site.trust.clone(),
        format!("AWS_ENDPOINT_URL={}", site.root()),
        format!("AWS_ACCESS_KEY_ID={KEY}"),
        format!("AWS_SECRET_ACCESS_KEY={SECRET}"),
        "AWS_REGION=us-east-1".into(),
    ];
    let disk = site.scratch.random("disk.img", 20 * MIB, 1);
    let url = "s3://bucket/disk.img";
    tool("env").args(&variables).args([NOWAIT, "copy", "--verify", text(&disk), url]).succeeds();
    assert!(site.server.script().object == fs::read(&disk).expect("a disk"));
    assert_eq!(site.server.script().unsigned, 0);
}

#[test]
fn http_2_is_spoken_in_the_tunnel_of_a_proxy() {
    let site = Site::new("h2", "/disk.img");
    site.shows(Flaw::Elsewhere, "h2");
    let port = site.root().rsplit(':').next().and_then(|port| port.parse().ok());
    let proxy = WebProxy::start(port.expect("a port"), None);
    let named = format!("HTTPS_PROXY=http://{}", proxy.address());
    let url = "https://elsewhere.example/disk.img";
    tool("env").args([&site.trust, &named]).args([NOWAIT, "info", url]).succeeds();
    assert!(site.server.script().http2_connections > 0);
}

#[test]
fn a_server_that_speaks_neither_version_is_refused_in_words() {
    let site = Site::new("h3", "/disk.img");
    let url = format!("{}/disk.img", site.root());
    let refused = refusal_under(&["env", &site.trust], &["info", &url]);
    refused.says(&["the server speaks neither HTTP/1.1 nor HTTP/2"]);
}
