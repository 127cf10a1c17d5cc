//! Storage that fails under a running server: the client gets an error, the server continues, no
//! answered write is lost.

use std::collections::HashMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process;
use std::sync::mpsc;
use std::thread;

use crate::common::{MIB, Scratch, Server, accepted, require_tool, skip, text};
use crate::log_messages::await_line;
use nowait_testkit::nbd::{Client, Command, EIO, ENOSPC, ESHUTDOWN, greet};

/// The length of one request here, in bytes.
const PIECE: u32 = 1 << 20;

/// A recognisable megabyte: every byte is the piece's number, counted from 1.
fn piece(number: u64) -> Vec<u8> {
    vec![u8::try_from(number + 1).expect("fewer than 255 pieces"); PIECE as usize]
}

#[test]
fn c55_an_image_truncated_while_it_is_served_gives_eio_and_the_rest_is_served() {
    for extra in [&[][..], &["--queue", "threads"], &["--direct", "off"]] {
        println!("serve {extra:?}");
        let scratch = Scratch::new();
        let image = scratch.random("disk.img", 8 * MIB, 1);
        let start = fs::read(&image).expect("the image")[..PIECE as usize].to_vec();
        let server = Server::start(&image, extra);
        let mut client = server.connect();
        client.read(4 * MIB, PIECE).expect("a whole image");
        let file = File::options().write(true).open(&image).expect("the image");
        file.set_len(MIB).expect("a shorter image");

        assert_eq!(client.read(4 * MIB, PIECE).err(), Some(EIO));
        assert_eq!(client.read(MIB - 512, 1024).err(), Some(EIO));
        assert_eq!(client.read(0, PIECE).expect("what is left"), start);
        client.write(MIB / 2, &piece(6)[..MIB as usize / 2]).expect("a write to what is left");
        client.call(&Command::Flush).expect("a flush");
        assert!(server.connect().read(MIB / 2, 512).expect("bytes") == piece(6)[..512]);
        server.stop();
    }
}

/// Mounts a small file system at $0 and executes the command; the file system ends with it.
const ON_TMPFS: &str =
    r#"mount -t tmpfs -o size=16m none "$0" && truncate -s 64M "$0/disk.img" && exec "$@""#;
const ON_EXT4: &str = r#"truncate -s 32M "$0.fs" && mkfs.ext4 -q "$0.fs" && mount -o loop "$0.fs" "$0" &&
truncate -s 64M "$0/disk.img" && exec "$@""#;

/// The flags of unshare(1) with which a private mount can be made here, if one can.
pub(crate) fn private_mounts() -> Option<&'static [&'static str]> {
    if !require_tool("unshare") {
        return None;
    }
    let is_root = rustix::process::geteuid().is_root();
    let flags: &[&str] = if is_root { &["--mount"] } else { &["--mount", "--map-root-user"] };
    let mount = ["--", "mount", "-t", "tmpfs", "none", "/tmp"];
    let tried = process::Command::new("unshare").args(flags).args(mount).output();
    let can = tried.is_ok_and(|output| output.status.success());
    (can || skip("no private mounts for this user")).then_some(flags)
}

