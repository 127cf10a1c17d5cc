//! `nowait copy` with other NBD servers, one of which returns wrong data.
//!
//! Invariant: the copy is compared with a file that was not transferred by the server.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nowait_testkit::{Running, wait_for};

use crate::common::{KIB, MIB, Scratch, accepted, refusal, require_tool, text};

/// A server process of another project, killed on drop.
pub(crate) struct Peer {
    process: Running,
    socket: PathBuf,
}

impl Peer {
    /// Runs `command`, which creates `socket`.
    fn start(command: &mut Command, socket: PathBuf) -> Self {
        let process = Running::start(command.stdout(Stdio::null()));
        wait_for(format!("{command:?} listens"), || UnixStream::connect(&socket));
        Self { process, socket }
    }

    pub(crate) fn nbdkit(scratch: &Scratch, arguments: &[&str]) -> Self {
        let socket = scratch.join("nbdkit.sock");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--newstyle", "-U"]).arg(&socket).args(arguments);
        Self::start(&mut command, socket)
    }

    pub(crate) fn qemu_nbd(scratch: &Scratch, image: &Path, arguments: &[&str]) -> Self {
        let socket = scratch.join("qemu.sock");
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=0", "-f", "raw", "-k"]).arg(&socket);
        Self::start(command.args(arguments).arg(image), socket)
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", text(&self.socket))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.process.end();
        let _ = fs::remove_file(&self.socket);
    }
}

/// Copies a source to `peer`, and from it to a new file; both copies are read back.
fn there_and_back(scratch: &Scratch, source: &Path, peer: &Peer) {
    accepted(&["copy", text(source), &peer.uri(), "--verify"]);
    let back = scratch.join("back");
    accepted(&["copy", &peer.uri(), text(&back), "--verify", "--force"]);
    assert!(fs::read(source).expect("the source") == fs::read(&back).expect("the copy"));
}

fn source(scratch: &Scratch) -> PathBuf {
    scratch.dotted("source", 32 * MIB, 300 * KIB as usize, 2 * MIB)
}

#[test]
fn a_disk_goes_to_nbdkit_and_back_with_any_features_missing() {
    nowait_testkit::needs!(require_tool("nbdkit"));
    let scratch = Scratch::new();
    let source = source(&scratch);
    let variants: [&[&str]; 6] = [
        &["memory", "32M"],
        &["--no-sr", "memory", "32M"],
        &["--filter=nozero", "memory", "32M"],
        &["--filter=multi-conn", "--filter=noparallel", "memory", "32M", "multi-conn-mode=disable"],
        &["--filter=noextents", "memory", "32M"],
        &[
            "--filter=blocksize-policy",
            "memory",
            "32M",
            "blocksize-minimum=4096",
            "blocksize-maximum=64K",
            "blocksize-error-policy=error",
        ],
    ];
    for arguments in variants {
        println!("nbdkit {arguments:?}");
        there_and_back(&scratch, &source, &Peer::nbdkit(&scratch, arguments));
    }
}

#[test]
fn a_partial_last_block_of_the_server_is_padded_with_zeros() {
    nowait_testkit::needs!(require_tool("nbdkit"));
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB + 1000, 1);
    let policy = ["--filter=blocksize-policy", "memory", "2M", "blocksize-minimum=64K"];
    let rest = ["blocksize-preferred=64K", "blocksize-maximum=1M", "blocksize-error-policy=error"];
    let peer = Peer::nbdkit(&scratch, &[&policy[..], &rest].concat());
    accepted(&["copy", text(&source), &peer.uri(), "--verify"]);
    let back = scratch.join("back");
    accepted(&["copy", &peer.uri(), text(&back), "--verify"]);
    let (back, source) = (fs::read(&back).expect("it"), fs::read(&source).expect("it"));
    assert!(back[..source.len()] == source && back[source.len()..].iter().all(|&byte| byte == 0));
}

#[test]
fn a_disk_goes_to_qemu_nbd_and_back() {
    nowait_testkit::needs!(require_tool("qemu-nbd"));
    let scratch = Scratch::new();
    let source = source(&scratch);
    let old = scratch.random("old", 32 * MIB, 2);
    let image = scratch.sparse("image", 32 * MIB);
    for (image, arguments) in [(&image, &[][..]), (&old, &["--cache=none"])] {
        let peer = Peer::qemu_nbd(&scratch, image, arguments);
        there_and_back(&scratch, &source, &peer);
        drop(peer);
        assert!(fs::read(image).expect("it") == fs::read(&source).expect("it"));
    }
}

#[test]
fn verify_finds_a_byte_that_the_target_has_changed() {
    nowait_testkit::needs!(require_tool("nbdkit"));
    let scratch = Scratch::new();
    let bytes = scratch.join("bytes");
    fs::write(&bytes, vec![0; MIB as usize]).expect("a file");
    let mut data = vec![b'a'; MIB as usize];
    data[700_001] = b'x';
    let source = scratch.join("source");
    fs::write(&source, &data).expect("a file");
    // Stores writes unchanged, but reads return y for each x.
    let dd = format!("dd of={} seek=$4 oflag=seek_bytes conv=notrunc status=none", text(&bytes));
    let read = format!(
        "dd if={} skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none | tr x y",
        text(&bytes)
    );
    let peer = Peer::nbdkit(
        &scratch,
        &[
            "eval",
            "get_size=echo 1M",
            "can_write=exit 0",
            &format!("pread={read}"),
            &format!("pwrite={dd}"),
        ],
    );
    accepted(&["copy", text(&source), &peer.uri()]);
    refusal(&["copy", text(&source), &peer.uri(), "--verify"])
        .says(&["differs from the source at byte 700001"]);
    assert!(fs::read(&bytes).expect("it") == data, "it was the reading that lied");
}

#[test]
fn an_error_of_the_server_is_reported_with_its_offset_and_leaves_no_file() {
    nowait_testkit::needs!(require_tool("nbdkit"));
    let scratch = Scratch::new();
    let source = scratch.random("source", 4 * MIB, 3);
    let target = scratch.join("target");
    let failing = ["--filter=error", "memory", "4M", "error=ENOSPC", "error-pwrite-rate=100%"];
    let peer = Peer::nbdkit(&scratch, &failing);
    let refused = refusal(&["copy", text(&source), &peer.uri()]);
    let words = ["cannot write at byte", "no space left", "is written in part"];
    assert!(words.iter().all(|word| refused.error.contains(word)), "{}", refused.error);
    assert_eq!(refused.code, 3, "{}", refused.error);
    drop(peer);
    let failing = ["--filter=error", "pattern", "4M", "error=EIO", "error-pread-rate=100%"];
    let peer = Peer::nbdkit(&scratch, &failing);
    refusal(&["copy", &peer.uri(), text(&target)]).says(&["cannot read at byte", "input/output"]);
    assert_eq!(fs::read_dir(scratch.path()).expect("a directory").count(), 2);
}

#[test]
fn a_missing_export_is_reported_by_name() {
    nowait_testkit::needs!(require_tool("qemu-nbd"));
    let scratch = Scratch::new();
    let image = scratch.sparse("image", MIB);
    let peer = Peer::qemu_nbd(&scratch, &image, &["-x", "there"]);
    let uri = peer.uri().replace(":///", ":///missing");
    refusal(&["copy", &uri, text(&scratch.join("target"))]).says(&["no export 'missing'"]);
}
