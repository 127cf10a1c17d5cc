//! Images of other servers that are added to a running one, and changes of what stands on them.
//!
//! Invariant: a request opens no URI that the server was not allowed when it was started.

use std::fs;
use std::sync::PoisonError;

use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::web_server::WebServer;
use nowait_testkit::{Finished, Random, seed};
use serde_json::Value;

use crate::ceph::{OSD, cluster};
use crate::common::{MIB, Scratch, Server, accepted, refusal, text};
use crate::upgrade::Upgraded;

const DISK_BYTES: u64 = 4 * MIB;

fn bytes(len: u64) -> Vec<u8> {
    Random::from_seed(seed()).bytes(len as usize)
}

/// A server that may add what `allowed` says, and images of `scratch`.
fn start(scratch: &Scratch, allowed: &str) -> Upgraded {
    Upgraded::start("raw", &["--allow-dir", text(&scratch.join(".")), "--allow-uri", allowed])
}

fn connect(server: &Upgraded, name: &str) -> Client {
    Client::connect_to(&server.socket(), name, Mode::Structured).expect("a connection")
}

/// The server's answer to a command, as JSON.
fn told(server: &Upgraded, arguments: &[&str]) -> Value {
    let json = server.command(arguments).arg("--json").succeeds();
    serde_json::from_str(&json).expect("JSON")
}

/// A server with a disk of random bytes, and its URI.
fn behind(scratch: &Scratch) -> (Server, String, Vec<u8>) {
    let (image, disk) = (scratch.join("behind.img"), bytes(DISK_BYTES));
    fs::write(&image, &disk).expect("a file");
    let server = Server::start(&image, &["-f", "raw", "--control", "off"]);
    let uri = format!("nbd+unix:///?socket={}", server.socket().display());
    (server, uri, disk)
}

#[test]
fn an_export_of_another_server_is_added_by_leave_snapshotted_and_handed_over() {
    let scratch = Scratch::new();
    let (behind, uri, disk) = behind(&scratch);
    let mut it = start(&scratch, &uri);
    for (wrong, why) in [
        (format!("{uri}2"), "--allow-uri does not allow"),
        ("nbd://localhost/".into(), "--allow-uri does not allow"),
        ("nbd://".into(), "nbd://"),
    ] {
        let refused = it.command(&["export", "add", "other", &wrong]).fails();
        assert!(refused.contains(why), "{refused}");
    }
    it.command(&["export", "add", "other", &uri]).succeeds();
    assert_eq!(told(&it, &["export", "list"])[1]["image"], uri);
    let twice = it.command(&["export", "add", "twice", &uri]).fails();
    assert!(twice.contains("it is served already"), "{twice}");
    let mut client = connect(&it, "other");
    assert!(client.read(0, DISK_BYTES as u32).expect("bytes") == disk);
    client.write(0, &[1; 4096]).expect("a write");
    let resized = it.command(&["export", "resize", "other", "+1M"]).fails();
    assert!(resized.contains("the server behind it"), "{resized}");
    let overlay = scratch.join("overlay.qcow2");
    it.command(&["export", "snapshot", "other", text(&overlay)]).succeeds();
    client.write(4096, &[2; 4096]).expect("a write into the overlay");
    it.upgrade();
    let expected = [&[1; 4096][..], &[2; 4096], &disk[8192..]].concat();
    assert!(client.read(0, DISK_BYTES as u32).expect("bytes") == expected);
    it.command(&["export", "remove", "other", "--force"]).succeeds();
    it.stop();
    behind.stop();
    let kept = fs::read(scratch.join("behind.img")).expect("the image");
    assert!(kept[..4096] == [1; 4096] && kept[4096..] == disk[4096..], "the snapshot");
    let refused = refusal(&["serve", text(&overlay)]);
    assert!(refused.error.contains(&format!("--backing {uri}")), "{}", refused.error);
}

