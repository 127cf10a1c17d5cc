//! Changes of exports in use at the control socket: limits of each client, read-only, sockets for virtual
//! machines; and what programs send there that is none of these.
//!
//! Invariant: what a request is refused leaves the server and its clients as they were.

use std::io::{ErrorKind, Read};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::{Finished, wait_until};
use serde_json::{Value, json};

use crate::common::{MIB, Scratch, Server, accepted, text};
use crate::control::Controlled;

/// How long a request that must wait is given to be answered wrongly.
const SOON: Duration = Duration::from_millis(100);
/// NBD proto.md, "Error values".
const EPERM: u32 = 1;

#[test]
fn a_client_over_its_limit_waits_and_another_one_does_not() {
    let it = Controlled::start();
    let hour = json!({"bandwidth": {"size": 1, "one_time_burst": 0, "refill_time": 3_600_000}});
    let change = json!({"connection_limits": hour});
    let changed = it.json("PATCH", "/v1/exports/@0", Some(change), 200);
    assert_eq!((&changed["connection_limits"], &changed["limits"]), (&hour, &json!({})));
    let (mut waits, mut other) = (it.server.connect(), it.server.connect());
    waits.write(0, &[1; 4096]).expect("a full bucket lets one request through");
    let waiting = std::thread::spawn(move || waits.read(0, 4096).expect("bytes"));
    other.write(8192, &[2; 4096]).expect("a bucket of its own");
    it.server.connect().read(0, 4096).expect("a new client has one, too");
    std::thread::sleep(SOON);
    assert!(!waiting.is_finished(), "the limit does not hold");
    it.nowait(&["export", "limit", "@0", "--clear", "--limit-iops-per-client", "5000"]).succeeds();
    assert_eq!(waiting.join().expect("an answer"), [1; 4096]);
    let limits = &it.json("GET", "/v1/exports/@0", None, 200)["connection_limits"];
    assert_eq!(*limits, json!({"ops": {"size": 500, "one_time_burst": 0, "refill_time": 100}}));
    it.server.stop();
}

#[test]
fn a_limit_that_is_not_named_stays_and_the_limits_are_shown_where_exports_are() {
    let it = Controlled::start();
    let limit = |arguments: &[&str]| {
        let said = it.nowait(&[&["export", "limit", ""], arguments].concat()).succeeds();
        said.trim().to_owned()
    };
    assert_eq!(limit(&["--limit-iops", "109"]), "109 requests/s");
    assert_eq!(limit(&["--limit-bandwidth", "10M"]), "109 requests/s and 10 MiB/s");
    let all = "109 requests/s and 10 MiB/s, each client 5 requests/s";
    assert_eq!(limit(&["--limit-iops-per-client", "5"]), all);
    assert_eq!(limit(&[]), all);
    for command in [&["status"][..], &["export", "list"]] {
        let said = it.nowait(command).succeeds();
        assert!(said.contains(&format!("limited to {all}")), "{said}");
    }
    assert_eq!(limit(&["--clear", "--limit-iops", "7"]), "7 requests/s");
    assert_eq!(limit(&["--clear"]), "no limits");
    // The export without a name, as for clients of NBD.
    it.nowait(&["export", "resize", "", "+8M"]).succeeds();
    assert_eq!(it.json("GET", "/v1/exports/@0", None, 200)["size_bytes"], 16 * MIB);
}

#[test]
fn the_weight_of_an_export_is_100_until_it_is_changed_and_stays_within_its_range() {
    let it = Controlled::start();
    let weight = || it.json("GET", "/v1/exports/@0", None, 200)["weight"].clone();
    assert_eq!(weight(), 100);
    assert_eq!(it.nowait(&["export", "weight", "@0", "300"]).succeeds(), "weight 300\n");
    assert_eq!(weight(), 300);
    for wrong in [0, 10_001] {
        it.json("PATCH", "/v1/exports/@0", Some(json!({"weight": wrong})), 400);
    }
    for right in [1, 10_000] {
        it.json("PATCH", "/v1/exports/@0", Some(json!({"weight": right})), 200);
        assert_eq!(weight(), right);
    }
    it.server.stop();
}

#[test]
fn limits_of_each_client_can_be_given_when_the_server_starts() {
    let scratch = Scratch::new();
    let image = scratch.join("disk.img");
    accepted(&["create", text(&image), "8M"]);
    let server = Server::start(&image, &["--limit-bandwidth-per-client", "1"]);
    let (mut first, mut second) = (server.connect(), server.connect());
    first.write(0, &[1; 4096]).expect("a full bucket");
    first.send(&Command::Read { offset: 0, len: 4096 }).expect("a request");
    second.read(0, 4096).expect("a bucket of its own");
    first.stream().set_read_timeout(Some(SOON)).expect("a socket");
    let answer = first.stream().read(&mut [0]).map_err(|error| error.kind());
    assert_eq!(answer, Err(ErrorKind::WouldBlock), "the limit does not hold");
    server.stop();
}

