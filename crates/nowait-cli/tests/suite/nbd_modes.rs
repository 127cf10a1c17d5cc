//! What clients are told in every mode that the installed libnbd can do; a block device as an image.
//!
//! Invariant: what is compared with is the command line, or bytes that did not come through the server.
//! Knows: nbdinfo, libnbd's Python binding, losetup. Known by: nobody.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::common::certificates::{Authority, Flaw, Role};
use crate::common::nbd::{Client, ENOTSUP, FLAG_FAST_ZERO, FLAG_NO_HOLE, Mode, RawRequest, ZERO};
use crate::common::{
    Finished, MIB, PYTHON, Scratch, Server, python_with_nbd, require_tool, skip, tool,
};

/// What nbdinfo says of `uri`, with more `arguments`.
fn told(uri: &str, arguments: &[&str]) -> Value {
    let said = tool("nbdinfo").arg("--json").args(arguments).arg(uri).succeeds();
    serde_json::from_str(&said).expect("JSON from nbdinfo")
}

/// Checks each of `wanted` in `answer`. What only a newer libnbd tells is checked where it is told.
fn tells(answer: &Value, wanted: &Value) {
    for (key, value) in wanted.as_object().expect("keys and values") {
        assert_eq!(&answer[key], value, "{key} in {answer}");
    }
}

/// What is the same for every export of an image of `bytes`.
fn export(name: &str, bytes: u64, is_read_only: bool) -> Value {
    let changes = !is_read_only;
    json!({
        "export-name": name,
        "export-size": bytes,
        "contexts": ["base:allocation"],
        "is_read_only": is_read_only,
        "is_rotational": false,
        "can_cache": true,
        "can_df": true,
        "can_flush": true,
        "can_fua": true,
        "can_multi_conn": true,
        "can_zero": changes,
        "can_fast_zero": changes,
        "can_trim": changes,
        "block_size_minimum": 1,
        "block_size_maximum": 32 * MIB,
    })
}

/// What is said of the connection.
fn checked(answer: &Value, has_tls: bool) {
    let wanted = json!({"protocol": "newstyle-fixed", "TLS": has_tls, "structured": true});
    tells(answer, &wanted);
    assert!(answer["extended"].is_null() || answer["extended"] == true, "{answer}");
}

#[test]
fn nbdinfo_tells_the_truth_of_writable_read_only_and_listed_exports() {
    if !require_tool("nbdinfo") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 3 * MIB + 512);
    let other = scratch.sparse("other.img", MIB);
    let named = format!("other={}", other.display());
    for (extra, is_read_only) in [(&[][..], false), (&["--read-only"], true)] {
        let server = Server::start(&image, &[&[&named[..]], extra].concat());
        let first = export("", 3 * MIB + 512, is_read_only);
        let answer = told(server.uri(), &[]);
        checked(&answer, false);
        tells(&answer["exports"][0], &first);
        assert_eq!(answer["exports"][0]["description"], image.to_str().expect("UTF-8"));
        let answer = told(server.uri(), &["--list"]);
        checked(&answer, false);
        let list = answer["exports"].as_array().expect("a list");
        assert_eq!(list.len(), 2);
        tells(&list[0], &first);
        tells(&list[1], &export("other", MIB, is_read_only));
        server.stop();
    }
}

#[test]
fn nbdinfo_tells_the_truth_of_exports_behind_tls() {
    if !require_tool("nbdinfo") {
        return;
    }
    let (scratch, certs) = (Scratch::new(), Scratch::new());
    let authority = Authority::new("the authority");
    authority.trusted_in(certs.path());
    authority.certify(certs.path(), Role::Server, Flaw::None);
    let directory = certs.path().to_str().expect("UTF-8");
    let other = scratch.sparse("other.img", MIB);
    let named = format!("other={}", other.display());
    let extra = [&named, "--read-only", "--tls-certs", directory];
    let server = Server::start(&scratch.sparse("disk.img", 2 * MIB), &extra);
    let uri = format!("{}&tls-certificates={directory}", server.uri());
    let answer = told(&uri, &["--list"]);
    checked(&answer, true);
    tells(&answer["exports"][0], &export("", 2 * MIB, true));
    tells(&answer["exports"][1], &export("other", MIB, true));
    server.stop();
}

