//! `nowait copy` that is killed, interrupted or out of space.
//!
//! Invariant: under the target's name there is a complete copy or no file.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{
    Finished, MIB, NOWAIT, Scratch, Server, accepted, allocated, refusal_under, require_tool, text,
    tool,
};
use crate::storage_faults::private_mounts;
use nowait_testkit::{Random, ends_with_test, output_of, seed, wait_until};

/// Large enough to be interrupted midway.
const BYTES: u64 = 96 * MIB;

fn start(from: &str, to: &str) -> Child {
    let command = &mut Command::new(NOWAIT);
    let silent = command.args(["copy", from, to]).stdout(Stdio::null()).stderr(Stdio::piped());
    ends_with_test(silent).spawn().expect("nowait")
}

/// A source without holes, and the time that a copy of it takes here.
fn source(scratch: &Scratch) -> (PathBuf, Duration) {
    let source = scratch.random("source", BYTES, 1);
    let begin = Instant::now();
    accepted(&["copy", text(&source), text(&scratch.join("first"))]);
    fs::remove_file(scratch.join("first")).expect("the first copy");
    (source, begin.elapsed())
}

/// Kills copies of `source` to `target`, which take about `takes`; a target that exists
/// nevertheless is checked by `assert_whole`.
fn kill_copies(source: &Path, target: &Path, takes: Duration, assert_whole: impl Fn()) {
    let mut random = Random::from_seed(seed());
    let mut cut = 0;
    for _ in 0..12 {
        let mut copy = start(text(source), text(target));
        thread::sleep(takes.mul_f64(random.below(1000) as f64 / 1000.0));
        copy.kill().expect("a child");
        copy.wait().expect("a child");
        if target.exists() {
            assert_whole();
            fs::remove_file(target).expect("the target");
        } else {
            cut += 1;
        }
    }
    assert!(cut > 0, "no copy was cut");
    // The files that they left do not block the next copy.
    accepted(&["copy", text(source), text(target), "--verify"]);
    let directory = target.parent().expect("a directory");
    assert_eq!(fs::read_dir(directory).expect("a directory").count(), 2);
}

#[test]
fn sigkill_at_any_moment_leaves_no_file_that_looks_complete() {
    let scratch = Scratch::new();
    let (source, takes) = source(&scratch);
    let target = scratch.join("target");
    kill_copies(&source, &target, takes, || {
        assert!(fs::read(&target).expect("it") == fs::read(&source).expect("it"));
    });
}

#[test]
fn sigkill_at_any_moment_leaves_no_image_that_looks_complete() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let (source, takes) = source(&scratch);
    let target = scratch.join("target.qcow2");
    let assert_whole = || {
        tool("qemu-img").args(["check", "-q"]).arg(&target).succeeds();
        tool("qemu-img").arg("compare").args([&source, &target]).succeeds();
    };
    kill_copies(&source, &target, takes, assert_whole);
    assert_whole();
}

#[test]
fn an_interrupted_copy_reports_it_and_leaves_no_file() {
    let scratch = Scratch::new();
    let (source, takes) = source(&scratch);
    let target = scratch.join("target");
    let mut interrupted = 0;
    for part in 1..8 {
        let copy = start(text(&source), text(&target));
        thread::sleep(takes.mul_f64(f64::from(part) / 8.0));
        kill_process(Pid::from_child(&copy), Signal::INT).expect("a child");
        let output = output_of(copy);
        assert!(!scratch.join("target.partial").exists());
        if output.status.success() {
            fs::remove_file(&target).expect("the copy");
            continue;
        }
        assert!(!target.exists(), "there is a target although the copy failed");
        // Before its handler is installed, a signal ends it without a message.
        if output.status.code() == Some(1) {
            let printed = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                printed.starts_with("nowait: interrupted") && printed.lines().count() == 1,
                "{printed}"
            );
            interrupted += 1;
        }
    }
    assert!(interrupted > 0, "no copy was interrupted");
}

#[test]
fn a_server_killed_during_a_copy_is_reported_and_leaves_no_file() {
    let scratch = Scratch::new();
    let (image, takes) = source(&scratch);
    let target = scratch.join("target");
    let mut cut = 0;
    for part in 1..6 {
        let server = Server::start(&image, &[]);
        let copy = start(server.uri(), text(&target));
        thread::sleep(takes.mul_f64(f64::from(part) / 6.0));
        // Dropped, it is killed.
        drop(server);
        let output = output_of(copy);
        assert!(!scratch.join("target.partial").exists());
        if output.status.success() {
            fs::remove_file(&target).expect("the copy");
            continue;
        }
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!target.exists() && printed.lines().count() == 1, "{printed}");
        assert!(
            printed.contains("closed the connection") || printed.contains("cannot connect"),
            "{printed}"
        );
        cut += 1;
    }
    assert!(cut > 0, "no copy was cut");
}

