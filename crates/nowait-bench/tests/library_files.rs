//! `bench library` with a program that pretends to have the runtimes. This test has its own file because a program
//! that was just written cannot be started while another test is starting a child process.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use clap::Parser;
use nowait_bench::{Bench, BenchArgs, CancelFlag, Error, Report, run};
use serde_json::Value;
use tempfile::TempDir;

/// Checks its arguments and its files. AsyncFile is twice as fast as the others, monoio fails, glommio is silent.
const PROGRAM: &str = r#"#!/bin/sh
if [ "$1" = --version ]; then echo compio 1, monoio 2; exit; fi
last=$(($5 - 1))
[ $# = 7 ] && [ -s "$2/0" ] && [ -s "$2/$last" ] && [ ! -e "$2/$5" ] || exit 1
case $1 in
monoio) echo no luck >&2; exit 3;;
glommio) exit;;
AsyncFile) seconds=0.5;;
*) seconds=1;;
esac
echo "$3 $4 $5 $6 $7" >> "$2/../../$1"
echo "{\"requests\":1024,\"seconds\":$seconds,\"cpu_seconds\":0.25}"
"#;

fn measured(directory: &TempDir, words: &str) -> Result<(Report, String), Error> {
    let words = words.split('|').map(str::to_owned);
    let place = ["--directory", "--peers"]
        .into_iter()
        .zip([directory.path().to_owned(), directory.path().join("peers")]);
    let place = place.flat_map(|(option, path)| [option.to_owned(), path.display().to_string()]);
    let line = ["nowait-bench", "library", "--seconds", "0.05", "--size", "16M"].map(str::to_owned);
    let args = BenchArgs::parse_from(line.into_iter().chain(place).chain(words));
    args.check().expect("good options");
    let bench = Bench { args, nowait: None, stop: CancelFlag::default() };
    let mut printed = Vec::new();
    let report = run(&bench, &mut printed)?;
    Ok((report, String::from_utf8(printed).expect("UTF-8")))
}

fn array<'a>(object: &'a Value, name: &str) -> &'a Vec<Value> {
    object[name].as_array().unwrap_or_else(|| panic!("no {name} in {object}"))
}

#[test]
fn the_library_is_compared_with_what_the_program_has_and_its_absence_says_how_to_build_it() {
    let directory = TempDir::new().expect("a temporary directory");
    let missing = measured(&directory, "--rounds|1").expect_err("no program").to_string();
    assert!(missing.lines().count() == 1 && missing.contains("cargo build --release"), "{missing}");

    let program = directory.path().join("peers");
    fs::write(&program, PROGRAM).expect("a script");
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("an executable script");
    let (report, printed) =
        measured(&directory, "--rounds|2|--only|read, depth 32").expect("a report");
    assert!(printed.contains("compio 1, monoio 2"), "{printed}");
    let tables = array(&report.json, "tables");
    assert_eq!(tables.len(), 2);
    for (table, files) in tables.iter().zip(["1 file", "1000 files"]) {
        let load = table["load"].as_str().expect("a load");
        assert!(load == format!("4K random read, depth 32, {files}") && printed.contains(load));
        let rows = array(table, "rows");
        assert_eq!(rows.len(), 8, "{table}");
        for row in rows {
            let name = row["name"].as_str().expect("a name");
            let (rate, to_best) = if name == "AsyncFile" { (2048.0, 2.0) } else { (1024.0, 1.0) };
            assert_eq!(
                (&row["requests_per_second"]["median"], &row["to_best_other"]),
                (&rate.into(), &to_best.into())
            );
            assert_eq!(row["cpu_to_least_other"], 1.0);
            assert!(printed.lines().any(|line| line.starts_with(name)), "{printed}");
        }
        for failure in [
            format!("monoio failed, {load}: no luck"),
            format!("glommio failed, {load}: nowait-runtimes printed no figures"),
        ] {
            assert!(report.failures.contains(&failure), "{:?}", report.failures);
        }
    }
    let calls = fs::read_to_string(directory.path().join("compio")).expect("calls");
    assert_eq!(calls, "4096 32 1 0.05 read\n".repeat(2) + &"4096 32 1000 0.05 read\n".repeat(2));

    let (report, printed) =
        measured(&directory, "--rounds|1|--json|--only|8K sequential").expect("a report");
    // Text is compared: a number that is read back can differ in its last bit.
    assert_eq!(printed, format!("{:#}\n", report.json));
    let json: Value = serde_json::from_str(&printed).expect("one JSON object");
    let names: Vec<&Value> =
        array(&json["tables"][0], "rows").iter().map(|row| &row["name"]).collect();
    assert_eq!(names[..4], ["LocalAsyncFile", "AsyncFile", "BlockingFile", "pread"]);
    // Not every file system for temporary files supports direct I/O, which dd asks for.
    assert!(names.get(4).is_none_or(|name| **name == "dd iflag=direct bs=1M"), "{names:?}");
    let calls = fs::read_to_string(directory.path().join("pread")).expect("calls");
    assert!(calls.ends_with("8192 1 1 3600 scan\n"), "{calls}");
    // The files are gone.
    let left = fs::read_dir(directory.path()).expect("a directory").filter_map(Result::ok);
    assert_eq!(left.filter(|entry| entry.path().is_dir()).count(), 0);
}
