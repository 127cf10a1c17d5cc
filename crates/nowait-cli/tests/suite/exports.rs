//! Several images in one server: each client gets the export that it names, and no other.
//!
//! Invariant: reads are compared with the image's file, and images differ in every block.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::{MIB, Scratch, Server, refusal, text};
use nowait_testkit::nbd::{
    Client, Mode, OPT_GO, OPT_INFO, export_request, greet, read_size, send_option,
};

/// A server of `root` (the first) and `data`, which is larger.
struct Pair {
    server: Server,
    _scratch: Scratch,
}

impl Pair {
    fn new(extra: &[&str]) -> Self {
        let scratch = Scratch::new();
        let root_path = scratch.random("root.img", MIB, 11);
        let data_path = scratch.random("data.img", 2 * MIB, 12);
        let named = format!("data={}", data_path.display());
        let extra = [extra, &[&named, "--export", "root"]].concat();
        let server = Server::start(&root_path, &extra);
        Self { server, _scratch: scratch }
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
