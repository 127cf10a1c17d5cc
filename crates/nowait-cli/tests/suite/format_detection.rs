//! Detection of image formats, which a guest that writes to a raw disk cannot influence.
//!
//! Invariant: a refused image is unchanged, and the message names the options.

use std::fs::{self, File};

use crate::common::{
    Finished, MIB, Scratch, Server, accepted, refusal, require_tool, skip, text, tool,
};
use crate::upgrade::Upgraded;
use nowait_testkit::qcow2_image::{self, DISK, Names};

/// Whether files in `scratch` can be marked as raw by extended attributes.
fn has_marks(scratch: &Scratch) -> bool {
    let path = scratch.sparse("marked", 512);
    let file = File::options().write(true).open(path).expect("a file");
    nowait_image::mark_raw(&file).is_ok()
        || skip("no extended attributes in the temporary directory")
}

/// The header that a malicious guest writes to have the file `secret` served to it the next time.
fn bait(secret: &str) -> Vec<u8> {
    qcow2_image::image(Names { backing: Some((secret, "raw")), data: None })
}

#[test]
fn a_qcow2_header_that_a_guest_writes_to_a_raw_disk_is_not_trusted_by_copy_or_serve() {
    let scratch = Scratch::new();
    nowait_testkit::needs!(has_marks(&scratch));
    scratch.random("secret", DISK, 1);
    let (disk, copy) = (scratch.sparse("disk.img", DISK), scratch.join("copy.img"));
    let server = Server::start(&disk, &["--format", "raw"]);
    server.connect().write(0, &bait("secret")).expect("a write");

    // From the server, and from the file.
    refusal(&["copy", server.uri(), text(&copy)]).says(&["copy.img", "a qcow2 image", "-O raw"]);
    server.stop();
    for command in [vec!["serve"], vec!["info"], vec!["map"], vec!["copy", "-O", "raw"]] {
        let mut command = [&command[..], &[text(&disk)]].concat();
        if command[0] == "copy" {
            command.push(text(&copy));
        }
        refusal(&command).says(&["disk.img", "a guest may have made so", "-f raw or -f qcow2"]);
    }
    refusal(&["copy", "-f", "raw", text(&disk), text(&copy)]).says(&["copy.img", "-O raw"]);
    assert!(!copy.exists() && !scratch.join("copy.img.partial").exists());
    accepted(&["copy", "-f", "raw", "-O", "raw", text(&disk), text(&copy)]);
    refusal(&["serve", text(&copy)]).says(&["copy.img", "-f raw or -f qcow2"]);
    let server = Server::start(&copy, &["-f", "raw", "--read-only"]);
    assert_eq!(server.connect().read(0, 512).as_deref(), Ok(&bait("secret")[..512]));
    server.stop();
}

#[test]
fn a_commit_makes_no_raw_file_that_is_detected_as_an_image() {
    let scratch = Scratch::new();
    nowait_testkit::needs!(has_marks(&scratch));
    scratch.random("secret", DISK, 1);
    let base = scratch.sparse("base.img", DISK);
    let top = scratch.join("top.qcow2");
    accepted(&["create", text(&top), "--backing", "base.img", "-F", "raw"]);
    let server = Server::start(&top, &[]);
    server.connect().write(0, &bait("secret")).expect("a write");
    server.stop();
    let before = fs::read(&base).expect("the base");
    refusal(&["commit", text(&top)]).says(&["base.img", "a qcow2 image", "--backing-format raw"]);
    assert!(fs::read(&base).expect("the base") == before);
    accepted(&["commit", text(&top), "--backing-format", "raw"]);
    refusal(&["serve", text(&base)]).says(&["base.img", "-f raw or -f qcow2"]);
    // The file is marked now, so that another commit is accepted.
    accepted(&["commit", text(&top)]);
}

#[test]
fn a_disk_that_its_guest_encrypts_or_makes_begin_like_a_packed_file_is_served_on() {
    for begin in [&b"LUKS\xba\xbe\0\x02"[..], b"\x1f\x8b\x08\0", b"KDMV\x01\0\0\0", b"conectix"] {
        let scratch = Scratch::new();
        nowait_testkit::needs!(has_marks(&scratch));
        let (image, control) = (scratch.sparse("disk", MIB), scratch.join("control"));
        let address = format!("unix:{}", control.display());
        let server = Server::start(&image, &["--control", &address, "--verbose"]);
        let mut it = Upgraded::of(server, &control, scratch);
        let mut first = begin.to_vec();
        first.resize(4096, 7);
        it.connect().write(0, &first).expect("a guest's write");
        it.upgrade();
        assert_eq!(it.connect().read(0, 4096).as_deref(), Ok(&first[..]));
        let (_scratch, image) = it.stop();
        // Started with the same command line, as after a reboot of the host.
        let server = Server::start(&image, &[]);
        assert_eq!(server.connect().read(0, 4096).as_deref(), Ok(&first[..]));
        assert!(server.log().contains("begins like"), "{}", server.log());
        server.connect().write(0, &bait("secret")[..512]).expect_err("no qcow2 image");
        server.stop();
        accepted(&["info", text(&image)]);
        // A file of which nothing is known is refused.
        rustix::fs::removexattr(&image, "user.nowait.format").expect("a mark");
        refusal(&["serve", text(&image)]).says(&["disk", "it begins like"]);
    }
}

