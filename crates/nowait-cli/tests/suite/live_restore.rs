//! `nowait restore --serve`: a point of a chain is a disk immediately, and becomes a complete one while it is used.
//!
//! Invariant: a model has the point and what a client has written since.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nowait_testkit::{Finished, ends_with_test, output_of, tool, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{MIB, NOWAIT, Scratch, Server, accepted, refusal, text};

/// A point that is served.
struct ServedPoint {
    child: Child,
    socket: PathBuf,
}

impl ServedPoint {
    fn start(scratch: &Scratch, from: &str) -> Self {
        let socket = scratch.join("point.sock");
        let mut command = Command::new(NOWAIT);
        command.args(["restore", from, "--serve", text(&socket)]);
        let child = ends_with_test(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
        let child = child.spawn().expect("nowait");
        wait_until("the point is served", || socket.exists());
        Self { child, socket }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Ends it by a signal, and returns what it has logged.
    fn end(self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("a child");
        let socket = self.socket.clone();
        let uri = self.uri();
        let output = output_of(self.child);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("serving {uri}\n"));
        assert!(!socket.exists());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// A chain of two points of a disk with holes, and the disk of the first.
fn chain(scratch: &Scratch) -> (PathBuf, Vec<u8>) {
    let (disk, chain) = (scratch.dotted("disk", 16 * MIB, 200_000, 3 * MIB), scratch.join("chain"));
    let first = fs::read(&disk).expect("the disk");
    accepted(&["backup", text(&disk), text(&chain), "-f", "raw"]);
    fs::write(&disk, vec![7; first.len()]).expect("the disk");
    accepted(&["backup", text(&disk), text(&chain), "-f", "raw"]);
    (chain, first)
}

#[test]
fn a_machine_goes_on_from_a_point_that_is_restored_below_it() {
    let scratch = Scratch::new();
    let (chain, mut model) = chain(&scratch);
    let point = ServedPoint::start(&scratch, &format!("{}@1", text(&chain)));
    let copy = scratch.join("copy");
    accepted(&["copy", &point.uri(), text(&copy), "-O", "raw", "--verify"]);
    assert!(fs::read(&copy).expect("the disk") == model);
    let holes: Value = serde_json::from_str(&accepted(&["map", &point.uri(), "--json"]))
        .expect("the extents of the point");
    assert!(holes.to_string().contains("true"), "{holes}");
    refusal(&["copy", text(&copy), &point.uri(), "-f", "raw"]).says(&["read-only"]);
    refusal(&["backup", "prune", text(&chain), "--keep", "1"]).says(&["being read"]);
    // The machine begins on an image that has nothing but the address of the point.
    let (overlay, moved) = (scratch.join("vm.qcow2"), scratch.join("moved.img"));
    let (uri, control) = (point.uri(), scratch.join("control"));
    let backing = ["--backing", &uri, "--backing-format", "raw"];
    accepted(&[&["create", text(&overlay)], &backing[..]].concat());
    let address = format!("unix:{}", control.display());
    let directory = text(scratch.path());
    let more = ["--backing", &uri, "--control", &address, "--allow-dir", directory];
    let server = Server::start(&overlay, &more);
    let mut client = server.connect();
    for (at, byte) in [(0, 1), (5 * MIB + 100, 2), (16 * MIB - 10_000, 3)] {
        client.write(at, &[byte; 9000]).expect("a write");
        model[at as usize..][..9000].fill(byte);
    }
    let mut export = tool(NOWAIT);
    export.args(["export", "move", "@0", text(&moved), "--max-pause", "60000"]);
    export.arg("--control").arg(&control).succeeds();
    // From now on the point is not needed.
    assert_eq!(point.end(), "");
    client.write(MIB, &[4; 4096]).expect("a write");
    model[MIB as usize..][..4096].fill(4);
    assert!(client.read(0, 16 * MIB as u32).expect("all of it")[..] == model[..]);
    server.stop();
    assert!(fs::read(&moved).expect("the disk") == model);
    accepted(&["backup", "prune", text(&chain), "--keep", "1"]);
}

#[test]
fn a_damaged_block_of_a_served_point_is_an_error_and_others_are_read() {
    let scratch = Scratch::new();
    let (chain, first) = chain(&scratch);
    let files = fs::read_dir(&chain).expect("a directory").map(|it| it.expect("an entry").path());
    let data = files.filter(|path| text(path).contains("data-")).max_by_key(|path| len(path));
    let data = data.expect("a data file");
    let mut bytes = fs::read(&data).expect("the data");
    bytes[100] ^= 1;
    fs::write(&data, bytes).expect("the data");
    let point = ServedPoint::start(&scratch, &format!("{}@1", text(&chain)));
    let copy = scratch.join("copy");
    refusal(&["copy", &point.uri(), text(&copy), "-O", "raw"]).says(&["error"]);
    accepted_in_part(&["copy", &point.uri(), text(&copy), "-O", "raw", "--rescue"]);
    let rescued = fs::read(&copy).expect("the disk");
    let differs = rescued.iter().zip(&first).filter(|(a, b)| a != b).count();
    assert!((1..=64 << 10).contains(&differs), "{differs}");
    let logged = point.end();
    assert_eq!(logged.matches("are damaged: its checksum is wrong").count(), 1, "{logged}");
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).expect("a file").len()
}

/// A copy that has left something out.
fn accepted_in_part(arguments: &[&str]) {
    let output = tool(NOWAIT).args(arguments).output().expect("nowait");
    assert_eq!(output.status.code(), Some(4), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn what_cannot_be_served_is_refused_in_one_line() {
    let scratch = Scratch::new();
    let (chain, _) = chain(&scratch);
    let none = scratch.join("absent").join("socket");
    let from = text(&chain);
    refusal(&["restore", from, "--serve", text(&none)]).says(&["absent", "No such file"]);
    let missing = format!("{from}@9");
    let socket = scratch.join("socket");
    refusal(&["restore", &missing, "--serve", text(&socket)]).says(&["there is no point 9"]);
    let point = ServedPoint::start(&scratch, from);
    refusal(&["restore", from, "--serve", text(&point.socket)]).says(&["in use"]);
    assert_eq!(point.end(), "");
}
