//! The server under a service manager: inherited sockets, notifications, unit files.
//!
//! Invariant: sockets of the manager are served but not removed.

use std::fs::{self, Permissions};
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use nowait_testkit::{BOUND, ends_with_test, output_of, wait_for};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{
    Finished, MIB, NOWAIT, PYTHON, Scratch, Server, python_with_nbd, refusal_under, require_tool,
    text, tool,
};
use crate::log_messages::await_line;
use crate::upgrade::Upgraded;
use nowait_testkit::nbd::{Client, Mode};

/// Opens the sockets of its arguments before `--`, from descriptor 3 on, and executes the command
/// after it.
const MANAGER: &str = r#"
import fcntl, os, socket, sys

def opened(what):
    kind, _, path = what.partition(":")
    if kind == "file":
        return os.open("/dev/null", os.O_RDONLY)
    if kind == "tcp":
        return socket.create_server(("127.0.0.1", 0)).detach()
    if kind == "udp":
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()
    own = socket.socket(socket.AF_UNIX)
    own.bind("\0" + path if kind == "abstract" else path)
    if kind != "deaf":
        own.listen()
    return own.detach()

end = sys.argv.index("--")
# Out of the way first, because they may be where another is to go.
given = [fcntl.fcntl(opened(what), fcntl.F_DUPFD, 100) for what in sys.argv[1:end]]
for number, descriptor in enumerate(given):
    os.dup2(descriptor, 3 + number)
    os.close(descriptor)
os.environ.setdefault("LISTEN_PID", str(os.getpid()))
os.environ.setdefault("LISTEN_FDS", str(len(given)))
os.environ["LISTEN_FDNAMES"] = ":".join("name%d" % number for number in range(len(given)))
os.execvp(sys.argv[end + 1], sys.argv[end + 1:])
"#;

/// The prefix that hands over `sockets`.
fn manager<'a>(sockets: &[&'a str]) -> Vec<&'a str> {
    [&[PYTHON, "-c", MANAGER], sockets, &["--"]].concat()
}

/// An image, and the path of a Unix socket for the manager to hand over.
struct Inherited {
    scratch: Scratch,
    image: PathBuf,
    path: PathBuf,
}

impl Inherited {
    /// `None`, and a message, where the manager's interpreter is missing.
    fn new() -> Option<Self> {
        if !require_tool(PYTHON) {
            return None;
        }
        let scratch = Scratch::new();
        let (image, path) = (scratch.sparse("disk.img", MIB), scratch.join("socket"));
        Some(Self { scratch, image, path })
    }

    /// The socket, as `manager` takes it.
    fn unix(&self) -> String {
        format!("unix:{}", self.path.display())
    }
}

/// Writes and reads back over a Unix socket.
fn writes_and_reads(socket: &Path) {
    let mut client = Client::connect(socket, Mode::Structured).expect("a connection");
    client.write(1001, b"handed over").expect("a write");
    assert!(client.read(1001, 11).expect("a read") == b"handed over");
}

#[test]
fn inherited_sockets_are_served_and_not_removed_and_no_other_is_made() {
    let Some(given) = Inherited::new() else { return };
    let (unix, Inherited { scratch, image, path }) = (given.unix(), &given);
    let runtime = format!("XDG_RUNTIME_DIR={}", scratch.path().display());
    let wrapper = [&["env", &runtime], &manager(&[&unix, "tcp"])[..]].concat();
    let server = Server::start_by(&wrapper, &["serve", &image.to_string_lossy(), "--json"]);

    let expected = format!("nbd+unix:///?socket={}", path.display());
    assert_eq!(server.uris().len(), 2, "{:?}", server.uris());
    assert_eq!(server.uris()[0], expected);
    writes_and_reads(path);
    let address = server.uris()[1].strip_prefix("nbd://").and_then(|uri| uri.strip_suffix('/'));
    let mut greeting = [0; 8];
    let mut peer = TcpStream::connect(address.expect("a TCP address")).expect("a connection");
    peer.read_exact(&mut greeting).expect("a greeting");
    assert_eq!(&greeting, b"NBDMAGIC");
    server.stop_but_leave_socket();

    assert!(path.exists(), "the manager's socket was removed");
    // The control socket was there, and is gone.
    let others = fs::read_dir(scratch.join("nowait")).expect("a directory").count();
    assert_eq!(others, 0, "a default socket was made too");
    assert_eq!(&fs::read(image).expect("the image")[1001..1012], b"handed over");
}

