//! A running server is asked and changed at its control socket, by HTTP and by the commands.
//!
//! Invariant: what a request is refused leaves the server and its clients as they were.

use std::io::{Read, Write};
use std::ops::Deref;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::{ControlSocket, Finished, PYTHON, require_tool, skip, tool, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{MIB, NOWAIT, Scratch, Server, accepted, text};

/// A server of a raw image that takes more images from a directory, and its control socket.
pub(crate) struct Controlled {
    pub(crate) server: Server,
    control: ControlSocket,
    pub(crate) scratch: Scratch,
}

impl Deref for Controlled {
    type Target = ControlSocket;

    fn deref(&self) -> &ControlSocket {
        &self.control
    }
}

impl Controlled {
    pub(crate) fn start() -> Self {
        let scratch = Scratch::new();
        let (image, socket) = (scratch.join("disk.img"), scratch.join("control"));
        accepted(&["create", text(&image), "8M"]);
        let images = scratch.join("images");
        std::fs::create_dir(&images).expect("a directory");
        let control = format!("unix:{}", socket.display());
        let arguments = ["--control", &control, "--allow-dir", text(&images)];
        let server = Server::start(&image, &arguments);
        Self { server, control: ControlSocket { socket }, scratch }
    }

    /// A new image in the directory that images may be added from.
    pub(crate) fn image(&self, name: &str, size: &str) -> String {
        let image = self.scratch.join("images").join(name);
        accepted(&["create", text(&image), size]);
        text(&image).to_owned()
    }

    /// `nowait` with `arguments`, for this server.
    pub(crate) fn nowait(&self, arguments: &[&str]) -> Command {
        let mut command = tool(NOWAIT);
        command.args(arguments).arg("--control").arg(&self.socket);
        command
    }
}

#[test]
fn every_path_answers() {
    if !require_tool("curl") {
        return;
    }
    let it = Controlled::start();
    assert_eq!(it.ask("GET", "/", None).0, 200);
    let curl = |arguments: &[&str]| {
        let mut curl = tool("curl");
        curl.args(["--silent", "--fail", "--unix-socket"]).arg(&it.socket).args(arguments);
        curl
    };
    assert_eq!(curl(&["http://localhost/healthz"]).succeeds(), "ok\n");
    curl(&["http://other.example/v1/server"]).fails();
    let change = ["--request", "PATCH", "--data", r#"{"weight": 100}"#];
    curl(&change).arg("http://localhost/v1/exports/@0").succeeds();
    let server = it.json("GET", "/v1/server", None, 200);
    assert_eq!(server["pid"], it.server.pid());
    let (mut client, data) = (it.server.connect(), vec![7; 4096]);
    client.write(0, &data).expect("a write");
    assert_eq!(client.read(0, 4096).expect("bytes"), data);
    client.read(MIB, 4096).expect("a hole");
    let export = it.json("GET", "/v1/exports/@0", None, 200);
    assert_eq!(export["size_bytes"], 8 * MIB);
    assert_eq!(export["members"], 1);
    let operations = &export["frontends"]["nbd"]["operations"];
    assert_eq!(operations["read"], json!({"requests": 2, "bytes": 8192, "errors": 0}));
    assert_eq!(operations["write"], json!({"requests": 1, "bytes": 4096, "errors": 0}));
    let connections = it.json("GET", "/v1/connections", None, 200);
    assert_eq!(
        (&connections[0]["export"], &connections[0]["frontend"]),
        (&"".into(), &"nbd".into())
    );
    let path = it.image("more.qcow2", "4M");
    let added = json!({"name": "a b/ü", "path": path, "description": "more"});
    let added = it.json("POST", "/v1/exports", Some(added), 201);
    assert_eq!((&added["format"], &added["size_bytes"]), (&"qcow2".into(), &(4 * MIB).into()));
    let place = added["places"][0].as_str().expect("a URI").to_owned();
    assert!(place.starts_with("nbd+unix:///a%20b%2F"), "{place}");
    assert_eq!(it.json("GET", "/v1/exports", None, 200).as_array().map(Vec::len), Some(2));
    let path = "/v1/exports/a%20b%2F%C3%BC";
    assert_eq!(it.json("GET", path, None, 200)["description"], "more");
    it.json("POST", &format!("{path}/flush"), None, 204);
    it.json("DELETE", path, None, 204);
    it.refusal("GET", path, None, 404);
    let grown = it.json("PATCH", "/v1/exports/@0", Some(json!({"size_bytes": 16 * MIB})), 200);
    assert_eq!(grown["size_bytes"], 16 * MIB);
    let overlay = it.scratch.join("images/overlay");
    let snapshot = Some(json!({"overlay": overlay}));
    let report = it.json("POST", "/v1/exports/@0/snapshot", snapshot, 200);
    assert_eq!(report["backing"], text(&it.scratch.join("disk.img")));
    assert!(report["pause_ms"].as_f64().is_some_and(|pause| pause > 0.0), "{report}");
    assert_eq!(it.json("GET", "/v1/exports/@0", None, 200)["image"], text(&overlay));
    client.read(0, 4096).expect("an old connection goes on");
    it.server.connect().write(16 * MIB - 4096, &data).expect("a write into what is new");
    let id = connections[0]["id"].as_u64().expect("a number");
    it.json("DELETE", &format!("/v1/connections/{id}"), None, 204);
    let is_listed = |all: Value| all.as_array().expect("a list").iter().any(|one| one["id"] == id);
    wait_until("the disconnect", || !is_listed(it.json("GET", "/v1/connections", None, 200)));
    it.server.stop();
    assert!(!it.control.socket.exists(), "the socket is left behind");
}

#[test]
fn what_is_refused_is_refused_in_one_line_and_changes_nothing() {
    let it = Controlled::start();
    let inside = it.image("inside.img", "1M");
    let outside = it.scratch.join("disk.img");
    let link = it.scratch.join("images/link.img");
    symlink(&outside, &link).expect("a link");
    let add = |name: &str, path: &str| Some(json!({"name": name, "path": path}));
    let dots = format!("{}/images/../disk.img", it.scratch.path().display());
    for path in [text(&outside), text(&link), &dots, "/etc/passwd", "/no/such/file"] {
        it.refusal("POST", "/v1/exports", add("x", path), 403);
    }
    let missing = format!("{}/images/missing", it.scratch.path().display());
    it.refusal("POST", "/v1/exports", add("x", &missing), 404);
    it.refusal("POST", "/v1/exports", add("x", "images/inside.img"), 400);
    it.refusal("POST", "/v1/exports", add(&"x".repeat(4097), &inside), 400);
    it.refusal("POST", "/v1/exports", Some(json!({"name": "x"})), 400);
    it.refusal("POST", "/v1/exports", Some(json!({"name": "x", "path": inside, "z": 1})), 400);
    it.json("POST", "/v1/exports", add("x", &inside), 201);
    let why = it.refusal("POST", "/v1/exports", add("y", &inside), 409);
    assert!(why.contains("served already"), "{why}");
    let other = it.image("other.qcow2", "1M");
    it.refusal("POST", "/v1/exports", add("x", &other), 409);
    it.json("POST", "/v1/exports", add("other", &other), 201);
    it.refusal("PATCH", "/v1/exports/other", Some(json!({"size_bytes": 4096})), 409);
    let outside = json!({"overlay": outside});
    it.refusal("POST", "/v1/exports/x/snapshot", Some(outside), 403);
    it.refusal("POST", "/v1/exports/x/snapshot", Some(json!({"overlay": other})), 409);
    it.refusal("POST", "/v1/exports/x/snapshot", Some(json!({"overlay": "relative"})), 400);
    it.refusal("POST", "/v1/exports/x/snapshot", Some(json!({})), 400);
    it.refusal("PATCH", "/v1/exports/x", Some(json!({"size_bytes": 1})), 409);
    it.refusal("DELETE", "/v1/exports/@0", None, 409);
    it.refusal("DELETE", "/v1/exports/x?mode=gentle", None, 400);
    it.refusal("DELETE", "/v1/connections/77", None, 404);
    it.refusal("DELETE", "/v1/connections/x", None, 400);
    it.refusal("PUT", "/v1/exports", None, 405);
    it.refusal("GET", "/v2", None, 404);
    let all = it.json("GET", "/v1/exports", None, 200);
    let sizes: Vec<_> = all.as_array().expect("a list").iter().map(|e| &e["size_bytes"]).collect();
    assert_eq!(sizes, [8 * MIB, MIB, MIB]);
    it.server.stop();
}

#[test]
fn an_export_in_use_is_removed_only_by_force_and_its_image_is_free_then() {
    let it = Controlled::start();
    let image = it.image("more.qcow2", "4M");
    it.nowait(&["export", "add", "more", &image]).succeeds();
    let client = Client::connect_to(&it.server.socket(), "more", Mode::Structured);
    let mut client = client.expect("a connection");
    client.write(0, &[5; 4096]).expect("a write");
    let why = it.nowait(&["export", "remove", "more"]).fails();
    assert!(why.starts_with("nowait: 1 client uses it"), "{why}");
    client.read(0, 4096).expect("the client goes on");
    it.nowait(&["export", "remove", "more", "--force"]).succeeds();
    let again = Server::start(Path::new(&image), &[]);
    assert_eq!(again.connect().read(0, 4096).expect("bytes"), [5; 4096]);
    again.stop();
    it.server.stop();
}

#[test]
fn a_limit_holds_up_requests_until_it_is_lifted() {
    let it = Controlled::start();
    it.nowait(&["export", "limit", "@0", "--limit-iops", "10"]).succeeds();
    let limits = &it.json("GET", "/v1/exports/@0", None, 200)["limits"];
    assert_eq!(*limits, json!({"ops": {"size": 10, "one_time_burst": 0, "refill_time": 1000}}));
    let (mut client, begin) = (it.server.connect(), Instant::now());
    for number in 0..12 {
        client.write(number * 4096, &[1; 4096]).expect("a write");
        client.read(MIB, 4096).expect("a hole");
    }
    // Ten together, and then one in each tenth of a second.
    let passed = begin.elapsed();
    assert!(passed >= Duration::from_millis(1200), "{passed:?}");
    let zero = json!({"limits": {"ops": {"size": 0, "refill_time": 1}}});
    it.refusal("PATCH", "/v1/exports/@0", Some(zero), 400);
    let hour = json!({"limits": {"bandwidth": {"size": 1, "refill_time": 3_600_000}}});
    it.json("PATCH", "/v1/exports/@0", Some(hour), 200);
    client.write(0, &[2; 4096]).expect("a full bucket lets one request through");
    let waiting = std::thread::spawn(move || client.read(0, 4096).expect("bytes"));
    // A server with a client that waits for months still takes others, and ends.
    it.server.connect();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!waiting.is_finished(), "the limit does not hold");
    it.json("PATCH", "/v1/exports/@0", Some(json!({"limits": {}})), 200);
    assert_eq!(waiting.join().expect("an answer"), [2; 4096]);
    it.server.stop();
}

#[test]
fn a_server_with_limits_from_its_command_line_ends_although_clients_wait_for_tokens() {
    let scratch = Scratch::new();
    let image = scratch.join("disk.img");
    accepted(&["create", text(&image), "8M"]);
    let server = Server::start(&image, &["--limit-bandwidth", "1"]);
    let mut client = server.connect();
    // The answer may come before or after the debt counts.
    let answered = std::thread::spawn(move || client.write(0, &[3; 1 << 20]).is_ok());
    wait_until("the write", || std::fs::read(&image).expect("the image")[0] == 3);
    server.stop();
    assert!(answered.join().expect("a client"));
}

#[test]
fn the_metrics_are_what_prometheus_reads() {
    let has_parser = Command::new(PYTHON).args(["-c", "import prometheus_client"]).output();
    if !has_parser.is_ok_and(|output| output.status.success()) {
        skip("no python3-prometheus-client");
        return;
    }
    let it = Controlled::start();
    let path = it.image("more.img", "1M");
    it.nowait(&["export", "add", "odd \"name\"\\", &path]).succeeds();
    let mut client = it.server.connect();
    client.read(0, 4096).expect("bytes");
    for number in 0..64 {
        client.write(number * 4096, &[1; 4096]).expect("a write");
    }
    let (status, text) = it.ask("GET", "/metrics", None);
    assert_eq!(status, 200);
    let file = it.scratch.join("metrics");
    std::fs::write(&file, text).expect("a file");
    let parse = r#"
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse
for family in parse(open(sys.argv[1]).read()):
    for sample in family.samples:
        print(family.type, sample.name, sorted(sample.labels.items()), sample.value)
"#;
    let printed = tool(PYTHON).args(["-c", parse]).arg(&file).succeeds();
    let reads =
        r#"counter nowait_export_reads_completed_total [('export', ''), ('frontend', 'nbd')] 1"#;
    let size = r#"gauge nowait_export_size_bytes [('export', 'odd "name"\\')] 1048576"#;
    let timed = r#"histogram nowait_export_request_duration_seconds_bucket [('export', ''), ('frontend', 'nbd'), ('le', '+Inf'), ('operation', 'write')] 4"#;
    for line in [reads, size, timed] {
        assert!(printed.lines().any(|other| other == line), "{line} is not in\n{printed}");
    }
    it.server.stop();
}

#[test]
fn the_commands_find_the_only_server_of_this_user_by_themselves() {
    let scratch = Scratch::new();
    let runtime = format!("XDG_RUNTIME_DIR={}", text(scratch.path()));
    let here = |arguments: &[&str]| {
        let mut command = tool("env");
        command.arg(&runtime).arg(NOWAIT).args(arguments);
        command
    };
    let why = here(&["status"]).fails();
    assert!(why.starts_with("nowait: no server of this user is running"), "{why}");
    let image = scratch.join("disk.img");
    accepted(&["create", text(&image), "8M"]);
    let mut server = Server::start_under(&["env", &runtime], &image, &[]);
    let all: Value = serde_json::from_str(&here(&["status", "--json"]).succeeds()).expect("JSON");
    assert_eq!(all[0]["exports"][0]["image"], text(&image));
    let printed = here(&["status"]).succeeds();
    assert!(printed.starts_with(&format!("server {}, up ", server.pid())), "{printed}");
    assert!(printed.contains("@0") && printed.contains("8 MiB rw"), "{printed}");
    let second = scratch.join("second.img");
    accepted(&["create", text(&second), "8M"]);
    let other = Server::start_under(&["env", &runtime], &second, &["--read-only"]);
    let why = here(&["export", "list"]).fails();
    assert!(
        why.starts_with("nowait: several servers are running; choose one by --control"),
        "{why}"
    );
    other.stop();
    let resized = here(&["export", "resize", "@0", "+8M", "--json"]).succeeds();
    let resized: Value = serde_json::from_str(&resized).expect("JSON");
    assert_eq!(resized["size_bytes"], 16 * MIB);
    let client = server.connect();
    let printed = here(&["connections"]).succeeds();
    assert!(printed.contains("(default)") && printed.contains("uid "), "{printed}");
    drop(client);
    // The socket of a killed server is not a server.
    server.signal(Signal::KILL);
    server.wait();
    here(&["status"]).fails();
    let left = std::fs::read_dir(scratch.join("nowait")).expect("a directory");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with("control-")), "{left:?}");
}

