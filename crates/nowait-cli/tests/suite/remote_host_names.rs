//! Names of hosts, whose addresses change while a confined server uses them.
//!
//! Invariant: the server itself opens none of the resolver's files.

use std::fs;
use std::path::Path;

use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{Random, seed};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{MIB, Scratch, Server, accepted, text};
use crate::log_messages::await_line;
use crate::storage_faults::private_mounts;
use crate::upgrade::child_of;

const NAME: &str = "store.test";
/// Puts the directory $0 in place of /etc and executes the command.
const WITH_ETC: &str = r#"mount --bind "$0" /etc && exec "$@""#;

/// `name` has `address` from now on, by another file in place of the one before.
fn becomes(etc: &Path, address: &str) {
    fs::write(etc.join("new"), format!("{address} {NAME}\n")).expect("a file");
    fs::rename(etc.join("new"), etc.join("hosts")).expect("another file");
}

#[test]
fn a_confined_server_follows_a_store_to_another_address_in_a_replaced_file() {
    let Some(flags) = private_mounts() else { return };
    let object = Random::from_seed(seed()).bytes(3 << 20);
    let before = WebServer::start(object.clone(), "/disk.img");
    let address = before.root().replace("http://127.0.0.1", "127.0.0.2");
    let after = WebServer::start_at(&address, object.clone(), "/disk.img");
    let scratch = Scratch::new();
    becomes(scratch.path(), "127.0.0.1");
    let etc = text(scratch.path());
    let wrapper = [&["unshare"], flags, &["--", "sh", "-c", WITH_ETC, etc]].concat();
    let url = before.url().replace("127.0.0.1", NAME);
    let options = ["--read-only", "--reconnect", "10"];
    let server = Server::start_under(&wrapper, url.as_ref(), &options);
    let mut client = server.connect();
    assert!(client.read(0, 4096).expect("a read") == object[..4096]);
    becomes(scratch.path(), "127.0.0.2");
    before.script().always = Some(Lie::HangUp);
    let data = client.read(MIB, 4096).unwrap_or_else(|_| panic!("{}", server.log()));
    assert!(data == object[MIB as usize..][..4096]);
    assert!(!after.script().ranges.is_empty(), "the other address was not asked");
    // Without its launcher it uses the addresses that it knows.
    let launcher = child_of(Pid::from_raw(server.pid() as i32).expect("a number"));
    kill_process(launcher, Signal::KILL).expect("a launcher");
    await_line(&server, "has exited");
    after.script().lies.push_back(Lie::HangUp);
    let data = client.read(2 * MIB, 4096).unwrap_or_else(|_| panic!("{}", server.log()));
    assert!(data == object[2 * MIB as usize..][..4096]);
    server.stop();
}

#[test]
fn a_name_of_a_server_that_is_added_later_has_its_address_from_the_launcher() {
    let scratch = Scratch::new();
    let image = scratch.random("behind.img", MIB, 1);
    let behind = Server::start(&image, &["--json", "--nbd", "tcp:127.0.0.1:0", "--control", "off"]);
    let uri = format!("nbd://localhost:{}/", behind.port());
    let socket = scratch.join("control");
    let control = format!("unix:{}", text(&socket));
    let own = scratch.sparse("own.img", MIB);
    let server = Server::start(&own, &["--control", &control, "--allow-uri", &uri]);
    accepted(&["export", "add", "other", &uri, "--control", text(&socket)]);
    let mut client =
        Client::connect_to(&server.socket(), "other", Mode::Structured).expect("a server");
    assert!(client.read(0, 4096).expect("a read") == fs::read(&image).expect("a file")[..4096]);
    drop(client);
    server.stop();
    behind.stop();
}
