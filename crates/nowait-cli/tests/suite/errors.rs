//! Errors are reported in one line that says what is wrong and what to do; wrong usage exits with
//! 2.
//!
//! Invariant: a refusal leaves every file unchanged.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::common::{
    Finished, MIB, NOWAIT, Scratch, Server, accepted, bench_program, refusal, refusal_under,
    require_tool, skip, text, tool,
};
use nowait_testkit::nbd::{Client, Mode};

/// `nowait serve IMAGE` on a socket in the same directory, with `extra` arguments.
fn serve(image: &Path, extra: &[&str]) -> Vec<String> {
    let socket = image.with_extension("socket");
    let fixed = [
        "serve".into(),
        image.display().to_string(),
        "--nbd".into(),
        format!("unix:{}", socket.display()),
    ];
    fixed.into_iter().chain(extra.iter().map(ToString::to_string)).collect()
}

#[test]
fn a_reader_of_the_output_may_leave_and_a_full_disk_is_an_error() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    for arguments in [&["--help"][..], &["map", text(&image)], &["completions", "bash"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = tool(NOWAIT).args(arguments).stdout(writer).output().expect("nowait");
        assert_eq!(output.status.code(), Some(141), "{arguments:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{arguments:?}: {output:?}");
        let full = File::create("/dev/full").expect("the device");
        let output = tool(NOWAIT).args(arguments).stdout(full).output().expect("nowait");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said, "nowait: standard output: No space left on device\n");
    }
}

#[test]
fn an_image_that_is_missing_is_refused_by_name() {
    let scratch = Scratch::new();
    let image = scratch.join("missing.img");
    refusal(&serve(&image, &[])).says(&["missing.img"]);
    assert!(!image.exists(), "a refusal made the image");
}

#[test]
fn a_missing_image_is_told_in_one_sentence_by_each_command() {
    let scratch = Scratch::new();
    let image = scratch.join("missing.img");
    let image = image.to_str().expect("a name in UTF-8");
    let sentence = format!("nowait: {image}: there is no such file");
    for arguments in [
        &["serve", image][..],
        &["info", image],
        &["map", image],
        &["check", image],
        &["copy", image, "copy.img"],
        &["resize", image, "1G"],
        &["commit", image],
    ] {
        let error = refusal(arguments).error;
        // Then what to do, in brackets.
        let rest =
            error.strip_prefix(&sentence).unwrap_or_else(|| panic!("{arguments:?}: {error}"));
        assert!(rest == "\n" || rest.starts_with(" ("), "{arguments:?}: {error}");
    }
}

#[test]
fn a_file_in_a_missing_directory_is_refused_in_one_sentence_by_each_option() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let image = image.to_str().expect("a name in UTF-8");
    let missing = scratch.join("missing/file");
    let missing = missing.to_str().expect("a name in UTF-8");
    let listen = format!("unix:{missing}");
    for arguments in [
        &["create", missing, "1M"][..],
        &["copy", image, missing],
        &["serve", image, "--log-file", missing],
        &["serve", image, "--pid-file", missing],
        &["serve", image, "--record", missing],
        &["serve", image, "--nbd", &listen],
        &["serve", image, "--control", &listen],
    ] {
        refusal(arguments).says(&["missing/file: its directory does not exist (make it first"]);
    }
}

#[test]
fn a_directory_is_refused_as_one() {
    let scratch = Scratch::new();
    let directory = scratch.join("folder");
    fs::create_dir(&directory).expect("a directory");
    refusal(&serve(&directory, &[])).says(&["folder", "directory"]);
}

