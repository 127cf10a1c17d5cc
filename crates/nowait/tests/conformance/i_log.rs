//! Group I: logs.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nowait::{Direct, Error, Log, LogOptions, LogPosition, LogRecord};
use nowait_testkit::Scratch;

use crate::deny::{Deny, denied};
use crate::rig::{BLOCK, KIB, MIB, Random, buffered, pattern};

rules![
    c66_records_are_read_back_by_position_and_in_order,
    c66_a_reader_behind_the_end_goes_on_when_others_append,
    c66_tasks_append_as_threads_do,
    c67_records_that_wait_share_a_write,
    c68_a_log_that_is_opened_again_has_every_record,
    c68_a_killed_process_leaves_every_acknowledged_record,
    c68_a_group_that_is_cut_off_anywhere_is_not_there,
    c69_a_damaged_group_that_others_follow_is_an_error_with_its_position,
    c69_a_damaged_group_of_an_earlier_segment_is_an_error_when_it_is_read,
    c69_a_missing_segment_is_an_error,
    c70_a_record_has_one_byte_to_16_mib,
    c71_without_space_a_record_is_refused_and_the_log_goes_on,
    c71_after_a_failed_sync_nothing_is_appended_until_the_log_is_reopened,
    c72_a_second_open_is_ebusy,
    c73_truncated_segments_are_reused_and_their_records_gone,
    c71_a_segment_that_is_made_ahead_is_used_next,
    c73_a_truncation_returns_when_it_is_durable,
    c73_further_spare_segments_are_removed,
];

/// The smallest segment.
const SEGMENT: u64 = 64 * KIB;
/// From the start of a segment to its first group, and from there to a record.
const FIRST: u64 = BLOCK;
const HEADERS: u64 = 40;

fn scratch() -> Scratch {
    Scratch::new()
}

fn options() -> LogOptions {
    LogOptions::new().segment_bytes(SEGMENT).prepare_ahead(false)
}

fn errno<T>(done: Result<T, Error>) -> i32 {
    done.map_or_else(|error| error.errno(), |_| 0)
}

fn segment(path: &Path, number: u64) -> PathBuf {
    path.join(format!("segment-{number:016x}"))
}

fn names(path: &Path, prefix: &str) -> usize {
    let names = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_str().unwrap().starts_with(prefix)).count()
}

fn all(log: &Log) -> Vec<LogRecord> {
    log.records().map(Result::unwrap).collect()
}

/// Appends records of these lengths, and returns them.
fn fill(log: &Log, lens: impl IntoIterator<Item = u64>) -> Vec<LogRecord> {
    let append = |(n, len)| {
        let data = pattern(n as u64 * 1000, len);
        LogRecord { position: log.append(&data).unwrap(), data }
    };
    lens.into_iter().enumerate().map(append).collect()
}

fn c66_records_are_read_back_by_position_and_in_order() {
    for direct in [Direct::Auto, Direct::Off] {
        let dir = scratch();
        let log = Log::open(&dir.path().join("new"), options().direct(direct)).unwrap();
        let lens = [1, 2, 8, 24, 4000, BLOCK - 64, BLOCK, BLOCK + 1, 30_000, 60_000, 7];
        let mut records = fill(&log, lens.into_iter().cycle().take(60));
        assert!(records.is_sorted_by(|one, next| one.position < next.position));
        assert!(all(&log) == records);
        for at in [0, 1, 30, 59] {
            let from: Vec<_> = log.records_from(records[at].position).map(Result::unwrap).collect();
            assert!(from == records[at..]);
        }
        let mut random = Random::from_seed(66);
        for _ in 0..200 {
            let record = &records[random.below(60) as usize];
            assert!(log.read(record.position).as_ref() == Ok(&record.data));
        }
        let wrong = |number| errno(log.read(LogPosition::new(number)));
        assert_eq!(wrong(records[4].position.get() + 16), libc::EBADMSG);
        assert_eq!(wrong(records[4].position.get() + 1), libc::EINVAL);
        assert_eq!(wrong(log.end().get()), libc::ENODATA);
        assert_eq!(wrong(log.start().get() - FIRST - 8), libc::ENODATA);
        assert_eq!(wrong(u64::MAX), libc::ENODATA);
        assert_eq!(log.records_from(log.end()).next(), None);
        assert_eq!(log.records_from(LogPosition::new(u64::MAX)).next(), None);
        let odd = LogPosition::new(log.start().get() + 1);
        assert_eq!(log.records_from(odd).next().map(errno), Some(libc::EBADMSG));
        records.extend(fill(&log, [5]));
        assert!(all(&log) == records);
    }
}

