//! The information that clients get in every mode of the installed libnbd.
//!
//! Invariant: the expected values are from the options, or bytes that were not transferred by
//! the server.

use std::fs;

use serde_json::{Value, json};

use crate::common::{
    Finished, MIB, PYTHON, Scratch, Server, export, python_with_nbd, require_tool, text, tool,
};
use nowait_testkit::certificates::{Authority, Flaw, Role};

/// The output of nbdinfo for `uri` with `arguments`.
fn nbdinfo(uri: &str, arguments: &[&str]) -> Value {
    let printed = tool("nbdinfo").arg("--json").args(arguments).arg(uri).succeeds();
    serde_json::from_str(&printed).expect("JSON from nbdinfo")
}

/// Checks each of `wanted` in `answer`.
fn assert_contains(answer: &Value, wanted: &Value) {
    for (key, value) in wanted.as_object().expect("keys and values") {
        assert_eq!(&answer[key], value, "{key} in {answer}");
    }
}

/// The expected properties of an export of `bytes`.
fn properties(name: &str, bytes: u64, is_read_only: bool) -> Value {
    let changes = !is_read_only;
    json!({
        "export-name": name,
        "export-size": bytes,
        "contexts": ["base:allocation", "qemu:allocation-depth"],
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

/// Checks the properties of the connection.
fn check_connection(answer: &Value, has_tls: bool) {
    let wanted = json!({"protocol": "newstyle-fixed", "TLS": has_tls, "structured": true});
    assert_contains(answer, &wanted);
    assert!(answer["extended"].is_null() || answer["extended"] == true, "{answer}");
}

#[test]
fn nbdinfo_reports_writable_read_only_and_listed_exports_correctly() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 3 * MIB + 512);
    let other = scratch.sparse("other.img", MIB);
    for is_read_only in [false, true] {
        let options = format!("read-only = {is_read_only}{}", export("other", &other));
        let server = Server::start(&image, &options);
        let first = properties("", 3 * MIB + 512, is_read_only);
        let answer = nbdinfo(&server.uri(), &[]);
        check_connection(&answer, false);
        assert_contains(&answer["exports"][0], &first);
        let name = image.file_name().expect("a name").to_str().expect("UTF-8");
        assert_eq!(answer["exports"][0]["description"], name);
        let answer = nbdinfo(&server.uri(), &["--list"]);
        check_connection(&answer, false);
        let list = answer["exports"].as_array().expect("a list");
        assert_eq!(list.len(), 2);
        assert_contains(&list[0], &first);
        assert_contains(&list[1], &properties("other", MIB, is_read_only));
        server.stop();
    }
}

#[test]
fn nbdinfo_reports_exports_behind_tls_correctly() {
    nowait_testkit::needs!(require_tool("nbdinfo"));
    let (scratch, certs) = (Scratch::new(), Scratch::new());
    let authority = Authority::new("the authority");
    authority.trusted_in(certs.path());
    authority.certify(certs.path(), Role::Server, Flaw::None);
    let directory = text(certs.path());
    let other = export("other", &scratch.sparse("other.img", MIB));
    let options = format!("read-only = true\ntls-certs = '{directory}'{other}");
    let server = Server::start(&scratch.sparse("disk.img", 2 * MIB), &options);
    let uri = format!("{}&tls-certificates={directory}", server.uri());
    let answer = nbdinfo(&uri, &["--list"]);
    check_connection(&answer, true);
    assert_contains(&answer["exports"][0], &properties("", 2 * MIB, true));
    assert_contains(&answer["exports"][1], &properties("other", MIB, true));
    server.stop();
}

/// libnbd with one feature less at a time: the remaining features are reported correctly, and data
/// are transferred both ways.
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
    nowait_testkit::needs!(python_with_nbd());
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 4 * MIB);
    let server = Server::start(&image, "");
    tool(PYTHON).args(["-c", LESSER_MODES_SCRIPT, &server.uri()]).succeeds();
    server.stop();
    let mut expected = vec![0; 4 << 20];
    expected[12345..12345 + (1 << 20)].fill(6);
    expected[20000..24096].fill(0);
    assert!(fs::read(&image).expect("the image") == expected);
}