#[test]
fn a_data_file_that_a_client_wrote_to_is_marked_as_raw() {
    let scratch = Scratch::new();
    nowait_testkit::needs!(has_marks(&scratch));
    let data = scratch.sparse("data", DISK);
    let top = scratch.join("top.qcow2");
    fs::write(&top, qcow2_image::image(Names { backing: None, data: Some("data") }))
        .expect("an image");
    let server = Server::start(&top, &["--data-file", text(&data)]);
    server.connect().write(0, &bait("secret")).expect("a write");
    server.stop();
    refusal(&["serve", text(&data)]).says(&["data: it was written to as a raw disk"]);
}

#[test]
fn an_image_of_another_format_is_refused_and_a_converter_is_named() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    for (format, name) in [
        ("vdi", "a VDI image"),
        ("vpc", "a VHD image"),
        ("qed", "a QED image"),
        ("parallels", "a Parallels image"),
        ("qcow", "qcow2's predecessor"),
    ] {
        let image = scratch.join(format);
        tool("qemu-img").args(["create", "-q", "-f", format]).arg(&image).arg("64M").succeeds();
        let (image, copy) = (text(&image), scratch.join("copy"));
        let convert = format!("qemu-img convert -f {format} -O qcow2");
        for command in [
            &["serve", image][..],
            &["serve", image, "--read-only"],
            &["copy", image, text(&copy)],
            &["info", image],
            &["map", image],
            &["check", image],
        ] {
            refusal(command).says(&[format, name, &convert]);
        }
        let server = Server::start(image.as_ref(), &["-f", "raw"]);
        server.stop();
        accepted(&["copy", "-f", "raw", "-O", "raw", image, text(&copy)]);
        fs::remove_file(copy).expect("the copy");
    }
}

#[test]
fn a_compressed_or_encrypted_file_is_served_only_with_format_raw() {
    let scratch = Scratch::new();
    for (name, bytes, way_out) in [
        ("gz", &b"\x1f\x8b\x08\0"[..], "gunzip"),
        ("xz", b"\xfd7zXZ\0", "unxz"),
        ("zst", b"\x28\xb5\x2f\xfd", "unzstd"),
        ("bz2", b"BZh91AY&SY", "bunzip2"),
        ("luks", b"LUKS\xba\xbe\0\x02", "-f raw"),
    ] {
        let path = scratch.join(name);
        let mut content = bytes.to_vec();
        content.resize(8192, 0);
        fs::write(&path, &content).expect("a file");
        refusal(&["serve", text(&path)]).says(&[name, way_out, "-f raw"]);
        refusal(&["copy", text(&path), text(&scratch.join("copy"))]).says(&[name, "-f raw"]);
        let server = Server::start(&path, &["--format", "raw"]);
        assert_eq!(server.connect().read(0, 8192).as_deref(), Ok(&content[..]), "{name}");
        server.stop();
        fs::write(scratch.join("other"), [0xeb; 512]).expect("a boot sector");
    }
    accepted(&["info", text(&scratch.join("other"))]);
}

#[test]
fn create_and_copy_take_the_format_of_a_new_file_from_its_name() {
    let scratch = Scratch::new();
    let source = scratch.random("source", DISK, 1);
    for (name, qcow2) in
        [("a.qcow2", true), ("b.qcow", true), ("c.QCOW2", true), ("d.img", false), ("e", false)]
    {
        for by_copy in [false, true] {
            let new = scratch.join(name);
            match by_copy {
                true => accepted(&["copy", text(&source), text(&new)]),
                false => accepted(&["create", text(&new), "1M"]),
            };
            let begins = fs::read(&new).expect("the new file").starts_with(b"QFI\xfb");
            assert_eq!(begins, qcow2, "{name}, by a copy: {by_copy}");
            fs::remove_file(new).expect("the new file");
        }
    }
    let new = scratch.join("raw.qcow2");
    accepted(&["create", "-f", "raw", text(&new), "1M"]);
    assert!(!fs::read(&new).expect("the new file").starts_with(b"QFI\xfb"));
}

#[test]
fn an_image_in_use_is_refused_with_the_process_that_uses_it() {
    let scratch = Scratch::new();
    for name in ["disk.img", "disk.qcow2"] {
        let image = scratch.join(name);
        accepted(&["create", text(&image), "1M"]);
        let server = Server::start(&image, &[]);
        let holder = format!("(process {}, nowait; end it first)", server.pid());
        let copy = scratch.join("copy");
        for command in [&["serve", text(&image)][..], &["copy", text(&image), text(&copy)]] {
            refusal(command).says(&[name, "another process has it open for writing", &holder]);
        }
        server.stop();
    }
}

#[test]
fn a_dirty_image_can_be_read_and_repaired() {
    let scratch = Scratch::new();
    let path = scratch.join("dirty.qcow2");
    let mut bytes = qcow2_image::image(Names::default());
    bytes[79] |= 1;
    fs::write(&path, &bytes).expect("an image");
    let image = text(&path);
    refusal(&["serve", image]).says(&["dirty.qcow2", "nowait check --repair"]);
    let server = Server::start(&path, &["--read-only"]);
    assert_eq!(server.connect().read(0, 512).as_deref(), Ok(&[0; 512][..]));
    server.stop();
    accepted(&["copy", image, text(&scratch.join("copy.img"))]);
    assert!(fs::read(&path).expect("the image") == bytes, "what is read is left as it was");
    accepted(&["check", image, "--repair"]);
    let server = Server::start(&path, &[]);
    server.stop();
}
