//! A log of a database: threads append what they change, and it is there after a loss of power.
//!
//! ```sh
//! cargo run -p nowait --example append_log -- /tmp/changes append 'set a = 1' 'set b = 2'
//! cargo run -p nowait --example append_log -- /tmp/changes list
//! cargo run -p nowait --example append_log -- /tmp/changes truncate POSITION
//! ```

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::thread;

use nowait::{Log, LogOptions, LogPosition};

/// Each record by a thread of its own: those that wait together are made durable by one write.
fn append(log: &Log, records: &[&str]) -> Result<(), Box<dyn Error>> {
    let positions = thread::scope(|scope| {
        let append = |record: &&str| {
            let (log, record) = (log.clone(), record.to_string());
            scope.spawn(move || log.append(record.as_bytes()))
        };
        let threads: Vec<_> = records.iter().map(append).collect();
        threads.into_iter().map(thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    for (position, record) in positions.into_iter().zip(records) {
        // The record is on storage now.
        let position = position.map_err(|_| "a thread has panicked")??;
        println!("{position}: {record}");
    }
    Ok(())
}

fn list(log: &Log) -> Result<(), Box<dyn Error>> {
    for record in log.records() {
        // A damaged record is an error with its position; a torn one behind the last durable one is not seen.
        let record = record?;
        println!("{}: {}", record.position, String::from_utf8_lossy(&record.data));
    }
    Ok(())
}

pub(crate) fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    let [directory, command, rest @ ..] = words else {
        return Err("usage: append_log DIRECTORY append RECORD… | list | truncate POSITION".into());
    };
    // A second open, also by another process, fails with EBUSY.
    let options = LogOptions::new().segment_bytes(1 << 20).create(*command == "append");
    let log = Log::open(Path::new(directory), options)?;
    match (*command, rest) {
        ("append", records) => append(&log, records),
        ("list", []) => list(&log),
        // Files whose records are all before the position are free for later ones.
        ("truncate", [position]) => {
            Ok(log.truncate_before(LogPosition::new(position.parse::<u64>()?))?)
        }
        _ => Err(format!("{command}: append RECORD…, list or truncate POSITION").into()),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let Err(error) = run(&words) {
        eprintln!("append_log: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
