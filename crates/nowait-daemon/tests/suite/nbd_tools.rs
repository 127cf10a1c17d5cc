//! libnbd's tools and fio: the server's capabilities, and the integrity of all data.
//!
//! Invariant: each test compares with bytes that were not transferred by the server.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;

use crate::common::{
    Finished, GIB, KIB, MIB, PYTHON, Scratch, Server, VARIANTS, allocated, export, python_with_nbd,
    require_tool, tool,
};

/// The output of nbdinfo for the only export.
fn export_of(server: &Server) -> Value {
    let text = tool("nbdinfo").args(["--json", &server.uri()]).succeeds();
    let answer: Value = serde_json::from_str(&text).expect("JSON from nbdinfo");
    answer["exports"][0].clone()
}

/// The (offset, length, kind) lines of `nbdinfo --map`.
fn map_of(server: &Server) -> Vec<(u64, u64, String)> {
    let text = tool("nbdinfo").args(["--map", &server.uri()]).succeeds();
    let number = |word: Option<&str>| word.and_then(|word| word.parse().ok()).expect("a number");
    text.lines()
        .map(|line| {
            let mut words = line.split_whitespace();
            let (offset, len, _flags) = (number(words.next()), number(words.next()), words.next());
            (offset, len, words.next().expect("a kind").to_owned())
        })
        .collect()
}

/// True if both files hold the same bytes.
fn same_bytes(one: &Path, other: &Path) -> bool {
    const CHUNK: usize = 4 << 20;
    let (one, other) = (File::open(one).expect("a file"), File::open(other).expect("a file"));
    let size = one.metadata().expect("a size").len();
    let (mut left, mut right) = (vec![0; CHUNK], vec![0; CHUNK]);
    size == other.metadata().expect("a size").len()
        && (0..size).step_by(CHUNK).all(|offset| {
            let len = usize::try_from(size - offset).map_or(CHUNK, |rest| rest.min(CHUNK));
            one.read_exact_at(&mut left[..len], offset).expect("bytes");
            other.read_exact_at(&mut right[..len], offset).expect("bytes");
            left[..len] == right[..len]
        })
}

#[test]
fn nbdinfo_sees_every_capability_of_a_writable_image() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", 3 * MIB + 512), "");
    let export = export_of(&server);
    assert_eq!(export["export-size"], 3 * MIB + 512);
    for yes in ["can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn"] {
        assert_eq!(export[yes], true, "{yes} in {export}");
    }
    assert_eq!(export["is_read_only"], false);
    server.stop();
}

#[test]
fn nbdinfo_sees_that_a_read_only_export_is_read_only() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), "read-only = true");
    assert_eq!(export_of(&server)["is_read_only"], true);
    server.stop();
}

#[test]
fn nbdinfo_finds_the_export_under_its_name_and_no_other() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let scratch = Scratch::new();
    let server = Server::of(&export("backup", &scratch.sparse("disk.img", MIB)));
    let size = tool("nbdinfo").args(["--size", &server.uri_of("backup")]).succeeds();
    assert_eq!(size.trim(), MIB.to_string());
    tool("nbdinfo").args(["--size", &server.uri_of("other")]).fails();
    server.stop();
}

#[test]
fn nbdinfo_gets_the_same_answer_over_tcp() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), "nbd = ['tcp:127.0.0.1:0']");
    for uri in [server.uri(), format!("nbd://127.0.0.1:{}", server.port())] {
        assert_eq!(tool("nbdinfo").args(["--size", &uri]).succeeds().trim(), MIB.to_string());
    }
    server.stop();
}

#[test]
fn nbdinfo_maps_data_holes_and_later_writes() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 8 * MIB);
    let file = File::options().write(true).open(&image).expect("the image");
    file.write_all_at(&vec![7; KIB as usize * 256], 2 * MIB).expect("room");
    file.sync_all().expect("a synced image");

    let server = Server::start(&image, "");
    let hole = || "hole,zero".to_owned();
    let data = || "data".to_owned();
    let tail = 2 * MIB + 256 * KIB;
    assert_eq!(
        map_of(&server),
        [(0, 2 * MIB, hole()), (2 * MIB, 256 * KIB, data()), (tail, 8 * MIB - tail, hole())]
    );

    let mut client = server.connect();
    client.write(4 * MIB, &[9; KIB as usize * 64]).expect("a write into a hole");
    let end = 4 * MIB + 64 * KIB;
    assert_eq!(
        map_of(&server)[2..],
        [(tail, 4 * MIB - tail, hole()), (4 * MIB, 64 * KIB, data()), (end, 8 * MIB - end, hole())]
    );
    server.stop();
}

#[test]
fn nbdcopy_takes_a_gibibyte_both_ways_and_holes_stay_holes() {
    nowait_testkit::needs!(require_tool("nbdcopy"));
    let scratch = Scratch::new();
    let source = scratch.dotted("source", GIB, MIB as usize, 8 * MIB);
    let image = scratch.sparse("disk.img", GIB);
    let back = scratch.join("back");

    let server = Server::start(&image, "");
    tool("nbdcopy").arg("--flush").arg(&source).arg(server.uri()).succeeds();
    tool("nbdcopy").arg(server.uri()).arg(&back).succeeds();
    server.stop();

    assert!(same_bytes(&source, &image), "what was copied in differs");
    assert!(same_bytes(&source, &back), "what was copied out differs");
    let most = allocated(&source) + MIB;
    assert!(allocated(&image) <= most, "{} bytes for an image of {most}", allocated(&image));
    assert!(allocated(&back) <= most, "{} bytes for a copy of {most}", allocated(&back));
}

