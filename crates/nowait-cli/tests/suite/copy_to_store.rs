//! `nowait copy` to an object of a store: uploads in parts.
//!
//! Invariant: the store of these tests answers only what is signed as it has to be, and has the object of
//! an upload only when that is complete.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nowait_testkit::multipart_upload::Call;
use nowait_testkit::signer::Signer;
use nowait_testkit::web_server::{Lie, WebServer};
use nowait_testkit::{ends_with_test, output_of, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Finished, MIB, NOWAIT, Scratch, Server, accepted, refusal_under, text, tool};
use crate::remote_objects::{KEY, SECRET};

const URL: &str = "s3://bucket/a dir/disk.img";
/// Three parts.
const BYTES: u64 = 20 * MIB + 512;
const OLD: &[u8] = b"the object that was there before";

/// A store.
struct Store {
    server: WebServer,
    environment: Vec<String>,
}

impl Store {
    /// A store with an object at `URL`, or with none.
    fn new(object: Option<&[u8]>) -> Self {
        let server =
            WebServer::start(object.unwrap_or_default().to_vec(), "/bucket/a%20dir/disk.img");
        let (key, secret, region) = (KEY.into(), SECRET.into(), String::new());
        server.script().signer = Some(Signer::Aws { key, secret, region });
        server.script().is_absent = object.is_none();
        let environment = environment_of(&server);
        Self { server, environment }
    }

    fn environment(&self) -> Vec<&str> {
        self.environment.iter().map(String::as_str).collect()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = tool("env");
        command.args(&self.environment[1..]).arg(NOWAIT).arg("copy").args(arguments);
        command
    }

    fn copies(&self, arguments: &[&str]) -> String {
        self.command(arguments).succeeds()
    }

    fn refuses(&self, arguments: &[&str], words: &[&str]) {
        let refused = refusal_under(&self.environment(), &[&["copy"], arguments].concat());
        refused.says(words);
        assert!(!refused.error.contains(SECRET), "{}", refused.error);
    }

    fn start(&self, from: &str, more: &[&str]) -> Child {
        let mut command = Command::new("env");
        command.args(&self.environment[1..]).args([NOWAIT, "copy", from, URL]).args(more);
        let silent = command.stdout(Stdio::null()).stderr(Stdio::piped());
        ends_with_test(silent).spawn().expect("nowait")
    }

    fn lie(&self, on: Call, lie: Lie) {
        self.server.script().upload_lies.push((on, lie));
    }

    fn has(&self, object: &[u8]) {
        let script = self.server.script();
        assert!(!script.is_absent && script.object == object);
        assert!(script.uploads.open.is_empty(), "an upload is open");
        assert_eq!(script.unsigned, 0);
    }

    /// The store has what it had before, and no parts.
    fn is_as_before(&self, object: Option<&[u8]>) {
        wait_until("the upload is aborted", || self.server.script().uploads.open.is_empty());
        let script = self.server.script();
        assert_eq!(script.is_absent, object.is_none());
        assert!(script.is_absent || script.object == object.unwrap_or_default());
        assert_eq!(script.uploads.aborted, script.uploads.begun);
    }
}

/// The command and its arguments by which a command has the key for `server`.
pub(crate) fn environment_of(server: &WebServer) -> Vec<String> {
    vec![
        "env".into(),
        format!("AWS_ENDPOINT_URL={}", server.root()),
        format!("AWS_ACCESS_KEY_ID={KEY}"),
        format!("AWS_SECRET_ACCESS_KEY={SECRET}"),
        "AWS_REGION=us-east-1".into(),
    ]
}

fn source(scratch: &Scratch) -> (PathBuf, Vec<u8>) {
    let source = scratch.random("source", BYTES, 1);
    let bytes = fs::read(&source).expect("the source");
    (source, bytes)
}