fn c66_a_reader_behind_the_end_goes_on_when_others_append() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let mut reader = log.records();
    assert_eq!(reader.next(), None);
    for len in [10, 20_000, 30_000, 50_000, 1] {
        let record = fill(&log, [len]).remove(0);
        assert!(reader.next() == Some(Ok(record)), "{len}");
        assert_eq!(reader.next(), None);
    }
}

fn c66_tasks_append_as_threads_do() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let tasks: Vec<_> = (0..40u64)
        .map(|n| {
            let log = log.clone();
            runtime.spawn(async move {
                let data = pattern(n, 1 + n * 1000);
                LogRecord { position: log.append_async(&data).await.unwrap(), data }
            })
        })
        .collect();
    let mut records = fill(&log, [100; 20]);
    records.extend(tasks.into_iter().map(|task| runtime.block_on(task).unwrap()));
    records.sort_by_key(|record| record.position);
    assert!(all(&log) == records);
    runtime.block_on(async {
        assert_eq!(errno(log.append_async(&[]).await), libc::EINVAL);
        // Futures that are dropped after a poll or before it leave the log well.
        drop(log.append_async(b"never"));
        let mut polled = Box::pin(log.append_async(b"perhaps"));
        let waker = std::task::Waker::noop();
        let _ = polled.as_mut().poll(&mut std::task::Context::from_waker(waker));
    });
    drop(log);
    let log = Log::open(dir.path(), options()).unwrap();
    assert!(all(&log)[..60] == records);
    assert!(all(&log).iter().all(|record| record.data != b"never"));
}

fn c67_records_that_wait_share_a_write() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let threads = 16;
    std::thread::scope(|scope| {
        for n in 0..threads {
            let log = log.clone();
            scope.spawn(move || fill(&log, [100 + n; 50]));
        }
    });
    let records = all(&log);
    assert_eq!(records.len(), threads as usize * 50);
    // A group begins in a block of its own.
    let is_first = |record: &&LogRecord| record.position.get() % BLOCK == HEADERS;
    let groups = records.iter().filter(is_first).count();
    println!("{} records in {groups} groups", records.len());
    assert!(groups < records.len());
}

fn c68_a_log_that_is_opened_again_has_every_record() {
    let dir = scratch();
    let mut records = Vec::new();
    for round in 0..6 {
        // The size of an existing log does not change.
        let log = Log::open(dir.path(), options().segment_bytes(SEGMENT << (round % 2))).unwrap();
        assert!(all(&log) == records);
        records.extend(fill(&log, [10, 5000, 40_000]));
        assert_eq!(log.max_record() as u64, SEGMENT - BLOCK - HEADERS - 24 - 16);
    }
    let absent = dir.path().join("absent");
    assert_eq!(errno(Log::open(&absent, options().create(false))), libc::ENOENT);
    assert!(!absent.exists());
    fs::create_dir(&absent).unwrap();
    assert_eq!(errno(Log::open(&absent, options().create(false))), libc::ENOENT);
    assert_eq!(errno(Log::open(&absent.join("a/b"), options())), libc::ENOENT);
}

/// The variable by which the test below tells its child where to append.
const KILLED: &str = "NOWAIT_TEST_KILLED_LOG";

