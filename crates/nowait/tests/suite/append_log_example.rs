//! The example of a log appends, lists and truncates.

#[path = "../../examples/append_log.rs"]
#[expect(dead_code, reason = "the test calls what its `main` calls")]
mod append_log;

use nowait::{Log, LogOptions};

#[test]
fn the_example_appends_records_that_an_open_finds_again() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("log");
    let run = |words: &[&str]| {
        let words = [&[path.to_str().unwrap()], words].concat();
        append_log::run(&words).map_err(|error| error.to_string())
    };
    assert!(run(&["list"]).is_err(), "there is none yet");
    for _ in 0..2 {
        run(&["append", "set a = 1", "set b = 2"]).unwrap();
    }
    run(&["list"]).unwrap();
    let log = Log::open(&path, LogOptions::new()).unwrap();
    let mut found: Vec<_> = log.records().map(|record| record.unwrap().data).collect();
    found.sort_unstable();
    assert_eq!(found, [b"set a = 1", b"set a = 1", b"set b = 2", b"set b = 2"]);
    let end = log.end().to_string();
    assert!(run(&["list"]).unwrap_err().contains("another handle or process"));
    drop(log);
    run(&["truncate", &end]).unwrap();
    assert!(run(&["truncate", "x"]).is_err() && run(&["other"]).is_err() && run(&[]).is_err());
}
