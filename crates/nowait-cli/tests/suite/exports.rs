//! Several images in one server: each client gets the export that it names, and no other.
//!
//! Invariant: reads are compared with the image's file, and images differ in every block.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{Finished, MIB, Scratch, Server, refusal, require_tool, text, tool};
use nowait_testkit::nbd::{
    Client, Mode, OPT_EXPORT_NAME, OPT_GO, OPT_INFO, RawRequest, export_request, greet,
    option_bytes, read_size, send_option,
};

const BLOCK_BYTES: usize = 4096;
/// Bytes of the header of a simple reply.
const REPLY_BYTES: usize = 16;

/// A server of `root` (the first) and `data`, which is larger.
struct Pair {
    server: Server,
    root: Vec<u8>,
    data: Vec<u8>,
    data_path: PathBuf,
    _scratch: Scratch,
}

impl Pair {
    fn new(extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let root_path = scratch.random("root.img", MIB, 11);
        let data_path = scratch.random("data.img", 2 * MIB, 12);
        let (root, data) = (bytes(&root_path), bytes(&data_path));
        let named = format!("data={}", data_path.display());
        let extra = [extra, &[&named, "--export", "root"]].concat();
        let server = Server::start(&root_path, &extra);
        Self { server, root, data, data_path, _scratch: scratch }
    }

    fn connect(&self, name: &str) -> Client {
        Client::connect_to(&self.server.socket(), name, Mode::Structured).expect("a connection")
    }

    /// The names of the serving threads.
    fn serving_threads(&self) -> BTreeSet<String> {
        let is_number = |name: &str| name.parse::<u16>().is_ok();
        let is_serving = |name: &String| name.strip_prefix("nowait-").is_some_and(is_number);
        self.server.threads().into_iter().filter(is_serving).collect()
    }
}

fn bytes(path: &Path) -> Vec<u8> {
    fs::read(path).expect("an image")
}

fn uri(server: &Server, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", server.socket().display())
}

#[test]
fn each_name_selects_its_image_and_the_empty_name_the_first() {
    for extra in [&[][..], &["--queue", "threads"], &["--queues", "3"]] {
        let pair = Pair::new(extra);
        for (name, expected) in
            [("", &pair.root), ("root", &pair.root), ("data", &pair.data), ("root", &pair.root)]
        {
            let mut client = pair.connect(name);
            assert_eq!(client.size, expected.len() as u64, "the size of '{name}'");
            let read = client.read(0, expected.len() as u32).expect("a read");
            assert!(read == *expected, "'{name}' has other bytes");
        }
        assert!(Client::connect_to(&pair.server.socket(), "other", Mode::Structured).is_err());
        pair.server.stop();
    }
}

#[test]
fn writes_to_one_export_are_flushed_at_the_end_and_do_not_change_the_other() {
    let pair = Pair::new(&[]);
    let (mut root, mut data) = (pair.connect("root"), pair.connect("data"));
    data.write(4096, &[0x5a; 8192]).expect("a write");
    let mut expected = pair.data.clone();
    expected[4096..4096 + 8192].fill(0x5a);
    assert!(data.read(0, 2 * MIB as u32).expect("a read") == expected);
    assert!(root.read(0, MIB as u32).expect("a read") == pair.root);
    pair.server.stop();
    assert!(bytes(&pair.data_path) == expected);
}

#[test]
fn requests_sent_together_with_the_choice_of_an_export_move_with_the_connection() {
    const READS: u64 = 20;
    for extra in [&[][..], &["--queue", "threads"]] {
        let pair = Pair::new(extra);
        let mut stream = greet(&pair.server.socket()).expect("a greeting");
        let mut sent = option_bytes(OPT_GO, &export_request("data"));
        for cookie in 0..READS {
            let offset = cookie * BLOCK_BYTES as u64;
            let write = RawRequest::write(offset, BLOCK_BYTES as u32);
            sent.extend(RawRequest { kind: 0, cookie, ..write }.bytes());
        }
        // The last request is split: its rest arrives at the other thread.
        let (first, rest) = sent.split_at(sent.len() - 10);
        stream.write_all(first).expect("a socket");
        assert_eq!(read_size(&mut stream).expect("an acknowledgement"), 2 * MIB);
        stream.write_all(rest).expect("a socket");
        let mut seen = BTreeSet::new();
        for _ in 0..READS {
            let mut reply = [0; REPLY_BYTES + BLOCK_BYTES];
            stream.read_exact(&mut reply).expect("a reply");
            let (head, data) = reply.split_at(REPLY_BYTES);
            assert_eq!(head[4..8], [0; 4], "an error");
            let cookie = usize::from(head[15]);
            assert!(data == &pair.data[cookie * BLOCK_BYTES..][..BLOCK_BYTES]);
            seen.insert(cookie);
        }
        assert_eq!(seen.len() as u64, READS);
        drop(stream);
        pair.server.stop();
    }
}

