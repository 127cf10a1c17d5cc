//! redb on nowait: what a transaction has committed is there after a kill, all of it or nothing.

#[path = "../../examples/redb_storage.rs"]
#[expect(dead_code, reason = "the test calls what its `main` calls")]
mod example;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use example::{TABLE, get, open, put, run};
use nowait_testkit::Random;
use redb::ReadableTableMetadata;

/// The program of a child: the file in which it commits until it is killed.
const CHILD: &str = "NOWAIT_REDB_CHILD";
const PAIRS: u64 = 20;

fn new_file() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("pairs.redb");
    (dir, path)
}

/// The pairs of a transaction.
fn pairs(commit: u64) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    (0..PAIRS).map(move |n| {
        let mut random = Random::from_seed(commit * PAIRS + n);
        let key = [commit.to_be_bytes(), n.to_be_bytes()].concat();
        let len = random.below(3000) as usize;
        (key, random.bytes(len))
    })
}

/// Runs only as the child of another test: commits and prints the number of each transaction that is durable.
#[test]
fn child_that_commits() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let database = open(Path::new(&path)).unwrap();
    let mut next = committed(&database);
    loop {
        put(&database, pairs(next)).unwrap();
        println!("\ncommitted {next}");
        next += 1;
    }
}

/// Transactions in the database, each of which is whole.
fn committed(database: &redb::Database) -> u64 {
    let transaction = database.begin_read().unwrap();
    let Ok(table) = transaction.open_table(TABLE) else { return 0 };
    let count = table.len().unwrap();
    assert_eq!(count % PAIRS, 0, "a part of a transaction");
    for commit in 0..count / PAIRS {
        for (key, value) in pairs(commit) {
            assert!(table.get(&key[..]).unwrap().unwrap().value() == value, "commit {commit}");
        }
    }
    count / PAIRS
}

#[test]
fn what_was_committed_is_there_after_a_kill() {
    let (_dir, path) = new_file();
    let mut known = 0;
    for round in 1..=5 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "redb_storage::child_that_commits", "--nocapture"])
            .env(CHILD, &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let numbers = lines.map_while(Result::ok).filter_map(|line| {
            line.strip_prefix("committed ").and_then(|number| number.parse::<u64>().ok())
        });
        let last = numbers.take(4 * round).last().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let database = open(&path).unwrap();
        let found = committed(&database);
        assert!(found > last && last >= known, "{found} after {last} were durable");
        known = found;
    }
    let mut database = open(&path).unwrap();
    assert!(database.check_integrity().unwrap());
}

#[test]
fn a_transaction_that_is_dropped_leaves_nothing_and_a_second_handle_is_refused() {
    let (_dir, path) = new_file();
    let database = open(&path).unwrap();
    put(&database, pairs(0)).unwrap();
    {
        let transaction = database.begin_write().unwrap();
        transaction.open_table(TABLE).unwrap().insert(&b"key"[..], &b"value"[..]).unwrap();
        transaction.abort().unwrap();
    }
    assert!(get(&database, b"key").unwrap().is_none());
    assert!(open(&path).is_err());
    drop(database);
    assert_eq!(committed(&open(&path).unwrap()), 1);
}

#[test]
fn the_example_puts_gets_and_refuses() {
    let (_dir, path) = new_file();
    let path = path.to_str().unwrap();
    run(&[path, "put", "key", "value"]).unwrap();
    run(&[path, "get", "key"]).unwrap();
    assert!(run(&[path, "get", "other"]).is_err() && run(&[path]).is_err());
    run(&[path, "compare", "3"]).unwrap();
}