#[test]
fn an_image_without_write_permission_is_refused_and_read_only_is_suggested() {
    let scratch = Scratch::new();
    let image = scratch.sparse("guarded.img", MIB);
    fs::set_permissions(&image, Permissions::from_mode(0o400)).expect("own file");
    // Root passes every permission check, unless it drops the capability.
    let as_mortal = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"];
    let is_root = rustix::process::geteuid().is_root();
    if is_root && !require_tool("setpriv") {
        return;
    }
    let wrapper: &[&str] = if is_root { &as_mortal } else { &[] };
    refusal_under(wrapper, &serve(&image, &[])).says(&["guarded.img", "--read-only"]);
    Server::start_under(wrapper, &image, &["--read-only"]).stop();
}

#[test]
fn a_socket_path_that_is_too_long_is_wrong_usage_and_the_limit_is_named() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let long = format!("unix:{}", scratch.join(&"x".repeat(120)).display());
    let refused = refusal(&["serve", image.to_str().expect("a name in UTF-8"), "--nbd", &long]);
    assert_eq!(refused.code, 2, "{}", refused.error);
    // sun_path of unix(7) has 108 bytes, the last of them zero.
    assert!(refused.error.contains("107"), "{}", refused.error);
}

#[test]
fn a_socket_with_a_listener_is_refused_and_left_unchanged() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let listener =
        UnixListener::bind(image.with_extension("socket")).expect("a socket of one's own");
    refusal(&serve(&image, &[])).says(&["disk.socket"]);
    UnixStream::connect(image.with_extension("socket")).expect("the socket still there");
    drop(listener);
}

#[test]
fn a_socket_file_without_a_listener_is_taken_over() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    drop(UnixListener::bind(scratch.join("stale")).expect("a socket of one's own"));
    let stale = format!("unix:{}", scratch.join("stale").display());
    let server = Server::start(&image, &["--nbd", &stale]);
    Client::connect(&scratch.join("stale"), Mode::Structured).expect("the new server");
    server.stop();
}

#[test]
fn a_file_that_is_no_socket_is_never_taken_over() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    fs::write(image.with_extension("socket"), b"precious").expect("a file");
    refusal(&serve(&image, &[])).says(&["disk.socket"]);
    assert_eq!(fs::read(image.with_extension("socket")).expect("the file"), b"precious");
}

#[test]
fn a_second_server_on_one_image_is_refused_while_the_first_runs() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let first = Server::start(&image, &[]);
    refusal(&serve(&image, &[])).says(&["disk.img"]);
    first.connect().write(0, b"still served").expect("the first server");
    first.stop();
    Server::start(&image, &[]).stop();
}

#[test]
fn two_read_only_servers_share_one_image() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let first = Server::start(&image, &["--read-only"]);
    Server::start(&image, &["--read-only"]).stop();
    refusal(&serve(&image, &[])).says(&["disk.img"]);
    first.stop();
}

#[test]
fn qemu_and_nowait_lock_each_other_out_of_an_image_that_one_writes() {
    nowait_testkit::needs!(require_tool("qemu-io"));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start(&image, &[]);
    let printed = tool("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(&image).fails();
    assert!(printed.contains("lock"), "{printed}");
    server.stop();
    tool("qemu-io").args(["-f", "raw", "-c", "write 0 512"]).arg(&image).succeeds();
}

#[test]
fn wrong_usage_exits_with_two() {
    for arguments in [
        &["serve", "--no-such-flag"][..],
        &["serve", "a.img", "--queue", "carrier-pigeon"],
        &["serve", "a.img", "--off", "everything"],
        &["serve", "a.img", "--direct", "perhaps"],
        &["serve", "a.img", "--nbd", "nowhere"],
        &["serve", "a.img", "--queues", "many"],
        &["serve", "a=x.img", "a=y.img"],
        &["serve", "a=x.img", "--export", "b"],
        &["create", "a.img"],
        &["create", "a.img", "12Q"],
        &["info"],
        &["no-such-command"],
        &[],
    ] {
        let refused = refusal(arguments);
        assert_eq!(refused.code, 2, "nowait {arguments:?}: {}", refused.error);
        assert!(!refused.error.is_empty(), "nowait {arguments:?} says nothing");
    }
}

#[test]
fn a_tcp_port_in_use_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let Ok(taken) = std::net::TcpListener::bind("127.0.0.1:0") else {
        skip("no loopback network");
        return;
    };
    let address = taken.local_addr().expect("an address");
    refusal(&[
        "serve",
        image.to_str().expect("a name in UTF-8"),
        "--nbd",
        &format!("tcp:{address}"),
    ])
    .says(&[&address.port().to_string()]);
}

