//! `nowait bench` with the shortest runs: every route of `copy`, and refused options.
//!
//! Invariant: the tests do not check how good the figures are.

use std::fs;

use crate::common::{Scratch, accepted, refusal, require_tool, text};

#[test]
fn every_route_is_measured_with_all_installed_programs_and_no_file_is_left() {
    if !require_tool("qemu-img") || !require_tool("nbdcopy") {
        return;
    }
    let scratch = Scratch::new();
    let short = ["bench", "copy", "--rounds", "1", "--size", "16M", "--json", "--directory"];
    let printed = accepted(&[&short[..], &[text(scratch.path())]].concat());
    let printed: serde_json::Value = serde_json::from_str(&printed).expect("one JSON object");
    let tables = printed["tables"].as_array().expect("tables");
    assert_eq!((tables.len(), &printed["failures"]), (10, &serde_json::json!([])), "{printed}");
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

#[test]
fn an_option_of_another_measurement_is_refused_and_no_file_is_made() {
    let scratch = Scratch::new();
    let page = scratch.join("page.html");
    for what in ["copy", "images"] {
        let refused = refusal(&["bench", what, "--html", text(&page)]);
        let words = format!("bench {what} has no --html");
        assert!(refused.code == 2 && refused.error.contains(&words), "{}", refused.error);
        assert!(!page.exists());
    }
    for (what, option) in [
        ("copy", "--file=x"),
        ("simple", "--directory=."),
        ("pool", "--servers=nbdkit"),
        ("images", "--transport=tls"),
        ("engines", "--latency=1ms"),
    ] {
        let (name, _) = option.split_once('=').expect("an option with a value");
        let refused = refusal(&["bench", what, option]);
        let words = format!("bench {what} has no {name}");
        assert!(refused.code == 2 && refused.error.contains(&words), "{}", refused.error);
    }
}
