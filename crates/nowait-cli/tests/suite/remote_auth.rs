//! Web servers that want a token, a password or another header of their clients.
//!
//! Invariant: the servers of these tests answer only clients that send it; no secret is in a line of nowait's.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use nowait_testkit::signer::Signer;
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Random, Scratch, seed, wait_until};

use crate::common::{MIB, Server, accepted, refusal, text};
use crate::log_messages::await_line;

/// A server of an object that wants `value` in the header `name`.
fn site(name: &'static str, value: &str) -> (WebServer, Vec<u8>) {
    let object = Random::from_seed(seed()).bytes(5 * MIB as usize);
    let server = WebServer::start(object.clone(), "/disk.img");
    wants(&server, name, value);
    (server, object)
}

fn wants(server: &WebServer, name: &'static str, value: &str) {
    server.script().signer = Some(Signer::Header(name, value.into()));
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

#[test]
fn a_token_that_is_replaced_while_a_confined_server_serves_costs_no_error() {
    let (store, object) = site("authorization", "Bearer one");
    let scratch = Scratch::new();
    // Kubernetes keeps its tokens so: behind a link to a directory that is replaced.
    let [file, new, data] = ["token", "new", "data"].map(|name| scratch.join(name));
    fs::create_dir(&data).unwrap();
    write(&data.join("token"), "one\n");
    symlink("data/token", &file).unwrap();
    let url = store.url();
    let options = ["--read-only", "--http-auth", text(&file)];
    let server = Server::start(Path::new(&url), &options);
    let mut client = server.connect();
    let mut is_read = |block: usize| {
        let data = client.read(block as u64 * MIB, 4096).unwrap();
        assert!(data[..] == object[block << 20..][..4096]);
    };
    is_read(0);
    wants(&store, "authorization", "Bearer two");
    write(&new, "bearer two");
    fs::rename(&new, &file).unwrap();
    is_read(1);
    wants(&store, "authorization", "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
    write(&file, "basic Aladdin:open sesame");
    is_read(2);
    // Some servers answer 403 to a token that has expired.
    store.script().lies.push_back(Lie::Status(403, "", ""));
    write(&file, "basic Aladdin:open sesame\nx-more: 1");
    is_read(4);
    // The new one comes after the old one has expired.
    let before = store.script().unsigned;
    wants(&store, "x-token", "three");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("the server refuses", || store.script().unsigned > before + 1);
            write(&new, "X-Token: three");
            fs::rename(&new, &file).unwrap();
        });
        is_read(3);
    });
    server.stop();
}

#[test]
fn every_command_that_reads_an_object_takes_the_file() {
    let (store, object) = site("authorization", "Bearer right");
    let (scratch, url) = (Scratch::new(), store.url());
    let [file, copy, overlay] = ["token", "copy.img", "over.qcow2"].map(|name| scratch.join(name));
    write(&file, "host 127.0.0.1\nright\nhost other.example\nbearer wrong\n");
    let auth = ["--http-auth", text(&file)];
    let run = |arguments: &[&str]| accepted(&[arguments, &auth].concat());
    assert!(run(&["info", &url]).contains("web server"));
    run(&["map", &url]);
    run(&["copy", &url, text(&copy)]);
    assert!(fs::read(&copy).unwrap() == object);
    run(&["create", text(&overlay), "--backing", &url, "--backing-format", "raw"]);
    run(&["check", text(&overlay), "--backing", &url]);
    let flattened = scratch.join("flat.img");
    run(&["copy", "--backing", &url, text(&overlay), text(&flattened)]);
    assert!(fs::read(&flattened).unwrap() == object);
}

#[test]
fn a_secret_is_sent_to_the_server_that_was_named_and_not_to_another_one() {
    let (store, _) = site("authorization", "Bearer secret");
    let other = WebServer::start(vec![7; 4096], "/disk.img");
    let scratch = Scratch::new();
    let file = scratch.join("token");
    write(&file, "secret");
    let leads = |to: &str| {
        let header = format!("location: {to}\r\n").leak();
        store.script().lies.push_back(Lie::Status(302, header, ""));
    };
    leads(&other.url());
    accepted(&["info", &store.url(), "--http-auth", text(&file)]);
    let asked = other.script().requests.clone();
    assert!(
        !asked.is_empty() && asked.iter().all(|it| it.header("authorization").is_none()),
        "{asked:?}"
    );
    leads("/disk.img");
    accepted(&["info", &store.url(), "--http-auth", text(&file)]);
    let asked = store.script().requests.clone();
    assert!(
        asked.iter().all(|it| it.header("authorization") == Some("Bearer secret")),
        "{asked:?}"
    );
}

#[test]
fn a_file_that_is_wrong_or_refused_is_an_error_without_a_secret() {
    let (store, _) = site("authorization", "Bearer right");
    let (scratch, url) = (Scratch::new(), store.url());
    let file = scratch.join("token");
    refusal(&["info", &url]).says(&["does not accept the credentials (401)", "--http-auth"]);
    for (content, words) in [
        ("bearer secret", "does not accept the credentials (401)"),
        ("# a\nuser:secret", "token: line 2 is none of 'bearer TOKEN'"),
        ("Host: secret", "token: line 1 has a header that only nowait itself sends"),
        ("", "token: it has no token, password or header"),
    ] {
        write(&file, content);
        let refused = refusal(&["info", &url, "--http-auth", text(&file)]);
        refused.says(&[words]);
        assert!(!refused.error.contains("secret"), "{}", refused.error);
    }
    fs::remove_file(&file).unwrap();
    refusal(&["info", &url, "--http-auth", text(&file)]).says(&["token: No such file"]);
    write(&file, "right");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let options = ["--read-only", "--http-auth", text(&file)];
    let server = Server::start(Path::new(&url), &options);
    await_line(&server, "token: other users may read it (chmod 600 it)");
    server.stop();
}
