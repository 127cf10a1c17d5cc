//! `nowait copy` between files, and to and from this server: bytes, holes, refusals.
//!
//! Invariant: each copy is compared byte for byte with its source by this test itself.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::common::{KIB, MIB, Scratch, Server, accepted, allocated, refusal, text};
use nowait_testkit::{Random, seed};

/// A path as an argument.
/// Copies with `extra` arguments.
pub(crate) fn copy(from: &str, to: &str, extra: &[&str]) -> String {
    accepted(&[&["copy", from, to], extra].concat())
}

fn assert_same(a: &Path, b: &Path) {
    let (a_bytes, b_bytes) = (fs::read(a).expect("a file"), fs::read(b).expect("a copy"));
    assert_eq!(a_bytes.len(), b_bytes.len(), "{} and {}", a.display(), b.display());
    let differs = a_bytes.iter().zip(&b_bytes).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{} and {}", a.display(), b.display());
}

/// A file with random pieces of data, of zeros that are written, and holes; of any size.
pub(crate) fn patchwork(scratch: &Scratch, name: &str, random: &mut Random) -> std::path::PathBuf {
    let bytes = MIB + random.below(24 * MIB);
    let path = scratch.sparse(name, bytes);
    let file = File::options().write(true).open(&path).expect("the new file");
    for _ in 0..random.below(40) {
        let longest = if random.chance(30) { 2 * MIB } else { 20 * KIB };
        let len = 1 + random.below(longest);
        let mut pos = random.below(bytes);
        if random.chance(50) {
            pos &= !(4 * KIB - 1);
        }
        let len = usize::try_from(len.min(bytes - pos)).expect("fits usize");
        let data = if random.chance(25) { vec![0; len] } else { random.bytes(len) };
        file.write_all_at(&data, pos).expect("room for test data");
    }
    path
}

#[test]
fn random_images_are_copied_exactly_with_all_options() {
    let mut random = Random::from_seed(seed());
    let options: [&[&str]; 6] = [
        &[],
        &["--verify"],
        &["--sparse", "0"],
        &["--sparse", "64K", "--requests", "1"],
        &["--requests", "1024"],
        &["--json"],
    ];
    for round in 0..12 {
        let scratch = Scratch::new();
        let source = patchwork(&scratch, "source", &mut random);
        let target = scratch.join("target");
        copy(text(&source), text(&target), options[round % options.len()]);
        assert_same(&source, &target);
        let names = fs::read_dir(scratch.path()).expect("a directory").count();
        assert_eq!(names, 2, "something is left behind");
    }
}

#[test]
fn holes_and_zeros_are_holes_in_a_new_file() {
    let scratch = Scratch::new();
    let source = scratch.dotted("source", 64 * MIB, 64 * KIB as usize, MIB);
    let file = File::options().write(true).open(&source).expect("the source");
    file.write_all_at(&vec![0; MIB as usize], 32 * MIB + 64 * KIB).expect("zeros");
    let (sparse, full) = (scratch.join("sparse"), scratch.join("full"));
    copy(text(&source), text(&sparse), &[]);
    copy(text(&source), text(&full), &["--sparse", "0"]);
    assert_same(&source, &sparse);
    assert_same(&source, &full);
    // 63 pieces are data, the 64th was overwritten; the file system may allocate further blocks.
    let data = 63 * 64 * KIB;
    let used = allocated(&sparse);
    assert!((data..data + 512 * KIB).contains(&used), "{used} bytes for {data}");
    assert!(allocated(&full) >= data + MIB - 64 * KIB, "zeros were left out");
}

#[test]
fn the_outcome_is_printed_as_text_and_as_json() {
    let scratch = Scratch::new();
    let source = scratch.dotted("source", 8 * MIB, MIB as usize, 2 * MIB);
    let printed = copy(text(&source), text(&scratch.join("a")), &["--verify"]);
    assert!(printed.contains("8 MiB") && printed.contains("compared and found equal"), "{printed}");
    let printed = copy(text(&source), text(&scratch.join("b")), &["--json"]);
    let outcome: serde_json::Value = serde_json::from_str(&printed).expect("one JSON object");
    for (key, value) in [
        ("size_bytes", 8 * MIB),
        ("to_size_bytes", 8 * MIB),
        ("data_bytes", 4 * MIB),
        ("zero_bytes", 4 * MIB),
    ] {
        assert_eq!(outcome[key], value, "{key}: {printed}");
    }
    assert_eq!(outcome["verified"], false);
}