/// Serves a 64 MiB image on the small file system that `script` makes, fills it, and checks the
/// state afterwards.
fn fill_the_file_system(flags: &[&str], script: &str, extra: &[&str]) {
    let scratch = Scratch::new();
    let mount_point = scratch.join("small");
    fs::create_dir(&mount_point).expect("a directory");
    let mount_point = mount_point.to_str().expect("a name in UTF-8");
    let wrapper: Vec<&str> = ["unshare"]
        .iter()
        .chain(flags)
        .chain(&["--", "sh", "-c", script, mount_point])
        .copied()
        .collect();
    let server = Server::start_under(&wrapper, &scratch.join("small/disk.img"), extra);
    let mut client = server.connect();

    let mut written = 0;
    let error = loop {
        assert!(written < 64, "64 MiB fit where there is room for 32 at most");
        match client.write(written * MIB, &piece(written)) {
            Ok(_) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, ENOSPC);
    let line = await_line(&server, "No space left on device");
    assert!(line.contains(&format!("write of {PIECE} bytes at byte {}", written * MIB)), "{line}");
    assert!(written > 4, "full after {written} MiB");
    client.call(&Command::Flush).expect("what was written is safe");
    for number in 0..written {
        assert!(
            client.read(number * MIB, PIECE).expect("bytes") == piece(number),
            "piece {number} is lost"
        );
    }

    // NBD proto.md, "`base:allocation` metadata context": a range that is not a hole has storage.
    for number in 0..written {
        client.write(number * MIB, &piece(number)).expect("a write where there is storage");
    }

    client.call(&Command::Trim { offset: 0, len: 4 * PIECE }).expect("room again");
    client.write(0, &piece(9)).expect("a write into the room made");
    assert!(server.connect().read(0, PIECE).expect("bytes") == piece(9));
    server.stop();
}

#[test]
fn a_full_file_system_gives_enospc_and_trim_frees_space() {
    let Some(flags) = private_mounts() else { return };
    let is_root = rustix::process::geteuid().is_root();
    let loop_mounts =
        is_root && require_tool("mkfs.ext4") && Path::new("/dev/loop-control").exists();
    if !loop_mounts {
        nowait_testkit::say_skipped("ext4 on a loop device is only for root");
    }
    for extra in [&[][..], &["--queue", "threads"], &["--direct", "off"]] {
        println!("serve {extra:?}");
        fill_the_file_system(flags, ON_TMPFS, extra);
        if loop_mounts {
            fill_the_file_system(flags, ON_EXT4, extra);
        }
    }
    if !loop_mounts {
        skip("no loop mounts for this user, so tmpfs only");
    }
}

#[test]
fn a_qcow2_image_can_be_written_up_to_a_limit_on_the_size_of_files() {
    nowait_testkit::needs!(require_tool("prlimit"));
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    accepted(&["create", text(&image), "64M"]);
    // Less than the step in which the file grows.
    let server = Server::start_under(&["prlimit", "--fsize=4194304"], &image, &[]);
    let mut client = server.connect();
    client.write(0, &piece(0)).expect("a write within the limit");
    let refused = (1..8).find_map(|number| client.write(number * MIB, &piece(number)).err());
    assert_eq!(refused, Some(ENOSPC));
    assert!(client.read(0, PIECE).expect("bytes") == piece(0));
    drop(client);
    server.stop();
}

/// Keeps writes in flight until the server ends the connection; returns the pieces whose write was
/// answered.
fn write_until_the_end(
    mut client: Client,
    pieces: Range<u64>,
    answered: &mpsc::Sender<()>,
) -> Vec<u64> {
    const IN_FLIGHT: usize = 4;
    let mut in_flight = HashMap::new();
    let mut done = Vec::new();
    for number in pieces.cycle() {
        match client.send(&Command::Write { offset: number * MIB, data: piece(number), fua: false })
        {
            Ok(cookie) => in_flight.insert(cookie, number),
            Err(_) => break,
        };
        if in_flight.len() < IN_FLIGHT {
            continue;
        }
        match client.receive() {
            Ok((cookie, Ok(_))) => {
                done.push(in_flight.remove(&cookie).expect("an answer to a write in flight"));
                // The receiver is dropped once the signal is sent.
                let _ = answered.send(());
            }
            Ok((_, Err(error))) => {
                assert_eq!(error, ESHUTDOWN, "a write failed before the end");
                break;
            }
            Err(_) => break,
        }
    }
    done
}

#[test]
fn sigterm_during_writes_succeeds_and_every_answered_write_is_in_the_image() {
    const CLIENTS: u64 = 3;
    const PIECES_EACH: u64 = 16;
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", CLIENTS * PIECES_EACH * MIB);
    let server = Server::start(&image, &[]);
    let (sender, answered) = mpsc::channel();
    let writers: Vec<_> = (0..CLIENTS)
        .map(|index| {
            let (client, sender) = (server.connect(), sender.clone());
            let pieces = index * PIECES_EACH..(index + 1) * PIECES_EACH;
            thread::spawn(move || write_until_the_end(client, pieces, &sender))
        })
        .collect();
    drop(sender);
    assert!(answered.iter().take(20).count() == 20, "the writers stopped early");
    server.stop();

    let file = File::open(&image).expect("the image");
    let mut bytes = vec![0; PIECE as usize];
    for writer in writers {
        for number in writer.join().expect("a writer") {
            file.read_exact_at(&mut bytes, number * MIB).expect("bytes");
            assert!(
                bytes == piece(number),
                "the answered write of piece {number} is not in the image"
            );
        }
    }
}

#[test]
fn sigterm_does_not_wait_for_idle_connections() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), &[]);
    let _idle = server.connect();
    let _in_handshake = greet(&server.socket()).expect("a greeting");
    server.stop();
}
