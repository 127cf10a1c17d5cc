//! A few seconds of each target, with a seed that nobody had before, each in a process of its own:
//! a panic or memory would be everybody's there.
//!
//! Knows: the program. Known by: nobody.

use std::process::Command;

/// Runs the target for a while.
fn holds(name: &str) {
    let findings = env!("CARGO_TARGET_TMPDIR");
    let mut command = Command::new(env!("CARGO_BIN_EXE_nowait-fuzz"));
    let output = command.args([name, "--seconds", "4", "--findings", findings]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
    assert!(said.contains(&format!("{name}: seed ")) && said.contains("inputs ("));
}

#[test]
fn no_bytes_break_the_handshake() {
    holds("handshake");
}

#[test]
fn no_bytes_break_the_transmission_phase() {
    holds("transmission");
}

#[test]
fn no_bytes_break_what_looks_at_qcow2_images() {
    holds("image");
}

#[test]
fn no_bytes_break_what_changes_qcow2_images() {
    holds("changed");
}

#[test]
fn no_list_of_segments_breaks_the_engine() {
    holds("segments");
}

#[test]
fn no_bytes_of_a_server_break_the_copying_client() {
    holds("client");
}
