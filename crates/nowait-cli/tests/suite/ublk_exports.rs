//! Several exports of one server are block devices of one guest, beside a node whose server changes (`ublk_pauses.rs`).
//!
//! Invariant: what is written to a node is in the image of its export, and in no other.

use crate::common::Kernel;
use crate::ublk::{Scene, assert_said};
use crate::ublk_pauses::{CHANGED, users_went_on};

/// Two nodes of a confined server through an upgrade to its end; then a server of which the nodes are taken away one
/// after the other.
const TWO: &str = r#"
load ublk_drv
truncate -s 16M /data/a.img /data/b.img
for n in 1 2 3 4; do dd if=/test/random of=/data/random$n bs=1M skip=$((4 * (n - 1))) count=4 2>/dev/null; done
both() { serve a=/data/a.img b=/data/b.img --direct off --control unix:/data/control "$@"; }
# Writes a file to a node, from a MiB on.
put() { dd if=/data/$1 of=/dev/ublkb$2 bs=1M seek=$3 conv=fsync 2>/dev/null || echo "guest: I/O error"; }
# Whether a file has what was written in the two halves.
has() { cat /data/$2 /data/$3 | cmp - $1 -n 8388608 && echo "guest: $1 is right"; }
both --ublk=b=4 --ublk=3 --sandbox on
put random1 3 0; put random2 4 0
command export remove b; echo "guest: removed $?"
command export remove a; echo "guest: removed the default $?"
upgraded && wait $server && echo "guest: upgraded"
put random3 3 4; put random4 4 4
upgraded && echo "guest: upgraded again"
/test/nowait ublk list
echo 3 >/proc/sys/vm/drop_caches
has /dev/ublkb3 random1 random3; has /dev/ublkb4 random2 random4
kill -TERM $(pidof nowait)
for try in $(seq 100); do [ -e /data/control ] || break; sleep 0.1; done
ls /dev/ublkb3 /dev/ublkb4 2>/dev/null || echo "guest: no nodes"
/test/nowait ublk list; echo "guest: listed"
has /data/a.img random1 random3; has /data/b.img random2 random4

both --ublk --ublk
grep -c '^serving /dev/ublkb[01]$' /data/out | sed 's/^/guest: nodes /'
/test/nowait ublk stop 1; command export remove b; echo "guest: removed without its node $?"
upgraded && wait $server && echo "guest: upgraded with one node"
put random2 0 0
/test/nowait ublk stop 0
for try in $(seq 100); do [ -e /data/control ] || break; sleep 0.1; done
[ -e /data/control ] || echo "guest: it ended with its last node"
has /data/a.img random2 random3; has /data/b.img random2 random4
both --ublk=5 --ublk=a=; /test/nowait ublk list
dd if=/dev/zero of=/data/c.img bs=1M count=1 2>/dev/null
/test/nowait serve c=/data/c.img d=/data/random1 --direct off --ublk --ublk=5; echo "guest: taken $?"
/test/nowait ublk list; end_server TERM; echo "guest: ended $status"
cat /data/out
"#;

#[test]
fn a_node_goes_on_through_changes_of_its_image_and_two_of_one_server_until_both_are_stopped() {
    let Some(scene) = Scene::new(Kernel::V7_3) else { return };
    let [changed, two] = scene.run([CHANGED, TWO]);
    users_went_on(&changed.console);
    two_exports_were_nodes(&two.console);
}

/// After [`TWO`]: through upgrades, until both are stopped or taken away.
fn two_exports_were_nodes(console: &str) {
    assert_said(
        console,
        &[
            "it is /dev/ublkb4 ('nowait ublk stop 4' removes that)",
            "guest: removed 1",
            "the default export cannot be removed",
            "guest: removed the default 1",
            "guest: upgraded\r",
            "guest: upgraded again",
            "guest: /dev/ublkb3 is right",
            "guest: /dev/ublkb4 is right",
            "guest: no nodes",
            "guest: nodes 2",
            "guest: removed without its node 0",
            "guest: upgraded with one node",
            "guest: it ended with its last node",
            "/dev/ublkb5: process",
            "guest: taken 1",
            "guest: ended 0",
        ],
    );
    for image in ["a", "b"] {
        let line = format!("guest: /data/{image}.img is right");
        assert_eq!(console.matches(&line).count(), 2, "{line}: {console}");
    }
    assert!(!console.contains("guest: I/O error"), "{console}");
    let listed = console.split("guest: no nodes").nth(1).and_then(|rest| rest.lines().nth(1));
    assert_eq!(listed.map(str::trim_end), Some("guest: listed"), "{console}");
}