/// The child appends and prints how many records are acknowledged, until it is killed.
fn append_until_killed(path: &Path) {
    let log = Log::open(path, options()).unwrap();
    for n in 0u64.. {
        if n % 7 == 0 {
            log.truncate_before(log.start()).unwrap();
        }
        let data = [&n.to_le_bytes()[..], &vec![n as u8; (n * 911 % 9000) as usize]].concat();
        log.append(&data).unwrap();
        println!("acknowledged {n}");
    }
}

fn c68_a_killed_process_leaves_every_acknowledged_record() {
    if let Some(path) = std::env::var_os(KILLED) {
        return append_until_killed(Path::new(&path));
    }
    for kill_after in [1, 10, 40] {
        let dir = scratch();
        let name = "i_log::tests::c68_a_killed_process_leaves_every_acknowledged_record";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture"])
            .env(KILLED, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        let mut numbers = lines.map_while(Result::ok).filter_map(|line| {
            line.split_once("acknowledged ").and_then(|(_, number)| number.parse::<u64>().ok())
        });
        let seen = numbers.by_ref().find(|&number| number >= kill_after).unwrap();
        child.kill().unwrap();
        let last = numbers.last().unwrap_or(seen);
        child.wait().unwrap();
        let log = Log::open(dir.path(), options()).unwrap();
        let records = all(&log);
        assert!(records.len() as u64 > last, "{} {last}", records.len());
        for (n, record) in (0u64..).zip(&records) {
            assert_eq!(record.data[..8], n.to_le_bytes());
            assert_eq!(record.data.len() as u64, 8 + n * 911 % 9000);
            assert!(record.data[8..].iter().all(|&byte| byte == n as u8));
        }
    }
}

fn c68_a_group_that_is_cut_off_anywhere_is_not_there() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let records = fill(&log, [10, 5000, 9000]);
    let (at, end) = (records[2].position.get() - HEADERS - SEGMENT, log.end().get() - SEGMENT);
    drop(log);
    let whole = fs::read(segment(dir.path(), 1)).unwrap();
    for sector in (at..end).step_by(512) {
        let mut torn = whole.clone();
        let lost = &mut torn[sector as usize..][..512];
        if lost.iter().all(|&byte| byte == 0) {
            continue;
        }
        lost.fill(if sector % 1024 == 0 { 0 } else { 0xa5 });
        fs::write(segment(dir.path(), 1), &torn).unwrap();
        let log = Log::open(dir.path(), options()).unwrap();
        assert!(all(&log) == records[..2], "{sector}");
        // The next group takes its place.
        let next = log.append(b"next").unwrap();
        assert_eq!(next, records[2].position);
        drop(log);
        let log = Log::open(dir.path(), options()).unwrap();
        assert_eq!(log.read(next).as_deref(), Ok(&b"next"[..]));
        assert_eq!(all(&log).len(), 3);
    }
}

fn c69_a_damaged_group_that_others_follow_is_an_error_with_its_position() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let records = fill(&log, [10, 5000, 9000, 20]);
    drop(log);
    let whole = fs::read(segment(dir.path(), 1)).unwrap();
    for record in &records[..3] {
        let group = record.position.get() - HEADERS;
        let inside = (group - SEGMENT) as usize;
        let last = inside + HEADERS as usize + 24 + record.data.len() - 1;
        for at in [inside, inside + 4, inside + 35, inside + 41, inside + 50, inside + 64, last] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(segment(dir.path(), 1), &damaged).unwrap();
            let error = Log::open(dir.path(), options()).unwrap_err();
            assert_eq!((error.errno(), error.range().pos), (libc::EBADMSG, group), "{at}");
            assert!(error.to_string().contains(&format!("byte {group} ")), "{error}");
            assert_eq!(fs::read(segment(dir.path(), 1)).unwrap(), damaged, "it is left alone");
        }
    }
    fs::write(segment(dir.path(), 1), &whole).unwrap();
    assert!(all(&Log::open(dir.path(), options()).unwrap()) == records);
    let header = buffered(&segment(dir.path(), 1));
    header.write_all_at(&[0], 20).unwrap();
    assert_eq!(errno(Log::open(dir.path(), options())), libc::EBADMSG);
}

