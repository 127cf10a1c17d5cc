//! Which other files an image can cause to be opened: in a home directory, a shared directory,
//! /dev.
//!
//! Invariant: a refused file is not changed, and the message names the option that would allow it.

use std::fs;

use crate::common::{
    Finished, LoopDevice, Scratch, Server, accepted, refusal, require_tool, text, tool,
};
use nowait_testkit::qcow2_image::{self, DISK, Names};

/// Creates the image `name` in `scratch`, whose header has `names`.
fn image(scratch: &Scratch, name: &str, names: Names<'_>) -> String {
    let path = scratch.join(name);
    fs::write(&path, qcow2_image::image(names)).expect("an image");
    text(&path).to_owned()
}

fn on(backing: &str) -> Names<'_> {
    Names { backing: Some((backing, "raw")), data: None }
}

/// Every command that opens the backing chain of `image`, the shortest first. What the library that all of them open images
/// with refuses is tested there, name by name.
fn commands<'a>(image: &'a str, copy: &'a str) -> [Vec<&'a str>; 8] {
    [
        vec!["map", image],
        vec!["serve", image],
        vec!["serve", image, "--read-only"],
        vec!["copy", image, copy],
        vec!["check", image],
        vec!["check", image, "--repair"],
        vec!["resize", image, "+1M"],
        vec!["commit", image],
    ]
}

#[test]
fn no_command_opens_a_hidden_backing_file_or_one_outside_the_images_directory() {
    let home = Scratch::new();
    fs::create_dir_all(home.join("vm/.ssh")).expect("directories");
    let others =
        ["vm/.ssh/id_rsa", "vm/.bashrc", "other.img"].map(|name| home.random(name, 4096, 1));
    let copy = home.join("copy");
    for (backing, why, count) in [
        (".ssh/id_rsa", "--backing-dir", 8),
        (text(&others[0]), "--backing-dir", 1),
        ("../other.img", "--backing-dir", 1),
        (".bashrc", "hidden", 1),
    ] {
        let top = image(&home, "vm/top.qcow2", on(backing));
        for command in commands(&top, text(&copy)).iter().take(count) {
            refusal(command).says(&["top.qcow2: its backing file", backing, why]);
        }
    }
    let above = home.path().canonicalize().expect("the directory");
    let option = format!("(allow it with --backing-dir {})", text(&above));
    let top = image(&home, "vm/top.qcow2", on("../other.img"));
    refusal(&["map", &top]).says(&[&option]);
    accepted(&["map", &top, "--backing-dir", text(&above)]);
    let new = ["create", "new.qcow2", "--format", "qcow2", "--backing"].map(str::to_owned);
    let path = home.join("vm/new.qcow2");
    let mut new = new.each_ref().map(String::as_str).to_vec();
    new[1] = text(&path);
    refusal(&[&new[..], &["../other.img"]].concat()).says(&["new.qcow2", "--backing-dir"]);
    refusal(&[&new[..], &[".bashrc"]].concat()).says(&["new.qcow2", "hidden"]);
    assert!(!path.exists() && !copy.exists());
}

#[test]
fn base_and_overlay_in_one_directory_need_no_option_with_any_owner() {
    let scratch = Scratch::new();
    scratch.random("base.img", DISK, 1);
    let top = image(&scratch, "top.qcow2", on("base.img"));
    // Succeeds only if this user may change the owner.
    let _ = std::os::unix::fs::chown(scratch.join("base.img"), Some(12_345), None);
    let server = Server::start(top.as_ref(), &[]);
    let disk = server.connect().read(0, DISK as u32).expect("the disk");
    assert!(disk == fs::read(scratch.join("base.img")).expect("the backing file"));
    server.stop();
    let link = scratch.join("link.qcow2");
    std::os::unix::fs::symlink("top.qcow2", &link).expect("a link");
    accepted(&["check", text(&link)]);
}

