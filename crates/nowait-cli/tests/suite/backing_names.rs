//! The forms in which a header names a backing file: file names, URLs, and QEMU's `json:{…}` and
//! `nbd:HOST:PORT`.
//!
//! Invariant: the advice in a refusal, given as it is printed, is never refused for what it is.

use std::fs;
use std::path::Path;

use nowait_image::{Chain, ChainOptions};
use nowait_testkit::qcow2_image::{self, DISK, Names};

use crate::common::{
    Finished, MIB, NOWAIT, Scratch, Server, accepted, refusal, require_tool, text, tool,
};
use crate::control::Controlled;

/// Creates the image `name` in `scratch`, on `backing` in `format`.
fn overlay(scratch: &Scratch, name: &str, backing: &str, format: &str) -> String {
    let path = scratch.join(name);
    let names = Names { backing: Some((backing, format)), data: None };
    fs::write(&path, qcow2_image::image(names)).expect("an image");
    text(&path).to_owned()
}

/// Why the library, with which each command opens images, does not open `image`, whose own file it names.
fn refused(image: &str) -> String {
    let error = Chain::open(image.as_ref(), &ChainOptions::default()).map(drop).unwrap_err();
    assert_eq!(error.path(), Path::new(image));
    error.what().to_owned()
}

/// The description of the file `name`, in `format`, with nested objects and with dots.
fn described(name: &str, format: &str) -> [String; 2] {
    [
        format!(r#"json:{{"driver":"{format}","file":{{"driver":"file","filename":"{name}"}}}}"#),
        format!(r#"json:{{"driver":"{format}","file.driver":"file","file.filename":"{name}"}}"#),
    ]
}

#[test]
fn a_file_that_is_described_in_json_is_opened_read_and_written_to() {
    let scratch = Scratch::new();
    let base = scratch.random("base.raw", DISK, 1);
    let bytes = fs::read(&base).expect("the base");
    let out = scratch.join("out.raw");
    overlay(&scratch, "mid.qcow2", "base.raw", "raw");
    for (name, format) in [("base.raw", "raw"), ("mid.qcow2", "qcow2"), (text(&base), "raw")] {
        for backing in described(name, format) {
            let top = overlay(&scratch, "top.qcow2", &backing, format);
            accepted(&["copy", &top, text(&out)]);
            assert!(fs::read(&out).expect("the copy") == bytes, "{backing}");
            fs::remove_file(&out).expect("the copy");
            for command in [&["map", &top][..], &["check", &top], &["resize", &top, "2M"]] {
                accepted(command);
            }
            let server = Server::start(top.as_ref(), &[]);
            let mut client = server.connect();
            client.write(0, &[5; 4096]).expect("a write");
            assert!(client.read(4096, 4096).expect("the base") == bytes[4096..8192]);
            server.stop();
        }
    }
    let [nested, _] = described("base.raw", "raw");
    let top = overlay(&scratch, "top.qcow2", &nested, "raw");
    let server = Server::start(top.as_ref(), &[]);
    server.connect().write(0, &[6; 4096]).expect("a write");
    server.stop();
    accepted(&["commit", &top]);
    assert_eq!(fs::read(&base).expect("the base")[..4096], [6; 4096]);
    let new = scratch.join("new.qcow2");
    accepted(&["create", text(&new), "--backing", &nested]);
    accepted(&["map", text(&new)]);
    let info = accepted(&["info", text(&new), "--json"]);
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    assert_eq!(info["full-backing-filename"], info["backing-filename"]);
    let top = overlay(&scratch, "top.qcow2", &nested, "qcow2");
    refusal(&["map", &top]).says(&["its backing file is raw by its name, and qcow2 otherwise"]);
}

#[test]
fn an_overlay_that_qemu_made_on_a_description_is_copied_as_qemu_does() {
    nowait_testkit::needs!(require_tool("qemu-img") && require_tool("qemu-io"));
    let scratch = Scratch::new();
    let (base, top) = (scratch.join("base.qcow2"), scratch.join("top.qcow2"));
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&base).arg("1M").succeeds();
    tool("qemu-io").args(["-f", "qcow2", "-c", "write -P 7 0 64k"]).arg(&base).succeeds();
    let [nested, _] = described(text(&base), "qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &nested];
    tool("qemu-img").args(create).arg(&top).succeeds();
    let (ours, theirs) = (scratch.join("ours"), scratch.join("theirs"));
    accepted(&["copy", text(&top), text(&ours)]);
    tool("qemu-img").args(["convert", "-O", "raw"]).args([&top, &theirs]).succeeds();
    assert!(fs::read(&ours).expect("a copy") == fs::read(&theirs).expect("a copy"));
}

/// The advice in `refused`: the arguments to add, and whether it is another command.
fn advice(refused: &str) -> Option<(&str, bool)> {
    let other = refused.split_once("(nowait copy ").map(|(_, rest)| (rest, true));
    let same = || refused.split_once("(allow it with ").map(|(_, rest)| (rest, false));
    let (rest, other) = other.or_else(same)?;
    Some((rest.split_once(" makes ").or_else(|| rest.rsplit_once(')'))?.0, other))
}

/// Does what the refusal of `command` on `top` advises; returns what is printed.
fn followed(scratch: &Scratch, command: &[&str], refused: &str) -> Option<String> {
    let (arguments, other) = advice(refused)?;
    let out = scratch.join("advised.raw");
    let copy = ["copy", command[1], text(&out)];
    let command = if other { &copy[..] } else { command };
    let script = format!(r#""$0" "$@" {arguments} 2>&1"#);
    let done = tool("sh").args(["-c", &script, NOWAIT]).args(command).output().expect("timeout(1)");
    let printed = String::from_utf8_lossy(&done.stdout).into_owned();
    let _ = fs::remove_file(&out);
    assert_eq!(done.status.code(), Some(0), "{arguments}: {printed}");
    Some(printed)
}

#[test]
fn each_advice_of_a_refused_backing_file_can_be_followed() {
    let scratch = Scratch::new();
    let (home, elsewhere) = (scratch.join("home"), scratch.join("else where's"));
    for directory in [&home, &elsewhere] {
        fs::create_dir(directory).expect("a directory");
    }
    let base = scratch.random("else where's/base.raw", DISK, 2);
    let served = scratch.random("served.raw", DISK, 2);
    let server = Server::start(&served, &["--read-only"]);
    let on_tcp = ["serve", text(&served), "--read-only", "--nbd", "tcp:127.0.0.1:0"];
    let on_tcp = Server::start_by(&[], &on_tcp);
    let (socket, port) = (server.socket(), on_tcp.port());
    let socket = text(&socket);
    let mut names = vec![
        "../else where's/base.raw".to_owned(),
        text(&base).to_owned(),
        server.uri().to_owned(),
        format!("nbd://127.0.0.1:{port}/"),
        format!("nbd:127.0.0.1:{port}"),
        format!("nbd:unix:{socket}"),
        format!("nbd:unix:{socket}:exportname="),
        format!(r#"json:{{"driver":"raw","file":{{"filename":"nbd://127.0.0.1:{port}"}}}}"#),
        format!(r#"json:{{"driver":"nbd","server":{{"type":"unix","path":"{socket}"}}}}"#),
        format!(r#"json:{{"driver":"raw","file.driver":"nbd","file.path":"{socket}"}}"#),
        format!(
            r#"json:{{"driver":"nbd","server.type":"inet","server.host":"127.0.0.1","server.port":"{port}"}}"#
        ),
    ];
    names.extend(described("../else where's/base.raw", "raw"));
    for (n, name) in names.iter().enumerate() {
        let top = overlay(&scratch, "home/top.qcow2", name, "raw");
        let copy = scratch.join("copy.raw");
        let bytes = fs::read(&top).expect("the image");
        let advised_directory = refusal(&["map", &top]).error.contains("--backing-dir");
        // A name of a directory, a URI and a description by each command, the other ones by one.
        let count = if [0, 2, 7].contains(&n) { 5 } else { 1 };
        let commands: [&[&str]; 5] = [
            &["copy", &top, text(&copy)],
            &["map", &top],
            &["check", &top],
            &["resize", &top, "2M"],
            &["commit", &top],
        ];
        for command in commands.into_iter().take(count) {
            let refused = refusal(command);
            refused.says(&["home/top.qcow2: its backing file"]);
            assert!(followed(&scratch, command, &refused.error).is_some(), "{}", refused.error);
            fs::write(&top, &bytes).expect("the image");
        }
        if !advised_directory {
            // The name itself can be given, too.
            accepted(&["map", &top, "--backing", name]);
        }
        assert!(fs::read(&copy).expect("the copy") == fs::read(&base).expect("the base"), "{name}");
        fs::remove_file(&copy).expect("the copy");
    }
    server.stop();
    on_tcp.stop_but_leave_socket();
}

#[test]
fn the_advice_for_an_image_that_is_added_is_an_option_of_the_server() {
    let it = Controlled::start();
    let names = Names { backing: None, data: Some("../base.raw") };
    it.scratch.random("base.raw", DISK, 4);
    let top = overlay(&it.scratch, "images/top.qcow2", "../base.raw", "raw");
    let other = it.scratch.join("images/other.qcow2");
    fs::write(&other, qcow2_image::image(names)).expect("an image");
    for (image, option) in [(&*top, "--backing-dir"), (text(&other), "--data-file")] {
        let refused = it.nowait(&["export", "add", "top", image]).fails();
        let (_, advised) = refused.split_once("(allow it with nowait serve ").expect("advice");
        let (advised, _) = advised.rsplit_once(')').expect("its end");
        let (given, value) = advised.split_once(' ').expect("an option and its value");
        assert_eq!(given, option);
        Server::start(image.as_ref(), &[option, value]).stop();
    }
    it.server.stop();
}

#[test]
fn a_name_that_cannot_be_opened_is_refused_without_advice() {
    let scratch = Scratch::new();
    let description = r#"json:{"driver":"ssh","server":{"host":"h","port":"22"},"path":"/a"}"#;
    for name in [
        "ssh://host/a.qcow2",
        "ftp://host/a.qcow2",
        "fat:/etc",
        "fat:rw:/etc",
        "https://host/a.qcow2?sig=1",
        "https://user:word@host/a.qcow2",
        "nbd://",
        "nbd:host",
        "nbd+vsock://1/",
        "rbd:",
        "sheepdog:a",
        "json:",
        "json:{}",
        description,
    ] {
        let top = overlay(&scratch, "top.qcow2", name, "raw");
        let refused = refused(&top);
        assert!(refused.starts_with("its backing file '"), "{refused}");
        assert!(!refused.contains("--"), "{refused}");
        let names = Names { backing: None, data: Some(name) };
        fs::write(&top, qcow2_image::image(names)).expect("an image");
        let refused = self::refused(&top);
        assert!(refused.starts_with("its data file '"), "{refused}");
        assert!(refused.contains("is not a file name") && !refused.contains("--"), "{refused}");
    }
    let top = overlay(&scratch, "top.qcow2", description, "raw");
    let (why, copy) = (refused(&top), scratch.join("copy.raw"));
    for command in [&["map", &top][..], &["copy", &top, text(&copy)], &["commit", &top]] {
        refusal(command).says(&["top.qcow2: ", &why]);
    }
}

#[test]
fn a_description_opens_no_file_that_its_name_alone_would_not() {
    let scratch = Scratch::new();
    for directory in ["vm/below", "other"] {
        fs::create_dir_all(scratch.join(directory)).expect("directories");
    }
    for name in ["vm/.hidden", "vm/below/base", "other/base"] {
        scratch.random(name, MIB, 3);
    }
    std::os::unix::fs::symlink("../other/base", scratch.join("vm/link")).expect("a link");
    let outside = text(&scratch.join("other/base")).to_owned();
    for (name, why) in [
        (".hidden", "is hidden"),
        ("below/base", "not in the image's own directory"),
        ("../other/base", "not in the image's own directory"),
        (&outside, "not in the image's own directory"),
        ("link", "not in the image's own directory"),
        ("none", "is missing"),
        ("top.qcow2", "it is its own backing file"),
    ] {
        let format = if name == "top.qcow2" { "qcow2" } else { "raw" };
        let of_file = format!(r#"json:{{"driver":"file","filename":"{name}"}}"#);
        for backing in described(name, format).into_iter().chain([of_file]) {
            let top = overlay(&scratch, "vm/top.qcow2", &backing, format);
            let refused = refused(&top);
            assert!(refused.contains(why), "{refused}");
        }
    }
}
