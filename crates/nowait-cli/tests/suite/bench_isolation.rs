//! `nowait bench isolation`: every neighbour with the shortest runs.
//!
//! Invariant: the tests do not check how good the figures are.

use std::process::Command;

use serde_json::Value;

use crate::common::{NOWAIT, bench_program, require_fuse};

fn list<'a>(object: &'a Value, name: &str) -> &'a Vec<Value> {
    object[name].as_array().unwrap_or_else(|| panic!("no {name} in {object}"))
}

#[test]
fn a_reader_is_measured_alone_and_beside_each_neighbour_and_what_needs_fuse_is_left_out_without_it()
{
    if bench_program().is_none() {
        return;
    }
    let mut command = Command::new(NOWAIT);
    command.args(["bench", "isolation", "--json", "--rounds", "1", "--seconds", "0.1"]);
    let ended = command.output().expect("nowait");
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&ended.stdout).expect("an object");
    let left_out: Vec<_> = list(&report, "left_out").iter().filter_map(Value::as_str).collect();
    let is_left_out = |what: &str| left_out.iter().any(|line| line.starts_with(what));
    // The device may be there, and this user may not mount.
    let has_fuse = require_fuse() && !is_left_out("no FUSE file system can be mounted");
    let neighbours = match has_fuse {
        true => &["none", "stops", "slow", "fails", "floods"][..],
        false => &["none", "floods"],
    };
    let expected =
        if is_left_out("no io_uring") { &["threads"][..] } else { &["uring", "threads"] };
    let tables = list(&report, "tables");
    let queues: Vec<_> = tables.iter().map(|table| &table["queue"]).collect();
    assert_eq!(queues, expected);
    for table in tables {
        let rows = list(table, "rows");
        let names: Vec<_> = rows.iter().map(|row| &row["neighbour"]).collect();
        assert_eq!(names, neighbours);
        for row in rows {
            let figure = |name: &str| row[name]["median"].as_f64().expect("a figure");
            let [p50, p99] = [figure("p50_us"), figure("p99_us")];
            assert!(figure("iops") > 0.0 && p50 > 0.0 && p50 <= p99, "{row}");
            assert!(row["p99_to_alone"].as_f64().is_some_and(|ratio| ratio > 0.0), "{row}");
            let is_silent = row["neighbour"] == "none" || row["neighbour"] == "stops";
            assert!(!is_silent || figure("neighbour_per_s") == 0.0, "{row}");
        }
    }
}

#[test]
fn a_row_that_is_not_there_and_an_option_of_other_tables_are_refused() {
    let Some(bench) = bench_program() else { return };
    let ended = |arguments: &[&str]| {
        let ended = Command::new(&bench).arg("isolation").args(arguments).output().expect("a run");
        (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    let (code, error) = ended(&["--only", "depth 64"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("no row has this in its title"), "{error}");
    let (code, error) = ended(&["--file", "image"]);
    assert_eq!(code, Some(2));
    assert!(
        error.contains("an option of all but copy, library, images, isolation and backup"),
        "{error}"
    );
}
