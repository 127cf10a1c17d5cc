//! `nowait bench`: the program that it runs, every route of `copy` with the shortest runs, and refused options.
//!
//! Invariant: the tests do not check how good the figures are.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{
    Finished, NOWAIT, Scratch, accepted, bench_program, refusal, require_tool, text, tool,
};

#[test]
fn the_program_is_found_beside_nowait_then_on_the_path_and_its_absence_is_one_line() {
    let Some(bench) = bench_program() else { return };
    let alone = Scratch::new();
    // By another process: a program that a child of this one may still have open for writing cannot
    // be started.
    let copy = |from: &str, name: &str| {
        tool("cp").arg(from).arg(alone.join(name)).succeeds();
    };
    copy(NOWAIT, "nowait");
    let nowait = alone.join("nowait");
    let run = |path: &str| {
        let mut command = Command::new(&nowait);
        command.args(["bench", "pool", "--file", "no/such/file"]).env("PATH", path);
        let ended = command.output().expect("nowait");
        (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    let (code, error) = run(text(alone.path()));
    assert_eq!((code, error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.starts_with("nowait: nowait-bench is neither beside"), "{error}");
    let beside = bench.parent().expect("a directory");
    for path in [text(beside), ""] {
        let (code, error) = run(path);
        assert_eq!(code, Some(1));
        assert!(error.starts_with("nowait: no/such/file: cannot open"), "{error}");
        copy(text(&bench), "nowait-bench");
    }
}

/// Whether a program has `name` in it; by grep, because programs are large and tests are compiled for no speed.
fn is_in(name: &str, program: &Path) -> bool {
    let found = Command::new("grep").args(["-qaF", "-e", name, "--"]).arg(program).status();
    let code = found.expect("grep").code();
    assert!(matches!(code, Some(0 | 1)), "grep {name}: {code:?}");
    code == Some(0)
}

#[test]
fn the_bench_its_certificate_maker_and_its_temporary_files_are_in_its_program_only() {
    let Some(bench) = bench_program() else { return };
    // A crate of the server has a module tempfile, too.
    for name in ["rcgen", "/tempfile-", "hdrhistogram", "nowait-bench/src"] {
        assert!(is_in(name, &bench) && !is_in(name, Path::new(NOWAIT)), "{name}");
    }
}

#[test]
fn the_program_by_itself_refuses_what_nowait_bench_refuses() {
    let Some(bench) = bench_program() else { return };
    let ended = |arguments: &[&str]| Command::new(&bench).args(arguments).output().expect("a run");
    let refused = ended(&["copy", "--seconds", "2"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("all but copy"));
    let help = ended(&["--help"]);
    assert!(String::from_utf8_lossy(&help.stdout).contains("Usage: nowait bench [OPTIONS] <WHAT>"));
}

#[test]
fn every_route_is_measured_with_all_installed_programs_and_no_file_is_left() {
    if !require_tool("qemu-img") || !require_tool("nbdcopy") || bench_program().is_none() {
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
fn an_option_of_another_measurement_is_refused() {
    for (what, option) in [
        ("copy", "--file=x"),
        ("simple", "--directory=."),
        ("pool", "--servers=nbdkit"),
        ("images", "--transport=tls"),
        ("isolation", "--file=x"),
    ] {
        let (name, _) = option.split_once('=').expect("an option with a value");
        let refused = refusal(&["bench", what, option]);
        let words = format!("bench {what} has no {name}");
        assert!(refused.code == 2 && refused.error.contains(&words), "{}", refused.error);
    }
}