#[test]
fn no_command_opens_a_data_file_that_was_not_given() {
    let shared = Scratch::new();
    let neighbour = shared.random("neighbour.img", DISK, 2);
    let before = fs::read(&neighbour).expect("a disk");
    let copy = shared.join("copy");
    let real = neighbour.canonicalize().expect("its path");
    let option = format!("(allow it with --data-file {})", text(&real));
    for (name, count) in [("neighbour.img", 8), ("./neighbour.img", 1), (text(&neighbour), 1)] {
        let top = image(&shared, "top.qcow2", Names { backing: None, data: Some(name) });
        for command in commands(&top, text(&copy)).iter().take(count) {
            refusal(command).says(&["top.qcow2: its data is in another file", name, &option]);
            // --backing-dir permits reading backing files, not writing data files.
            let given = [&command[..], &["--backing-dir", text(shared.path())]].concat();
            refusal(&given).says(&["--data-file"]);
        }
    }
    assert!(fs::read(&neighbour).expect("a disk") == before);
    let top = text(&shared.join("top.qcow2")).to_owned();
    let server = Server::start(top.as_ref(), &["--data-file", text(&neighbour)]);
    server.connect().write(0, &[7; 4096]).expect("a write");
    server.stop();
    assert_eq!(fs::read(&neighbour).expect("a disk")[..4096], [7; 4096]);
    accepted(&["copy", &top, text(&copy), "--data-file", text(&neighbour)]);
    let over =
        image(&shared, "over.qcow2", Names { backing: Some(("top.qcow2", "qcow2")), data: None });
    refusal(&["map", &over]).says(&["top.qcow2: its data is in another file", "--data-file"]);
    accepted(&["map", &over, "--data-file", text(&neighbour)]);
}

#[test]
fn a_block_device_is_never_detected_as_qcow2_and_opens_no_other_one() {
    let scratch = Scratch::new();
    let victim = scratch.random("victim", DISK, 3);
    let Some(victim_device) = LoopDevice::on(&victim) else { return };
    let names = Names { backing: None, data: Some(text(victim_device.path())) };
    let image_path = image(&scratch, "device", names);
    let Some(device) = LoopDevice::on(image_path.as_ref()) else { return };
    let path = text(device.path());
    let bytes = qcow2_image::image(names);

    let server = Server::start(device.path(), &[]);
    let mut client = server.connect();
    assert_eq!(client.read(0, 512).as_deref(), Ok(&bytes[..512]), "the bytes as they are");
    // A device's format is never detected, so a write of qcow2's magic is allowed.
    client.write(0, &bytes[..4096]).expect("a write");
    drop(client);
    server.stop();
    let printed = accepted(&["info", path, "--json"]);
    assert!(printed.contains("\"format\":\"raw\""), "{printed}");
    let copy = scratch.join("copy");
    refusal(&["copy", path, text(&copy)]).says(&["copy: it would begin like a qcow2 image"]);
    accepted(&["copy", path, text(&copy), "-O", "raw"]);
    assert!(fs::read(&copy).expect("the copy") == bytes);
    assert_eq!(refusal(&["check", path]).code, 63, "it is raw");

    let qcow2 = ["--format", "qcow2"];
    refusal(&[&["serve", path], &qcow2[..]].concat()).says(&["--data-file /dev/"]);
    fs::write(device.path(), qcow2_image::image(on(text(victim_device.path()))))
        .expect("a new header");
    refusal(&[&["serve", path], &qcow2[..]].concat())
        .says(&["trusts no directory", "--backing-dir /dev)"]);
    accepted(&[&["map", path], &qcow2[..], &["--backing-dir", "/dev"]].concat());
    // An image file cannot open a block device in its own directory either.
    if require_tool("mknod") {
        let minor = text(victim_device.path()).trim_start_matches("/dev/loop").to_owned();
        let node = scratch.join("node");
        tool("mknod").arg(&node).args(["b", "7", &minor]).succeeds();
        let top = image(&scratch, "top.qcow2", on("node"));
        refusal(&["map", &top]).says(&["top.qcow2: its backing file 'node' is a block device"]);
    }
    assert!(fs::read(&victim).expect("the victim").len() == DISK as usize);
}
