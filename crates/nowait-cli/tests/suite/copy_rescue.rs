//! `nowait copy --rescue` of partly unreadable sources: readable data is copied, unreadable ranges
//! become zeros and are listed.

use std::fs::{self, File};
use std::path::Path;

use serde_json::Value;

use crate::common::{
    Finished, KIB, MIB, NOWAIT, Scratch, accepted, allocated, refusal, require_tool, text, tool,
};
use crate::copy_other_servers::Peer;

/// The exit status of a copy with unreadable ranges.
const UNREADABLE: i32 = 4;
/// The offset of the first data cluster that qemu-img allocates.
const FIRST_DATA: u64 = 5 * 64 * KIB;

/// Copies with `--rescue --json` and checks the exit status for lost ranges. Returns the JSON
/// object and standard error.
fn rescue(from: &str, to: &Path, extra: &[&str]) -> (Value, String) {
    let mut command = tool(NOWAIT);
    command.args(["copy", from, text(to), "--rescue", "--json"]).args(extra);
    let printed = command.output().expect("timeout(1)");
    let error = String::from_utf8_lossy(&printed.stderr).into_owned();
    assert_eq!(printed.status.code(), Some(UNREADABLE), "{error}");
    (serde_json::from_slice(&printed.stdout).expect("JSON"), error)
}

/// The lost ranges, as offset and length.
fn ranges(report: &Value) -> Vec<(u64, u64)> {
    let number = |value: &Value| value.as_u64().expect("a number");
    let all = report["unreadable"].as_array().expect("an array").iter();
    all.map(|range| (number(&range["offset"]), number(&range["length"]))).collect()
}

/// The bytes of `whole` with zeros in `lost`.
fn without(whole: &[u8], lost: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for &(pos, len) in lost {
        bytes[pos as usize..(pos + len) as usize].fill(0);
    }
    bytes
}

#[test]
fn an_image_with_a_truncated_cluster_is_copied_except_for_that_cluster() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let image = scratch.join("cut.qcow2");
    tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("64M").succeeds();
    let mut io = tool("qemu-io");
    io.args(["-f", "qcow2"]);
    // The third allocated cluster is in the middle of the data.
    for write in ["-P 1 0 64k", "-P 2 192k 64k", "-P 3 128k 64k"] {
        io.args(["-c", &format!("write {write}")]);
    }
    io.arg(&image).succeeds();
    let whole = scratch.join("whole");
    accepted(&["copy", text(&image), text(&whole)]);
    let file = File::options().write(true).open(&image).expect("the image");
    file.set_len(FIRST_DATA + 2 * 64 * KIB).expect("a shorter image");

    let target = scratch.join("target");
    let refused = refusal(&["copy", text(&image), text(&target)]);
    refused.says(&["cut.qcow2"]);
    assert!(refused.code == 1 && !target.exists());

    let (report, error) = rescue(text(&image), &target, &[]);
    let lost = [(128 * KIB, 64 * KIB)];
    assert_eq!(ranges(&report), lost);
    assert_eq!(report["unreadable_bytes"], 64 * KIB);
    assert_eq!(report["unreadable_truncated"], false);
    assert!(error.contains("65536 bytes cannot be read"), "{error}");
    assert!(error.contains("\n  offset 131072, length 65536\n"), "{error}");
    assert!(fs::read(&target).expect("the copy") == without(&fs::read(&whole).expect("it"), &lost));
    assert!(allocated(&target) < MIB, "what is lost is a hole, as is what was one");
}

