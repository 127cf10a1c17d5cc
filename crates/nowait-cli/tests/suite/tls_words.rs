//! Messages about TLS: how certificates are made, and why some are refused.
//!
//! Invariant: certificates are made by openssl, by the lines of docs/operating.md or by those that
//! others have from elsewhere; no message has a name of Rust in it.

use std::fs;
use std::path::Path;

use crate::common::{Finished, MIB, Scratch, Server, accepted, refusal, require_tool, text, tool};
use crate::log_messages::await_line;

/// The lines of docs/operating.md that make certificates.
fn documented_lines() -> String {
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md");
    let manual = fs::read_to_string(manual).expect("the manual");
    let (_, from) = manual.split_once("### Certificates").expect("the section");
    let (_, from) = from.split_once("```sh\n").expect("the lines");
    from.split_once("```").expect("their end").0.to_owned()
}

/// Runs `script` in the directory.
fn run(script: &str, directory: &Scratch) {
    tool("sh").args(["-e", "-c", script]).current_dir(directory.path()).succeeds();
}

/// Has a key and a certificate of version 1 made for `name`, as `openssl x509 -req` makes it where
/// it is given no extensions. False: this openssl makes others.
fn make_version_1(directory: &Scratch, name: &str) -> bool {
    let script = format!(
        "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} \
         -keyout {name}-key.pem -out {name}.csr 2>&1\n\
         openssl x509 -req -in {name}.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
         -out {name}-cert.pem 2>&1\n\
         openssl x509 -in {name}-cert.pem -noout -text"
    );
    let printed = tool("sh").args(["-e", "-c", &script]).current_dir(directory.path()).succeeds();
    printed.contains("Version: 1 ")
}

/// Checks that the one line of an error has no name of Rust in it.
fn assert_plain(error: &str) {
    for name in ["Other", "Unsupported", "Unknown", "rustls", "{"] {
        assert!(!error.contains(name), "{error}");
    }
}

#[test]
fn the_documented_lines_make_certificates_that_work() {
    nowait_testkit::needs!(require_tool("openssl"));
    let certs = Scratch::new();
    let lines = documented_lines();
    assert_eq!(lines.lines().filter(|line| line.starts_with("openssl")).count(), 3, "{lines}");
    run(&lines, &certs);
    let image = certs.sparse("disk.img", MIB);
    let directory = text(certs.path());
    let verified =
        ["--nbd", "tcp:localhost:0", "--json", "--tls-certs", directory, "--tls-verify-peer"];
    let server = Server::start(&image, &verified);
    let uri = server.uris().iter().find(|uri| uri.starts_with("nbds://")).expect("its address");
    let uri = format!("{uri}?tls-certificates={directory}");
    assert!(accepted(&["info", &uri]).contains("1 MiB"));
    if require_tool("nbdinfo") {
        let printed = tool("nbdinfo").arg(&uri).succeeds();
        assert!(printed.contains("with TLS"), "{printed}");
    }
    server.stop();
}

#[test]
fn a_certificate_of_version_1_is_told_as_such_and_the_right_file_is_named() {
    nowait_testkit::needs!(require_tool("openssl"));
    let certs = Scratch::new();
    run(&documented_lines(), &certs);
    let image = certs.sparse("disk.img", MIB);
    let directory = text(certs.path());
    let server = Server::start(&image, &["--tls-certs", directory, "--tls-verify-peer"]);
    if !make_version_1(&certs, "client") || !make_version_1(&certs, "server") {
        nowait_testkit::say_skipped("this openssl makes no certificates of version 1");
        return server.stop();
    }
    let uri = format!("{}&tls-certificates={directory}", server.uri());
    let refused = refusal(&["info", &uri]);
    refused.says(&["client-cert.pem: the certificate is of version 1"]);
    assert_plain(&refused.error);
    if require_tool("nbdinfo") {
        tool("nbdinfo").arg(&uri).fails();
        let line = await_line(&server, "TLS has failed");
        assert!(line.contains("certificate of the client is of version 1"), "{line}");
    }
    server.stop();
    let socket = format!("unix:{}", text(&certs.join("other.sock")));
    let refused = refusal(&["serve", text(&image), "--nbd", &socket, "--tls-certs", directory]);
    refused.says(&["server-cert.pem: the certificate is of version 1"]);
    assert_plain(&refused.error);
}

#[test]
fn a_client_without_tls_has_a_line_of_its_own_in_the_log() {
    nowait_testkit::needs!(require_tool("openssl"));
    let certs = Scratch::new();
    run(&documented_lines(), &certs);
    let image = certs.sparse("disk.img", MIB);
    let server = Server::start(&image, &["--tls-certs", text(certs.path())]);
    let plain = server.uri().replace("nbds+", "nbd+");
    refusal(&["info", &plain]).says(&["TLS"]);
    let line = await_line(&server, "without TLS");
    assert!(line.contains("a client without TLS was refused"), "{line}");
    server.stop();
}