fn c69_a_damaged_group_of_an_earlier_segment_is_an_error_when_it_is_read() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let records = fill(&log, [30_000, 20_000, 30_000, 30_000]);
    assert_eq!(names(dir.path(), "segment-"), 3);
    drop(log);
    // The last record of the first segment, whose file nothing follows.
    let damaged = records[1].position;
    let file = buffered(&segment(dir.path(), 1));
    file.write_all_at(&[1; 3], damaged.get() - SEGMENT + 5000).unwrap();
    let log = Log::open(dir.path(), options()).unwrap();
    let mut found = log.records();
    assert!(found.next() == Some(Ok(records[0].clone())));
    for _ in 0..2 {
        let error = found.next().unwrap().unwrap_err();
        assert_eq!(error.errno(), libc::EBADMSG);
        assert!((damaged.get() - HEADERS..=damaged.get()).contains(&error.range().pos));
    }
    assert_eq!(errno(log.read(damaged)), libc::EBADMSG);
    assert!(log.read(records[2].position).as_ref() == Ok(&records[2].data));
    // Its header is lost, too.
    file.write_all_at(&[1; 64], 0).unwrap();
    assert_eq!(log.records().next().map(errno), Some(libc::EBADMSG));
}

fn c69_a_missing_segment_is_an_error() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    fill(&log, [50_000; 4]);
    drop(log);
    fs::rename(segment(dir.path(), 2), dir.path().join("kept")).unwrap();
    let error = Log::open(dir.path(), options()).unwrap_err();
    assert_eq!((error.errno(), error.range().pos), (libc::ENOENT, 2 * SEGMENT));
    fs::rename(dir.path().join("kept"), segment(dir.path(), 2)).unwrap();
    fs::rename(segment(dir.path(), 4), segment(dir.path(), 5)).unwrap();
    assert_eq!(errno(Log::open(dir.path(), options())), libc::EBADMSG, "another number");
    fs::rename(segment(dir.path(), 5), dir.path().join(format!("segment-{:x}", u64::MAX))).unwrap();
    assert_eq!(errno(Log::open(dir.path(), options())), libc::EBADMSG);
}

fn c70_a_record_has_one_byte_to_16_mib() {
    let dir = scratch();
    for (segment_bytes, most) in [(SEGMENT, SEGMENT - BLOCK - 80), (64 * MIB, 16 * MIB)] {
        let path = dir.path().join(most.to_string());
        let log = Log::open(&path, options().segment_bytes(segment_bytes)).unwrap();
        assert_eq!(log.max_record() as u64, most);
        assert_eq!(errno(log.append(&[])), libc::EINVAL);
        assert_eq!(errno(log.append(&pattern(0, most + 1))), libc::EMSGSIZE);
        let records = fill(&log, [1, most, most - 1, 1]);
        assert!(all(&log) == records);
        for record in &records {
            assert!(log.read(record.position).as_ref() == Ok(&record.data));
        }
        drop(log);
        assert!(all(&Log::open(&path, options()).unwrap()) == records);
    }
    for wrong in [SEGMENT - BLOCK, SEGMENT + BLOCK, 2 << 30] {
        let path = dir.path().join("wrong");
        assert_eq!(errno(Log::open(&path, options().segment_bytes(wrong))), libc::EINVAL);
        assert!(!path.exists());
    }
}

