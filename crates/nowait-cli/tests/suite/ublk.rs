//! A guest has an image as a block device of its own, through its ublk driver.
//!
//! Invariant: the server under test runs in the guest, because only there is a driver. What the
//! guest has written is checked outside, on the image itself.

use std::array;
use std::path::{Path, PathBuf};

use crate::common::{Guest, Kernel, MIB, Scratch, path_of, require_tool, skip};
use crate::guest::check_written;

const DISK_BYTES: u64 = 128 * MIB;
/// QEMU's arguments for two processors, so that the device has two queues.
const PROCESSORS: [&str; 2] = ["-smp", "2"];

/// Beginning of every guest's script. `serve ARGUMENTS…` starts a server and waits for its node, by
/// the command prefix `$as`; `threads LABEL PROCESS…` tells
/// which threads are I/O flushers; `idle LABEL` waits until nothing waits for I/O.
const BEGIN: &str = r#"
mount -t proc none /proc
mount -t sysfs none /sys
mkdir -p /data /disk/new
mount -t tmpfs none /data
serve() {
    rm -f /data/out; : >/data/out
    $as /test/nowait serve "$@" >/data/out 2>&1 & server=$!
    served; cat /data/out
}
# Whether a line of the server's output matches. By the shell alone: each program that is started costs the emulator
# as much as a server does in a tenth of a second.
said() { while read -r line; do case $line in $1) return 0 ;; esac; done </data/out; return 1; }
served() { for try in $(seq 600); do said 'serving*' && break; sleep 0.2; done; }
command() { /test/nowait "$@" --control /data/control; }
# The next server takes over. On a busy host it may be refused for lack of time, which changes nothing; then again.
upgraded() { for try in $(seq 5); do command upgrade && return; done; false; }
# Says so when a second has passed in which no thread of the system has waited for I/O.
idle() {
    for try in $(seq 20); do
        before=$(grep some /proc/pressure/io); sleep 1; after=$(grep some /proc/pressure/io)
        [ "${before##*=}" = "${after##*=}" ] && echo "guest: $1: idle" && break
        echo "guest: $1: $((${after##*=} - ${before##*=})) us of a second are waits for I/O"
    done
}
end_server() { kill -$1 $server; wait $server; status=$?; }
# The flags of an I/O flusher are PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE, in the ninth field of its status (proc(5)).
threads() {
    label=$1; shift
    for process in "$@"; do for thread in /proc/$process/task/*; do
        { read -r name <$thread/comm && read -r stat <$thread/stat; } 2>/dev/null || continue
        set -- ${stat##*) }
        case $(($7 & 0x180000)) in
            $((0x180000))) echo "guest: $label: flusher $name" ;;
            *) echo "guest: $label: no flusher $name" ;;
        esac
    done; done
}
"#;

/// The node from its making to its removal, with a server that is killed three times under load.
const LIFE: &str = r#"
/test/nowait serve $disk --ublk; echo "guest: without a driver $?"
load ublk_drv
serve $disk --ublk=5
grep -q 'serving /dev/ublkb5' /data/out && [ -b /dev/ublkb5 ] && echo "guest: there is a node"
cd /sys/block/ublkb5/queue
echo "guest: queue $(cat write_cache), fua $(cat fua), discard $(cat discard_max_bytes)"
cd / && /test/mkfs.ext4 -q /dev/ublkb5 && mount -t ext4 /dev/ublkb5 /disk/new
mkdir /disk/new/written
dd if=/test/random of=/data/random bs=1M count=12 2>/dev/null
( cd /disk/new/written && for file in 1 2 3 4 5 6; do
    dd if=/data/random of=$file bs=128k conv=fsync 2>/dev/null || echo "guest: I/O error"
done; echo "guest: load ended" ) & load=$!
for kill in 1 2 3; do
    sleep 0.5
    end_server KILL
    /test/nowait ublk list
    serve $disk --ublk=5
done
wait $load
/test/nowait ublk stop 5; echo "guest: stop while in use $?"
fstrim /disk/new && echo "guest: trimmed"
echo 3 >/proc/sys/vm/drop_caches
sum=$(sha256sum /data/random)
cd /disk/new/written && for file in *; do
    cmp $file /data/random && echo "guest: wrote ${sum%% *}  $file" || echo "guest: $file differs"
done
cd / && kill -TERM $server
for try in $(seq 100); do said '*is in use*' && break; sleep 0.1; done
umount /disk/new && wait $server; echo "guest: ended $?"
cat /data/out
ls /dev/ublkb5 2>/dev/null || echo "guest: no node"
"#;

/// Features of the driver; a server that exits while its node is in use, and nodes that are taken away from servers.
const LEFT: &str = r#"
load ublk_drv
/test/nowait ublk features
serve $disk --ublk
/test/mkfs.ext4 -q /dev/ublkb0 && mount -t ext4 /dev/ublkb0 /disk/new
dd if=/test/random of=/data/random bs=1M count=8 2>/dev/null
mkdir /disk/new/written && cp /data/random /disk/new/written/1
end_server TERM; cat /data/out; echo "guest: ended in use $status"
( /test/nowait ublk list --json; : >/data/listed ) &
for try in $(seq 150); do [ -e /data/listed ] && break; sleep 0.1; done
[ -e /data/listed ] || {
    echo "guest: the driver hangs"; echo w >/proc/sysrq-trigger; dmesg | tail -n 80; poweroff -f
}
( sync; echo "guest: synced" ) & sync=$!
dd if=/dev/zero of=/data/other bs=1M count=1 2>/dev/null
/test/nowait serve /data/other --direct off --ublk=0; echo "guest: another image $?"
serve $disk --ublk=0; wait $sync
cmp /disk/new/written/1 /data/random && echo "guest: wrote $(cd /disk/new/written && sha256sum 1)"
umount /disk/new
/test/nowait ublk stop 0; echo "guest: stopped $?"
wait $server; echo "guest: ended without its node $?"
cat /data/out
serve $disk --ublk=3 --read-only
echo "guest: read-only $(cat /sys/block/ublkb3/ro)"
mount -t ext4 -o ro /dev/ublkb3 /disk/new && cmp /disk/new/written/1 /data/random && umount /disk/new
end_server TERM; echo "guest: ended $status"
serve $disk --ublk=3 --nbd unix:/data/socket
/test/nowait ublk stop 3; sleep 0.5
[ -d /proc/$server ] && end_server TERM && echo "guest: NBD goes on, then $status"
cat /data/out
/test/nowait ublk stop 3; echo "guest: no device $?"
chmod 777 /data && chown 1000 /data/other
user() { /test/setpriv --reuid=1000 --regid=1000 --clear-groups "$@"; }
user /test/nowait ublk list; echo "guest: no right $?"
chmod 666 /dev/ublk-control
# As a rule of udev does.
( until chown 1000 /dev/ublkc0 2>/dev/null; do sleep 0.05; done
  until chown 1000 /dev/ublkb0 2>/dev/null; do sleep 0.05; done ) &
user /test/nowait serve /data/other --direct off --ublk >/data/out 2>&1 & server=$!
served
user cmp -n 1048576 /dev/ublkb0 /data/other && echo "guest: a user has a node"
user /test/nowait ublk stop 0 && wait $server && echo "guest: the user's server ended"
/test/nowait ublk list | wc -l
"#;

/// Features of newer drivers: a size that changes, a hand-over in which no request is done twice, and
/// a stop that no opener can be hidden from.
const NEWER: &str = r#"
load ublk_drv; load loop
dd if=/dev/zero of=/data/other bs=1M count=8 2>/dev/null
sectors() { cat /sys/block/ublkb1/size; }
serve /data/other --direct off --ublk=1
truncate -s 12M /data/other && kill -HUP $server
for try in $(seq 100); do [ $(sectors) = 24576 ] && break; sleep 0.1; done
echo "guest: grown to $(sectors), $(blockdev --getsz /dev/ublkb1)"
dd if=/data/other of=/dev/ublkb1 bs=1M count=1 seek=11 conv=fsync 2>/dev/null && echo "guest: its end is written"
end_server KILL
truncate -s 16M /data/other
serve /data/other --direct off --ublk=1
echo "guest: recovered with $(sectors)"
losetup /dev/loop0 /dev/ublkb1
/test/nowait ublk stop 1; echo "guest: stop with a hidden user $?"
losetup -d /dev/loop0
/test/nowait ublk stop 1 && wait $server; echo "guest: stopped $?"
serve $disk --ublk=2 --verbose
/test/mkfs.ext4 -q /dev/ublkb2 && mount -t ext4 /dev/ublkb2 /disk/new && mkdir /disk/new/written
dd if=/test/random of=/data/random bs=1M count=4 2>/dev/null
( while [ ! -e /data/enough ]; do
    dd if=/data/random of=/disk/new/written/1 bs=128k conv=fsync 2>/dev/null || echo "guest: I/O error"
done ) & load=$!
end_server TERM; echo "guest: handed over $status"
cat /data/out
serve $disk --ublk=2 --verbose
touch /data/enough; wait $load
echo 3 >/proc/sys/vm/drop_caches
cmp /disk/new/written/1 /data/random && echo "guest: wrote $(cd /disk/new/written && sha256sum 1)"
umount /disk/new && end_server TERM; echo "guest: ended $status"
"#;

/// Data between the image and their users without a copy, and requests that need one: holes, and writes
/// that allocate. No request is spared its first try: in a slow guest enough of these are refused in a row that the
/// others would all be copied.
const ZERO_COPY: &str = r#"
load ublk_drv
dd if=/test/random of=/data/random bs=1M count=8 2>/dev/null
run() {
    name=$1; shift
    serve $1 --ublk=4 --off back-off --verbose
    dd if=/data/random of=/dev/ublkb4 bs=256k oflag=direct conv=fsync 2>/dev/null
    dd if=/data/random of=/dev/ublkb4 bs=256k oflag=direct conv=fsync 2>/dev/null
    dd if=/dev/ublkb4 of=/data/read bs=64k count=128 iflag=direct 2>/dev/null
    cmp /data/read /data/random && echo "guest: read what was written"
    dd if=/dev/ublkb4 bs=64k skip=256 count=16 iflag=direct 2>/dev/null | cmp -n 1048576 - /dev/zero && echo "guest: read zeros"
    dd if=/data/random of=/dev/ublkb4 bs=4k count=1 seek=5000 conv=fsync 2>/dev/null
    [ "$2" ] && { end_server $2; serve $1 --ublk=4 --off back-off --verbose; }
    dd if=/dev/ublkb4 bs=4k skip=5000 count=1 2>/dev/null | cmp -n 4096 - /data/random && echo "guest: read the end"
    end_server TERM; echo "guest: $name: ended $status"
    grep 'a copy' /data/out
}
run device $disk KILL
/test/mkfs.ext4 -q $disk && mount -t ext4 $disk /disk/new
truncate -s 64M /disk/new/sparse
run file /disk/new/sparse
serve /disk/new/sparse --ublk=4 --off zero-copy --verbose
dd if=/dev/ublkb4 bs=64k count=128 iflag=direct 2>/dev/null | cmp -n 8388608 - /data/random && echo "guest: read with copies"
end_server TERM; grep -q 'without a copy' /data/out || echo "guest: there was no zero copy"
cmp -n 8388608 /disk/new/sparse /data/random && echo "guest: the image has it"
umount /disk/new
"#;

/// An image on a file system that needs requests of 4096 bytes, and that ends within a sector; and the device below it.
const BLOCKS: &str = r#"
load ublk_drv; load configfs; load null_blk nr_devices=1 gb=1 bs=4096 memory_backed=1
mkdir -p /disk/large
/test/mkfs.ext4 -q -b 4096 /dev/nullb0 16384 && mount -t ext4 /dev/nullb0 /disk/large
dd if=/test/random of=/data/random bs=8389000 count=1 iflag=fullblock 2>/dev/null
cp /data/random /disk/large/disk
for off in none zero-copy; do
    serve /disk/large/disk --ublk=3 $([ $off = none ] || echo --off $off)
    echo "guest: $off: blocks of $(cat /sys/block/ublkb3/queue/logical_block_size), $(cat /sys/block/ublkb3/size) sectors"
    cmp -n 8389000 /dev/ublkb3 /data/random && echo "guest: $off: the bytes are there"
    dd if=/dev/ublkb3 bs=512 skip=16384 count=1 iflag=direct 2>/dev/null >/data/last
    [ "$(tail -c 120 /data/last | tr -d '\000' | wc -c)" = 0 ] && echo "guest: $off: padded"
    for sector in 3 77 16384; do
        dd if=/data/random of=/dev/ublkb3 bs=512 seek=$sector skip=9 count=1 oflag=direct 2>/dev/null || echo "guest: I/O error"
    done
    [ -e /data/copy ] || cp /data/random /data/copy
    for sector in 3 77 16384; do
        dd if=/data/random of=/data/copy bs=512 seek=$sector skip=9 count=1 conv=notrunc 2>/dev/null
    done
    end_server TERM; echo "guest: $off: ended $status"
    cat /data/out
    [ "$(wc -c </disk/large/disk)" = 8389000 ] && echo "guest: $off: as long as before"
    cmp -n 8389000 /disk/large/disk /data/copy && echo "guest: $off: the image has it"
    cp /data/copy /data/random
done
umount /disk/large
serve /dev/nullb0 --ublk=4
echo "guest: the device has blocks of $(cat /sys/block/ublkb4/queue/logical_block_size)"
end_server TERM
"#;

/// Nodes with blocks that were asked for, and which they keep at the next server; after [`BLOCKS`], on its device.
const BLOCK_SIZES: &str = r#"
truncate -s 1M /data/disk; truncate -s 1048064 /data/odd
blocks() { cat /sys/block/ublkb$1/queue/logical_block_size; }
for size in 512 4K; do
    serve /data/disk --direct off --ublk=6 --block-size $size
    echo "guest: $size: blocks of $(blocks 6), $(blockdev --getsz /dev/ublkb6) sectors"
    end_server KILL
    for other in '' '--block-size 512' '--block-size 4096'; do
        for try in $(seq 100); do /test/nowait ublk list | grep -q waiting && break; sleep 0.3; done
        serve /data/disk --direct off --ublk=6 $other
        echo "guest: $size: then $other blocks of $(blocks 6)"
        end_server KILL
    done
    for try in $(seq 100); do /test/nowait ublk list | grep -q waiting && break; sleep 0.3; done
    /test/nowait ublk stop 6
done
/test/nowait serve /data/odd --direct off --ublk=6 --block-size 4096; echo "guest: odd $?"
serve /dev/nullb0 --ublk=7 --block-size 512
echo "guest: device: blocks of $(blocks 7)"
end_server TERM; echo "guest: ended $status"
"#;

/// XFS on a node, and a file on it that fio writes and verifies, with a server that is killed meanwhile.
const XFS: &str = r#"
load ublk_drv; load xfs
truncate -s 320M /data/xfs.img
serve /data/xfs.img --direct off --ublk=6
/test/mkfs.xfs -q /dev/ublkb6 && mount -t xfs /dev/ublkb6 /disk/new && echo "guest: mounted"
( /test/fio --name=verify --directory=/disk/new --ioengine=psync --thread --numjobs=2 --direct=1 --size=12M \
    --rw=randrw --bs=16k --verify=crc32c --verify_fatal=1 --fsync=16 --output=/data/fio
echo "guest: fio $?" ) & load=$!
sleep 0.5; end_server KILL; serve /data/xfs.img --direct off --ublk=6
wait $load; head -n 20 /data/fio
umount /disk/new && mount -t xfs /dev/ublkb6 /disk/new && echo "guest: mounted again" && umount /disk/new
end_server TERM; echo "guest: ended $status"
"#;

/// Separates what two parts of a script have printed.
const NEXT: &str = "guest: next part";

/// A guest, and the programs that it needs.
pub(crate) struct Scene {
    guest: Guest,
    pub(crate) programs: Vec<PathBuf>,
}

/// Output of a part of a script, and the content of its disk.
pub(crate) struct Part {
    pub(crate) console: String,
    scratch: Scratch,
    disk: PathBuf,
}

impl Scene {
    /// `None` if the test cannot run here.
    pub(crate) fn new(kernel: Kernel) -> Option<Self> {
        let tools = ["mkfs.ext4", "setpriv"].map(path_of);
        let [Some(mkfs), Some(setpriv)] = tools else {
            skip("no mkfs.ext4 or no setpriv");
            return None;
        };
        if !["e2fsck", "debugfs"].into_iter().all(require_tool) {
            return None;
        }
        let guest = Guest::with(kernel)?;
        let programs = vec![PathBuf::from(env!("CARGO_BIN_EXE_nowait")), mkfs, setpriv];
        Some(Self { guest, programs })
    }

    /// Runs `scripts` one after the other in one guest, because to boot costs as much as a script does. Each has an
    /// image of its own, at `$disk`, and begins with `/data` empty.
    pub(crate) fn run<const N: usize>(&self, scripts: [&str; N]) -> [Part; N] {
        let disks: [_; N] = array::from_fn(|_| {
            let scratch = Scratch::new();
            let disk = scratch.sparse("disk.img", DISK_BYTES);
            (scratch, disk)
        });
        let (mut script, mut devices) = (BEGIN.to_owned(), PROCESSORS.map(str::to_owned).to_vec());
        for ((part, (_, disk)), (n, letter)) in
            scripts.iter().zip(&disks).zip(('a'..='z').enumerate())
        {
            script += &format!("(disk=/dev/vd{letter}\n{part})\nrm -rf /data/*; echo '{NEXT}'\n");
            let drive =
                format!("file={},format=raw,if=none,id=disk{n},discard=unmap", disk.display());
            let device = format!("virtio-blk-pci,drive=disk{n}");
            devices.extend(["-drive".to_owned(), drive, "-device".to_owned(), device]);
        }
        let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
        let programs: Vec<&Path> = self.programs.iter().map(PathBuf::as_path).collect();
        let console = self.guest.run(&(script + "poweroff -f\n"), &programs, &devices);
        let mut parts = console.split(NEXT).map(str::to_owned);
        disks.map(|(scratch, disk)| {
            let console = parts.next().unwrap_or_default();
            Part { console, scratch, disk }
        })
    }

    /// Runs `script` once more if the driver hangs. Linux 6.12's does sometimes on a busy machine,
    /// when a server ends while its node is in use: no program gets an answer from it then, nor ends.
    fn run_past_hangs<const N: usize>(&self, scripts: [&str; N]) -> [Part; N] {
        let parts = self.run(scripts);
        let hung = parts.iter().find(|part| part.console.contains("guest: the driver hangs"));
        let Some(Part { console, .. }) = hung else { return parts };
        nowait_testkit::say_skipped(&format!("a run in which the driver hung:\n{console}"));
        self.run(scripts)
    }
}

impl Part {
    /// Checks the file system on the disk, and its `count` files.
    fn check_written(&self, count: usize) {
        check_written(&self.scratch, &self.disk, &self.console, count);
    }
}

pub(crate) fn assert_said(console: &str, lines: &[&str]) {
    for line in lines {
        assert!(console.contains(line), "the guest did not say '{line}':\n{console}");
    }
}

/// After [`LIFE`].
fn a_node_has_survived_killed_servers(part: &Part) {
    let console = &part.console;
    assert_said(
        console,
        &[
            "/dev/ublk-control is missing: there is no ublk driver (try 'modprobe ublk_drv'",
            "guest: without a driver 1",
            "guest: there is a node",
            "guest: queue write back, fua 1, discard 1073741824",
            "/dev/ublkb5    waiting",
            "guest: load ended",
            "/dev/ublkb5 is in use: /dev/ublkb5 is mounted on /disk/new (try --force)",
            "guest: stop while in use 1",
            "guest: trimmed",
            "/dev/ublkb5 is in use: /dev/ublkb5 is mounted on /disk/new; waiting for at most 10 s",
            "guest: ended 0",
            "guest: no node",
        ],
    );
    assert!(!console.contains("guest: I/O error") && !console.contains("differs"), "{console}");
    part.check_written(6);
}

/// After [`LEFT`].
fn a_node_in_use_was_left(part: &Part) {
    let console = &part.console;
    assert_said(
        console,
        &[
            "/dev/ublkb0 is left waiting for the next 'nowait serve --ublk=0'",
            "guest: ended in use 0",
            r#""state":"waiting""#,
            "/dev/ublkb0 waits for the server of another image ('nowait ublk stop 0' removes it)",
            "guest: another image 1",
            "guest: synced",
            "guest: stopped 0",
            "/dev/ublkb0 was removed by another program",
            "guest: ended without its node 0",
            "guest: read-only 1",
            "guest: ended 0",
            "/dev/ublkb3 was removed by another program",
            "guest: NBD goes on, then 0",
            "there is no ublk device 3",
            "guest: no device 1",
            "/dev/ublk-control: permission denied (be root, or",
            "guest: no right 1",
            "guest: a user has a node",
            "guest: the user's server ended",
        ],
    );
    part.check_written(1);
}

/// Checks what the driver was asked and says that it can do, which is more where it is a newer one.
fn assert_features(console: &str, newer: bool) {
    for feature in ["USER_RECOVERY\r\n", "USER_COPY\r\n"] {
        assert!(console.contains(feature), "{feature}: {console}");
    }
    for feature in ["AUTO_BUF_REG", "UPDATE_SIZE", "QUIESCE", "SAFE_STOP_DEV", "BATCH_IO"] {
        assert_eq!(console.contains(&format!("{feature}\r\n")), newer, "{feature}: {console}");
    }
}

#[test]
fn a_node_of_an_older_driver_survives_servers_that_are_killed_and_is_left_to_the_next_one() {
    let Some(scene) = Scene::new(Kernel::V6_12) else { return };
    let [life, left] = scene.run_past_hangs([LIFE, LEFT]);
    a_node_has_survived_killed_servers(&life);
    assert_features(&left.console, false);
    a_node_in_use_was_left(&left);
}

#[test]
fn a_node_of_a_newer_driver_is_also_resized_handed_over_and_stopped_only_without_hidden_users() {
    let Some(scene) = Scene::new(Kernel::V7_3) else { return };
    let [life, left, newer] = scene.run_past_hangs([LIFE, LEFT, NEWER]);
    a_node_has_survived_killed_servers(&life);
    assert_features(&left.console, true);
    a_node_in_use_was_left(&left);
    a_node_was_resized_and_handed_over(&newer);
}

#[test]
fn a_node_has_the_blocks_that_were_asked_for_data_without_a_copy_and_xfs_that_fio_verifies() {
    let (Some(xfs), Some(fio)) = (path_of("mkfs.xfs"), path_of("fio")) else {
        skip("no mkfs.xfs or no fio");
        return;
    };
    let Some(mut scene) = Scene::new(Kernel::V7_3) else { return };
    scene.programs.extend([xfs, fio]);
    let blocks = [BLOCKS, BLOCK_SIZES].concat();
    let [blocks, zero_copy, verified] = scene.run([&blocks, ZERO_COPY, XFS]);
    blocks_are_those_asked_for(&blocks.console);
    data_went_without_a_copy(&zero_copy.console);
    fio_has_verified(&verified.console);
}

/// After [`XFS`].
fn fio_has_verified(console: &str) {
    let lines =
        ["mounted\r", "fio 0", "mounted again", "ended 0"].map(|line| format!("guest: {line}"));
    assert_said(console, &lines.each_ref().map(String::as_str));
    assert!(!console.contains("I/O error"), "{console}");
    let places = ["serving /dev/ublkb6", "guest: fio 0"].map(|line| console.rfind(line));
    assert!(places[0] < places[1], "fio had ended before the server was killed: {console}");
}

/// After [`NEWER`].
fn a_node_was_resized_and_handed_over(part: &Part) {
    let console = &part.console;
    assert_said(
        console,
        &[
            "guest: grown to 24576, 24576",
            "guest: its end is written",
            "guest: recovered with 32768",
            "/dev/ublkb1 is in use: something that is not visible from here (try --force)",
            "guest: stop with a hidden user 1",
            "guest: stopped 0",
            "/dev/ublkb2: the driver keeps its requests for the next server",
            "guest: handed over 0",
            "guest: ended 0",
        ],
    );
    assert!(!console.contains("guest: I/O error"), "{console}");
    part.check_written(1);
}

/// After [`BLOCKS`] and [`BLOCK_SIZES`]: 512 bytes on any file system, or those asked for, which a node keeps.
fn blocks_are_those_asked_for(console: &str) {
    for off in ["none", "zero-copy"] {
        let lines = [
            "blocks of 512, 16385 sectors",
            "the bytes are there",
            "padded",
            "ended 0",
            "as long as before",
            "the image has it",
        ];
        let lines = lines.map(|line| format!("guest: {off}: {line}"));
        assert_said(console, &lines.each_ref().map(String::as_str));
    }
    assert_said(console, &["guest: the device has blocks of 4096"]);
    assert!(!console.contains("guest: I/O error"), "{console}");
    assert_block_sizes(console);
}

/// Checks what the guest has said of nodes with blocks that were asked for.
fn assert_block_sizes(console: &str) {
    for (size, bytes) in [("512", 512), ("4K", 4096)] {
        let line = format!("guest: {size}: blocks of {bytes}, 2048 sectors");
        let others = ["", "--block-size 512", "--block-size 4096"];
        let kept = others.map(|other| format!("guest: {size}: then {other} blocks of {bytes}"));
        let lines: Vec<&str> = kept.iter().chain([&line]).map(String::as_str).collect();
        assert_said(console, &lines);
    }
    assert_said(
        console,
        &[
            "/data/odd: its 1048064 bytes are not a multiple of --block-size 4096",
            "guest: odd 66",
            "guest: device: blocks of 512",
            "guest: ended 0",
        ],
    );
}

/// After [`ZERO_COPY`]: no copy where no request must wait.
fn data_went_without_a_copy(console: &str) {
    assert_said(console, &["guest: device: ended 0", "guest: file: ended 0"]);
    let last = ["read with copies", "there was no zero copy", "the image has it"];
    let last = last.map(|line| format!("guest: {line}"));
    assert_said(console, &last.each_ref().map(String::as_str));
    for line in ["guest: read what was written", "guest: read zeros", "guest: read the end"] {
        assert_eq!(console.matches(line).count(), 2, "{line}: {console}");
    }
    let counts = console.lines().filter_map(|line| line.split_once(" requests without a copy, "));
    let last = |line: &str| line.rsplit(' ').next().and_then(|word| word.parse::<u64>().ok());
    let first = |line: &str| line.split(' ').next().and_then(|word| word.parse::<u64>().ok());
    let counts: Vec<_> = counts.map(|(without, with)| (last(without), first(with))).collect();
    let without: u64 = counts.iter().filter_map(|count| count.0).sum();
    let with: u64 = counts.iter().filter_map(|count| count.1).sum();
    assert!(without > 64 && with > 0, "{without} without a copy, {with} with one: {console}");
}