#[test]
fn a_full_file_system_is_reported_and_no_file_is_left() {
    let Some(flags) = private_mounts() else { return };
    let scratch = Scratch::new();
    let source = scratch.random("source", 16 * MIB, 2);
    let small = scratch.join("small");
    fs::create_dir(&small).expect("a directory");
    // The exit status says whether files are left: the mount ends with the command.
    const SCRIPT: &str = r#"mount -t tmpfs -o size="$1" none "$0" && cd "$0" && echo old >old || exit 9
shift; "$@"; status=$?; [ "$(ls -A; cat old)" = "old
old" ] || exit 8; exit $status"#;
    for (size, target, words) in [
        // One page is taken, so that the last write is short.
        ("8m", "target", "target: cannot write at byte"),
        ("8m", "old", "old: cannot write at byte"),
        ("8m", "target.qcow2", "target.qcow2: cannot write at byte"),
        // The data fits, but the tables do not.
        ("16396k", "target.qcow2", "target.qcow2: cannot write the image's tables"),
    ] {
        let script = ["--", "sh", "-c", SCRIPT, text(&small), size];
        let wrapper = [&["unshare"], flags, &script].concat();
        for more in [&["--force"][..], &["--force", "--verify"]] {
            let copy = [&["copy", text(&source), target], more].concat();
            refusal_under(&wrapper, &copy).says(&[words, "No space left"]);
        }
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_reported_and_no_file_is_left() {
    nowait_testkit::needs!(require_tool("prlimit"));
    let scratch = Scratch::new();
    let source = scratch.random("source", 4 * MIB, 3);
    let target = scratch.join("target");
    // One cause has one message, whatever meets it.
    let words = "no file may have more than 1048576 bytes here (ulimit -f)";
    let small = text(&source).replace("source", "small");
    accepted(&["create", &small, "1M"]);
    let qcow2 = &format!("{}.qcow2", text(&target));
    for (command, named) in [
        (&["copy", text(&source), text(&target)][..], "target: cannot make"),
        (&["copy", text(&source), qcow2], "target.qcow2: cannot write at byte"),
        (&["create", text(&target), "4M"], "target: cannot create"),
        (&["create", qcow2, "4M", "--preallocation", "metadata"], "target.qcow2: cannot create"),
        (&["resize", &small, "4M"], "small: cannot resize it"),
    ] {
        refusal_under(&LIMITED, command).says(&[named, words]);
    }
    assert_eq!(fs::read_dir(scratch.path()).expect("a directory").count(), 2);
}

/// No file may have more than 1 MiB.
const LIMITED: [&str; 2] = ["prlimit", "--fsize=1048576"];

#[test]
fn a_limit_on_the_size_of_files_counts_what_is_written_to_a_qcow2_image_not_its_disk() {
    nowait_testkit::needs!(require_tool("prlimit"));
    let scratch = Scratch::new();
    let source = scratch.sparse("source", 200 << 30);
    let data = Random::from_seed(4).bytes(64 << 10);
    let file = fs::File::options().write(true).open(&source).expect("the source");
    file.write_all_at(&data, 100 << 30).expect("room");
    let server = Server::start(&source, &["--read-only"]);
    for (from, clusters) in [(text(&source), "64K"), (server.uri(), "64K"), (text(&source), "4K")] {
        let target = scratch.join("target.qcow2");
        let copy = ["copy", from, text(&target), "--verify", "--cluster-size", clusters];
        let mut limited = tool(LIMITED[0]);
        limited.arg(LIMITED[1]).arg(NOWAIT).args(copy).succeeds();
        assert!(fs::metadata(&target).expect("the copy").len() <= MIB, "clusters of {clusters}");
        fs::remove_file(&target).expect("the copy");
    }
}

/// Starts a copy of `source` to an export and interrupts it by `cut` when some of it has arrived,
/// while the server is stopped; returns the exit status and the message.
fn cut_amid_export(source: &Path, cut: impl Fn(&Child, &Server)) -> (Option<i32>, String) {
    for _ in 0..10 {
        let scratch = Scratch::new();
        let image = scratch.sparse("target.img", BYTES);
        let server = Server::start(&image, &[]);
        let copy = start(text(source), server.uri());
        wait_until("the first bytes of a copy", || allocated(&image) > 0);
        server.signal(Signal::STOP);
        cut(&copy, &server);
        let output = output_of(copy);
        // A copy that was complete before the server was stopped is repeated.
        if !output.status.success() {
            let printed = String::from_utf8_lossy(&output.stderr).into_owned();
            return (output.status.code(), printed);
        }
    }
    panic!("no copy was cut");
}

#[test]
fn a_copy_cut_within_an_export_reports_a_partly_written_target_and_exits_with_three() {
    let scratch = Scratch::new();
    let source = scratch.random("source", BYTES, 1);
    let interrupt = |copy: &Child, _: &Server| {
        kill_process(Pid::from_child(copy), Signal::INT).expect("a child");
    };
    let (status, printed) = cut_amid_export(&source, interrupt);
    assert!(printed.starts_with("nowait: interrupted: nbd+unix:///"), "{printed}");
    assert!(printed.contains("is written in part") && printed.lines().count() == 1, "{printed}");
    assert_eq!(status, Some(3), "{printed}");
    let (status, printed) = cut_amid_export(&source, |_, server| server.signal(Signal::KILL));
    assert!(
        printed.contains("; nbd+unix:///") && printed.contains("is written in part"),
        "{printed}"
    );
    assert_eq!((status, printed.lines().count()), (Some(3), 1), "{printed}");
}