#[test]
fn an_image_with_an_unreadable_table_is_copied_beyond_it() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let image = scratch.join("cut.qcow2");
    // A table of 512 bytes maps 64 clusters, 32 KiB together.
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512"];
    tool("qemu-img").args(create).arg(&image).arg("4M").succeeds();
    let mut io = tool("qemu-io");
    io.args(["-f", "qcow2"]);
    for write in ["-P 1 0 64k", "-P 2 3M 64k", "-P 3 1M 4k"] {
        io.args(["-c", &format!("write {write}")]);
    }
    io.arg(&image).succeeds();
    let whole = scratch.join("whole");
    accepted(&["copy", text(&image), text(&whole)]);
    // The table entry for the data at 1 MiB is not the start of a cluster.
    use std::os::unix::fs::FileExt;
    let file = File::options().read(true).write(true).open(&image).expect("the image");
    let mut tables = [0; 8];
    file.read_exact_at(&mut tables, 40).expect("a header");
    let entry = u64::from_be_bytes(tables) + 8 * (MIB / (32 * KIB));
    file.write_all_at(&(1_u64 << 63 | 1 << 55).to_be_bytes(), entry).expect("a damaged entry");

    let target = scratch.join("target");
    refusal(&["copy", text(&image), text(&target)]).says(&["cut.qcow2"]);
    let (report, _) = rescue(text(&image), &target, &[]);
    let lost = [(MIB, 32 * KIB)];
    assert_eq!(ranges(&report), lost);
    assert!(fs::read(&target).expect("the copy") == without(&fs::read(&whole).expect("it"), &lost));
}

#[test]
fn a_readable_source_is_rescued_completely_with_exit_status_0() {
    let scratch = Scratch::new();
    let source = scratch.dotted("source", 8 * MIB, 64 * KIB as usize, MIB);
    let target = scratch.join("target");
    let printed = accepted(&["copy", text(&source), text(&target), "--rescue", "--json"]);
    let report: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!((ranges(&report), &report["unreadable_bytes"]), (vec![], &0.into()));
    assert!(fs::read(&source).expect("it") == fs::read(&target).expect("the copy"));
}

#[test]
fn rescue_does_not_go_with_verify() {
    let refused = refusal(&["copy", "a", "b", "--rescue", "--verify"]);
    assert_eq!(refused.code, 2, "{}", refused.error);
}

/// An export of `source`. Reads fail with EIO where they touch a bad block of 4096 bytes: `bad` is
/// a shell condition on its number `$block`.
fn failing(scratch: &Scratch, source: &Path, bad: &str) -> Peer {
    let size = fs::metadata(source).expect("the source").len();
    let read = format!(
        "pread=block=$(($4 / 4096)); last=$((($4 + $3 - 1) / 4096)); \
         while [ $block -le $last ]; do \
         if {bad}; then echo EIO bad block >&2; exit 1; fi; block=$((block + 1)); done; \
         exec dd if='{}' skip=$4 count=$3 iflag=skip_bytes,count_bytes,fullblock bs=64k status=none",
        source.display()
    );
    let size = format!("get_size=echo {size}");
    Peer::nbdkit(scratch, &["-r", "eval", &size, &read])
}

#[test]
fn only_the_blocks_that_a_server_cannot_read_are_lost() {
    nowait_testkit::needs!(require_tool("nbdkit"));
    let scratch = Scratch::new();
    let source = scratch.random("source", 3 * MIB + 512, 1);
    let peer = failing(
        &scratch,
        &source,
        "[ $block -eq 0 ] || [ $block -eq 300 ] || [ $block -eq 301 ] || [ $block -eq 768 ]",
    );
    let target = scratch.join("target");
    refusal(&["copy", &peer.uri(), text(&target)]).says(&["cannot read at byte"]);
    let (report, _) = rescue(&peer.uri(), &target, &[]);
    let lost = [(0, 4 * KIB), (300 * 4 * KIB, 8 * KIB), (768 * 4 * KIB, 512)];
    assert_eq!(ranges(&report), lost);
    assert_eq!(report["unreadable_bytes"], 12 * KIB + 512);
    assert!(
        fs::read(&target).expect("the copy") == without(&fs::read(&source).expect("it"), &lost)
    );
}

#[test]
fn of_many_lost_ranges_the_first_are_on_standard_error_and_all_in_json() {
    nowait_testkit::needs!(require_tool("nbdkit"));
    let scratch = Scratch::new();
    let source = scratch.random("source", MIB / 4, 1);
    let peer = failing(&scratch, &source, "[ $((block % 2)) -eq 1 ]");
    let (report, error) = rescue(&peer.uri(), &scratch.join("target"), &[]);
    assert_eq!(ranges(&report).len(), 32);
    assert_eq!(error.lines().count(), 22, "{error}");
    assert!(error.ends_with("  and 12 more ranges\n"), "{error}");
}
