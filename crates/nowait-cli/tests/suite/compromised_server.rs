//! A confined server that was taken over asks its launcher, and the new programs that this starts.
//!
//! Invariant: what the server says widens nothing that its command line allows.

use std::fs::{self, File};
use std::io::{IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

use nowait_testkit::{BOUND, ends_with_test, wait_for_exit};
use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
};
use serde_json::{Value, json};

use crate::common::{NOWAIT, Scratch, text};

fn pair() -> (OwnedFd, OwnedFd) {
    let kind = SocketType::SEQPACKET;
    let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    let (near, far) = pair.expect("sockets");
    set_socket_timeout(&near, Timeout::Recv, Some(BOUND)).expect("a timeout");
    (near, far)
}

/// Sends `body` in a file, with `more` files, as one packet.
fn send(socket: &OwnedFd, body: &Value, more: &[BorrowedFd<'_>]) {
    let text = serde_json::to_vec(body).expect("JSON");
    let mut memory = File::from(memfd_create("message", MemfdFlags::CLOEXEC).expect("memory"));
    memory.write_all(&(text.len() as u64).to_le_bytes()).expect("a write");
    memory.write_all(&text).expect("a write");
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [&[memory.as_fd()], more].concat();
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL).expect("a peer");
}

fn receive(socket: &OwnedFd) -> Value {
    let (mut byte, mut files) = ([0], Vec::new());
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .expect("an answer");
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    let mut memory = File::from(files.pop().expect("a file"));
    memory.rewind().expect("memory");
    let mut bytes = Vec::new();
    memory.read_to_end(&mut bytes).expect("a message");
    serde_json::from_slice(&bytes[8..]).expect("JSON")
}

fn name(path: &Path) -> Value {
    json!({ "Unix": path.as_os_str().as_bytes() })
}

fn export(image: &Path, read_only: bool, backing_dirs: &[&Path]) -> Value {
    let backing_dirs: Vec<_> = backing_dirs.iter().map(|directory| name(directory)).collect();
    json!({
        "name": "", "description": null, "image": name(image), "format": "raw", "read_only": read_only,
        "backing_dirs": backing_dirs, "backing": [], "changes": {},
    })
}

fn begin(exports: &[Value], listeners: &[Value]) -> Value {
    json!({
        "protocol": 2, "exports": exports, "listeners": listeners, "control": null, "control_tcp": [],
        "ublk": null,
    })
}

#[test]
fn a_server_that_was_taken_over_gets_nothing_more_from_its_launcher() {
    let scratch = Scratch::new();
    let [disk, neighbour, control] = ["disk", "neighbour", "control"].map(|it| scratch.join(it));
    for file in [&disk, &neighbour] {
        fs::write(file, [7; 4096]).expect("a file");
    }
    let (launcher, far) = pair();
    let mut command = Command::new(NOWAIT);
    command.args(["serve", text(&disk), "--format", "raw", "--read-only", "--control"]);
    command.arg(format!("unix:{}", control.display())).env("NOWAIT_UPGRADE", "launcher");
    command.stdin(far).stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = ends_with_test(&mut command).spawn().expect("a launcher");
    let start = || {
        let (near, far) = pair();
        send(
            &launcher,
            &json!({ "Start": { "binary": name("/bin/sh".as_ref()) } }),
            &[far.as_fd()],
        );
        (near, receive(&launcher))
    };
    let root = Path::new("/");
    let removed = json!({
        "path": name(&neighbour), "host": "", "port": 0, "is_own": true,
        "temporary": name(scratch.path()),
    });
    let as_it_is = export(&disk, true, &[]);
    for (what, exports, listeners) in [
        ("opened for writing", vec![export(&disk, false, &[])], vec![]),
        ("of a neighbour", vec![as_it_is.clone(), export(&neighbour, true, &[])], vec![]),
        ("on any file", vec![export(&disk, true, &[root])], vec![]),
        ("removed at the end", vec![as_it_is], vec![removed]),
    ] {
        let (channel, started) = start();
        let pid = started["Ok"].as_u64().unwrap_or_else(|| panic!("{what}: {started}"));
        let program = fs::read_link(format!("/proc/{pid}/exe")).expect("a program");
        assert_eq!(program, Path::new(NOWAIT).canonicalize().expect("a path"), "its own program");
        let (_, second) = start();
        let refused = second["Err"].as_str().unwrap_or_default();
        assert!(refused.contains("another new program"), "{what}: {second}");
        let listener = std::os::unix::net::UnixListener::bind(scratch.join("bound")).expect("it");
        let files: Vec<_> = listeners.iter().map(|_| listener.as_fd()).collect();
        send(&channel, &begin(&exports, &listeners), &files);
        let answer = receive(&channel);
        let why = answer["No"]["why"].as_str().unwrap_or_default();
        assert!(why.contains("its command line does not allow"), "{what}: {answer}");
        send(&launcher, &json!("End"), &[]);
        assert_eq!(receive(&launcher), json!({ "Ok": 0 }));
        fs::remove_file(scratch.join("bound")).expect("it");
    }
    looks_up_names_and_has_credentials_given_only_at_the_first_ends(&launcher, &scratch);
    drop(launcher);
    assert!(wait_for_exit(&mut process).success());
    for file in [disk, neighbour] {
        assert!(fs::read(file).expect("a file") == [7; 4096]);
    }
}

/// Addresses of hosts are looked up, and credentials are given by the one program, at the ends that came with the names, and
/// at no other ones.
fn looks_up_names_and_has_credentials_given_only_at_the_first_ends(
    launcher: &OwnedFd,
    scratch: &Scratch,
) {
    let none = json!({ "files": [], "directories": [], "pid_file": null, "log_file": null });
    let keep = |command: &str| {
        let ((hosts, far), (output, last)) = (pair(), pair());
        let kept = json!({ "Keep": { "names": none, "command": command } });
        send(launcher, &kept, &[far.as_fd(), last.as_fd()]);
        drop((far, last));
        (hosts, output, receive(launcher))
    };
    let (hosts, output, kept) = keep("echo 'the one'");
    assert_eq!(kept, json!({ "Ok": 0 }));
    let mut answer = [0; 2000];
    rustix::net::send(&hosts, b"localhost", SendFlags::NOSIGNAL).expect("a launcher");
    let (len, _) = recv(&hosts, &mut answer, RecvFlags::empty()).expect("an answer");
    assert!(answer[0] == 1 && len % 16 == 1, "{len}");
    let made = format!("touch {}", scratch.join("made").display());
    let long = "x".repeat(1 << 16);
    for (command, first, says) in [
        (&*made, 0, "has changed since this server was started"),
        ("echo 'the one' two", 0, "has changed since"),
        ("echo 'the one'", 1, "the one\n"),
        (&long, 0, "has changed since"),
    ] {
        rustix::net::send(&output, command.as_bytes(), SendFlags::NOSIGNAL).expect("a launcher");
        let (len, _) = recv(&output, &mut answer, RecvFlags::empty()).expect("an answer");
        let told = String::from_utf8_lossy(&answer[3..len]);
        assert!(answer[0] == first && told.starts_with(says), "{command}: {told}");
    }
    let (second, other, refused) = keep(&made);
    assert!(refused["Err"].as_str().is_some_and(|why| why.contains("already")), "{refused}");
    for end in [second, other] {
        assert_eq!(recv(&end, &mut answer, RecvFlags::empty()).expect("the end").0, 0);
    }
    assert!(!scratch.join("made").exists());
}
