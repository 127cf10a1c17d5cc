//! A server is killed while it takes over a ublk node, at each of the points where older drivers then let no
//! other server take over the node.
//!
//! Invariant: this test program, in the guest, plays the server that is killed: it makes the same calls, and exits
//! between two of them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::thread::sleep;
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::common::Kernel;
use crate::ublk::{Scene, assert_said};
use crate::ublk_pauses::{KEPT, NBD_FLUSHERS, a_pause_was_refused};

const NAME: &str = "ublk_takeover::dies_while_it_takes_over";
/// Where it dies: `mapped` or `one-queue`.
const POINT: &str = "NOWAIT_DIES";

const START_USER_RECOVERY: u32 = 0xc020_7510;
const FETCH_REQ: u32 = 0xc010_7520;
const ID: u32 = 5;
/// The server's, with two queues.
const DEPTH: u16 = 128;
const DESCRIPTORS_BYTES: usize = 3072;

const SCRIPT: &str = r#"
load ublk_drv
dd if=/test/random of=/data/random bs=1M count=4 2>/dev/null
serve $disk --ublk=5
exec 9<>/dev/ublkb5
dd if=/data/random of=/dev/ublkb5 bs=1M conv=fsync 2>/dev/null
for point in mapped one-queue; do
    end_server KILL
    for try in $(seq 100); do /test/nowait ublk list | grep -q waiting && break; sleep 0.3; done
    NOWAIT_DIES=$point /test/SUITE --exact TEST --ignored --nocapture
    serve $disk --ublk=5
    grep -q '^serving' /data/out || { dmesg | tail -n 40; poweroff -f; }
    echo 3 >/proc/sys/vm/drop_caches
    cmp -n 4194304 /dev/ublkb5 /data/random && echo "guest: taken over after $point"
done
exec 9>&-
end_server TERM; echo "guest: ended $status"
dmesg | grep -E 'WARNING|BUG' && echo "guest: the kernel complains"
"#;

#[test]
fn an_older_driver_gives_a_node_over_although_a_server_was_killed_meanwhile_and_refuses_a_pause() {
    let Some(mut scene) = Scene::new(Kernel::V6_12) else { return };
    let suite = std::env::current_exe().expect("this program");
    let name = suite.file_name().and_then(|name| name.to_str()).expect("UTF-8").to_owned();
    scene.programs.push(suite);
    let taken_over = SCRIPT.replace("SUITE", &name).replace("TEST", NAME);
    let kept = [KEPT, NBD_FLUSHERS].concat();
    let [taken_over, kept] = scene.run([&taken_over, &kept]);
    a_pause_was_refused(&kept.console);
    let console = taken_over.console;
    let lines = ["mapped", "one-queue"].map(|point| format!("guest: taken over after {point}"));
    assert_said(&console, &lines.each_ref().map(String::as_str));
    assert_said(&console, &["dies after mapped", "dies after one-queue", "guest: ended 0"]);
    assert!(!console.contains("guest: the kernel complains"), "{console}");
}

fn open(path: &str) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("a device of the driver")
}

/// Tells the driver that another server is about to take the device over.
fn start_recovery() {
    let control = open("/dev/ublk-control");
    let mut arguments = [0; 80];
    arguments[..4].copy_from_slice(&ID.to_ne_bytes());
    arguments[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    let mut ring: IoUring<squeue::Entry128, cqueue::Entry> =
        IoUring::builder().build(4).expect("a ring");
    for _ in 0..100 {
        let device = types::Fd(control.as_raw_fd());
        let command = opcode::UringCmd80::new(device, START_USER_RECOVERY).cmd(arguments).build();
        // SAFETY: the command names no memory.
        unsafe { ring.submission().push(&command) }.expect("room");
        ring.submit_and_wait(1).expect("an answer");
        match ring.completion().next().expect("an answer").result() {
            0 => return,
            // The last server's descriptors are being closed.
            _ => sleep(Duration::from_millis(50)),
        }
    }
    panic!("the device cannot be taken over");
}

/// Not a test of its own: a server, in the guest of another test, that dies.
#[test]
#[ignore = "takes a ublk device over and dies; another test runs it in a guest"]
fn dies_while_it_takes_over() {
    let Ok(point) = std::env::var(POINT) else { return };
    start_recovery();
    let device = open(&format!("/dev/ublkc{ID}"));
    let mut ring = IoUring::new(DEPTH.into()).expect("a ring");
    if point == "one-queue" {
        for tag in 0..DEPTH {
            let mut arguments = [0; 16];
            arguments[2..4].copy_from_slice(&tag.to_ne_bytes());
            // The address for data of a driver that copies; none that can be mapped.
            arguments[8] = 1;
            let device = types::Fd(device.as_raw_fd());
            let command = opcode::UringCmd16::new(device, FETCH_REQ).cmd(arguments).build();
            // SAFETY: the command names no memory of this process.
            unsafe { ring.submission().push(&command) }.expect("room");
        }
        ring.submit().expect("commands of the driver");
    }
    // SAFETY: a new mapping at an address of the kernel's choice.
    let mapped = unsafe {
        mmap(null_mut::<c_void>(), DESCRIPTORS_BYTES, ProtFlags::READ, MapFlags::SHARED, &device, 0)
    };
    mapped.expect("descriptors");
    println!("dies after {point}");
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
        .expect("killed");
}