#[test]
fn a_raw_disk_is_uploaded_compared_and_served() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let (source, bytes) = source(&scratch);
    let printed = store.copies(&[text(&source), URL, "--verify", "--json"]);
    let report: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(report["size_bytes"], BYTES);
    assert_eq!(report["to_size_bytes"], BYTES);
    assert_eq!(report["to_format"], "raw");
    assert_eq!(report["verified"], true);
    store.has(&bytes);
    assert_eq!(store.server.script().uploads.parts, 3);
    let server = Server::start_under(&store.environment(), URL.as_ref(), &["--read-only"]);
    assert!(server.connect().read(0, 20 * MIB as u32).expect("a read")[..] == bytes[..20 << 20]);
    server.stop();
}

#[test]
fn the_disk_of_a_qcow2_image_is_uploaded_with_zeros_for_its_holes() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let raw = scratch.dotted("raw", 100 * MIB, 100_000, 30 * MIB);
    let image = scratch.join("disk.qcow2");
    accepted(&["copy", text(&raw), text(&image)]);
    store.copies(&[text(&image), URL, "--requests", "64"]);
    store.has(&fs::read(&raw).expect("the source"));
    // The image itself, as it is.
    store.copies(&["-f", "raw", text(&image), URL, "--force"]);
    store.has(&fs::read(&image).expect("the image"));
    store.refuses(&[text(&raw), URL, "--force", "-O", "qcow2"], &["as a file only", "-f raw"]);
}

#[test]
fn an_object_that_exists_is_overwritten_only_with_force() {
    let (scratch, store) = (Scratch::new(), Store::new(Some(OLD)));
    let (source, bytes) = source(&scratch);
    store.refuses(&[text(&source), URL], &[URL, "already", "--force"]);
    assert_eq!(store.server.script().uploads.begun, 0);
    store.is_as_before(Some(OLD));
    store.copies(&[text(&source), URL, "--force"]);
    store.has(&bytes);
}

#[test]
fn an_object_that_is_made_during_the_upload_is_not_overwritten() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let (source, _) = source(&scratch);
    // Long enough to be noticed between the first request and the last one.
    store.server.script().delay = Duration::from_secs(1);
    let copy = store.start(text(&source), &[]);
    wait_until("the upload has begun", || store.server.script().uploads.begun == 1);
    {
        let mut script = store.server.script();
        (script.is_absent, script.object) = (false, OLD.to_vec());
    }
    let output = output_of(copy);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && printed.contains("already"), "{printed}");
    store.is_as_before(Some(OLD));
    store.server.script().delay = Duration::ZERO;
    // By the request that completes it, where nothing was seen before.
    store.server.script().is_absent = true;
    let refusal = "<Error><Code>PreconditionFailed</Code></Error>";
    store.lie(Call::Complete, Lie::Status(412, "", refusal));
    store.refuses(&[text(&source), URL], &["already", "--force"]);
    store.is_as_before(None);
}

#[test]
fn a_request_that_fails_once_is_made_again() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let (source, bytes) = source(&scratch);
    for (on, lie) in [
        (Call::Begin, Lie::Status(500, "", "")),
        (Call::Part, Lie::Status(503, "", "<Error><Code>SlowDown</Code></Error>")),
        (Call::Part, Lie::HangUp),
        (Call::Complete, Lie::Status(200, "", "<Error><Code>InternalError</Code></Error>")),
    ] {
        store.lie(on, lie);
    }
    store.copies(&[text(&source), URL]);
    store.has(&bytes);
    let parts = store.server.script().uploads.parts;
    assert!(parts >= 4, "{parts}");
}

#[test]
fn a_store_without_conditional_requests_is_uploaded_to() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let (source, bytes) = source(&scratch);
    store.server.script().uploads.knows_no_conditions = true;
    store.copies(&[text(&source), URL]);
    store.has(&bytes);
}

#[test]
fn an_upload_whose_last_answer_is_lost_is_complete() {
    let (scratch, store) = (Scratch::new(), Store::new(Some(OLD)));
    let (source, bytes) = source(&scratch);
    store.lie(Call::Complete, Lie::HangUp);
    store.copies(&[text(&source), URL, "--force"]);
    store.has(&bytes);
    store.server.script().is_absent = true;
    store.lie(Call::Complete, Lie::HangUp);
    store.copies(&[text(&source), URL]);
    store.has(&bytes);
}