#[test]
fn a_disk_goes_to_a_server_and_back() {
    let scratch = Scratch::new();
    let mut random = Random::from_seed(seed());
    let source = patchwork(&scratch, "source", &mut random);
    let bytes = fs::metadata(&source).expect("the source").len();
    for extra in [&[][..], &["--queue", "threads"], &["--direct", "off"]] {
        let name = format!("disk{}", extra.len());
        let image = scratch.random(&name, bytes, 1);
        let back = scratch.join("back");
        let server = Server::start(&image, extra);
        copy(text(&source), server.uri(), &["--verify", "--connections", "3"]);
        copy(server.uri(), text(&back), &["--verify", "--force"]);
        server.stop();
        assert_same(&source, &image);
        assert_same(&source, &back);
        fs::remove_file(&image).expect("the image");
    }
}

#[test]
fn an_export_that_is_zero_already_stays_sparse() {
    let scratch = Scratch::new();
    let source = scratch.dotted("source", 64 * MIB, 64 * KIB as usize, MIB);
    let image = scratch.sparse("disk", 64 * MIB);
    let server = Server::start(&image, &[]);
    copy(text(&source), server.uri(), &[]);
    server.stop();
    assert_same(&source, &image);
    let used = allocated(&image);
    assert!(used < 5 * MIB, "{used} bytes for 4 MiB");
}

#[test]
fn an_export_and_a_socket_are_found_by_names_that_need_escapes() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB, 2);
    let image = scratch.sparse("disk", MIB);
    let socket = scratch.join("a b?%");
    let listen = format!("unix:{}", socket.display());
    let server =
        Server::start(&image, &["--export", "d\u{ef}sk/100% #1", "--nbd", &listen, "--json"]);
    let uri = server.uris().iter().find(|uri| uri.contains("%3F%25")).expect("its address");
    copy(text(&source), uri, &["--verify"]);
    server.stop();
    assert_same(&source, &image);
}

#[test]
fn bytes_beyond_the_end_of_the_source_are_unchanged() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB + 1000, 3);
    let image = scratch.random("disk", 2 * MIB, 4);
    let before = fs::read(&image).expect("the image");
    let server = Server::start(&image, &[]);
    let printed = copy(text(&source), server.uri(), &["--verify"]);
    assert!(printed.contains("are as they were"), "{printed}");
    server.stop();
    let (after, source) = (fs::read(&image).expect("the image"), fs::read(&source).expect("it"));
    assert!(after[..source.len()] == source && after[source.len()..] == before[source.len()..]);
}

#[test]
fn a_target_that_is_too_small_is_refused_and_unchanged() {
    let scratch = Scratch::new();
    let source = scratch.random("source", 2 * MIB, 5);
    let image = scratch.random("disk", MIB, 6);
    let before = fs::read(&image).expect("the image");
    let server = Server::start(&image, &[]);
    refusal(&["copy", text(&source), server.uri()]).says(&["too small", "2097152"]);
    server.stop();
    assert!(fs::read(&image).expect("the image") == before);
}

#[test]
fn an_export_that_is_read_only_is_no_target() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk", MIB);
    let server = Server::start(&image, &["--read-only"]);
    let source = scratch.random("source", MIB, 5);
    refusal(&["copy", text(&source), server.uri()]).says(&["read-only"]);
    copy(server.uri(), text(&scratch.join("copy")), &[]);
    server.stop();
}

