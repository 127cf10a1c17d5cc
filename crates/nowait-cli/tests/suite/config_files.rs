//! A server that reads its options from a file.
//!
//! Invariant: the file is read once at the start of a process, before its sandbox; a mistake in it is one line and status
//! 2, and ends no server that serves.

use std::fs;
use std::path::{Path, PathBuf};

use nowait_testkit::nbd::{Client, Mode};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::common::{Scratch, Server, accepted, refusal, text};
use crate::upgrade::Upgraded;

/// A file in a directory of its own for a server of `disk` there, with more `keys`.
fn file(scratch: &Scratch, keys: &str) -> PathBuf {
    let (image, config) = (scratch.join("disk"), scratch.join("nowait.toml"));
    if !image.exists() {
        accepted(&["create", text(&image), "1M"]);
    }
    let at = |name: &str| scratch.join(name).display().to_string();
    let all = format!(
        "nbd = ['unix:{}']\ncontrol = ['unix:{}']\n{keys}\n[[export]]\nimage = '{}'\ndescription = 'from a file'\n",
        at("socket"),
        at("control"),
        at("disk"),
    );
    fs::write(&config, all).expect("a file");
    config
}

fn start(config: &Path, more: &[&str]) -> Server {
    Server::start_by(&[], &[&["serve", "--config", text(config)], more].concat())
}

#[test]
fn a_server_is_what_its_file_says_with_the_command_line_over_it() {
    let scratch = Scratch::new();
    let config = file(&scratch, "threads = 2\nread-only = true\njson = true\nsandbox = 'on'");
    let ready = |server: &Server| -> Value {
        serde_json::from_str(server.ready_line()).expect("a ready line in JSON")
    };
    let server = start(&config, &[]);
    let told = ready(&server);
    assert_eq!((&told["threads"], &told["read_only"]), (&json!(2), &json!(true)), "{told}");
    assert_eq!(server.connect().write(0, &[1; 512]), Err(Errno::PERM.raw_os_error() as u32));
    server.stop();
    let more = scratch.join("more");
    accepted(&["create", text(&more), "2M"]);
    let server = start(&config, &["--threads", "3", "--export", "first", text(&more)]);
    let told = ready(&server);
    let names = ["first", "more"].map(|name| json!(name));
    assert_eq!(told["threads"], json!(3), "{told}");
    assert_eq!([0, 1].map(|n| told["exports"][n]["name"].clone()), names, "{told}");
    server.stop();
}

#[test]
fn a_mistake_in_a_file_is_one_line_with_its_place_and_nothing_is_opened() {
    let scratch = Scratch::new();
    let config = file(&scratch, "colour = 'blue'");
    let refused = refusal(&["serve", "--config", text(&config)]);
    assert_eq!((refused.code, refused.error.lines().count()), (2, 1), "{}", refused.error);
    assert!(refused.error.contains("nowait.toml:3: there is no key colour"), "{}", refused.error);
    assert!(!scratch.join("socket").exists());
    let missing = refusal(&["serve", "--config", text(&scratch.join("missing"))]);
    assert_eq!(missing.code, 2);
    assert!(missing.error.contains("no such file"), "{}", missing.error);
}

#[test]
fn what_is_printed_is_a_file_that_says_the_same() {
    let scratch = Scratch::new();
    let config = file(&scratch, "threads = 2");
    fs::remove_file(scratch.join("disk")).expect("an image");
    let print = |config: &Path, more: &[&str]| {
        accepted(&[&["serve", "--config", text(config), "--print-config"], more].concat())
    };
    let printed = print(&config, &["--slow-requests", "90s", "b=./b", "--fork"]);
    for line in ["threads = 2", "slow-requests = \"90s\"", "name = \"b\"", "fork = true"] {
        assert!(printed.lines().any(|it| it == line), "{line}: {printed}");
    }
    assert!(!scratch.join("socket").exists() && !scratch.join("disk").exists());
    let copy = scratch.join("copy.toml");
    fs::write(&copy, &printed).expect("a file");
    assert_eq!(print(&copy, &[]), printed);
}

#[test]
fn an_upgrade_reads_the_file_again_and_one_with_a_mistake_changes_nothing() {
    let scratch = Scratch::new();
    let config = file(&scratch, "verbose = true");
    let server = start(&config, &[]);
    let control = scratch.join("control");
    let mut client = server.connect();
    client.write(0, &[7; 512]).expect("a write");
    fs::write(&config, "colour = 'blue'").expect("a file");
    let refused = refusal(&["upgrade", "--control", text(&control)]);
    assert!(refused.error.contains("there is no key colour"), "{}", refused.error);
    assert_eq!(client.read(0, 512).expect("a read"), [7; 512]);
    let other =
        fs::read_to_string(file(&scratch, "")).expect("a file").replace("/disk'", "/other'");
    fs::write(&config, other).expect("a file");
    let refused = refusal(&["upgrade", "--control", text(&control)]);
    assert!(refused.error.contains("its command line does not allow"), "{}", refused.error);
    assert_eq!(client.read(0, 512).expect("a read"), [7; 512]);
    file(&scratch, "verbose = true\nmax-connections = 2");
    let mut it = Upgraded::of(server, &control, scratch);
    it.upgrade();
    assert_eq!(client.read(0, 512).expect("a read"), [7; 512]);
    let _second = it.connect();
    assert!(Client::connect(&it.socket(), Mode::Structured).is_err(), "a third connection");
    drop((client, _second));
    it.stop();
}

#[test]
fn a_server_that_could_write_to_its_own_file_is_not_started() {
    let scratch = Scratch::new();
    let config = file(&scratch, &format!("allow-dir = ['{}']", scratch.path().display()));
    let refused = refusal(&["serve", "--config", text(&config)]);
    assert_eq!(refused.code, 2);
    assert!(refused.error.contains("whose files this server may change"), "{}", refused.error);
    start(&config, &["--sandbox", "off"]).stop();
    let help = accepted(&["serve", "--help"]);
    assert!(help.contains("--print-config") && help.contains("[[export]]"));
}
