//! Several images in one server: each client gets the export that it names, and no other.
//!
//! Invariant: reads are compared with the image's file, and images differ in every block.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;

use serde_json::Value;

use crate::common::{Finished, MIB, Scratch, Server, export, require_tool, tool};
use nowait_testkit::nbd::{
    Client, Mode, OPT_EXPORT_NAME, OPT_GO, RawRequest, export_request, greet, option_bytes,
    read_size,
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
    fn new(options: &str) -> Self {
        let scratch = Scratch::new();
        let root_path = scratch.random("root.img", MIB, 11);
        let data_path = scratch.random("data.img", 2 * MIB, 12);
        let (root, data) = (bytes(&root_path), bytes(&data_path));
        let exports = export("root", &root_path) + &export("data", &data_path);
        let server = Server::of(&(options.to_owned() + &exports));
        Self { server, root, data, data_path, _scratch: scratch }
    }
}

fn bytes(path: &std::path::Path) -> Vec<u8> {
    fs::read(path).expect("an image")
}

#[test]
fn each_name_selects_its_image_and_the_empty_name_the_first() {
    for options in ["", "queue = 'threads'", "threads = 3"] {
        let pair = Pair::new(options);
        for (name, expected) in
            [("", &pair.root), ("root", &pair.root), ("data", &pair.data), ("root", &pair.root)]
        {
            let mut client = pair.server.connect_to(name);
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
    let pair = Pair::new("");
    let (mut root, mut data) = (pair.server.connect_to("root"), pair.server.connect_to("data"));
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
    for options in ["", "queue = 'threads'"] {
        let pair = Pair::new(options);
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
    let pair = Pair::new("");
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
fn nbdinfo_lists_every_export_with_its_description() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let pair = Pair::new("");
    let list = tool("nbdinfo").args(["--json", "--list", &pair.server.uri()]).succeeds();
    let list: Value = serde_json::from_str(&list).expect("JSON from nbdinfo");
    let field = |n: usize, key: &str| list["exports"][n][key].clone();
    assert_eq!((field(0, "export-name"), field(1, "export-name")), ("root".into(), "data".into()));
    assert_eq!((field(0, "export-size"), field(1, "export-size")), (MIB.into(), (2 * MIB).into()));
    let description = field(1, "description");
    // Only the file name: clients do not learn the directory.
    let name = pair.data_path.file_name().expect("a name").to_str().expect("a name in UTF-8");
    assert_eq!(description, name);
    let size = tool("nbdinfo").args(["--size", &pair.server.uri_of("data")]).succeeds();
    assert_eq!(size.trim(), (2 * MIB).to_string());
    pair.server.stop();
}
