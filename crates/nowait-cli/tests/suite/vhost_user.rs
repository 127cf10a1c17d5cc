//! Stock guests have their disks at vhost-user sockets.
//!
//! Invariant: what a guest says that it has written is checked outside, without the server.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use nowait_testkit::{PYTHON, skip, wait_for};
use rustix::process::Signal;

use crate::common::{
    Finished, Guest, Kernel, MIB, NOWAIT, Scratch, Server, require_tool, text, tool,
};
use crate::guest::{WRITTEN_FILES, assert_ran, check_written, have_file_system_tools, make_disk};
use crate::upgrade::Upgraded;

/// Size of a disk without a file system, in bytes.
const DISK_BYTES: u64 = 96 * MIB;
/// How often a server is exchanged, and what the guest writes before the first time and between.
const EXCHANGES: u64 = 5;
const WRITTEN_FIRST: u64 = 3 * MIB;
const WRITTEN_BETWEEN: u64 = 7 * MIB;
/// The parts that a guest writes while servers are exchanged, of 4 MiB each.
const PARTS: u64 = 10;

/// The arguments of QEMU for disks at `sockets`, with two queues each.
fn devices(sockets: &[&Path]) -> Vec<String> {
    let memory = ["-object", "memory-backend-memfd,id=mem,size=1G,share=on"];
    let mut arguments: Vec<String> = memory.map(String::from).into();
    arguments.extend(["-machine", "memory-backend=mem", "-smp", "2"].map(String::from));
    for (n, socket) in sockets.iter().enumerate() {
        let socket = socket.display();
        let chardev = format!("socket,id=disk{n},path={socket},reconnect=1");
        let device = format!("vhost-user-blk-pci,chardev=disk{n},num-queues=2");
        arguments.extend(["-chardev".into(), chardev, "-device".into(), device]);
    }
    arguments
}