#[test]
fn in_a_unit_with_a_runtime_directory_the_default_socket_is_there() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let (own, users) = (scratch.join("unit"), scratch.join("user"));
    for (mode, expected) in [
        (0o700, own.join("disk.sock")),
        (0o755, own.join("disk.sock")),
        (0o777, users.join("nowait/disk.sock")),
    ] {
        [&own, &users].iter().for_each(|it| fs::create_dir(it).expect("a directory"));
        fs::set_permissions(&own, Permissions::from_mode(mode)).expect("own directory");
        let unit = format!("RUNTIME_DIRECTORY={}:/nowhere", own.display());
        let user = format!("XDG_RUNTIME_DIR={}", users.display());
        let control = scratch.join("control");
        let address = format!("unix:{}", control.display());
        let serve = ["serve", text(&image), "--control", &address, "--verbose"];
        let server = Server::start_by(&["env", &unit, &user], &serve);
        assert_eq!(server.socket(), expected, "mode {mode:o}");
        let mut server = Upgraded::of(server, &control, Scratch::new());
        server.upgrade();
        writes_and_reads(&expected);
        server.stop();
        assert!(!expected.exists(), "the socket is left");
        [&own, &users].iter().for_each(|it| fs::remove_dir_all(it).expect("a directory"));
    }
}

#[test]
fn a_failed_start_sets_the_exit_status_and_waiting_clients_are_disconnected() {
    let scratch = Scratch::new();
    let missing = scratch.join("disk.img").to_string_lossy().into_owned();
    assert_eq!(refusal_under(&["env"], &["serve", &missing]).code, 66);
    nowait_testkit::needs!(require_tool(PYTHON));
    let image = scratch.sparse("image", MIB).to_string_lossy().into_owned();
    let directory = scratch.path().to_string_lossy().into_owned();
    let no_directory = format!("unix:{missing}/control");
    for (code, arguments) in [
        (66, &["serve", &missing][..]),
        (66, &["serve", &image, "--tls-certs", &directory]),
        (66, &["serve", &image, "--control", &no_directory]),
        (66, &["serve", &image, "--pid-file", &directory]),
        (2, &["serve", &image, "--no-such-option"]),
        (2, &["serve", &image, "--queues", "many"]),
    ] {
        disconnects(&scratch, code, arguments);
    }
}

/// Starts `nowait` with `arguments` and a socket of a manager that a client waits at, and expects it to end with `code`.
fn disconnects(scratch: &Scratch, code: i32, arguments: &[&str]) {
    let path = scratch.join("socket");
    // The one of the start before is left, as the manager's always is.
    let _ = fs::remove_file(&path);
    let unix = format!("unix:{}", path.display());
    let receive_message = thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut client = wait_for("a listening socket", || UnixStream::connect(&path));
            client.set_read_timeout(Some(BOUND)).expect("a timeout");
            client.read(&mut [0; 8]).expect("the end of the connection")
        });
        let refused = refusal_under(&manager(&[&unix]), arguments);
        assert_eq!(refused.code, code, "{arguments:?}: {}", refused.error);
        client.join().expect("a client")
    });
    assert_eq!(receive_message, 0, "{arguments:?}: a greeting without an image");
}

#[test]
fn standard_output_stays_empty_with_inherited_sockets() {
    let Some(given) = Inherited::new() else { return };
    let (unix, Inherited { image, path, .. }) = (given.unix(), &given);
    let words = manager(&[&unix]);
    let server = ends_with_test(&mut Command::new(words[0]))
        .args(&words[1..])
        .args([NOWAIT, "serve"])
        .arg(image)
        .stdout(Stdio::piped())
        .spawn()
        .expect("python");
    wait_for("a listening socket", || UnixStream::connect(path));
    writes_and_reads(path);
    kill_process(Pid::from_child(&server), Signal::TERM).expect("a child");
    let ended = output_of(server);
    assert!(ended.status.success());
    assert_eq!(ended.stdout, b"");
}