#[test]
fn no_refusal_has_the_password_or_the_signature_of_a_url() {
    let scratch = Scratch::new();
    let mut it = start(&scratch, "nbd://localhost/");
    for url in [
        "https://host/image?X-Amz-Signature=SECRET",
        "https://user:SECRET@host/image",
        "s3://bucket/key?X-Amz-Signature=SECRET",
        "nbd://user:SECRET@host/export",
        "nbd://user:SECRET@host:10809/export",
    ] {
        let served = refusal(&["serve", url, "--read-only"]).error;
        let added = it.command(&["export", "add", "other", url]).fails();
        for refused in [served, added] {
            assert!(refused.contains("nowait: ") && !refused.contains("SECRET"), "{refused}");
        }
    }
    it.upgrade();
    it.stop();
}

#[test]
fn an_image_of_a_cluster_is_added_to_a_confined_server() {
    let Some(cluster) = cluster() else { return };
    let _osd = OSD.read().unwrap_or_else(PoisonError::into_inner);
    let (scratch, location) = (Scratch::new(), cluster.image("added"));
    let mut it = start(&scratch, &location);
    it.command(&["export", "add", "added", &location]).succeeds();
    let mut client = connect(&it, "added");
    client.write(0, &[5; 4096]).expect("a write");
    let refused = it.command(&["upgrade"]).fails();
    assert!(refused.contains("another client holds its lock"), "{refused}");
    let overlay = scratch.join("overlay.qcow2");
    it.command(&["export", "snapshot", "added", text(&overlay)]).succeeds();
    client.write(4096, &[6; 4096]).expect("a write into the overlay");
    drop(client);
    it.upgrade();
    let bytes = connect(&it, "added").read(0, 12 << 10).expect("bytes");
    assert!(bytes == [[5; 4096], [6; 4096], [0; 4096]].concat());
    it.stop();
}

#[test]
fn overlays_on_an_object_are_added_changed_and_handed_over_and_share_what_was_read() {
    let object = bytes(DISK_BYTES);
    let store = WebServer::start(object.clone(), "/dir/base.img");
    let (url, prefix) = (store.url(), format!("{}/dir/", store.root()));
    let scratch = Scratch::new();
    let mut it = start(&scratch, &prefix);
    let overlay = |name: &str| {
        let path = scratch.join(name);
        let base = ["--backing", &url, "--backing-format", "raw"];
        accepted(&[&["create", text(&path)][..], &base].concat());
        text(&path).to_owned()
    };
    let (first, second) = (overlay("first.qcow2"), overlay("second.qcow2"));
    let refused = it.command(&["export", "add", "first", &first]).fails();
    assert!(refused.contains(&format!("--backing {url}")), "{refused}");
    let elsewhere = format!("{}/base.img", store.root());
    let refused = it.command(&["export", "add", "no", &first, "--backing", &elsewhere]).fails();
    assert!(refused.contains("--allow-uri does not allow"), "{refused}");
    it.command(&["export", "add", "first", &first, "--backing", &url]).succeeds();
    it.command(&["export", "add", "second", &second, "--backing", &url]).succeeds();
    let mut clients = ["first", "second"].map(|name| connect(&it, name));
    for client in &mut clients {
        assert!(client.read(0, DISK_BYTES as u32).expect("bytes") == object);
    }
    let status = told(&it, &["status"]);
    let stores = &status[0]["server"]["stores"];
    assert_eq!(stores[0]["fetched_bytes"], DISK_BYTES, "read once for both: {status}");
    let third = scratch.join("third.qcow2");
    let [client, other] = &mut clients;
    client.write(0, &[3; 4096]).expect("a write");
    it.command(&["export", "snapshot", "first", text(&third)]).succeeds();
    it.command(&["export", "resize", "first", "+1M"]).succeeds();
    client.write(4096, &[4; 4096]).expect("a write");
    it.upgrade();
    let expected = [&[3; 4096][..], &[4; 4096], &object[8192..]].concat();
    assert!(client.read(0, DISK_BYTES as u32).expect("bytes") == expected);
    assert!(other.read(0, DISK_BYTES as u32).expect("bytes") == object);
    it.stop();
    assert!(store.script().object == object, "the object is only read");
}