#[test]
fn a_client_that_closes_its_side_together_with_its_choice_is_answered() {
    let pair = Pair::new(&[]);
    let mut stream = greet(&pair.server.socket()).expect("a greeting");
    let mut sent = option_bytes(OPT_EXPORT_NAME, b"data");
    let read = RawRequest::write(0, BLOCK_BYTES as u32);
    sent.extend(RawRequest { kind: 0, ..read }.bytes());
    stream.write_all(&sent).expect("a socket");
    stream.shutdown(std::net::Shutdown::Write).expect("a socket");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("all of the answer");
    // Size and flags without padding, because this client negotiated NO_ZEROES.
    assert_eq!(answer.len(), 10 + REPLY_BYTES + BLOCK_BYTES);
    assert!(answer[10 + REPLY_BYTES..] == pair.data[..BLOCK_BYTES]);
    pair.server.stop();
}

#[test]
fn the_serving_threads_are_the_same_whatever_export_is_queried_or_chosen() {
    let pair = Pair::new(&["--threads", "3"]);
    let all = BTreeSet::from(["nowait-0".into(), "nowait-1".into(), "nowait-2".into()]);
    assert_eq!(pair.serving_threads(), all);
    let mut stream = greet(&pair.server.socket()).expect("a greeting");
    send_option(&mut stream, OPT_INFO, &export_request("data")).expect("a socket");
    assert_eq!(read_size(&mut stream).expect("an answer"), 2 * MIB);
    // The export of OPT_INFO may differ from the chosen one.
    send_option(&mut stream, OPT_GO, &export_request("root")).expect("a socket");
    assert_eq!(read_size(&mut stream).expect("an answer"), MIB);
    pair.connect("").read(0, 512).expect("a read");
    pair.connect("data").read(0, 512).expect("a read");
    assert_eq!(pair.serving_threads(), all);
    pair.server.stop();
}

#[test]
fn nbdinfo_lists_every_export_with_its_description() {
    if !require_tool("nbdinfo") {
        return;
    }
    let pair = Pair::new(&[]);
    let list = tool("nbdinfo").args(["--json", "--list", pair.server.uri()]).succeeds();
    let list: Value = serde_json::from_str(&list).expect("JSON from nbdinfo");
    let field = |n: usize, key: &str| list["exports"][n][key].clone();
    assert_eq!((field(0, "export-name"), field(1, "export-name")), ("root".into(), "data".into()));
    assert_eq!((field(0, "export-size"), field(1, "export-size")), (MIB.into(), (2 * MIB).into()));
    let description = field(1, "description");
    // Only the file name: clients do not learn the directory.
    let name = pair.data_path.file_name().expect("a name").to_str().expect("a name in UTF-8");
    assert_eq!(description, name);
    let size = tool("nbdinfo").args(["--size", &uri(&pair.server, "data")]).succeeds();
    assert_eq!(size.trim(), (2 * MIB).to_string());
    pair.server.stop();
}

#[test]
fn the_ready_line_names_every_export_and_has_the_first_at_the_top_level() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.sparse("one.img", MIB), scratch.sparse("two.img", 2 * MIB));
    let socket = scratch.join("socket");
    let listen = format!("unix:{}", socket.display());
    let arguments = ["serve", "--json", "--nbd", &listen, text(&one), text(&two)];
    let server = Server::start_by(&[], &arguments);
    let ready: Value = serde_json::from_str(server.ready_line()).expect("JSON");
    let exports = &ready["exports"];
    assert_eq!((&exports[0]["name"], &exports[1]["name"]), (&"".into(), &"two.img".into()));
    assert_eq!(exports[1]["size_bytes"], 2 * MIB);
    assert_eq!(exports[1]["uris"][0], format!("nbd+unix:///two.img?socket={}", socket.display()));
    for key in ["uris", "image", "size_bytes", "read_only", "direct_io"] {
        assert!(!ready[key].is_null() && ready[key] == exports[0][key], "{key} in {ready}");
    }
}

#[test]
fn an_image_given_twice_is_refused_unless_it_is_only_read() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", MIB, 13);
    let path = image.to_str().expect("a name in UTF-8");
    let again = format!("again={path}");
    refusal(&["serve", path, &again]).says(&["disk.img", "twice", "--read-only"]);
    let server = Server::start(&image, &[&again, "--read-only"]);
    let mut client =
        Client::connect_to(&server.socket(), "again", Mode::Structured).expect("a connection");
    assert!(client.read(0, MIB as u32).expect("a read") == bytes(&image));
    server.stop();
}

#[test]
fn an_image_that_cannot_be_served_is_named_and_no_image_is_served() {
    let scratch = Scratch::new();
    let image = scratch.sparse("good.img", MIB);
    let socket = scratch.join("socket");
    let listen = format!("unix:{}", socket.display());
    let (good, bad) = (image.display().to_string(), scratch.join("bad.img").display().to_string());
    refusal(&["serve", &good, &bad, "--nbd", &listen]).says(&["bad.img"]);
    assert!(!socket.exists(), "a socket is there");
}