#[test]
fn an_address_given_with_inherited_sockets_is_also_served() {
    let Some(given) = Inherited::new() else { return };
    let server = Server::start_under(&manager(&[&given.unix()]), &given.image, &["--json"]);
    assert_eq!(server.uris().len(), 2, "{:?}", server.uris());
    for uri in server.uris() {
        let (_, socket) = uri.split_once("?socket=").expect("a Unix address");
        writes_and_reads(Path::new(socket));
    }
    server.stop_but_leave_socket();
}

#[test]
fn sockets_for_another_process_are_not_used() {
    let Some(given) = Inherited::new() else { return };
    let unix = given.unix();
    let wrapper = [&["env", "LISTEN_PID=1"], &manager(&[&unix])[..]].concat();
    let server = Server::start_under(&wrapper, &given.image, &["--json"]);
    assert_eq!(server.uris().len(), 1, "{:?}", server.uris());
    server.stop();
}

#[test]
fn an_inherited_descriptor_that_is_no_listening_socket_is_refused_by_its_name() {
    nowait_testkit::needs!(require_tool(PYTHON));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB).to_string_lossy().into_owned();
    let deaf = format!("deaf:{}", scratch.join("deaf").display());
    let unseen = format!("abstract:{}", scratch.join("unseen").display());
    for (what, why) in [
        ("file", "it is not a socket"),
        ("udp", "neither a Unix nor a TCP socket"),
        (deaf.as_str(), "it does not listen for connections"),
        (unseen.as_str(), "no path that clients could connect to"),
    ] {
        let refusal = refusal_under(&manager(&["tcp", what]), &["serve", &image]);
        refusal.says(&["descriptor 4 (name1)", why]);
    }
    for number in ["2", "4000000000", "99999999999", "-1", "one"] {
        let set = format!("LISTEN_FDS={number}");
        let wrapper = [&["env", &set], &manager(&["tcp"])[..]].concat();
        refusal_under(&wrapper, &["serve", &image]).says(&["LISTEN_FDS"]);
    }
}

/// Receives the next message to the manager.
fn receive_message(manager: &UnixDatagram) -> String {
    let mut message = [0; 4096];
    let len = manager.recv(&mut message).expect("a message in time");
    String::from_utf8(message[..len].to_vec()).expect("text")
}

#[test]
fn the_manager_is_notified_when_clients_can_connect_and_during_the_shutdown() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let socket = scratch.join("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    manager.set_read_timeout(Some(BOUND)).expect("a timeout");
    let notify = format!("NOTIFY_SOCKET={}", socket.display());
    let wrapper = ["env", &notify];

    refusal_under(&wrapper, &["serve", "/dev/null"]).says(&["/dev/null"]);
    manager.set_nonblocking(true).expect("own socket");
    let nothing = manager.recv(&mut [0]).expect_err("ready without an image");
    assert_eq!(nothing.kind(), ErrorKind::WouldBlock);
    manager.set_nonblocking(false).expect("own socket");

    let server = Server::start_under(&wrapper, &image, &[]);
    assert_eq!(receive_message(&manager), format!("READY=1\nSTATUS=serving {}\n", server.uri()));
    writes_and_reads(&server.socket());
    server.stop();
    assert_eq!(receive_message(&manager), "STOPPING=1\nSTATUS=finishing requests\n");
    assert_eq!(receive_message(&manager), "STATUS=flushing\n");

    // A longer name than a message holds, which needs encoding.
    let name = "\u{e9}".repeat(2048);
    let server = Server::start_under(&wrapper, &image, &["--export", &name]);
    let ready = receive_message(&manager);
    assert!(ready.starts_with("READY=1\nSTATUS=serving nbd+unix:///%C3"), "{ready}");
    assert_eq!((ready.len() < 4096, ready.lines().count()), (true, 2), "{ready}");
    server.stop();
}

#[test]
fn the_server_works_without_a_reachable_manager() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start_under(&["env", "NOTIFY_SOCKET=/nonexistent/notify"], &image, &[]);
    writes_and_reads(&server.socket());
    // The ready line is printed before the manager is notified.
    await_line(&server, "warning: NOTIFY_SOCKET");
    server.stop();
}