#[test]
fn an_export_becomes_read_only_and_writable_while_it_is_used() {
    let it = Controlled::start();
    let mut client = it.server.connect();
    client.write(0, &[1; 4096]).expect("a write");
    it.nowait(&["export", "read-only", "@0", "on"]).succeeds();
    assert_eq!(it.json("GET", "/v1/exports/@0", None, 200)["read_only"], true);
    assert_eq!(client.write(0, &[2; 4096]), Err(EPERM));
    assert_eq!(client.read(0, 4096).expect("bytes"), [1; 4096]);
    assert_eq!(it.server.connect().write(0, &[3; 4096]), Err(EPERM));
    let (_, metrics) = it.ask("GET", "/metrics", None);
    let mut lines = metrics.lines().filter(|line| line.starts_with("nowait_export_errors_total"));
    let line = lines.next().expect("refused writes are errors");
    assert!(line.contains("errno=\"1\"") && line.ends_with(" 2"), "{metrics}");
    let change = Some(json!({"read_only": false}));
    assert_eq!(it.json("PATCH", "/v1/exports/@0", change.clone(), 200)["read_only"], false);
    client.write(0, &[4; 4096]).expect("a write");
    let image = it.image("locked.img", "1M");
    it.nowait(&["export", "add", "locked", &image, "--read-only"]).succeeds();
    let why = it.refusal("PATCH", "/v1/exports/locked", change, 409);
    assert_eq!(why, "its image was opened for reading only");
    it.json("PATCH", "/v1/exports/locked", Some(json!({"read_only": true})), 200);
    it.server.stop();
}

#[test]
fn an_added_export_is_a_disk_of_virtual_machines_at_the_socket_that_is_named() {
    let it = Controlled::start();
    let (image, socket) = (it.image("more.img", "1M"), it.scratch.join("images/vm.sock"));
    let add = ["export", "add", "more", &image, "--vhost-user", text(&socket)];
    let printed = it.nowait(&add).succeeds();
    let place = format!("serving vhost-user:{}\n", socket.display());
    assert!(printed.contains(&place), "{printed}");
    // A VMM that says nothing yet.
    let mut machine = UnixStream::connect(&socket).expect("the socket");
    machine.set_read_timeout(Some(nowait_testkit::BOUND)).expect("a socket");
    let all = || it.json("GET", "/v1/connections", None, 200);
    let is_machine = |one: &&Value| one["frontend"] == "vhost-user" && one["export"] == "more";
    let found = || all().as_array().and_then(|all| all.iter().find(is_machine).cloned());
    wait_until("the connection", || found().is_some());
    it.refusal("DELETE", "/v1/exports/more", None, 409);
    let id = found().expect("the connection")["id"].clone();
    it.json("DELETE", &format!("/v1/connections/{id}"), None, 204);
    assert_eq!(machine.read(&mut [0; 16]).expect("the end"), 0);
    wait_until("its end", || found().is_none());
    it.refusal("DELETE", &format!("/v1/connections/{id}"), None, 404);
    // Others find the device where it was.
    let mut machine = UnixStream::connect(&socket).expect("the socket");
    machine.set_read_timeout(Some(nowait_testkit::BOUND)).expect("a socket");
    wait_until("the connection", || found().is_some());
    let mut client =
        Client::connect_to(&it.server.socket(), "more", Mode::Structured).expect("NBD");
    client.write(0, &[5; 4096]).expect("a write");
    it.nowait(&["export", "remove", "more", "--force"]).succeeds();
    assert_eq!(machine.read(&mut [0; 16]).expect("the end"), 0);
    assert_eq!(client.stream().read(&mut [0]).expect("the end"), 0);
    assert!(!socket.exists(), "the socket is left behind");
    assert_eq!(std::fs::read(&image).expect("the image")[..4096], [5; 4096]);
    it.nowait(&add).succeeds();
    it.nowait(&["export", "remove", "more"]).succeeds();
    it.server.stop();
}