fn borrowed(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

/// Boots the guest from `image` at a vhost-user socket.
pub(crate) fn booted_from(guest: &Guest, image: &Path) -> String {
    let scratch = Scratch::new();
    let socket = scratch.join("socket");
    let server = Server::start_vhost_user(image, &socket, &[]);
    assert_eq!(server.ready_line(), format!("serving vhost-user:{}", socket.display()));
    let console = guest.boot(&borrowed(&devices(&[&socket])));
    server.stop_but_leave_socket();
    assert!(!socket.exists(), "the socket is left behind");
    assert_ran(&console);
    console
}

#[test]
fn a_stock_kernel_boots_from_a_vhost_user_disk_and_its_files_are_right_on_both_sides() {
    nowait_testkit::needs!(have_file_system_tools());
    let Some(guest) = Guest::with(Kernel::V6_1) else { return };
    let scratch = Scratch::new();
    let disk = make_disk(&scratch, &guest.busybox());
    let console = booted_from(&guest, &disk);
    check_written(&scratch, &disk, &console, WRITTEN_FILES);
}

#[test]
fn it_boots_from_a_qcow2_overlay_at_a_vhost_user_socket_too() {
    nowait_testkit::needs!(have_file_system_tools() && require_tool("qemu-img"));
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let scratch = Scratch::new();
    let disk = make_disk(&scratch, &guest.busybox());
    let overlay = scratch.join("overlay.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    tool("qemu-img").args(create).arg(&disk).arg(&overlay).succeeds();
    let console = booted_from(&guest, &overlay);
    tool("qemu-img").args(["check", "-q"]).arg(&overlay).succeeds();
    let all = scratch.join("all.img");
    tool("qemu-img").args(["convert", "-O", "raw"]).arg(&overlay).arg(&all).succeeds();
    check_written(&scratch, &all, &console, WRITTEN_FILES);
}

/// Writes and reads while the server is exchanged, then tells whether the kernel has seen an error.
const BUSY_INIT: &str = r#"
mount -t proc none /proc
dd if=/test/random of=/tmp/data bs=1M count=4 2>/dev/null
for n in $(seq 0 9); do
    dd if=/tmp/data of=/dev/vda bs=4k seek=$((n * 1024)) oflag=direct conv=notrunc 2>/dev/null || echo "guest: write $n failed"
    dd if=/dev/vda bs=16k skip=$((n * 256)) count=256 iflag=direct 2>/dev/null | cmp - /tmp/data || echo "guest: read $n failed"
done
echo "guest: wrote $(sha256sum < /tmp/data)"
dmesg | grep "I/O error" && echo "guest: failed"
echo "guest: done"
poweroff -f
"#;

/// Runs a busy guest with its disk at `socket`, whose image is `disk`, and `exchange` several times
/// meanwhile.
fn run_busy_guest(guest: &Guest, disk: &Path, socket: &Path, mut exchange: impl FnMut()) -> String {
    let arguments = devices(&[socket]);
    thread::scope(|scope| {
        let guest = scope.spawn(|| guest.run(BUSY_INIT, &[], &borrowed(&arguments)));
        for n in 0..EXCHANGES {
            let written = WRITTEN_FIRST + n * WRITTEN_BETWEEN;
            wait_for("the guest's writes", || {
                let blocks = std::fs::metadata(disk).expect("an image").blocks();
                if blocks * 512 >= written { Ok(()) } else { Err(blocks) }
            });
            exchange();
        }
        guest.join().expect("a guest that powers off")
    })
}

/// Checks what a busy guest has said, and `disk`.
fn check_busy_guest(console: &str, disk: &Path) {
    assert!(console.contains("guest: done"), "{console}");
    assert!(!console.contains("failed") && !console.contains("differ"), "{console}");
    let sum = console.lines().find_map(|line| line.trim().strip_prefix("guest: wrote "));
    let sum = sum.and_then(|line| line.split_whitespace().next()).expect("a sum");
    for n in 0..PARTS {
        let script = format!("dd if={} bs=4M skip={n} count=1 | sha256sum", disk.display());
        let outside = tool("sh").args(["-c", &script]).succeeds();
        assert_eq!(outside.split_whitespace().next(), Some(sum), "part {n}");
    }
}

#[test]
fn a_guest_sees_no_error_when_its_server_is_killed_under_load_and_started_again() {
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.sparse("disk.img", DISK_BYTES), scratch.join("socket"));
    let mut server = Some(Server::start_vhost_user(&disk, &socket, &[]));
    let console = run_busy_guest(&guest, &disk, &socket, || {
        let mut killed = server.take().expect("a server");
        killed.signal(Signal::KILL);
        killed.wait();
        server = Some(Server::start_vhost_user(&disk, &socket, &[]));
    });
    server.take().expect("a server").stop_but_leave_socket();
    check_busy_guest(&console, &disk);
}

#[test]
fn a_guest_sees_no_error_through_upgrades_of_its_server_under_load() {
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let scratch = Scratch::new();
    let socket = scratch.join("socket");
    let mut it = Upgraded::start("raw", &["--vhost-user", text(&socket)]);
    let image = it.image();
    let console = run_busy_guest(&guest, &image, &socket, || {
        let report = it.upgrade();
        assert_eq!((&report["connections"], &report["closed"]), (&1.into(), &0.into()));
    });
    let (_scratch, image) = it.stop();
    check_busy_guest(&console, &image);
    assert!(!socket.exists(), "the socket is left behind");
}

/// Tells what the kernel finds on two disks, one of them read-only.
const PROPERTIES_INIT: &str = r#"
mount -t proc none /proc
mount -t sysfs none /sys
for disk in vda vdb; do
    cd /sys/block/$disk
    echo "guest: $disk $(cat size ro queue/write_cache queue/physical_block_size serial | tr '\n' ' ')"
    echo "guest: $disk queues $(ls mq | wc -l)"
done
blkdiscard -f /dev/vda && echo "guest: discarded"
dd if=/dev/zero of=/dev/vdb bs=4k count=1 2>/dev/null || echo "guest: read-only"
echo "write through" > /sys/block/vda/queue/write_cache
cat /sys/block/vda/cache_type
poweroff -f
"#;

#[test]
fn a_guest_finds_the_size_the_queues_and_the_rights_of_its_disks() {
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let scratch = Scratch::new();
    let (one, two) = (scratch.sparse("one.img", 8 * MIB), scratch.sparse("two.img", 16 * MIB));
    std::fs::write(&one, vec![7; 8 << 20]).expect("an image");
    let sockets = [scratch.join("a"), scratch.join("b")];
    let writable = Server::start_vhost_user(&one, &sockets[0], &["--export", "golden"]);
    let read_only = Server::start_vhost_user(&two, &sockets[1], &["--read-only"]);
    let [a, b] = &sockets;
    let console = guest.run(PROPERTIES_INIT, &[], &borrowed(&devices(&[a, b])));
    writable.stop_but_leave_socket();
    read_only.stop_but_leave_socket();
    for line in [
        "guest: vda 16384 0 write back 4096 golden",
        "guest: vdb 32768 1 write back 4096",
        "guest: vda queues 2",
        "guest: discarded",
        "guest: read-only",
    ] {
        assert!(console.contains(line), "the guest did not say '{line}':\n{console}");
    }
    assert!(std::fs::read(&one).expect("an image").iter().all(|byte| *byte == 0), "not discarded");
}

/// Writes, waits until its disk is larger, and writes to the end of it.
const RESIZED_INIT: &str = r#"
mount -t sysfs none /sys
before=$(cat /sys/block/vda/size)
dd if=/dev/urandom of=/dev/vda bs=1M count=2 oflag=direct 2>/dev/null
for n in $(seq 600); do
    after=$(cat /sys/block/vda/size)
    [ $after = $before ] || break
    sleep 0.1
done
echo "guest: $before, then $after"
printf resized | dd of=/dev/vda bs=512 seek=$((after - 1)) conv=sync,fsync 2>/dev/null && echo "guest: wrote"
poweroff -f
"#;

#[test]
fn a_guest_sees_that_its_disk_has_become_larger_and_writes_to_the_new_part() {
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.sparse("disk.img", 8 * MIB), scratch.join("socket"));
    let server = Server::start_vhost_user(&disk, &socket, &[]);
    let arguments = devices(&[&socket]);
    let console = thread::scope(|scope| {
        let guest = scope.spawn(|| guest.run(RESIZED_INIT, &[], &borrowed(&arguments)));
        wait_for("the guest's first write", || {
            let blocks = std::fs::metadata(&disk).expect("an image").blocks();
            if blocks * 512 >= MIB { Ok(()) } else { Err(blocks) }
        });
        tool("truncate").args(["-s", "24M"]).arg(&disk).succeeds();
        server.signal(Signal::HUP);
        guest.join().expect("a guest that powers off")
    });
    server.stop_but_leave_socket();
    assert!(console.contains("guest: 16384, then 49152"), "{console}");
    assert!(console.contains("guest: wrote"), "{console}");
    let bytes = std::fs::read(&disk).expect("an image");
    assert_eq!(bytes.len() as u64, 24 * MIB);
    assert!(bytes[bytes.len() - 512..].starts_with(b"resized"));
}

