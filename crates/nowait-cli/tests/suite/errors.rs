//! What cannot be served is refused in one line that says what and what to do; wrong usage exits 2.
//!
//! Invariant: a refusal leaves every file as it was. Knows: the command line. Known by: nobody.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::common::nbd::{Client, Mode};
use crate::common::{
    Finished, MIB, Scratch, Server, refusal, refusal_under, require_tool, skip, tool,
};

/// `nowait serve IMAGE` on a socket in the same directory, with `extra` arguments.
fn serve(image: &Path, extra: &[&str]) -> Vec<String> {
    let socket = image.with_extension("socket");
    let fixed = [
        "serve".into(),
        image.display().to_string(),
        "--nbd".into(),
        format!("unix:{}", socket.display()),
    ];
    fixed.into_iter().chain(extra.iter().map(ToString::to_string)).collect()
}

#[test]
fn an_image_that_is_missing_is_refused_by_name() {
    let scratch = Scratch::new();
    let image = scratch.join("missing.img");
    refusal(&serve(&image, &[])).says(&["missing.img"]);
    assert!(!image.exists(), "a refusal made the image");
}

#[test]
fn a_directory_is_refused_as_one() {
    let scratch = Scratch::new();
    let directory = scratch.join("folder");
    fs::create_dir(&directory).expect("a directory");
    refusal(&serve(&directory, &[])).says(&["folder", "directory"]);
}

#[test]
fn an_empty_file_is_refused_as_one() {
    let scratch = Scratch::new();
    refusal(&serve(&scratch.sparse("hollow.img", 0), &[])).says(&["hollow.img", "empty"]);
}

#[test]
fn an_image_that_may_not_be_written_is_refused_with_read_only_as_the_way_out() {
    let scratch = Scratch::new();
    let image = scratch.sparse("guarded.img", MIB);
    fs::set_permissions(&image, Permissions::from_mode(0o400)).expect("own file");
    // Root passes every permission check, unless it gives that up.
    let as_mortal = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"];
    let is_root = rustix::process::geteuid().is_root();
    if is_root && !require_tool("setpriv") {
        return;
    }
    let wrapper: &[&str] = if is_root { &as_mortal } else { &[] };
    refusal_under(wrapper, &serve(&image, &[])).says(&["guarded.img", "--read-only"]);
    Server::start_under(wrapper, &image, &["--read-only"]).stop();
}

#[test]
fn a_socket_path_beyond_what_an_address_holds_is_wrong_usage_and_says_the_bound() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let long = format!("unix:{}", scratch.join(&"x".repeat(120)).display());
    let refused = refusal(&["serve", image.to_str().expect("a name in UTF-8"), "--nbd", &long]);
    assert_eq!(refused.code, 2, "{}", refused.error);
    // sun_path of unix(7) has 108 bytes, the last of them zero.
    assert!(refused.error.contains("107"), "{}", refused.error);
}

#[test]
fn a_socket_that_somebody_listens_on_is_refused_and_left_alone() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let listener =
        UnixListener::bind(image.with_extension("socket")).expect("a socket of one's own");
    refusal(&serve(&image, &[])).says(&["disk.socket"]);
    UnixStream::connect(image.with_extension("socket")).expect("the socket still there");
    drop(listener);
}

#[test]
fn a_socket_file_that_nobody_listens_on_is_taken_over() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    drop(UnixListener::bind(scratch.join("stale")).expect("a socket of one's own"));
    let stale = format!("unix:{}", scratch.join("stale").display());
    let server = Server::start(&image, &["--nbd", &stale]);
    Client::connect(&scratch.join("stale"), Mode::Structured).expect("the new server");
    server.stop();
}

#[test]
fn a_file_that_is_no_socket_is_never_taken_over() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    fs::write(image.with_extension("socket"), b"precious").expect("a file");
    refusal(&serve(&image, &[])).says(&["disk.socket"]);
    assert_eq!(fs::read(image.with_extension("socket")).expect("the file"), b"precious");
}

#[test]
fn a_second_server_on_one_image_is_refused_while_the_first_lives() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let first = Server::start(&image, &[]);
    refusal(&serve(&image, &[])).says(&["disk.img"]);
    first.connect().write(0, b"still served").expect("the first server");
    first.stop();
    Server::start(&image, &[]).stop();
}

#[test]
fn two_read_only_servers_share_one_image() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let first = Server::start(&image, &["--read-only"]);
    Server::start(&image, &["--read-only"]).stop();
    refusal(&serve(&image, &[])).says(&["disk.img"]);
    first.stop();
}

#[test]
fn qemu_and_nowait_keep_each_other_off_an_image_one_of_them_writes() {
    if !require_tool("qemu-io") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start(&image, &[]);
    let said = tool("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(&image).fails();
    assert!(said.contains("lock"), "{said}");
    server.stop();
    tool("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(&image).succeeds();
}

#[test]
fn wrong_usage_exits_with_two() {
    for arguments in [
        &["serve", "--no-such-flag"][..],
        &["serve", "a.img", "--queue", "carrier-pigeon"],
        &["serve", "a.img", "--off", "everything"],
        &["serve", "a.img", "--direct", "perhaps"],
        &["serve", "a.img", "--nbd", "nowhere"],
        &["serve", "a.img", "--queues", "many"],
        &["serve", "a=x.img", "a=y.img"],
        &["serve", "a=x.img", "--export", "b"],
        &["create", "a.img"],
        &["create", "a.img", "12Q"],
        &["info"],
        &["no-such-command"],
        &[],
    ] {
        let refused = refusal(arguments);
        assert_eq!(refused.code, 2, "nowait {arguments:?}: {}", refused.error);
        assert!(!refused.error.is_empty(), "nowait {arguments:?} says nothing");
    }
}

#[test]
fn a_tcp_port_in_use_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let Ok(taken) = std::net::TcpListener::bind("127.0.0.1:0") else {
        skip("no loopback network");
        return;
    };
    let address = taken.local_addr().expect("an address");
    refusal(&[
        "serve",
        image.to_str().expect("a name in UTF-8"),
        "--nbd",
        &format!("tcp:{address}"),
    ])
    .says(&[&address.port().to_string()]);
}
