//! A failing server must not fail the measurement. This test has its own file because a program
//! that was just written cannot be started while another test is starting a child process.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;

use clap::Parser;
use nowait_bench::{Bench, BenchArgs, CancelFlag, run};
use tempfile::TempDir;

#[test]
fn a_server_that_does_not_start_is_reported_with_its_last_message_and_tried_once() {
    let directory = TempDir::new().expect("a temporary directory");
    let program = directory.path().join("nowait");
    let script = "#!/bin/sh\nif [ \"$1\" = --version ]; then echo nowait 0; exit; fi\necho no luck >&2\nexit 3\n";
    fs::write(&program, script).expect("a script");
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("an executable script");
    let image = directory.path().join("image");
    File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("a sparse file");

    let words = ["peers", "--servers", "nowait", "--caching", "cached", "--transport", "plain"];
    let line = ["nowait-bench"].iter().chain(&words).map(OsStr::new);
    let args = BenchArgs::parse_from(line.chain([OsStr::new("--file"), image.as_os_str()]));
    let bench = Bench { args, nowait: Some(program), stop: CancelFlag::default() };
    let report = run(&bench, &mut Vec::new()).expect("a report");
    assert_eq!(report.json["servers"][0]["version"], "nowait 0");
    assert_eq!(report.failures.len(), 1);
    assert!(report.failures[0].ends_with("no luck"), "{}", report.failures[0]);
    assert_eq!(report.json["comparisons"], serde_json::json!([]));
}
