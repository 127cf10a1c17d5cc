//! `nowait bench copy` as short as it gets: every route, by whoever is installed.
//!
//! Invariant: figures are not judged. Knows: the command line. Known by: nobody.

use std::fs;

use crate::common::{Scratch, accepted, require_tool};
use crate::copy::text;

#[test]
fn every_route_is_measured_by_all_that_are_there_and_nothing_is_left() {
    if !require_tool("qemu-img") || !require_tool("nbdcopy") {
        return;
    }
    let scratch = Scratch::new();
    let short = ["bench", "copy", "--rounds", "1", "--size", "16M", "--json", "--directory"];
    let said = accepted(&[&short[..], &[text(scratch.path())]].concat());
    let said: serde_json::Value = serde_json::from_str(&said).expect("one JSON object");
    let tables = said["tables"].as_array().expect("tables");
    assert_eq!((tables.len(), &said["failures"]), (10, &serde_json::json!([])), "{said}");
    for table in tables {
        let copiers = table["copiers"].as_array().expect("rows");
        assert!(copiers.len() >= 4 && copiers[0]["copier"] == "nowait copy", "{table}");
        let taken = |row: &serde_json::Value| row["taken_mib"]["median"].as_f64().expect("MiB");
        for row in copiers {
            let figure = |name: &str| row[name]["median"].as_f64().expect("seconds");
            assert!(figure("ended_s") > 0.0 && figure("stored_s") >= figure("ended_s"), "{row}");
            assert_eq!(row["server_cpu_s"].is_null(), !table["route"].to_string().contains("NBD"));
            // All of the data is there.
            let data = if table["content"] == "full" { 16.0 } else { 2.0 };
            assert!(taken(row) >= data, "{row}");
        }
        assert!(table["nowait_to_best_peer"]["stored"]["ratio"].is_number(), "{table}");
    }
    assert_eq!(fs::read_dir(scratch.path()).expect("a directory").count(), 0);
}