#[test]
fn a_file_that_is_not_empty_is_overwritten_only_with_force() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB, 7);
    let target = scratch.random("target", 2 * MIB, 8);
    fs::set_permissions(&target, fs::Permissions::from_mode(0o604)).expect("own file");
    let before = fs::read(&target).expect("the target");
    refusal(&["copy", text(&source), text(&target)])
        .says(&["target: there is such a file", "--force"]);
    assert!(fs::read(&target).expect("the target") == before);
    copy(text(&source), text(&target), &["--force"]);
    assert_same(&source, &target);
    assert_eq!(fs::metadata(&target).expect("the target").mode() & 0o777, 0o604);
    copy(text(&source), text(&scratch.sparse("empty", 0)), &[]);
    assert_same(&source, &scratch.join("empty"));
}

#[test]
fn the_file_that_a_link_points_to_is_replaced_and_not_the_link() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB, 9);
    let (real, link) = (scratch.random("real", 10, 1), scratch.join("link"));
    symlink(&real, &link).expect("a link");
    copy(text(&source), text(&link), &["--force"]);
    assert!(fs::symlink_metadata(&link).expect("the link").is_symlink());
    assert_same(&source, &real);
    let dangling = scratch.join("dangling");
    symlink(scratch.join("nowhere"), &dangling).expect("a link");
    refusal(&["copy", text(&source), text(&dangling)]).says(&["dangling: it is a link to nothing"]);
}

#[test]
fn a_source_is_never_its_own_target() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB, 10);
    let before = fs::read(&source).expect("the source");
    let (hard, soft) = (scratch.join("hard"), scratch.join("soft"));
    fs::hard_link(&source, &hard).expect("a link");
    symlink(&source, &soft).expect("a link");
    for target in [&source, &hard, &soft] {
        refusal(&["copy", text(&source), text(target), "--force"])
            .says(&["it is the source itself"]);
    }
    assert!(fs::read(&source).expect("the source") == before);
}

#[test]
fn an_impossible_copy_is_refused_in_one_line_and_leaves_no_file() {
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB, 11);
    let target = scratch.join("target");
    let nowhere = format!("nbd+unix:///?socket={}", text(&scratch.join("no-server")));
    for (from, to, words) in [
        (text(&scratch.join("missing")), text(&target), &["missing: there is no such file"][..]),
        (text(scratch.path()), text(&target), &["it is a directory"]),
        ("/dev/null", text(&target), &["neither a regular file nor a block device"]),
        (nowhere.as_str(), text(&target), &["cannot connect", "is the server running?"]),
        (text(&source), nowhere.as_str(), &["cannot connect"]),
        (text(&source), text(&scratch.join("no/target")), &["its directory does not exist"]),
        (text(&source), text(scratch.path()), &["neither a regular file nor a block device"]),
    ] {
        refusal(&["copy", from, to]).says(words);
        assert!(!target.exists() && !scratch.join("target.partial").exists());
    }
}

#[test]
fn files_in_use_are_refused_on_either_side() {
    let scratch = Scratch::new();
    let (image, other) = (scratch.random("disk", MIB, 12), scratch.random("other", MIB, 13));
    let server = Server::start(&image, &[]);
    let used = ["disk: another process has it open for writing"];
    refusal(&["copy", text(&image), text(&scratch.join("copy"))]).says(&used);
    refusal(&["copy", text(&other), text(&image), "--force"]).says(&["disk: another process"]);
    server.stop();
    let server = Server::start(&image, &["--read-only"]);
    copy(text(&image), text(&scratch.join("copy")), &[]);
    refusal(&["copy", text(&other), text(&image), "--force"]).says(&["disk: another process"]);
    server.stop();
}

#[test]
fn a_wrong_command_line_is_reported_before_any_file_is_opened() {
    for arguments in [
        &["copy"][..],
        &["copy", "a"],
        &["copy", "a", "b", "c"],
        &["copy", "nbd://h:x/", "b"],
        &["copy", "a", "nbds://h/?tls-psk-file=k"],
        &["copy", "a", "b", "--from-format", "vdi"],
        &["copy", "a", "b", "-O", "vmdk"],
        &["copy", "a", "b", "--cluster-size", "100"],
        &["copy", "a", "b", "--sparse", "3K"],
        &["copy", "a", "b", "--requests", "0"],
        &["copy", "a", "b", "--connections", "65"],
    ] {
        let refused = refusal(arguments);
        assert_eq!(refused.code, 2, "nowait {arguments:?}: {}", refused.error);
    }
}