fn c71_without_space_a_record_is_refused_and_the_log_goes_on() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let mut records = fill(&log, [30_000, 20_000]);
    for (call, error) in [(libc::SYS_fallocate, libc::ENOSPC), (libc::SYS_fallocate, libc::EDQUOT)]
    {
        let shared = log.clone();
        let refused = denied(Deny::all(call, error), move || {
            // It needs another segment; a small one finds room in this.
            (errno(shared.append(&[1; 30_000])), fill(&shared, [100]))
        });
        let Some((refused, more)) = refused else { return };
        assert_eq!(refused, error);
        records.extend(more);
        assert!(all(&log) == records);
        assert_eq!((names(dir.path(), "segment-"), names(dir.path(), "new-")), (1, 0));
    }
    // The page cache has no direct write that fails by itself.
    let short = denied(Deny { call: libc::SYS_pwritev2, from: 1, errno: libc::ENOSPC }, {
        let log = log.clone();
        move || errno(log.append(&[2; 10]))
    });
    assert_eq!(short, Some(libc::ENOSPC));
    records.extend(fill(&log, [10, 30_000]));
    drop(log);
    assert!(all(&Log::open(dir.path(), options()).unwrap()) == records);
}

fn c71_a_segment_that_is_made_ahead_is_used_next() {
    let dir = scratch();
    let log = Log::open(dir.path(), options().prepare_ahead(true)).unwrap();
    let mut records = fill(&log, [20_000]);
    assert_eq!(names(dir.path(), "spare-"), 0);
    records.extend(fill(&log, [20_000]));
    // Closing the log waits for the thread that makes it.
    drop(log);
    assert_eq!((names(dir.path(), "spare-"), names(dir.path(), "new-")), (1, 0));
    let log = Log::open(dir.path(), options()).unwrap();
    let shared = log.clone();
    let more =
        denied(Deny::all(libc::SYS_fallocate, libc::ENOSPC), move || fill(&shared, [50_000]));
    let Some(more) = more else { return };
    records.extend(more);
    assert_eq!((names(dir.path(), "segment-"), names(dir.path(), "spare-")), (2, 0));
    assert!(all(&log) == records);
}

fn c71_after_a_failed_sync_nothing_is_appended_until_the_log_is_reopened() {
    let dir = scratch();
    // Through the page cache each group needs a sync of its own.
    let cached = options().direct(Direct::Off);
    let mut log = Log::open(dir.path(), cached).unwrap();
    let mut records = fill(&log, [10, 100]);
    for (call, error) in [(libc::SYS_fdatasync, libc::EIO), (libc::SYS_pwritev2, libc::EROFS)] {
        let shared = log.clone();
        let failed = denied(Deny::all(call, error), move || errno(shared.append(b"in doubt")));
        let Some(failed) = failed else { return };
        assert_eq!(failed, error);
        for _ in 0..2 {
            assert_eq!(errno(log.append(b"later")), error);
        }
        assert!(all(&log) == records, "it can be read");
        drop(log);
        log = Log::open(dir.path(), cached).unwrap();
        let found = all(&log);
        assert!(found[..records.len()] == records);
        assert!(found[records.len()..].iter().all(|record| record.data == b"in doubt"));
        records = found;
        records.extend(fill(&log, [20]));
        assert!(all(&log) == records);
    }
}

fn c72_a_second_open_is_ebusy() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    let error = Log::open(dir.path(), options()).unwrap_err();
    assert_eq!(error.errno(), libc::EBUSY);
    assert!(error.to_string().contains("another handle or process has open"), "{error}");
    let copy = log.clone();
    drop(log);
    assert_eq!(errno(Log::open(dir.path(), options())), libc::EBUSY);
    copy.append(b"still open").unwrap();
    drop(copy);
    assert_eq!(all(&Log::open(dir.path(), options()).unwrap()).len(), 1);
}

