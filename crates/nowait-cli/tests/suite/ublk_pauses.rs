//! A node whose server is exchanged or opens its image again, while programs use it.
//!
//! Invariant: the users of the node see a pause and nothing else.

use crate::ublk::assert_said;

/// A node under load through snapshots, another size, and upgrades.
pub(crate) const CHANGED: &str = r#"
load ublk_drv
truncate -s 64M /data/disk.img
serve /data/disk.img --direct off --ublk=7 --control unix:/data/control --allow-dir /data
/test/mkfs.ext4 -q /dev/ublkb7 && mount -t ext4 /dev/ublkb7 /disk/new
dd if=/test/random of=/data/random bs=1M count=4 2>/dev/null
( n=0; while [ ! -e /data/enough ]; do
    n=$((n + 1))
    dd if=/data/random of=/disk/new/file bs=64k oflag=direct conv=fsync 2>/dev/null || echo "guest: I/O error"
    dd if=/disk/new/file bs=64k iflag=direct 2>/dev/null | cmp - /data/random || echo "guest: differs"
done; [ $n -gt 1 ] && echo "guest: load ended" ) & load=$!
threads first $server
for n in 1 2 3; do
    sleep 0.3
    command export snapshot @0 /data/overlay$n && echo "guest: snapshot $n"
done
command export resize @0 80M && echo "guest: resized to $(blockdev --getsz /dev/ublkb7)"
for n in 1 2 3; do
    sleep 0.3
    upgraded && echo "guest: upgrade $n"
done
wait $server; echo "guest: the first server ended $?"
sleep 0.3; threads upgraded $(pidof nowait)
touch /data/enough; wait $load
for pid in $(pidof nowait); do kill -KILL $pid; done
for try in $(seq 100); do /test/nowait ublk list | grep -q waiting && break; sleep 0.3; done
/test/nowait ublk list
serve /data/overlay3 --direct off --ublk=7 --control unix:/data/control
echo 3 >/proc/sys/vm/drop_caches
cmp /disk/new/file /data/random && echo "guest: the file is whole"
umount /disk/new
idle node
/test/nowait ublk list
/test/nowait ublk stop 7; echo "guest: stopped $?"
for try in $(seq 100); do [ -e /data/control ] || break; sleep 0.1; done
[ -e /data/control ] || echo "guest: the last server ended"
/test/nowait check /data/overlay3 && echo "guest: the image is right"
cat /data/out
"#;

/// After [`CHANGED`].
pub(crate) fn users_went_on(console: &str) {
    let counted =
        ["snapshot", "upgrade"].map(|what| [1, 2, 3].map(|n| format!("guest: {what} {n}")));
    assert_said(console, &counted.as_flattened().iter().map(String::as_str).collect::<Vec<_>>());
    assert_said(
        console,
        &[
            "guest: resized to 163840",
            "guest: the first server ended 0",
            "guest: load ended",
            "/dev/ublkb7    waiting",
            "guest: the file is whole",
            "guest: node: idle",
            "guest: stopped 0",
            "guest: the last server ended",
            "guest: the image is right",
        ],
    );
    assert!(!console.contains("I/O error") && !console.contains("differs"), "{console}");
    ["first", "upgraded"].into_iter().for_each(|server| are_flushers(console, server));
}

/// Checks that all threads of `server` are I/O flushers, workers among them.
fn are_flushers(console: &str, server: &str) {
    assert!(!console.contains(&format!("guest: {server}: no flusher")), "{server}: {console}");
    let line = format!("guest: {server}: flusher nowait-worker");
    assert!(console.contains(&line), "'{line}': {console}");
}

/// A driver that cannot keep requests back.
pub(crate) const KEPT: &str = r#"
load ublk_drv
truncate -s 8M /data/disk.img
serve /data/disk.img --direct off --ublk=7 --control unix:/data/control --allow-dir /data
/test/nowait export snapshot @0 /data/overlay --control /data/control; echo "guest: snapshot $?"
/test/nowait upgrade --control /data/control; echo "guest: upgrade $?"
dd if=/dev/ublkb7 bs=1M count=8 iflag=direct 2>/dev/null | cmp - /data/disk.img && echo "guest: it is served"
idle node
end_server TERM; echo "guest: ended $status"
"#;

/// Servers that are I/O flushers, that of a user among them; one that has not been asked to, and some that may not.
pub(crate) const NBD_FLUSHERS: &str = r#"
chmod 777 /data; chown 1000 /data/disk.img
uri='nbd+unix:///?socket=/data/socket'
common='/data/disk.img --direct off --nbd unix:/data/socket --control unix:/data/control'
user='/test/setpriv --reuid=1000 --regid=1000 --clear-groups'
serve $common; threads plain $server; end_server TERM
as="$user --inh-caps=+sys_resource --ambient-caps=+sys_resource"
serve $common --io-flusher --sandbox on
dd if=/test/random of=/data/random bs=1M count=8 2>/dev/null
/test/nowait copy /data/random $uri && cmp /data/random /data/disk.img && echo "guest: copied"
threads nbd $server; idle nbd
upgraded && wait $server && echo "guest: upgraded"
/test/nowait copy /data/random $uri; threads successor $(pidof nowait)
kill $(pidof nowait); for try in $(seq 100); do pidof nowait >/data/pid || break; sleep 0.1; done
$user /test/nowait serve $common --io-flusher; echo "guest: user $?"
as='/test/setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource'
serve /data/disk.img --direct off --ublk=7
threads 'without the right' $server; end_server TERM
$as /test/nowait serve /data/disk.img --ublk --io-flusher; echo "guest: asked for $?"
"#;

/// After [`KEPT`] and [`NBD_FLUSHERS`]: the driver refuses a pause, and the node goes on.
pub(crate) fn a_pause_was_refused(console: &str) {
    assert_said(
        console,
        &[
            "cannot keep requests back (Linux 6.16 can)",
            "guest: snapshot 1",
            "guest: upgrade 1",
            "guest: it is served",
            "guest: ended 0",
        ],
    );
    // A server of NBD, because this guest's root has the right that a container's has not.
    assert_said(
        console,
        &[
            "--io-flusher: the capability CAP_SYS_RESOURCE is missing",
            "guest: user 1",
            "guest: asked for 1",
            "guest: copied",
            "guest: node: idle",
            "guest: nbd: idle",
            "guest: upgraded",
        ],
    );
    ["nbd", "successor"].into_iter().for_each(|server| are_flushers(console, server));
    for server in ["plain", "without the right"] {
        assert!(console.contains(&format!("guest: {server}: no flusher nowait")), "{console}");
        assert!(!console.contains(&format!("guest: {server}: flusher")), "{console}");
    }
    assert!(console.contains("nowait: warning: --ublk: when memory is short"), "{console}");
}
