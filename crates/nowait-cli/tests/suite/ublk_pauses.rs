//! A node whose server is exchanged or opens its image anew, while programs use it.
//!
//! Invariant: the users of the node see a pause and nothing else.

use crate::common::Kernel;
use crate::ublk::{Scene, assert_said};

/// A node under load through snapshots, another size, and upgrades.
const CHANGED: &str = r#"
load ublk_drv
truncate -s 64M /data/disk.img
command() { /test/nowait "$@" --control /data/control; }
serve /data/disk.img --direct off --ublk=7 --control unix:/data/control --allow-dir /data
/test/mkfs.ext4 -q /dev/ublkb7 && mount -t ext4 /dev/ublkb7 /disk/new
dd if=/dev/urandom of=/data/random bs=1M count=4 2>/dev/null
( n=0; while [ ! -e /data/enough ]; do
    n=$((n + 1))
    dd if=/data/random of=/disk/new/file bs=64k oflag=direct conv=fsync 2>/dev/null || echo "guest: I/O error"
    dd if=/disk/new/file bs=64k iflag=direct 2>/dev/null | cmp - /data/random || echo "guest: differs"
done; [ $n -gt 1 ] && echo "guest: load ended" ) & load=$!
for n in 1 2 3; do
    sleep 0.3
    command export snapshot @0 /data/overlay$n && echo "guest: snapshot $n"
done
command export resize @0 80M && echo "guest: resized to $(blockdev --getsz /dev/ublkb7)"
for n in 1 2 3; do
    sleep 0.3
    command upgrade && echo "guest: upgrade $n"
done
wait $server; echo "guest: the first server ended $?"
sleep 0.3; touch /data/enough; wait $load
for pid in $(pidof nowait); do kill -KILL $pid; done
for try in $(seq 100); do /test/nowait ublk list | grep -q waiting && break; sleep 0.1; done
/test/nowait ublk list
serve /data/overlay3 --direct off --ublk=7 --control unix:/data/control
echo 3 >/proc/sys/vm/drop_caches
cmp /disk/new/file /data/random && echo "guest: the file is whole"
umount /disk/new
/test/nowait ublk list
/test/nowait ublk stop 7; echo "guest: stopped $?"
for try in $(seq 100); do [ -e /data/control ] || break; sleep 0.1; done
[ -e /data/control ] || echo "guest: the last server ended"
/test/nowait check /data/overlay3 && echo "guest: the image is right"
cat /data/out
"#;

#[test]
fn the_users_of_a_node_go_on_through_snapshots_another_size_and_upgrades_of_its_server() {
    let Some(scene) = Scene::new(Kernel::V7_3) else { return };
    let console = scene.run(CHANGED);
    let counted =
        ["snapshot", "upgrade"].map(|what| [1, 2, 3].map(|n| format!("guest: {what} {n}")));
    assert_said(&console, &counted.as_flattened().iter().map(String::as_str).collect::<Vec<_>>());
    assert_said(
        &console,
        &[
            "guest: resized to 163840",
            "guest: the first server ended 0",
            "guest: load ended",
            "/dev/ublkb7    waiting",
            "guest: the file is whole",
            "guest: stopped 0",
            "guest: the last server ended",
            "guest: the image is right",
        ],
    );
    assert!(!console.contains("I/O error") && !console.contains("differs"), "{console}");
}

#[test]
fn a_driver_that_keeps_no_requests_back_refuses_a_pause_and_the_node_goes_on() {
    let Some(scene) = Scene::new(Kernel::V6_12) else { return };
    let console = scene.run(
        r#"
load ublk_drv
truncate -s 8M /data/disk.img
serve /data/disk.img --direct off --ublk=7 --control unix:/data/control --allow-dir /data
/test/nowait export snapshot @0 /data/overlay --control /data/control; echo "guest: snapshot $?"
/test/nowait upgrade --control /data/control; echo "guest: upgrade $?"
dd if=/dev/ublkb7 bs=1M count=8 iflag=direct 2>/dev/null | cmp - /data/disk.img && echo "guest: it is served"
end_server TERM; echo "guest: ended $status"
"#,
    );
    assert_said(
        &console,
        &[
            "cannot keep requests back (Linux 6.16 can)",
            "guest: snapshot 1",
            "guest: upgrade 1",
            "guest: it is served",
            "guest: ended 0",
        ],
    );
}