fn c73_truncated_segments_are_reused_and_their_records_gone() {
    let dir = scratch();
    let log = Log::open(dir.path(), options().spares(3)).unwrap();
    // Records of the same sizes, so that those of an earlier use lie where new ones end.
    let mut records = fill(&log, [9000; 40]);
    let mut reader = log.records();
    assert!(reader.next() == Some(Ok(records[0].clone())));
    for round in 0..8 {
        let kept = records[records.len() / 2].position;
        let segments = names(dir.path(), "segment-");
        log.truncate_before(kept).unwrap();
        let start = log.start();
        assert!(start < kept && kept.get() - start.get() < SEGMENT);
        let (gone, stay): (Vec<_>, Vec<_>) =
            records.into_iter().partition(|record| record.position < start);
        assert!(gone.len() > 1, "{round}");
        for record in &gone {
            assert_eq!(errno(log.read(record.position)), libc::ENODATA);
            assert_eq!(log.records_from(record.position).next().map(errno), Some(libc::ENODATA));
        }
        let files = |prefix| names(dir.path(), prefix);
        assert!((1..=3).contains(&files("spare-")) && files("segment-") < segments);
        records = stay;
        let before = files("segment-") + files("spare-");
        records.extend(fill(&log, vec![9000; 6 * files("spare-") - 5]));
        assert_eq!(files("segment-") + files("spare-"), before, "nothing is allocated");
        records.extend(fill(&log, [9000; 20]));
        assert!(all(&log) == records);
    }
    assert_eq!(reader.next().map(errno), Some(libc::ENODATA));
    let behind = LogPosition::new(log.end().get() + 1);
    assert_eq!(errno(log.truncate_before(behind)), libc::EINVAL);
    // With all records truncated the last segment stays, and positions go on.
    log.truncate_before(log.end()).unwrap();
    assert_eq!(names(dir.path(), "segment-"), 1);
    let (last, kept) = (records.last().unwrap().position, all(&log).len());
    drop((log, reader));
    let log = Log::open(dir.path(), options()).unwrap();
    assert_eq!(all(&log).len(), kept);
    assert!(log.append(b"next").unwrap() > last);
}

fn c73_a_truncation_returns_when_it_is_durable() {
    let dir = scratch();
    let log = Log::open(dir.path(), options()).unwrap();
    fill(&log, [50_000; 4]);
    let shared = log.clone();
    let failed = denied(Deny::all(libc::SYS_fsync, libc::EIO), move || {
        // The second one finds the first segment freed, but not durably.
        [(); 2].map(|()| errno(shared.truncate_before(LogPosition::new(2 * SEGMENT + FIRST))))
    });
    let Some(failed) = failed else { return };
    assert_eq!(failed, [libc::EIO; 2]);
    assert_eq!(log.truncate_before(log.end()), Ok(()));
    assert_eq!((names(dir.path(), "segment-"), names(dir.path(), "spare-")), (1, 2));
    fill(&log, [50_000; 2]);
    assert_eq!((names(dir.path(), "segment-"), names(dir.path(), "spare-")), (3, 0));
}

fn c73_further_spare_segments_are_removed() {
    let dir = scratch();
    for (spares, left) in [(0, 0), (1, 1), (100, 6)] {
        let path = dir.path().join(spares.to_string());
        let log = Log::open(&path, options().spares(spares)).unwrap();
        fill(&log, [50_000; 7]);
        log.truncate_before(log.end()).unwrap();
        assert_eq!((names(&path, "segment-"), names(&path, "spare-")), (1, left));
    }
    let path = dir.path().join("100");
    for unfinished in ["new-0000000000000009", "other", "segment-9"] {
        fs::write(path.join(unfinished), b"x").unwrap();
    }
    let log = Log::open(&path, options().spares(2)).unwrap();
    let left = ["spare-", "new-", "other", "segment-9"].map(|prefix| names(&path, prefix));
    assert_eq!(left, [2, 0, 1, 1]);
    assert_eq!(errno(Log::open(&path.join("other"), options())), libc::ENOTDIR);
    drop(log);
    assert_eq!(errno(Log::open(&path, options().spares(1025))), libc::EINVAL);
}