/// libnbd with one thing less at a time: what is left is told as it is, and data go both ways.
const LESSER_MODES_SCRIPT: &str = r#"
import sys
import nbd

MIB = 1 << 20

def connected(change):
    h = nbd.NBD()
    change(h)
    h.connect_uri(sys.argv[1])
    return h

def works(h, byte, chunks, fixed):
    assert h.get_protocol() == ("newstyle-fixed" if fixed else "newstyle"), h.get_protocol()
    assert h.get_structured_replies_negotiated() == chunks
    assert h.can_df() == chunks
    assert h.get_size() == 4 * MIB and not h.is_read_only()
    for can in ("flush", "fua", "trim", "zero", "fast_zero", "cache", "multi_conn"):
        assert getattr(h, "can_" + can)(), can
    h.pwrite(bytes([byte]) * MIB, 12345, nbd.CMD_FLAG_FUA)
    assert h.pread(MIB + 2, 12344) == b"\0" + bytes([byte]) * MIB + b"\0"
    h.zero(4096, 20000)
    assert h.pread(4096, 20000) == bytes(4096)
    h.flush()
    h.shutdown()

def structured(wanted):
    return lambda h: h.set_request_structured_replies(wanted)

def flags(wanted):
    return lambda h: h.set_handshake_flags(wanted)

both = nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE | nbd.HANDSHAKE_FLAG_NO_ZEROES
works(connected(structured(True)), 1, True, True)
works(connected(structured(False)), 2, False, True)
works(connected(flags(both)), 3, True, True)
works(connected(flags(nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE)), 4, True, True)
works(connected(flags(nbd.HANDSHAKE_FLAG_NO_ZEROES)), 5, False, False)
works(connected(flags(0)), 6, False, False)
"#;

#[test]
fn libnbd_is_served_without_structured_replies_and_without_options() {
    if !python_with_nbd() {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 4 * MIB);
    let server = Server::start(&image, &[]);
    tool(PYTHON).args(["-c", LESSER_MODES_SCRIPT, server.uri()]).succeeds();
    server.stop();
    let mut expected = vec![0; 4 << 20];
    expected[12345..12345 + (1 << 20)].fill(6);
    expected[20000..24096].fill(0);
    assert!(fs::read(&image).expect("the image") == expected);
}

/// A loop device, detached when it is dropped.
struct LoopDevice(String);

impl LoopDevice {
    /// One on `file`; `None` where there is none to be had.
    fn on(file: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8(made.stdout).ok()?.trim().to_owned();
        made.status.success().then_some(Self(name))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // It fails only where the device is gone already, which is what it is for.
        let _ = Command::new("losetup").args(["--detach", &self.0]).output();
    }
}

/// NBD proto.md, "Command flags": where zeroing is no faster than writing, the server MUST fail quickly
/// with `NBD_ENOTSUP`. A kernel that is to zero a device and keep its storage may write zeros.
#[test]
fn nbd_must_fast_zeroing_of_a_device_never_comes_to_writing() {
    if !require_tool("losetup") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 4 * MIB, 7);
    let Some(device) = LoopDevice::on(&image) else {
        skip("no loop device for this user");
        return;
    };
    let mut expected = fs::read(&image).expect("the image");
    let server = Server::start(Path::new(&device.0), &[]);
    let mut client = Client::connect(&server.socket(), Mode::Extended).expect("a connection");
    let mut zero = |offset: u64, flags| {
        let request = RawRequest { kind: ZERO, flags, ..RawRequest::write(offset, 1 << 20) };
        client.call_raw(&request, &[])
    };
    assert_eq!(zero(0, FLAG_FAST_ZERO | FLAG_NO_HOLE), Err(ENOTSUP));
    zero(MIB, FLAG_NO_HOLE).expect("zeroes, however long it takes");
    expected[1 << 20..2 << 20].fill(0);
    // Giving storage back is fast where the device can do it.
    match zero(2 * MIB, FLAG_FAST_ZERO) {
        Ok(_) => expected[2 << 20..3 << 20].fill(0),
        Err(error) => assert_eq!(error, ENOTSUP),
    }
    assert!(client.read(0, 4 * MIB as u32).expect("bytes") == expected);
    server.stop();
}