#[test]
fn sockets_elsewhere_and_what_are_none_are_refused_and_nothing_is_left_of_the_export() {
    let it = Controlled::start();
    let image = it.image("more.img", "1M");
    let (inside, outside) = (it.scratch.join("images"), it.scratch.join("outside"));
    std::fs::create_dir(&outside).expect("a directory");
    symlink(&outside, inside.join("link")).expect("a link");
    let at = |name: &str| text(&inside.join(name)).to_owned();
    let vhost = |path: &str| json!([{"vhost_user": path}]);
    let elsewhere = text(&outside.join("vm.sock")).to_owned();
    let many: Vec<_> = (0..17).map(|n| json!({"vhost_user": at(&n.to_string())})).collect();
    let bodies = [
        (vhost(&elsewhere), 403),
        (vhost(&at("link/vm.sock")), 403),
        (vhost(&at("../outside/vm.sock")), 403),
        (vhost("/etc/vm.sock"), 403),
        (vhost("vm.sock"), 400),
        (vhost("/"), 400),
        (vhost(&at("..")), 400),
        (vhost(""), 400),
        (vhost(&at("missing/vm.sock")), 404),
        (vhost(&at(&"x".repeat(200))), 400),
        (vhost(&image), 409),
        (vhost(text(&it.socket)), 403),
        (json!([{"vhost_user": at("a")}, {"vhost_user": at("a")}]), 409),
        (json!([{"vhost_user": at("b")}, {"vhost_user": elsewhere}]), 403),
        (json!(many), 400),
        (json!([{"nbd": at("c")}]), 400),
        (json!([{"vhost_user": 5}]), 400),
        (json!([{"vhost_user": at("c"), "nbd": at("c")}]), 400),
        (json!({"vhost_user": at("c")}), 400),
        (json!(at("c")), 400),
    ];
    for (frontends, status) in bodies {
        let body = json!({"name": "more", "path": image, "frontends": frontends});
        it.refusal("POST", "/v1/exports", Some(body), status);
    }
    // A NUL ends a path for the system.
    let body = json!({"name": "more", "path": image, "frontends": vhost(&at("a\0b"))});
    let (status, why) = it.ask("POST", "/v1/exports", Some(body));
    assert!((400..500).contains(&status), "{status}: {why}");
    assert_eq!(it.json("GET", "/v1/exports", None, 200).as_array().map(Vec::len), Some(1));
    let left: Vec<_> = std::fs::read_dir(&inside).expect("a directory").collect();
    assert_eq!(left.len(), 2, "a socket is left behind: {left:?}");
    let body = json!({"name": "more", "path": image, "frontends": vhost(&at("a"))});
    it.json("POST", "/v1/exports", Some(body), 201);
    it.server.stop();
}

#[test]
fn a_change_with_a_wrong_field_changes_nothing() {
    let it = Controlled::start();
    let before = it.json("GET", "/v1/exports/@0", None, 200);
    let deep = format!("{}1{}", "[".repeat(10_000), "]".repeat(10_000));
    let bodies = [
        r#"{"size_bytes": 16777216, "connection_limits": {"ops": {"size": 0, "refill_time": 1}}}"#,
        r#"{"size_bytes": 16777216, "connection_limits": {"ops": {"size": 1, "refill_time": 0}}}"#,
        r#"{"read_only": true, "limits": {"ops": {"size": 1, "refill_time": 86400001}}}"#,
        r#"{"read_only": true, "connection_limits": {"ops": {"size": -1, "refill_time": 1}}}"#,
        r#"{"read_only": true, "connection_limits": {"ops": {"size": 1e99, "refill_time": 1}}}"#,
        r#"{"read_only": true, "connection_limits": {"ops": {"size": 18446744073709551616, "refill_time": 1}}}"#,
        r#"{"read_only": true, "connection_limits": {"requests": {"size": 1, "refill_time": 1}}}"#,
        r#"{"read_only": true, "connection_limits": "none"}"#,
        r#"{"read_only": true, "connection_limit": {}}"#,
        r#"{"read_only": true, "read_only": true}"#,
        r#"{"read_only": "yes"}"#,
        r#"{"read_only": 1}"#,
        r#"{"read_only": [true]}"#,
        r#"{"read_only": true"#,
        &format!(r#"{{"read_only": true, "connection_limits": {deep}}}"#),
    ];
    for body in bodies {
        let path = "/v1/exports/@0";
        let (status, answer) = it.send("PATCH", path, body).expect("an answer");
        let shown = &body[..body.len().min(100)];
        assert_eq!(status, 400, "{shown}: {answer}");
    }
    assert_eq!(it.json("GET", "/v1/exports/@0", None, 200), before);
    it.server.connect().write(8 * MIB - 4096, &[1; 4096]).expect("a write");
    // The largest values that there are.
    let most = json!({"size": u64::MAX, "one_time_burst": u64::MAX, "refill_time": 86_400_000});
    let limits = json!({"ops": most, "bandwidth": most});
    let change = json!({"limits": limits, "connection_limits": limits});
    it.json("PATCH", "/v1/exports/@0", Some(change), 200);
    it.server.connect().write(0, &[1; 4096]).expect("a write");
    it.server.stop();
}
