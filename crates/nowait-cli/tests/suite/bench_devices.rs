//! `nowait bench nowait --device`: block devices and exports side by side, and what is not to be written to.
//!
//! Invariant: the tests use only their own loop devices, and do not check how good the figures are.

use std::fs;

use serde_json::Value;

use crate::common::loop_device::{LoopDevice, Mounted};
use crate::common::{
    Finished, MIB, Scratch, Server, accepted, bench_program, refusal, require_tool, text, tool,
};

const BYTES: u64 = 64 * MIB;
const SHORT: [&str; 7] = ["bench", "nowait", "--rounds", "1", "--seconds", "0.05", "--json"];

fn measured(arguments: &[&str]) -> Value {
    serde_json::from_str(&accepted(&[&SHORT[..], arguments].concat())).expect("one JSON object")
}

fn rows(table: &Value) -> Vec<&str> {
    let rows = table["rows"].as_array().expect("rows");
    rows.iter().map(|row| row["row"].as_str().expect("a title")).collect()
}

#[test]
fn two_devices_are_read_side_by_side_and_keep_every_byte() {
    let Some(_) = bench_program() else { return };
    let scratch = Scratch::new();
    let files = [1, 2].map(|seed| scratch.random(&format!("disk-{seed}"), BYTES, seed));
    let Some(first) = LoopDevice::on(&files[0]) else { return };
    let Some(second) = LoopDevice::on(&files[1]) else { return };
    let before = files.each_ref().map(|file| fs::read(file).expect("the bytes"));
    let printed = measured(&["--device", &first.0, "--device", &second.0]);
    assert_eq!(
        (&printed["written"], printed["tables"].as_array().map(Vec::len)),
        (&false.into(), Some(1))
    );
    let table = &printed["tables"][0];
    let loads = ["sequential", "random"].map(|order| format!("4K {order} read, 12 jobs, depth 16"));
    assert_eq!(rows(table), loads);
    for row in table["rows"].as_array().expect("rows") {
        let cells = row["cells"].as_array().expect("cells");
        let names: Vec<_> = cells.iter().map(|cell| cell["variant"].as_str()).collect();
        assert_eq!(names, [Some(first.0.as_str()), Some(second.0.as_str())]);
        let iops = |cell: &Value| cell["iops"]["median"].as_f64().expect("a figure");
        assert!(cells.iter().all(|cell| iops(cell) > 0.0), "{row}");
        // The gain is the first device's rate divided by the second's.
        let gain = cells[1]["gain"].as_f64().expect("a ratio");
        assert!((gain - iops(&cells[0]) / iops(&cells[1])).abs() < 1e-6, "{row}");
    }
    let after = files.each_ref().map(|file| fs::read(file).expect("the bytes"));
    assert!(before == after);
}

#[test]
fn writes_are_measured_with_overwrite_only_also_to_a_device_without_storage() {
    let Some(_) = bench_program() else { return };
    let scratch = Scratch::new();
    let file = scratch.random("disk", BYTES, 1);
    let Some(device) = LoopDevice::on(&file) else { return };
    let before = fs::read(&file).expect("the bytes");
    let sizes = ["--jobs", "2", "--depth", "4", "--block-size", "4K,64K"];
    let writes = ["--device", &device.0, "--overwrite", "--discard"];
    let printed = measured(&[&writes[..], &sizes].concat());
    assert_eq!((&printed["written"], &printed["bytes"]), (&true.into(), &BYTES.into()));
    let tables = printed["tables"].as_array().expect("tables");
    assert_eq!(tables.len(), 2);
    for table in tables {
        let titles = rows(table);
        assert_eq!(titles.len(), 8, "{titles:?}");
        assert!(titles.contains(&"64K random write, 2 jobs, depth 4"), "{titles:?}");
    }
    assert!(before != fs::read(&file).expect("the bytes"));
    let plain = ["bench", "nowait", "--rounds", "1", "--seconds", "0.05", "--jobs", "1"];
    let text = accepted(&[&plain[..], &["--device", &device.0, "--overwrite"]].concat());
    let line = format!("OVERWRITTEN: what was in the first 64 MiB of {} is lost", device.0);
    assert!(text.lines().any(|printed| printed == line), "{text}");
}

#[test]
fn a_mounted_device_and_a_file_are_refused_and_stay_as_they_are() {
    let Some(_) = bench_program() else { return };
    let scratch = Scratch::new();
    let (file, at) = (scratch.sparse("fs", BYTES), scratch.join("at"));
    fs::create_dir(&at).expect("a directory");
    let device = |path: &str| refusal(&[&SHORT[..], &["--overwrite", "--device", path]].concat());
    device(text(&file)).says(&[text(&file), "no block device", "--file"]);
    for option in ["--jobs=2", "--depth=2", "--block-size=4K", "--discard"] {
        assert_eq!(refusal(&["bench", "nowait", option]).code, 2, "{option}");
    }
    assert_eq!(refusal(&["bench", "pool", "--device", "/dev/null"]).code, 2);
    let Some(disk) = LoopDevice::on(&file) else { return };
    nowait_testkit::needs!(require_tool("mkfs.ext4"));
    tool("mkfs.ext4").arg("-q").arg(disk.path()).succeeds();
    let Some(mounted) = Mounted::at(&disk, &at) else { return };
    device(&disk.0).says(&[&disk.0, "it is mounted, or another program has claimed it"]);
    assert!(at.join("lost+found").is_dir());
    drop(mounted);
    assert!(Mounted::at(&disk, &at).is_some(), "not a byte was written");
}

#[test]
fn an_export_is_measured_as_a_device_is_and_written_to_with_overwrite_only() {
    let Some(_) = bench_program() else { return };
    let scratch = Scratch::new();
    let file = scratch.random("disk", BYTES, 1);
    let before = fs::read(&file).expect("the bytes");
    let behind = Server::start(&file, &["-f", "raw"]);
    let load = ["--jobs", "2", "--depth", "4", "--device", behind.uri()];
    let printed = measured(&load);
    assert_eq!(rows(&printed["tables"][0]).len(), 2);
    assert_eq!(
        (&printed["written"], &printed["devices"][0]),
        (&false.into(), &behind.uri().into())
    );
    assert!(before == fs::read(&file).expect("the bytes"));
    let printed = measured(&[&load[..], &["--overwrite", "--discard"]].concat());
    for table in printed["tables"].as_array().expect("tables") {
        assert_eq!(rows(table).len(), 4);
        for row in table["rows"].as_array().expect("rows") {
            let iops = row["cells"][0]["iops"]["median"].as_f64();
            assert!(iops.expect("a figure") > 0.0, "{row}");
        }
    }
    behind.stop();
    assert!(before != fs::read(&file).expect("the bytes"));
    let object = ["--overwrite", "--device", "https://127.0.0.1:1/disk"];
    refusal(&[&SHORT[..], &object].concat()).says(&["an object is only read"]);
}
