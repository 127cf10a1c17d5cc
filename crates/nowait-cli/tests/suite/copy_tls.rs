//! `nowait copy` over TLS: with this server and others, and with servers that must be rejected.
//!
//! Invariant: the copy is compared with a file that was not transferred by TLS.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{MIB, Scratch, Server, refusal, require_tool, text};
use crate::copy::{copy, patchwork};
use crate::copy_other_servers::Peer;
use nowait_testkit::certificates::{Authority, Flaw, Role};
use nowait_testkit::{Random, ends_with_test, seed};

/// An authority, the certificate directories of a server and a client, and a directory for files.
struct Fixture {
    authority: Authority,
    server: Scratch,
    client: Scratch,
    scratch: Scratch,
}

impl Fixture {
    fn new() -> Self {
        let authority = Authority::new("the authority");
        let (server, client, scratch) = (Scratch::new(), Scratch::new(), Scratch::new());
        for directory in [&server, &client] {
            authority.trusted_in(directory.path());
            authority.revoke(directory.path());
        }
        authority.certify(server.path(), Role::Server, Flaw::None);
        authority.certify(client.path(), Role::Client, Flaw::None);
        Self { authority, server, client, scratch }
    }

    fn serve(&self, image: &Path, extra: &[&str]) -> Server {
        let certs = text(self.server.path());
        let fixed = ["--json", "--nbd", "tcp:localhost:0", "--tls-certs", certs];
        Server::start(image, &[&fixed, extra].concat())
    }

    fn source(&self) -> PathBuf {
        patchwork(&self.scratch, "source", &mut Random::from_seed(seed()))
    }

    /// Copies to `uri` and back, and compares.
    fn there_and_back(&self, source: &Path, uri: &str) {
        let back = self.scratch.join("back");
        let certs = ["--tls-certs", text(self.client.path()), "--verify"];
        copy(text(source), uri, &certs);
        copy(uri, text(&back), &[&certs[..], &["--force", "--connections", "2"]].concat());
        assert!(fs::read(source).expect("the source") == fs::read(&back).expect("the copy"));
    }
}

#[test]
fn a_disk_goes_through_tls_to_this_server_and_back() {
    let fixture = Fixture::new();
    let source = fixture.source();
    let bytes = fs::metadata(&source).expect("the source").len();
    for extra in [&[][..], &["--tls-verify-peer", "--queues", "2"]] {
        let image = fixture.scratch.random("image", bytes, 1);
        let server = fixture.serve(&image, extra);
        let uris = server.uris().to_vec();
        assert!(uris[0].starts_with("nbds+unix:") && uris[1].starts_with("nbds://localhost:"));
        uris.iter().for_each(|uri| fixture.there_and_back(&source, uri));
        // libnbd's URI parameters for the directory and the name of the certificate.
        let more =
            format!("tls-certificates={}&tls-hostname=127.0.0.1", text(fixture.client.path()));
        copy(&format!("{}&{more}", uris[0]), text(&fixture.scratch.join("third")), &["--force"]);
        server.stop();
        for copy in [&image, &fixture.scratch.join("third")] {
            assert!(fs::read(copy).expect("it") == fs::read(&source).expect("the source"));
        }
    }
}

#[test]
fn a_disk_goes_through_tls_to_qemu_nbd_and_nbdkit_and_back() {
    nowait_testkit::needs!(require_tool("qemu-nbd") && require_tool("nbdkit"));
    let fixture = Fixture::new();
    let source = fixture.scratch.dotted("source", 32 * MIB, 300_000, 2 * MIB);
    let image = fixture.scratch.sparse("image", 32 * MIB);
    let certs = text(fixture.server.path());
    let credentials = format!("tls-creds-x509,id=tls,endpoint=server,verify-peer=on,dir={certs}");
    let qemu = ["--object", credentials.as_str(), "--tls-creds", "tls"];
    let peer = Peer::qemu_nbd(&fixture.scratch, &image, &qemu);
    fixture.there_and_back(&source, &peer.uri().replace("nbd+", "nbds+"));
    drop(peer);
    assert!(fs::read(&image).expect("it") == fs::read(&source).expect("the source"));

    let directory = format!("--tls-certificates={certs}");
    for more in [&[][..], &["--tls-verify-peer", "--no-sr"]] {
        let tls = [&["--tls=require", directory.as_str()], more, &["memory", "32M"]].concat();
        let peer = Peer::nbdkit(&fixture.scratch, &tls);
        fixture.there_and_back(&source, &peer.uri().replace("nbd+", "nbds+"));
    }
}