#[test]
fn wrong_usage_of_any_command_is_one_line_for_any_arguments() {
    let evil = "a\nb\x1b[2J\u{202e}c";
    for command in ["serve", "create", "info", "map", "check", "copy", "resize", "commit", "bench"]
    {
        if command == "bench" && bench_program().is_none() {
            continue; // Another program reads them.
        }
        let option = format!("--{evil}");
        let surplus = [command, evil, evil, evil, evil];
        for arguments in [&[command, &option][..], &[command, "--json=1"], &surplus] {
            if command == "serve" && arguments == surplus {
                continue; // It takes any number of images.
            }
            let refused = refusal(arguments);
            let status = if command == "check" { 64 } else { 2 };
            assert_eq!(refused.code, status, "{arguments:?}: {}", refused.error);
            assert!(refused.error.starts_with("nowait: "), "{}", refused.error);
            assert_eq!(refused.error.lines().count(), 1, "{}", refused.error);
            assert!(!refused.error.contains(['\x1b', '\u{202e}']), "{:?}", refused.error);
            let manual = format!("(see 'nowait {command} --help')\n");
            assert!(refused.error.ends_with(&manual), "{}", refused.error);
        }
    }
}

#[test]
fn a_failure_is_one_line_for_any_image_name() {
    let scratch = Scratch::new();
    let evil = scratch.join("a\nb\x1b[2J");
    let evil = evil.to_str().expect("a name in UTF-8");
    let other = scratch.sparse("disk.img", MIB);
    let other = other.to_str().expect("a name in UTF-8");
    for arguments in [
        &["serve", evil][..],
        &["info", evil],
        &["map", evil],
        &["check", evil],
        &["copy", evil, other],
        &["resize", evil, "1G"],
        &["commit", evil],
    ] {
        let refused = refusal(arguments);
        refused.says(&[r"a\nb\u{1b}[2J"]);
        assert!(!refused.error.contains('\x1b'), "{:?}", refused.error);
    }
}

#[test]
fn success_is_printed_on_separate_lines_for_any_image_name() {
    let scratch = Scratch::new();
    let name = |plain: &str| format!("{}/{plain}\n\x1b[2J", scratch.path().display());
    let (image, copied) = (name("a"), name("b"));
    for arguments in [
        &["create", &image, "1M"][..],
        &["resize", &image, "+1M"],
        &["copy", &image, &copied],
        &["info", &image],
    ] {
        let printed = accepted(arguments);
        let first = printed.lines().next().expect("a line");
        assert!(first.contains(r"a\n\u{1b}[2J") && !printed.contains('\x1b'), "{printed:?}");
    }
}

#[test]
fn check_distinguishes_wrong_usage_and_raw_images_from_corruption_by_exit_status() {
    let scratch = Scratch::new();
    let raw = scratch.sparse("disk.img", MIB);
    let raw = raw.to_str().expect("a name in UTF-8");
    for (arguments, code) in [
        (&["check"][..], 64),
        (&["check", raw, "--no-such-flag"], 64),
        (&["check", raw, "--format", "vdi"], 64),
        (&["check", raw], 63),
        (&["check", "missing.qcow2"], 1),
    ] {
        let refused = refusal(arguments);
        assert_eq!(refused.code, code, "{arguments:?}: {}", refused.error);
        assert_eq!(refused.error.lines().count(), 1, "{}", refused.error);
    }
}