#[test]
fn without_a_control_socket_there_is_none() {
    let scratch = Scratch::new();
    let runtime = format!("XDG_RUNTIME_DIR={}", text(scratch.path()));
    let image = scratch.join("disk.img");
    accepted(&["create", text(&image), "8M"]);
    let server = Server::start_under(&["env", &runtime], &image, &["--control", "off"]);
    let made = scratch.join("nowait").exists();
    assert!(!made, "there is a directory for control sockets");
    server.stop();
}

#[test]
fn only_the_user_of_the_server_and_root_are_answered() {
    let it = Controlled::start();
    let mode = std::fs::metadata(&it.socket).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    if !rustix::process::geteuid().is_root() {
        nowait_testkit::say_skipped("no other user without root");
        return it.server.stop();
    }
    // Even where the file's mode lets others in.
    let open = |path: &Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("a mode");
    };
    open(&it.socket, 0o666);
    open(it.scratch.path(), 0o755);
    let mut curl = tool("setpriv");
    curl.args(["--reuid", "65534", "--clear-groups", "curl", "--silent", "--unix-socket"]);
    let why = curl.arg(&it.socket).arg("http://localhost/healthz").fails();
    assert!(!why.contains("ok"), "{why}");
    wait_until("the warning", || it.server.log().contains("another user's connection was closed"));
    it.server.stop();
}

#[test]
fn what_is_no_request_ends_its_connection_and_nothing_else() {
    let it = Controlled::start();
    let mut client = it.server.connect();
    let huge = vec![b'a'; 1 << 20];
    let requests: [&[u8]; 5] = [
        b"\0\xff\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/exports HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999\r\n\r\n{",
        b"DELETE /v1/exports/%ff%00 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n",
        &huge,
    ];
    for request in requests {
        let mut stream = UnixStream::connect(&it.socket).expect("the control socket");
        stream.set_read_timeout(Some(nowait_testkit::BOUND)).expect("a timeout");
        // It may be closed before all is sent.
        let _ = stream.write_all(request);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    // Connections that send nothing do not keep others out for long.
    let silent: Vec<_> =
        (0..100).map(|_| UnixStream::connect(&it.socket).expect("a connection")).collect();
    client.read(0, 4096).expect("the disk is served");
    it.nowait(&["status"]).succeeds();
    drop(silent);
    it.server.stop();
}
