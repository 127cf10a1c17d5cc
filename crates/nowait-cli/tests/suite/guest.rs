//! A stock Linux guest uses file systems on the server: its root through QEMU, another through its
//! own NBD driver.
//!
//! Invariant: the files are checked on both sides: the image's files in the guest, and the guest's
//! files outside, without the server.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::common::{
    Finished, Guest, Kernel, MIB, Scratch, Server, path_of, require_tool, skip, tool,
};
use nowait_testkit::Random;

/// Size of the disk in bytes.
const DISK_BYTES: u64 = 192 * MIB;
/// Files that come with the image, and files the guest writes.
const GIVEN_FILES: u64 = 3;
pub(crate) const WRITTEN_FILES: usize = 4;

/// The guest's only process: checks the given files, writes, deletes, trims, and powers off.
const GUEST_INIT: &str = r#"#!/bin/sh
mount -t proc none /proc
cd /given && sha256sum -c SHA256SUMS && echo "guest: given files are right"
mkdir /written /scratch
for number in 1 2 3 4; do
    dd if=/dev/urandom of=/written/$number bs=64k count=$((number * 12)) conv=fsync 2>/dev/null
    dd if=/written/$number of=/scratch/$number bs=5000 2>/dev/null
done
sync
rm -r /scratch
fstrim / && echo "guest: trimmed"
echo 3 >/proc/sys/vm/drop_caches
cd /written && for file in *; do echo "guest: wrote $(sha256sum $file)"; done
cd / && sync && mount -o remount,ro / && echo "guest: done"
poweroff -f
"#;

/// An ext4 image that holds busybox, the guest's init, and files with their checksums.
pub(crate) fn make_disk(scratch: &Scratch, busybox: &Path) -> PathBuf {
    let root = scratch.join("root");
    for directory in ["bin", "sbin", "dev", "proc", "given"] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    fs::copy(busybox, root.join("bin/busybox")).expect("busybox");
    let applets = ["sh", "mount", "sha256sum", "mkdir", "dd", "sync", "rm", "fstrim", "poweroff"];
    for applet in applets {
        symlink("busybox", root.join("bin").join(applet)).expect("a link");
    }
    fs::write(root.join("sbin/init"), GUEST_INIT).expect("the guest's init");
    fs::set_permissions(root.join("sbin/init"), Permissions::from_mode(0o755)).expect("own file");
    let mut random = Random::from_seed(4);
    for number in 1..=GIVEN_FILES {
        fs::write(root.join(format!("given/{number}")), random.bytes(700_001 * number as usize))
            .expect("a file");
    }
    let given = root.join("given");
    let sums = tool("sha256sum").current_dir(&given).args(["1", "2", "3"]).succeeds();
    fs::write(given.join("SHA256SUMS"), sums).expect("checksums");

    let disk = scratch.sparse("disk.img", DISK_BYTES);
    tool("mkfs.ext4").args(["-q", "-F", "-d"]).arg(&root).arg(&disk).succeeds();
    disk
}

/// File name → checksum, from the guest's lines `guest: wrote SUM  NAME`.
fn printed_sums(console: &str) -> BTreeMap<String, String> {
    console
        .lines()
        .filter_map(|line| line.trim().strip_prefix("guest: wrote "))
        .map(|line| line.split_once("  ").expect("a sum and a name"))
        .map(|(sum, name)| (name.to_owned(), sum.to_owned()))
        .collect()
}

