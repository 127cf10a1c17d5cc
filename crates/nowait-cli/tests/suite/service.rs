//! A service manager starts the server: hands it sockets, hears how it is, finds its units in order.
//!
//! Invariant: what a manager has opened is the manager's: it is served and left where it is.
//! Knows: the protocols of sd_listen_fds(3) and sd_notify(3), contrib/. Known by: nobody.

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::common::nbd::{Client, Mode};
use crate::common::{
    Finished, MIB, NOWAIT, PYTHON, Scratch, Server, python_with_nbd, refusal_under, require_tool,
    tool,
};

/// How long a message or a socket may take before the test fails.
const BOUND: Duration = Duration::from_secs(30);

/// Opens what its arguments before `--` say, from descriptor 3 on, and becomes the command after it.
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

/// The command that hands over `sockets`.
fn manager<'a>(sockets: &[&'a str]) -> Vec<&'a str> {
    [&[PYTHON, "-c", MANAGER], sockets, &["--"]].concat()
}

/// Writes and reads back over a Unix socket.
fn writes_and_reads(socket: &Path) {
    let mut client = Client::connect(socket, Mode::Structured).expect("a connection");
    client.write(1001, b"handed over").expect("a write");
    assert!(client.read(1001, 11).expect("a read") == b"handed over");
}

#[test]
fn sockets_handed_over_are_served_and_left_and_no_other_is_made() {
    if !require_tool(PYTHON) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let path = scratch.join("socket");
    let unix = format!("unix:{}", path.display());
    let runtime = format!("XDG_RUNTIME_DIR={}", scratch.path().display());
    let wrapper = [&["env", &runtime], &manager(&[&unix, "tcp"])[..]].concat();
    let server = Server::start_by(&wrapper, &["serve", &image.to_string_lossy(), "--json"]);

    let expected = format!("nbd+unix:///?socket={}", path.display());
    assert_eq!(server.uris().len(), 2, "{:?}", server.uris());
    assert_eq!(server.uris()[0], expected);
    writes_and_reads(&path);
    let address = server.uris()[1].strip_prefix("nbd://").and_then(|uri| uri.strip_suffix('/'));
    let mut greeting = [0; 8];
    let mut peer = TcpStream::connect(address.expect("a TCP address")).expect("a connection");
    peer.read_exact(&mut greeting).expect("a greeting");
    assert_eq!(&greeting, b"NBDMAGIC");
    server.stop_but_leave_socket();

    assert!(path.exists(), "the manager's socket was removed");
    assert!(!scratch.join("nowait").exists(), "a default socket was made too");
    assert_eq!(&fs::read(&image).expect("the image")[1001..1012], b"handed over");
}

#[test]
fn an_address_given_beside_sockets_handed_over_is_served_too() {
    if !require_tool(PYTHON) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let path = scratch.join("socket");
    let unix = format!("unix:{}", path.display());
    let server = Server::start_under(&manager(&[&unix]), &image, &["--json"]);
    assert_eq!(server.uris().len(), 2, "{:?}", server.uris());
    for uri in server.uris() {
        let (_, socket) = uri.split_once("?socket=").expect("a Unix address");
        writes_and_reads(Path::new(socket));
    }
    server.stop_but_leave_socket();
}

#[test]
fn sockets_handed_over_to_another_process_are_not_touched() {
    if !require_tool(PYTHON) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let unix = format!("unix:{}", scratch.join("socket").display());
    let wrapper = [&["env", "LISTEN_PID=1"], &manager(&[&unix])[..]].concat();
    let server = Server::start_under(&wrapper, &image, &["--json"]);
    assert_eq!(server.uris().len(), 1, "{:?}", server.uris());
    server.stop();
}

