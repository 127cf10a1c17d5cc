//! Logs whose files were damaged at random: an open or a read fails with the right errno, and gives nothing that
//! was not appended.

use std::fs;
use std::path::{Path, PathBuf};

use nowait::{Log, LogOptions};
use nowait_testkit::{Random, Scratch, seed};

const SEGMENT: u64 = 64 << 10;

/// Changes one of the files.
fn damage(files: &[PathBuf], random: &mut Random) {
    let file = &files[random.below(files.len() as u64) as usize];
    let mut bytes = fs::read(file).unwrap();
    for _ in 0..=random.below(3) {
        // Mostly where there are headers.
        let block = random.below(16) as usize * 4096;
        let behind = if random.chance(50) { 64 } else { 4096 };
        let at = block + random.below(behind) as usize;
        match random.below(8) {
            0 => bytes.truncate(random.below(SEGMENT + 1) as usize),
            1 => bytes.resize(SEGMENT as usize + random.below(8192) as usize, 7),
            2 => {
                let from = random.below(16) as usize * 4096;
                let len = 4096.min(bytes.len().saturating_sub(from.max(block)));
                if len > 0 {
                    bytes.copy_within(from..from + len, block);
                }
            }
            3 => bytes.iter_mut().skip(at).take(512).for_each(|byte| *byte = 0),
            _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << random.below(8)),
        }
    }
    fs::write(file, bytes).unwrap();
}

fn check(path: &Path, appended: &[Vec<u8>], random: &mut Random) {
    let errnos = [libc::EBADMSG, libc::ENOENT];
    let log = match Log::open(path, LogOptions::new().segment_bytes(SEGMENT)) {
        Ok(log) => log,
        Err(error) => return assert!(errnos.contains(&error.errno()), "{error}"),
    };
    let mut last = None;
    for record in log.records().take(appended.len() + 1) {
        match record {
            Ok(record) => {
                let at = appended.iter().position(|data| *data == record.data);
                assert!(at.is_some() && at > last, "{at:?} after {last:?}");
                last = at;
            }
            Err(error) => {
                assert_eq!(error.errno(), libc::EBADMSG, "{error}");
                break;
            }
        }
    }
    for _ in 0..20 {
        let position = nowait::LogPosition::new(random.below(5 * SEGMENT));
        if let Ok(data) = log.read(position) {
            assert!(appended.contains(&data), "{position}");
        }
    }
    log.append(b"it goes on").unwrap();
}

#[test]
fn c69_a_damaged_log_gives_nothing_that_was_not_appended() {
    let dir = Scratch::new();
    let path = dir.join("log");
    let log = Log::open(&path, LogOptions::new().segment_bytes(SEGMENT).spares(1)).unwrap();
    let record = |n: usize| [&n.to_le_bytes()[..], &vec![n as u8; n * 997 % 9000]].concat();
    let appended: Vec<_> = (0..40).map(record).collect();
    appended.iter().for_each(|data| _ = log.append(data).unwrap());
    drop(log);
    let files: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()).collect();
    let whole: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let segments: Vec<_> =
        files.iter().filter(|file| file.to_str().unwrap().contains("segment-")).cloned().collect();
    assert!(segments.len() > 2);
    let mut random = Random::from_seed(seed());
    for _ in 0..150 {
        damage(&segments, &mut random);
        check(&path, &appended, &mut random);
        for entry in fs::read_dir(&path).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        files.iter().zip(&whole).for_each(|(file, bytes)| fs::write(file, bytes).unwrap());
    }
}
