//! `nowait bench backup`: both servers with every kind of notes, with the shortest runs.
//!
//! Invariant: the tests do not check how good the figures are.

use std::process::Command;

use nowait_testkit::require_tool;
use serde_json::Value;

use crate::common::{NOWAIT, bench_program};

#[test]
fn writes_are_measured_with_each_kind_of_bitmap_and_with_a_backup() {
    let tools = ["qemu-img", "qemu-io", "qemu-storage-daemon"];
    if bench_program().is_none() || !tools.into_iter().all(require_tool) {
        return;
    }
    let mut command = Command::new(NOWAIT);
    command.args(["bench", "backup", "--json", "--rounds", "1", "--seconds", "0.05"]);
    let output = command.args(["--only", "depth 1,"]).output().expect("nowait");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("an object");
    let tables = report["tables"].as_array().expect("tables");
    let rows = |table: &Value| -> Vec<(String, String)> {
        let text = |row: &Value, name: &str| row[name].as_str().expect("text").to_owned();
        let rows = table["rows"].as_array().expect("rows");
        rows.iter().map(|row| (text(row, "server"), text(row, "notes"))).collect()
    };
    let [nowait, qemu] = ["nowait", "qemu-storage-daemon"];
    let (none, memory, stored) = ("nothing", "bitmap in memory", "stored bitmap");
    let expected: [&[(&str, &str)]; 3] = [
        &[(nowait, none), (nowait, memory), (nowait, stored), (qemu, none), (qemu, memory)],
        &[(nowait, none), (nowait, stored), (qemu, none), (qemu, stored)],
        &[(nowait, none), (nowait, "backup"), (qemu, none), (qemu, "backup")],
    ];
    assert_eq!(tables.len(), expected.len(), "{report}");
    for (table, expected) in tables.iter().zip(expected) {
        let owned = |(server, notes): &(&str, &str)| ((*server).to_owned(), (*notes).to_owned());
        assert_eq!(rows(table), expected.iter().map(owned).collect::<Vec<_>>());
        for row in table["rows"].as_array().expect("rows") {
            assert!(row["iops"]["median"].as_f64().is_some_and(|it| it > 0.0), "{row}");
            assert!(row["iops_to_nothing"].as_f64().is_some_and(|it| it > 0.0), "{row}");
        }
    }
}