#[test]
fn a_store_that_refuses_leaves_what_was_there() {
    let (scratch, store) = (Scratch::new(), Store::new(Some(OLD)));
    let (source, _) = source(&scratch);
    let arguments = [text(&source), URL, "--force"];
    let denied = Lie::Status(403, "", "<Error><Code>AccessDenied</Code></Error>");
    for on in [Call::Part, Call::Complete] {
        store.lie(on, denied.clone());
        store.refuses(&arguments, &[URL, "refuses access (403 AccessDenied)"]);
        store.is_as_before(Some(OLD));
    }
    store.lie(Call::Begin, denied);
    store.refuses(&arguments, &["refuses access (403 AccessDenied)"]);
    store.lie(Call::Complete, Lie::Status(200, "", "<Error><Code>InvalidPart</Code></Error>"));
    store.refuses(&arguments, &["(400 InvalidPart)"]);
    store.is_as_before(Some(OLD));
}

#[test]
fn parts_that_may_be_left_in_the_store_are_told_of() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let (source, _) = source(&scratch);
    let denied = Lie::Status(403, "", "<Error><Code>AccessDenied</Code></Error>");
    for on in [Call::Part, Call::Complete] {
        store.lie(on, denied.clone());
        store.lie(Call::Abort, denied.clone());
        let words = ["(403 AccessDenied); parts of it may be left in the store: the store refuses"];
        store.refuses(&[text(&source), URL], &words);
        assert_eq!(store.server.script().uploads.open.len(), 1);
        store.server.script().uploads.open.clear();
    }
}

#[test]
fn an_upload_is_given_up_when_a_part_is_never_taken() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let source = scratch.random("source", MIB, 1);
    (0..10_000).for_each(|_| store.lie(Call::Part, Lie::Status(503, "", "")));
    store.refuses(&[text(&source), URL], &["asks to come back later (503)"]);
    store.is_as_before(None);
}

#[test]
fn a_signal_aborts_the_upload_and_the_old_object_stays() {
    let (scratch, store) = (Scratch::new(), Store::new(Some(OLD)));
    let (source, _) = source(&scratch);
    for (signal, begun) in [(Signal::INT, 1), (Signal::TERM, 2)] {
        let before = store.server.script().uploads.parts;
        store.lie(Call::Part, Lie::Stall(0));
        let copy = store.start(text(&source), &["--force"]);
        wait_until("parts are there", || store.server.script().uploads.parts >= before + 2);
        kill_process(Pid::from_child(&copy), signal).expect("a child");
        let output = output_of(copy);
        assert_eq!(output.status.code(), Some(1));
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(printed, "nowait: interrupted, there is no copy\n");
        store.is_as_before(Some(OLD));
        assert_eq!(store.server.script().uploads.begun, begun);
    }
}

#[test]
fn a_source_that_is_lost_aborts_the_upload() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let source = scratch.random("source", 64 * MIB, 1);
    let server = Server::start(&source, &[]);
    // No part is taken, so that the source is not read to its end.
    (0..5).for_each(|_| store.lie(Call::Part, Lie::Stall(0)));
    let copy = store.start(server.uri(), &["--requests", "1"]);
    wait_until("parts are there", || store.server.script().uploads.parts >= 4);
    // Dropped, it is killed.
    drop(server);
    let output = output_of(copy);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), printed.lines().count()), (Some(1), 1), "{printed}");
    store.is_as_before(None);
}

#[test]
fn places_and_options_that_are_not_for_objects_are_refused() {
    let (scratch, store) = (Scratch::new(), Store::new(None));
    let (source, _) = source(&scratch);
    let web = store.server.url();
    store.refuses(&[text(&source), &web, "--force"], &[&web, "a web server is only read"]);
    let empty = scratch.sparse("empty", 0);
    store.refuses(&[text(&empty), URL], &["without bytes"]);
    let more = [text(&source), URL, "--cluster-size", "64K"];
    assert!(store.command(&more).fails().contains("--cluster-size is for qcow2"));
    let more = [text(&source), URL, "--allow-mounted"];
    assert!(store.command(&more).fails().contains("--allow-mounted is for block devices"));
    store.is_as_before(None);
    assert_eq!(store.server.script().uploads.begun, 0);
    assert!(!Path::new(URL).exists());
}