#[test]
fn what_is_handed_over_and_no_socket_to_serve_on_is_refused_by_its_name() {
    if !require_tool(PYTHON) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB).to_string_lossy().into_owned();
    let deaf = format!("deaf:{}", scratch.join("deaf").display());
    let unseen = format!("abstract:{}", scratch.join("unseen").display());
    for (what, why) in [
        ("file", "it is no socket"),
        ("udp", "neither a Unix nor a TCP socket"),
        (deaf.as_str(), "nobody listens on it"),
        (unseen.as_str(), "no path that clients could be told"),
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

/// The next message to the manager.
fn heard(manager: &UnixDatagram) -> String {
    let mut message = [0; 4096];
    let len = manager.recv(&mut message).expect("a message in time");
    String::from_utf8(message[..len].to_vec()).expect("text")
}

#[test]
fn the_manager_is_told_when_clients_can_connect_and_what_is_done_at_the_end() {
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
    assert_eq!(heard(&manager), format!("READY=1\nSTATUS=serving {}\n", server.uri()));
    writes_and_reads(&server.socket());
    server.stop();
    assert_eq!(heard(&manager), "STOPPING=1\nSTATUS=finishing requests\n");
    assert_eq!(heard(&manager), "STATUS=flushing\n");

    // More exports than a message holds, with names that need encoding.
    let name = "\u{e9}".repeat(2048);
    let server = Server::start_under(&wrapper, &image, &["--export", &name]);
    let ready = heard(&manager);
    assert!(ready.starts_with("READY=1\nSTATUS=serving nbd+unix:///%C3"), "{ready}");
    assert_eq!((ready.len() < 4096, ready.lines().count()), (true, 2), "{ready}");
    server.stop();
}

#[test]
fn a_manager_that_is_gone_is_no_reason_not_to_serve() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start_under(&["env", "NOTIFY_SOCKET=/nonexistent/notify"], &image, &[]);
    writes_and_reads(&server.socket());
    // The line about the socket comes first, and the manager is told after it.
    while !server.log().contains("warning: NOTIFY_SOCKET") {
        thread::sleep(Duration::from_millis(5));
    }
    server.stop();
}

#[test]
fn systemd_socket_activate_starts_it_with_the_first_client() {
    if !require_tool("systemd-socket-activate") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB).to_string_lossy().into_owned();
    let path = scratch.join("socket");
    let wrapper = ["systemd-socket-activate", "-l", &path.to_string_lossy()];
    let server = thread::scope(|scope| {
        scope.spawn(|| {
            // Between bind(2) and listen(2) the socket is there and takes nobody.
            while UnixStream::connect(&path).is_err() {
                thread::sleep(Duration::from_millis(5));
            }
            writes_and_reads(&path);
        });
        Server::start_by(&wrapper, &["serve", &image])
    });
    writes_and_reads(&path);
    server.stop_but_leave_socket();
}

/// Starts the command after it by libnbd, which hands it a socket of its own.
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
fn libnbd_starts_it_as_a_server_of_its_own() {
    if !python_with_nbd() {
        return;
    }
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

/// What a unit says of `key`, once.
fn value<'a>(unit: &'a str, key: &str) -> &'a str {
    let mut values = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let value = values.next().expect("a value");
    assert_eq!(values.next(), None, "{key} is said twice");
    value
}

#[test]
fn the_units_say_nothing_that_systemd_does_not_understand() {
    if !require_tool("systemd-analyze") {
        return;
    }
    let scratch = Scratch::new();
    let copied: Vec<PathBuf> = ["nowait@.service", "nowait@.socket"]
        .into_iter()
        .map(|name| {
            let path = scratch.join(name);
            // The command has to be there.
            fs::write(&path, unit(name).replace("/usr/local/bin/nowait", NOWAIT)).expect("a unit");
            path
        })
        .collect();
    let mut verify = tool("systemd-analyze");
    let output = verify.args(["verify", "--man=no"]).args(&copied).output().expect("timeout(1)");
    let said = String::from_utf8_lossy(&output.stderr);
    // It exits with 0 also when it did not understand a line.
    assert!(output.status.success() && !said.contains("nowait@"), "{said}");
}

#[test]
fn the_command_of_the_unit_serves_what_it_is_handed() {
    if !require_tool(PYTHON) {
        return;
    }
    let scratch = Scratch::new();
    scratch.sparse("disk.img", MIB);
    let service = unit("nowait@.service");
    assert_eq!(value(&service, "Type"), "notify");
    let state = scratch.path().to_string_lossy();
    let command = value(&service, "ExecStart").replace("${STATE_DIRECTORY}", &state);
    let mut words = command.split_whitespace().filter(|word| *word != "$OPTIONS");
    assert_eq!(words.next(), Some("/usr/local/bin/nowait"));
    let path = scratch.join("socket");
    let unix = format!("unix:{}", path.display());
    let server = Server::start_by(&manager(&[&unix]), &words.collect::<Vec<_>>());
    writes_and_reads(&path);
    server.stop_but_leave_socket();
}
