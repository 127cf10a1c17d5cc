//! Logs on each file system, also on one that runs out of space.

use std::path::Path;

use nowait::{Direct, Log, LogOptions, LogPosition};
use nowait_testkit::on_each_file_system;

const HERE: &str = env!("CARGO_TARGET_TMPDIR");

/// The positions of all records, each of which is as [`data_of`] says.
fn positions(log: &Log) -> Vec<LogPosition> {
    let check = |(n, record): (usize, Result<nowait::LogRecord, nowait::Error>)| {
        let record = record.unwrap();
        let first = usize::from_le_bytes(*record.data.first_chunk().unwrap());
        assert!(record.data == data_of(first, record.data.len()), "{n}");
        record.position
    };
    log.records().enumerate().map(check).collect()
}

fn data_of(n: usize, len: usize) -> Vec<u8> {
    let mut data = vec![n as u8 | 1; len];
    data[..8].copy_from_slice(&n.to_le_bytes());
    data
}

#[test]
fn c68_a_log_is_found_again_on_every_file_system() {
    on_each_file_system(Path::new(HERE), |directory, system| {
        for direct in [Direct::Auto, Direct::Off] {
            let path = directory.join(format!("{direct:?}"));
            let options = LogOptions::new().segment_bytes(256 << 10).direct(direct);
            let mut kept: Vec<LogPosition> = Vec::new();
            for round in 0..4 {
                let log = Log::open(&path, options).unwrap();
                assert_eq!(positions(&log), kept, "{system}, {direct:?}, {round}");
                for n in 0..40 {
                    kept.push(log.append(&data_of(n, 8 + n * 1001 % 30_000)).unwrap());
                }
                log.truncate_before(kept[kept.len() / 2]).unwrap();
                kept.retain(|position| *position >= log.start());
                assert_eq!(positions(&log), kept, "{system}, {direct:?}, {round}");
            }
        }
    });
}

#[test]
fn c71_a_full_disk_refuses_records_and_a_truncation_lets_the_log_go_on() {
    on_each_file_system(Path::new(HERE), |directory, system| {
        if !system.starts_with("mkfs") {
            return;
        }
        let path = directory.join("log");
        let options = LogOptions::new().segment_bytes(32 << 20);
        let log = Log::open(&path, options).unwrap();
        let append = |n: usize| log.append(&data_of(n, 1 << 20)).map_err(|error| error.errno());
        let mut kept = Vec::new();
        let refused = loop {
            match append(kept.len()) {
                Ok(position) => kept.push(position),
                Err(errno) => break errno,
            }
        };
        assert_eq!(refused, libc::ENOSPC, "{system}");
        assert!(kept.len() > 100, "{system}: {}", kept.len());
        for _ in 0..3 {
            assert_eq!(append(0), Err(libc::ENOSPC), "{system}");
        }
        assert_eq!(positions(&log), kept, "{system}");
        log.truncate_before(kept[kept.len() / 2]).unwrap();
        kept.retain(|position| *position >= log.start());
        for n in 0..50 {
            kept.push(append(n).unwrap());
        }
        assert_eq!(positions(&log), kept, "{system}");
        drop(log);
        assert_eq!(positions(&Log::open(&path, options).unwrap()), kept, "{system}");
    });
}