#[test]
fn a_program_by_the_conventions_of_qemu_tells_what_it_can_and_serves() {
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    let program = contrib.join("nowait-vhost-user-blk");
    let told = tool("sh").arg(&program).arg("--print-capabilities").succeeds();
    let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["type"], "block");
    assert_eq!(told["features"], serde_json::json!(["read-only", "blk-file"]));
    let description = contrib.join("50-nowait-vhost-user-blk.json");
    let description = std::fs::read_to_string(description).expect("a description");
    let description: serde_json::Value = serde_json::from_str(&description).expect("JSON");
    assert_eq!(description["type"], told["type"]);
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.sparse("a=b.img", MIB), scratch.join("socket"));
    // The program finds `nowait`, whose path is the argument after its own, on the path.
    let script = r#"program=$1 PATH=$(dirname "$2"):$PATH; shift 2; exec sh "$program" "$@""#;
    let options = [format!("--blk-file={}", disk.display()), "--socket-path".into()];
    let server = Server::start_by(
        &["sh", "-c", script, "sh", &program.display().to_string()],
        &[&options[0], &options[1], &socket.display().to_string(), &"--read-only".to_owned()],
    );
    assert_eq!(server.ready_line(), format!("serving vhost-user:{}", socket.display()));
    server.stop_but_leave_socket();
}

/// Hands one end of a pair of sockets over as descriptor N (in place of `FD` in the arguments), asks
/// for the features of the device, and closes its end. Prints what it got, and the exit status.
const HAND_OVER: &str = r#"
import os, socket, struct, subprocess, sys
mine, theirs = socket.socketpair()
number = theirs.fileno()
words = [word.replace("FD", str(number)) for word in sys.argv[1:]]
server = subprocess.Popen(words, pass_fds=[number], stdout=subprocess.PIPE)
theirs.close()
print(server.stdout.readline().decode().strip().replace(str(number), "N"))
mine.sendall(struct.pack("<III", 1, 1, 0))
request, flags, size = struct.unpack("<III", mine.recv(12, socket.MSG_WAITALL))
features, = struct.unpack("<Q", mine.recv(8, socket.MSG_WAITALL))
print("features", request, size, features >> 32 & 1)
mine.close()
print("ended", server.wait(20))
"#;

#[test]
fn a_connection_that_was_handed_over_is_served_and_the_server_ends_with_it() {
    if !Path::new(PYTHON).is_file() {
        skip("no python3");
        return;
    }
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.img", MIB).display().to_string();
    let hand_over = |words: &[&str]| tool(PYTHON).args(["-c", HAND_OVER]).args(words).succeeds();
    let printed = hand_over(&[NOWAIT, "serve", &disk, "--vhost-user", "fd:FD"]);
    assert_eq!(printed, "serving vhost-user:fd:N\nfeatures 1 8 1\nended 0\n");
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    let program = contrib.join("nowait-vhost-user-blk").display().to_string();
    let script = r#"program=$1 PATH=$(dirname "$2"):$PATH; shift 2; exec sh "$program" "$@""#;
    let file = format!("--blk-file={disk}");
    let words = ["sh", "-c", script, "sh", &program, NOWAIT, &file, "--fd=FD"];
    assert_eq!(hand_over(&words), printed);
}

#[test]
fn a_descriptor_that_is_no_connection_is_refused_in_one_line() {
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.img", MIB).display().to_string();
    for (script, why) in [
        (r#"exec "$@" 9>&-"#, "nowait: --vhost-user fd:9: this process was not given such"),
        (
            r#"exec "$@" 9</dev/null"#,
            "nowait: --vhost-user fd:9: it is not a connected Unix socket",
        ),
    ] {
        let mut server = tool("sh");
        server.args(["-c", script, "sh", NOWAIT, "serve", &disk, "--vhost-user", "fd:9"]);
        let said = server.fails();
        assert!(said.starts_with(why) && said.lines().count() == 1, "{said}");
    }
}