#[test]
fn systemd_socket_activate_starts_the_server_with_the_first_client() {
    nowait_testkit::needs!(require_tool("systemd-socket-activate"));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB).to_string_lossy().into_owned();
    let path = scratch.join("socket");
    let wrapper = ["systemd-socket-activate", "-l", &path.to_string_lossy()];
    let server = thread::scope(|scope| {
        scope.spawn(|| {
            // Between bind(2) and listen(2) the socket exists but accepts no connection.
            wait_for("a listening socket", || UnixStream::connect(&path));
            writes_and_reads(&path);
        });
        Server::start_by(&wrapper, &["serve", &image, "--json"])
    });
    writes_and_reads(&path);
    server.stop_but_leave_socket();
}

/// Starts the given command through libnbd, which hands it a socket.
const LIBNBD_MANAGER: &str = r#"
import sys
import nbd

h = nbd.NBD()
h.connect_systemd_socket_activation(sys.argv[1:])
h.pwrite(b"handed over", 1001)
assert h.pread(11, 1001) == b"handed over"
h.flush()
h.shutdown()
"#;

#[test]
fn libnbd_starts_the_server_by_socket_activation() {
    nowait_testkit::needs!(python_with_nbd());
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    tool(PYTHON).args(["-c", LIBNBD_MANAGER, NOWAIT, "serve"]).arg(&image).succeeds();
    assert_eq!(&fs::read(&image).expect("the image")[1001..1012], b"handed over");
}

/// The text of a unit in `contrib`.
fn unit(name: &str) -> String {
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    fs::read_to_string(contrib.join(name)).expect("a unit")
}

/// The value of `key` in a unit, which must occur once.
fn value<'a>(unit: &'a str, key: &str) -> &'a str {
    let mut values = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let value = values.next().expect("a value");
    assert_eq!(values.next(), None, "{key} is said twice");
    value
}

#[test]
fn the_units_contain_only_lines_that_systemd_understands() {
    nowait_testkit::needs!(require_tool("systemd-analyze"));
    let scratch = Scratch::new();
    let copied: Vec<PathBuf> = ["nowait@.service", "nowait@.socket"]
        .into_iter()
        .map(|name| {
            let path = scratch.join(name);
            // The command must exist.
            fs::write(&path, unit(name).replace("/usr/local/bin/nowait", NOWAIT)).expect("a unit");
            path
        })
        .collect();
    let mut verify = tool("systemd-analyze");
    let output = verify.args(["verify", "--man=no"]).args(&copied).output().expect("timeout(1)");
    let printed = String::from_utf8_lossy(&output.stderr);
    // systemd-analyze exits with 0 even if it did not understand a line.
    assert!(output.status.success() && !printed.contains("nowait@"), "{printed}");
}

/// The network is open, for disks over TCP, which is most of what is left.
#[test]
fn the_service_is_as_little_exposed_as_the_threat_model_says() {
    nowait_testkit::needs!(require_tool("systemd-analyze"));
    let mut security = tool("systemd-analyze");
    security.args(["security", "--offline=yes", "--threshold=15"]);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/nowait@.service");
    let output = security.arg(path).output().expect("timeout(1)");
    let printed = String::from_utf8_lossy(&output.stdout);
    // An end with status 0 says that the exposure is below the threshold.
    assert!(output.status.success() && printed.contains("Overall exposure level"), "{printed}");
}

#[test]
fn the_command_of_the_unit_serves_inherited_sockets() {
    nowait_testkit::needs!(require_tool(PYTHON));
    let scratch = Scratch::new();
    scratch.sparse("disk.img", MIB);
    let service = unit("nowait@.service");
    assert_eq!(value(&service, "Type"), "notify");
    assert_eq!(value(&service, "ExecReload"), "kill -HUP $MAINPID");
    assert_eq!(value(&service, "RestartPreventExitStatus"), "2 66");
    let state = scratch.path().to_string_lossy();
    let command =
        value(&service, "ExecStart").replace("${STATE_DIRECTORY}", &state).replace("%i", "vm1");
    let mut words = command.split_whitespace().filter(|word| *word != "$OPTIONS");
    assert_eq!(words.next(), Some("/usr/local/bin/nowait"));
    let path = scratch.join("socket");
    let unix = format!("unix:{}", path.display());
    let server = Server::start_by(&manager(&[&unix]), &words.chain(["--json"]).collect::<Vec<_>>());
    writes_and_reads(&path);
    server.stop_but_leave_socket();
}
