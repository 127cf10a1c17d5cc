//! A log under threads and tasks that append, truncate and read simultaneously.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use nowait::{Log, LogOptions, LogPosition};
use nowait_testkit::Scratch;

const WRITERS: u64 = 6;
const TASKS: u64 = 6;
const EACH: u64 = 150;

/// The data of a record: its writer, its number, and bytes that follow from both.
fn data_of(writer: u64, n: u64) -> Vec<u8> {
    let len = if n.is_multiple_of(50) { 40_000 } else { (writer * 131 + n * 977) % 3000 };
    let filler = (writer * 31 + n) as u8;
    [&writer.to_le_bytes()[..], &n.to_le_bytes(), &vec![filler; len as usize]].concat()
}

fn parsed(data: &[u8]) -> (u64, u64) {
    let word = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().unwrap());
    let (writer, n) = (word(0), word(8));
    assert!(data == data_of(writer, n), "{writer} {n}");
    (writer, n)
}

/// Reads all records again and again; those of a writer are in their order.
fn read(log: &Log, ended: &AtomicBool) {
    while !ended.load(Ordering::Relaxed) {
        let mut last = BTreeMap::new();
        for record in log.records() {
            let record = match record {
                Ok(record) => record,
                // It was truncated meanwhile.
                Err(error) => {
                    assert_eq!(error.errno(), libc::ENODATA, "{error}");
                    break;
                }
            };
            let (writer, n) = parsed(&record.data);
            assert!(last.insert(writer, n).is_none_or(|before| before < n), "{writer} {n}");
            match log.read(record.position) {
                Ok(data) => assert!(data == record.data),
                Err(error) => assert_eq!(error.errno(), libc::ENODATA, "{error}"),
            }
        }
    }
}

#[test]
fn c66_threads_and_tasks_append_truncate_and_read_simultaneously() {
    let dir = Scratch::new();
    let options = LogOptions::new().segment_bytes(64 << 10).spares(3);
    let log = Log::open(&dir.join("log"), options).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let (positions, ended, truncated) =
        (Mutex::new(BTreeMap::new()), AtomicBool::new(false), AtomicU64::new(0));
    let keep = |position: LogPosition, writer, n| {
        let before = positions.lock().unwrap().insert(position.get(), (writer, n));
        assert_eq!(before, None, "{position}");
    };
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (log, writer) = (log.clone(), WRITERS + task);
            runtime.spawn(async move {
                let mut all = Vec::new();
                for n in 0..EACH {
                    all.push((log.append_async(&data_of(writer, n)).await.unwrap(), n));
                }
                (writer, all)
            })
        })
        .collect();
    thread::scope(|scope| {
        let others = (0..2).map(|_| scope.spawn(|| read(&log, &ended))).collect::<Vec<_>>();
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (log, keep, truncated) = (log.clone(), &keep, &truncated);
                scope.spawn(move || {
                    for n in 0..EACH {
                        let position = log.append(&data_of(writer, n)).unwrap();
                        keep(position, writer, n);
                        if writer == 0 && n % 40 == 39 {
                            log.truncate_before(position).unwrap();
                            truncated.fetch_max(position.get(), Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        for task in tasks {
            let (writer, all) = runtime.block_on(task).unwrap();
            all.into_iter().for_each(|(position, n)| keep(position, writer, n));
        }
        ended.store(true, Ordering::Relaxed);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
    drop(log);
    let log = Log::open(&dir.join("log"), options).unwrap();
    let found: BTreeMap<_, _> = log
        .records()
        .map(Result::unwrap)
        .map(|record| (record.position.get(), parsed(&record.data)))
        .collect();
    let mut kept = positions.into_inner().unwrap();
    assert_eq!(kept.len() as u64, (WRITERS + TASKS) * EACH);
    assert!(log.start().get() <= truncated.into_inner() && log.start().get() > 2 * (64 << 10));
    let kept = kept.split_off(&log.start().get());
    assert!(found == kept);
}
