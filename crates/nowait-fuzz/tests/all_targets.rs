//! Runs each target with a fixed seed on a fixed number of inputs, each in a separate process, because a panic
//! or the memory use of one target would affect the others.

use std::process::Command;

/// The seed of each run; `.ci/hunt` runs fresh ones.
const SEED: &str = "1";

/// Runs the target on this number of `inputs`.
fn check_target(name: &str, inputs: u64) {
    let findings = env!("CARGO_TARGET_TMPDIR");
    let mut command = Command::new(env!("CARGO_BIN_EXE_nowait-fuzz"));
    let output = command
        .args([name, "--seed", SEED, "--inputs", &inputs.to_string(), "--findings", findings])
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
    assert!(printed.contains(&format!("{name}: seed ")) && printed.contains("inputs ("));
}

#[test]
fn no_bytes_break_the_handshake() {
    check_target("handshake", 60_000);
}

#[test]
fn no_bytes_break_the_transmission_phase() {
    check_target("transmission", 4_000);
}

#[test]
fn no_bytes_break_the_readers_of_qcow2_images() {
    check_target("image", 6_000);
}

#[test]
fn no_bytes_break_the_reader_of_vmdk_images() {
    check_target("vmdk", 4_000);
}

#[test]
fn no_bytes_break_the_reader_of_vhdx_images() {
    check_target("vhdx", 2_000);
}

#[test]
fn no_header_reaches_a_file_that_it_may_not_name() {
    check_target("names", 4_000);
}

#[test]
fn no_bytes_make_a_dirty_bitmap_lose_a_change() {
    check_target("bitmaps", 400);
}

#[test]
fn no_file_with_bitmaps_of_a_raw_disk_makes_them_lose_a_change() {
    check_target("raw-bitmaps", 400);
}

#[test]
fn no_bytes_break_the_writers_of_qcow2_images() {
    check_target("changed", 1_600);
}

#[test]
fn no_wrong_counts_make_a_served_image_lose_data() {
    check_target("counts", 1_200);
}

#[test]
fn no_memory_of_a_guest_breaks_its_virtqueue() {
    check_target("virtqueue", 20_000);
}

#[test]
fn no_list_of_segments_breaks_the_engine() {
    check_target("segments", 600);
}

#[test]
fn no_bytes_of_a_server_break_the_copying_client() {
    check_target("client", 100_000);
}

#[test]
fn no_bytes_break_the_control_interface() {
    check_target("control", 1_600);
}

#[test]
fn no_answer_of_a_store_and_no_file_of_its_cache_is_believed_wrongly() {
    check_target("remote", 3_000);
}

#[test]
fn no_manifest_and_no_block_of_a_backup_is_believed_wrongly() {
    check_target("backup", 4_000);
}