#[test]
fn a_server_with_an_unverified_certificate_or_another_name_is_rejected() {
    let fixture = Fixture::new();
    let source = fixture.scratch.random("source", MIB, 3);
    let image = fixture.scratch.sparse("image", MIB);
    let stranger = Authority::new("a stranger");
    let certs = ["--tls-certs", text(fixture.client.path())];
    for (signer, flaw, words) in [
        (
            &stranger,
            Flaw::None,
            "certificate is not good: it is signed by an authority that is not",
        ),
        (&fixture.authority, Flaw::Expired, "certificate is not good: it has expired"),
        (&fixture.authority, Flaw::Revoked, "certificate is not good: it is revoked"),
    ] {
        signer.certify(fixture.server.path(), Role::Server, flaw);
        let server = fixture.serve(&image, &[]);
        for uri in server.uris() {
            refusal(&[&["copy", text(&source), uri], &certs[..]].concat()).says(&[uri, words]);
        }
        server.stop();
    }
    fixture.authority.certify(fixture.server.path(), Role::Server, Flaw::None);
    let server = fixture.serve(&image, &[]);
    for (uri, mark) in server.uris().iter().zip(["&", "?"]) {
        let named = format!("{uri}{mark}tls-hostname=other.example");
        refusal(&[&["copy", text(&source), &named], &certs[..]].concat())
            .says(&["certificate is not good", "other.example"]);
    }
    server.stop();
    assert!(fs::read(&image).expect("the image") == vec![0; MIB as usize]);
}

#[test]
fn missing_tls_files_are_reported_in_one_line() {
    let fixture = Fixture::new();
    let image = fixture.scratch.sparse("image", MIB);
    let target = fixture.scratch.join("target");
    let server = fixture.serve(&image, &["--tls-verify-peer"]);
    let (uri, known) = (server.uri().to_owned(), Scratch::new());
    let plain = uri.replace("nbds+", "nbd+");
    let refused = |uri: &str, directory: Option<&Path>, words: &[&str]| {
        let certs = directory.map(|directory| ["--tls-certs", text(directory)]);
        let certs = certs.as_ref().map_or(&[][..], |certs| &certs[..]);
        refusal(&[&["copy", uri, text(&target)], certs].concat()).says(words);
        assert!(!target.exists() && !fixture.scratch.join("target.partial").exists());
    };
    refused(&uri, None, &["TLS needs certificates", "--tls-certs"]);
    refused(&plain, None, &["the server wants TLS", "nbds://"]);
    refused(&uri, Some(known.path()), &["ca-cert.pem: there is no such file"]);
    fs::write(known.join("ca-cert.pem"), "nothing").expect("a file");
    refused(&uri, Some(known.path()), &["ca-cert.pem: it holds nothing"]);
    fixture.authority.trusted_in(known.path());
    // With TLS 1.3 the client receives the alert at the first record after its own handshake.
    refused(&uri, Some(known.path()), &["it may want a client's certificate"]);
    fixture.authority.certify(known.path(), Role::Client, Flaw::None);
    fs::remove_file(known.join("client-key.pem")).expect("the key");
    refused(&uri, Some(known.path()), &["client-key.pem: there is no such file"]);
    server.stop();
    let server = Server::start(&image, &[]);
    let secret = server.uri().replace("nbd+", "nbds+");
    refused(&secret, Some(fixture.client.path()), &["the server has no TLS"]);
    server.stop();
}

#[test]
fn a_server_killed_during_a_copy_by_tls_is_reported_and_leaves_no_file() {
    nowait_testkit::needs!(require_tool("nbdkit"));
    let fixture = Fixture::new();
    let directory = format!("--tls-certificates={}", text(fixture.server.path()));
    let slow = ["--filter=delay", "pattern", "64M", "delay-read=50ms"];
    let arguments = [&["--tls=require", directory.as_str()], &slow[..]].concat();
    let peer = Peer::nbdkit(&fixture.scratch, &arguments);
    let uri = peer.uri().replace("nbd+", "nbds+");
    let target = fixture.scratch.join("target");
    let copy = ends_with_test(&mut Command::new(crate::common::NOWAIT))
        .args(["copy", &uri, text(&target), "--tls-certs", text(fixture.client.path())])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("nowait");
    std::thread::sleep(std::time::Duration::from_millis(250));
    drop(peer);
    let output = nowait_testkit::output_of(copy);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && printed.lines().count() == 1, "{printed}");
    let ended = ["closed the connection", "the connection is lost"];
    assert!(ended.iter().any(|words| printed.contains(words)), "{printed}");
    assert!(!target.exists() && !fixture.scratch.join("target.partial").exists());
}