/// Boots the guest from a server of `image`; returns its console output, which is checked for all
/// expected lines.
fn booted_from(guest: &Guest, image: &Path) -> String {
    let server = Server::start(image, &[]);
    let drive = format!("file={},format=raw,if=none,id=disk,discard=unmap", server.uri());
    let console = guest.boot(&["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    server.stop();
    assert_ran(&console);
    console
}

/// Checks that the guest of [`make_disk`] has said all that it should.
pub(crate) fn assert_ran(console: &str) {
    for line in ["guest: given files are right", "guest: trimmed", "guest: done"] {
        assert!(console.contains(line), "the guest did not say '{line}':\n{console}");
    }
}

pub(crate) fn have_file_system_tools() -> bool {
    ["mkfs.ext4", "e2fsck", "debugfs"].into_iter().all(require_tool)
}

#[test]
fn a_stock_kernel_boots_from_the_export_and_its_files_are_right_on_both_sides() {
    nowait_testkit::needs!(have_file_system_tools());
    let Some(guest) = Guest::with(Kernel::V6_1) else {
        return;
    };
    let scratch = Scratch::new();
    let disk = make_disk(&scratch, &guest.busybox());
    let console = booted_from(&guest, &disk);
    check_written(&scratch, &disk, &console, WRITTEN_FILES);
}

#[test]
fn the_same_kernel_boots_from_a_qcow2_overlay_and_does_not_change_the_backing_file() {
    nowait_testkit::needs!(have_file_system_tools() && require_tool("qemu-img"));
    let Some(guest) = Guest::with(Kernel::V6_1) else {
        return;
    };
    let scratch = Scratch::new();
    let disk = make_disk(&scratch, &guest.busybox());
    let before = fs::read(&disk).expect("the backing file");
    let overlay = scratch.join("overlay.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    tool("qemu-img").args(create).arg(&disk).arg(&overlay).succeeds();
    let console = booted_from(&guest, &overlay);
    assert!(fs::read(&disk).expect("the backing file") == before, "the backing file was changed");
    tool("qemu-img").args(["check", "-q"]).arg(&overlay).succeeds();
    let all = scratch.join("all.img");
    tool("qemu-img").args(["convert", "-O", "raw"]).arg(&overlay).arg(&all).succeeds();
    check_written(&scratch, &all, &console, WRITTEN_FILES);
}

/// Attaches the export by the kernel's own driver, makes a file system on it, and writes to it.
const ATTACHING_INIT: &str = r#"
mount -t proc none /proc
mount -t sysfs none /sys
for module in failover net_failover virtio_net nbd; do load $module; done
ip link set lo up && ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up
/test/nbd-client 10.0.2.2 PORT /dev/nbd0 -N data && echo "guest: attached"
/test/mkfs.ext4 -q /dev/nbd0 && mkdir /disk/new && mount -t ext4 -o discard /dev/nbd0 /disk/new
mkdir /disk/new/written && cd /disk/new/written
for number in 1 2 3; do
    dd if=/dev/urandom of=$number bs=100k count=$((number * 9)) conv=fsync 2>/dev/null
done
echo 3 >/proc/sys/vm/drop_caches
for file in *; do echo "guest: wrote $(sha256sum $file)"; done
cd / && umount /disk/new && /test/nbd-client -d /dev/nbd0 && echo "guest: done"
poweroff -f
"#;

#[test]
fn a_stock_kernel_attaches_the_export_by_nbd_client_and_keeps_a_file_system_there() {
    let tools = ["mkfs.ext4", "nbd-client"].map(path_of);
    let [Some(mkfs), Some(nbd_client)] = tools else {
        skip("no mkfs.ext4 or no nbd-client");
        return;
    };
    nowait_testkit::needs!(["e2fsck", "debugfs"].into_iter().all(require_tool));
    let Some(guest) = Guest::with(Kernel::V6_12) else { return };
    let scratch = Scratch::new();
    let (root, disk) = (scratch.sparse("root.img", MIB), scratch.sparse("disk.img", DISK_BYTES));
    let named = format!("data={}", disk.display());
    let server = Server::start(&root, &[&named, "--nbd", "tcp:127.0.0.1:0", "--json"]);
    let script = ATTACHING_INIT.replace("PORT", server.port());
    // The guest reaches the host as 10.0.2.2. The network card needs no boot ROM.
    let network = ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="];
    let console = guest.run(&script, &[&mkfs, &nbd_client], &network);
    server.stop();
    for line in ["guest: attached", "guest: done"] {
        assert!(console.contains(line), "the guest did not say '{line}':\n{console}");
    }
    check_written(&scratch, &disk, &console, 3);
}

/// Checks the file system on `disk`, and the `count` files whose checksums the guest printed.
pub(crate) fn check_written(scratch: &Scratch, disk: &Path, console: &str, count: usize) {
    tool("e2fsck").arg("-fn").arg(disk).succeeds();
    let sums = printed_sums(console);
    assert_eq!(sums.len(), count, "{console}");
    for (name, sum) in sums {
        let copy = scratch.join(&name);
        tool("debugfs")
            .arg("-R")
            .arg(format!("dump /written/{name} {}", copy.display()))
            .arg(disk)
            .succeeds();
        let outside = tool("sha256sum").arg(&copy).succeeds();
        assert_eq!(
            outside.split_whitespace().next(),
            Some(sum.as_str()),
            "file {name} as seen outside"
        );
    }
}
