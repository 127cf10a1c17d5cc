//! Runs each target for a few seconds with a new seed, each in a separate process, because a panic
//! or the memory use of one target would affect the others.

use std::process::Command;

/// Runs the target for a while.
fn check_target(name: &str) {
    let findings = env!("CARGO_TARGET_TMPDIR");
    let mut command = Command::new(env!("CARGO_BIN_EXE_nowait-fuzz"));
    let output = command.args([name, "--seconds", "4", "--findings", findings]).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
    assert!(printed.contains(&format!("{name}: seed ")) && printed.contains("inputs ("));
}

#[test]
fn no_bytes_break_the_handshake() {
    check_target("handshake");
}

#[test]
fn no_bytes_break_the_transmission_phase() {
    check_target("transmission");
}

#[test]
fn no_bytes_break_the_readers_of_qcow2_images() {
    check_target("image");
}

#[test]
fn no_header_reaches_a_file_that_it_may_not_name() {
    check_target("names");
}

#[test]
fn no_bytes_break_the_writers_of_qcow2_images() {
    check_target("changed");
}

#[test]
fn no_wrong_counts_make_a_served_image_lose_data() {
    check_target("counts");
}

#[test]
fn no_memory_of_a_guest_breaks_its_virtqueue() {
    check_target("virtqueue");
}

#[test]
fn no_list_of_segments_breaks_the_engine() {
    check_target("segments");
}

#[test]
fn no_bytes_of_a_server_break_the_copying_client() {
    check_target("client");
}

#[test]
fn no_bytes_break_the_control_interface() {
    check_target("control");
}

#[test]
fn no_answer_of_a_store_and_no_file_of_its_cache_is_believed_wrongly() {
    check_target("remote");
}