/// Every call of the binding that applies to a disk; strict mode is off, so that invalid requests
/// are sent.
const LIBNBD_SCRIPT: &str = r#"
import errno, sys
import nbd

h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_uri(sys.argv[1])
h.set_strict_mode(0)
assert h.get_structured_replies_negotiated()
assert h.can_meta_context("base:allocation")
size = h.get_size()
KIB = 1024

def refused(wanted, call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errnum == wanted, (arguments[1:], error.errnum, wanted)
    else:
        raise AssertionError("not refused: %r" % (call,))

pattern = bytes(range(1, 252)) * 1000
for offset in (0, 1, 511, 4095, 4096, 100001, size - len(pattern)):
    h.pwrite(pattern, offset)
    assert h.pread(len(pattern), offset) == pattern, offset
for flags in (0, nbd.CMD_FLAG_FUA):
    h.pwrite(b"\x5a" * 64 * KIB, 512 * KIB, flags)
    assert h.pread(64 * KIB, 512 * KIB) == b"\x5a" * 64 * KIB
    h.zero(10 * KIB + 1, 512 * KIB + 3, flags)
    assert h.pread(10 * KIB + 1, 512 * KIB + 3) == bytes(10 * KIB + 1)
    assert h.pread(3, 512 * KIB) == b"\x5a" * 3
    h.zero(4 * KIB, 544 * KIB, flags | nbd.CMD_FLAG_NO_HOLE)
    assert h.pread(4 * KIB, 544 * KIB) == bytes(4 * KIB)
    h.pwrite(b"\x5a" * 64 * KIB, 512 * KIB)
    h.trim(64 * KIB, 512 * KIB, flags)
    assert set(h.pread(64 * KIB, 512 * KIB)) <= {0, 0x5a}
    h.flush()
assert h.pread(KIB, 100001, nbd.CMD_FLAG_DF) == pattern[:KIB]
if h.can_cache():
    h.cache(KIB, 100001)
if h.can_fast_zero():
    # Fast or not at all: then nothing has changed.
    before = h.pread(4 * KIB, 200 * KIB)
    try:
        h.zero(4 * KIB, 200 * KIB, nbd.CMD_FLAG_FAST_ZERO)
        assert h.pread(4 * KIB, 200 * KIB) == bytes(4 * KIB)
    except nbd.Error as error:
        assert error.errnum == errno.ENOTSUP
        assert h.pread(4 * KIB, 200 * KIB) == before

def extents(count, offset, flags=0):
    found = []
    def note(context, start, entries, error):
        assert (context, start) == ("base:allocation", offset)
        found.extend(zip(entries[::2], entries[1::2]))
        return 0
    h.block_status(count, offset, note, flags)
    return found

at, end = 0, size
while at < end:
    found = extents(end - at, at)
    assert found and all(length > 0 for length, _ in found), found
    for length, kind in found:
        step = min(length, end - at)
        if kind & nbd.STATE_ZERO:
            assert h.pread(step, at) == bytes(step), (at, step)
        at += step
assert len(extents(size, 0, nbd.CMD_FLAG_REQ_ONE)) == 1

refused(errno.EINVAL, h.pread, KIB, size)
refused(errno.EINVAL, h.pread, KIB, size - 1)
refused(errno.EINVAL, h.pread, 1, 1 << 62)
refused(errno.ENOSPC, h.pwrite, b"x" * KIB, size)
refused(errno.ENOSPC, h.pwrite, b"x" * KIB, size - 1)
refused(errno.ENOSPC, h.zero, KIB, size - 1)
assert h.pread(251, size - 251) == pattern[-251:], "a refused write left bytes"
h.flush()
h.shutdown()
"#;

#[test]
fn libnbd_gets_every_command_answered_and_bad_ones_refused() {
    nowait_testkit::needs!(python_with_nbd());
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", 4 * MIB), "");
    tool(PYTHON).args(["-c", LIBNBD_SCRIPT, &server.uri()]).succeeds();
    server.stop();
}

/// Writes random blocks of random sizes all over the export, then reads each back by its checksum.
fn fio_verify(server: &Server, bytes: u64) {
    let state = Scratch::new();
    tool("fio")
        .current_dir(state.path())
        .args([
            "--name=verify",
            "--ioengine=nbd",
            "--rw=randwrite",
            "--bsrange=512-64k",
            "--iodepth=32",
        ])
        .args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--fsync=100"])
        .arg(format!("--uri={}", server.uri()))
        .arg(format!("--size={bytes}"))
        .succeeds();
}

#[test]
fn fio_reads_back_the_checksums_it_wrote_in_every_variant() {
    nowait_testkit::needs!(require_tool("fio"));
    for (number, variant) in VARIANTS.iter().enumerate() {
        println!("serve {variant:?}");
        let bytes = if number == 0 { 256 * MIB } else { 32 * MIB };
        let scratch = Scratch::new();
        let image = scratch.sparse("disk.img", bytes);
        let server = Server::start(&image, variant);
        fio_verify(&server, bytes);
        server.stop();
        assert_eq!(fs::metadata(&image).expect("the image").len(), bytes);
    }
}
