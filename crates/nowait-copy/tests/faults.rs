//! Copies with a fault on either side fail with a message of one line and leave no file.
//!
//! Invariant: each copy ends; existing files are unchanged afterwards.

mod server;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use nowait_copy::{CopySource, CopyTarget, Error, Location, Lost, Options, Progress, Report, copy};
use nowait_testkit::Random;
use server::{BLOCK_STATUS, READ, WRITE, correct_answer, failure, serve};

const MIB: u64 = 1 << 20;

fn location(text: &str) -> Location {
    Location::parse(&text.into()).unwrap()
}

fn options(from: &str, to: &str) -> Options {
    let (from, to) = (CopySource::At(location(from)), CopyTarget::At(location(to)));
    Options { connections: 2, requests: 4, sparse_bytes: 4096, ..Options::new(from, to) }
}

fn run(from: &str, to: &str) -> Result<Report, Error> {
    copy(&options(from, to), &AtomicBool::new(false), &mut |_| {})
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Checks that a copy from `uri` fails with one line that has `words`, and leaves no file.
fn assert_refused(uri: &str, directory: &Path, words: &str) {
    let target = directory.join("target");
    let message = run(uri, text(&target)).unwrap_err().to_string();
    assert!(message.contains(words) && !message.contains('\n'), "no '{words}' in: {message}");
    assert!(!target.exists() && !directory.join("target.partial").exists());
}

#[test]
fn a_correct_server_is_copied() {
    let directory = tempfile::tempdir().unwrap();
    let uri = serve(directory.path(), 3 * MIB + 512, |request| Some(correct_answer(request, 9)));
    let target = directory.path().join("target");
    let report = run(&uri, text(&target)).unwrap();
    assert_eq!((report.size, report.data, report.zero), (3 * MIB + 512, 3 * MIB + 512, 0));
    assert_eq!(fs::read(&target).unwrap(), vec![9; (3 * MIB + 512) as usize]);
}

#[test]
fn a_server_that_disconnects_at_any_request_is_reported() {
    for requests in 0..6 {
        let directory = tempfile::tempdir().unwrap();
        let mut left = requests;
        let uri = serve(directory.path(), 8 * MIB, move |request| {
            left -= 1;
            (left >= 0).then(|| correct_answer(request, 1))
        });
        assert_refused(&uri, directory.path(), "the server closed the connection");
    }
}

#[test]
fn a_server_that_disconnects_within_a_reply_is_reported() {
    for bytes in [1, 19, 20, 27, 28, 29, 100_000] {
        let directory = tempfile::tempdir().unwrap();
        let mut cut = false;
        let uri = serve(directory.path(), 8 * MIB, move |request| {
            if cut {
                return None;
            }
            let mut answer = correct_answer(request, 1);
            // The first read is alone; later reads are followed by more requests, at which the
            // server closes the connection.
            if request.command == READ && request.offset > 0 {
                cut = true;
                answer.truncate(bytes);
            }
            Some(answer)
        });
        assert_refused(&uri, directory.path(), "the server closed the connection");
    }
}

#[test]
fn a_source_that_shrinks_during_the_copy_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    fs::write(&source, vec![1; (16 * MIB) as usize]).unwrap();
    let victim = source.clone();
    let uri = serve(directory.path(), 16 * MIB, move |request| {
        if request.command == WRITE {
            File::options().write(true).open(&victim).unwrap().set_len(MIB).unwrap();
        }
        Some(correct_answer(request, 0))
    });
    let message = run(text(&source), &uri).unwrap_err().to_string();
    assert!(message.contains("source: it became shorter while it was copied"), "{message}");
}

#[test]
fn a_cancelled_copy_ends_and_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("source"), directory.path().join("target"));
    fs::write(&source, vec![1; (32 * MIB) as usize]).unwrap();
    let stop = AtomicBool::new(false);
    let mut tell = |_: Progress| stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let ended = copy(&options(text(&source), text(&target)), &stop, &mut tell);
    assert_eq!(ended, Err(Error::Interrupted));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn progress_grows_to_the_size_of_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("source"), directory.path().join("target"));
    fs::write(&source, vec![1; (4 * MIB) as usize]).unwrap();
    File::options().write(true).open(&source).unwrap().set_len(8 * MIB).unwrap();
    let (mut last, options) = (None, options(text(&source), text(&target)));
    let options = Options { verify: true, ..options };
    let mut tell = |now: Progress| {
        assert!(now.done <= now.total && now.total == 8 * MIB);
        if let Some(before) = last.replace(now) {
            assert!(before.phase != now.phase || before.done <= now.done);
        }
    };
    copy(&options, &AtomicBool::new(false), &mut tell).unwrap();
    assert_eq!(last.map(|last| last.done), Some(8 * MIB));
}

/// EIO and ESHUTDOWN of the protocol ("Error values").
const EIO: u32 = 5;
const ESHUTDOWN: u32 = 108;

fn rescue(uri: &str, target: &Path) -> Result<Report, Error> {
    let options = Options { rescue: true, ..options(uri, text(target)) };
    copy(&options, &AtomicBool::new(false), &mut |_| {})
}

#[test]
fn a_rescue_continues_where_the_server_cannot_report_the_mapping() {
    let directory = tempfile::tempdir().unwrap();
    let uri = serve(directory.path(), 5 * MIB + 512, |request| match request.command {
        BLOCK_STATUS => Some(failure(request, EIO)),
        _ => Some(correct_answer(request, 9)),
    });
    let target = directory.path().join("target");
    assert_eq!(rescue(&uri, &target).unwrap().lost, Lost::default());
    assert_eq!(fs::read(&target).unwrap(), vec![9; (5 * MIB + 512) as usize]);
}

#[test]
fn a_rescue_of_an_unreadable_disk_ends_after_three_reads_of_each_byte() {
    let directory = tempfile::tempdir().unwrap();
    let read_bytes = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = read_bytes.clone();
    let uri = serve(directory.path(), 2 * MIB, move |request| match request.command {
        READ => {
            let bytes = request.length;
            counted.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
            Some(failure(request, EIO))
        }
        _ => Some(correct_answer(request, 0)),
    });
    let target = directory.path().join("target");
    let lost = rescue(&uri, &target).unwrap().lost;
    assert_eq!((lost.ranges, lost.bytes), (vec![nowait::ByteRange::new(0, 2 * MIB)], 2 * MIB));
    assert_eq!(fs::read(&target).unwrap(), vec![0; 2 * MIB as usize]);
    // The first bytes are also read once before the copy begins.
    let read_bytes = read_bytes.load(std::sync::atomic::Ordering::Relaxed);
    assert!(read_bytes <= 3 * (2 * MIB + 128 * 1024), "{read_bytes}");
}

#[test]
fn a_rescue_fails_when_the_server_shuts_down_and_loses_no_range() {
    let directory = tempfile::tempdir().unwrap();
    let uri = serve(directory.path(), 2 * MIB, |request| match request.command {
        READ if request.offset >= MIB => Some(failure(request, ESHUTDOWN)),
        _ => Some(correct_answer(request, 1)),
    });
    let target = directory.path().join("target");
    let message = rescue(&uri, &target).unwrap_err().to_string();
    assert!(message.contains("the server is shutting down"), "{message}");
    assert!(!target.exists());
}

#[test]
fn a_rescue_with_verify_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = (directory.path().join("source"), directory.path().join("target"));
    fs::write(&source, [1; 4096]).unwrap();
    let options = options(text(&source), text(&target));
    let options = Options { rescue: true, verify: true, ..options };
    let message = copy(&options, &AtomicBool::new(false), &mut |_| {}).unwrap_err().to_string();
    assert!(message.contains("not read again") && !target.exists(), "{message}");
}

#[test]
fn an_invalid_handshake_is_reported() {
    use server::{export_info, greeting, listen, option_reply, receive_option};
    let unsupported = |option| option_reply(option, (1 << 31) + 1, &[]);
    let ack = || option_reply(7, 1, &[]);
    let block_sizes = |min: u32, max: u32| {
        let sizes = [min, 4096, max].map(u32::to_be_bytes).concat();
        option_reply(7, 3, &[&3u16.to_be_bytes()[..], &sizes].concat())
    };
    let long = [&option_reply(7, 3, &[])[..16], &u32::MAX.to_be_bytes()].concat();
    for (first, go, words) in [
        (b"HTTP/1.1 400 Bad Request\r\n".to_vec(), vec![], "does not speak NBD"),
        (b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\x00\x00".to_vec(), vec![], "old style"),
        (b"NBD".to_vec(), vec![], "closed the connection in the handshake"),
        (greeting(), unsupported(7), "too old"),
        (greeting(), option_reply(7, (1 << 31) + 5, b"no\nway"), "wants TLS"),
        (greeting(), option_reply(7, (1 << 31) + 2, b"go\naway"), r"does not allow it: go\naway"),
        (greeting(), ack(), "does not say how large"),
        (greeting(), [export_info(1 << 63), ack()].concat(), "9223372036854775808 bytes"),
        (greeting(), [export_info(MIB), block_sizes(3, 4096), ack()].concat(), "block sizes"),
        (greeting(), [export_info(MIB), block_sizes(512, 1), ack()].concat(), "block sizes"),
        (greeting(), export_info(MIB).repeat(100), "come to an end"),
        (greeting(), long, "is not an answer"),
        (greeting(), vec![7; 20], "is not an answer"),
        (greeting(), vec![], "closed the connection in the handshake"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let uri = listen(directory.path(), move |stream| {
            stream.write_all(&first)?;
            if first.len() < 18 {
                return Ok(());
            }
            stream.read_exact(&mut [0; 4])?;
            // Structured replies are refused.
            let option = receive_option(stream)?;
            stream.write_all(&unsupported(option))?;
            receive_option(stream)?;
            stream.write_all(&go)
        });
        assert_refused(&uri, directory.path(), words);
    }
}

#[test]
fn replies_with_random_bytes_changed_are_an_error_or_the_right_bytes() {
    // Requested in several parts.
    const BYTES: u64 = 1 << 20;
    let (mut failed, mut whole) = (0, 0);
    for seed in 0..150 {
        let directory = tempfile::tempdir().unwrap();
        let mut random = Random::from_seed(seed);
        let uri = serve(directory.path(), BYTES, move |request| {
            let mut answer = correct_answer(request, 5);
            let head = answer.len().min(32);
            match random.below(4) {
                // Changed data cannot be detected; only the bytes around it are changed.
                0 => {
                    let at = random.below(head.min(28) as u64) as usize;
                    answer[at] ^= 1 << random.below(8);
                }
                1 => {
                    let shorter = random.below(answer.len() as u64) as usize;
                    answer.truncate(shorter);
                    answer.extend([0; 64]);
                }
                _ => {}
            }
            Some(answer)
        });
        let target = directory.path().join("target");
        let stop = AtomicBool::new(false);
        let begin = std::time::Instant::now();
        let options = options(&uri, text(&target));
        let ended = std::thread::scope(|scope| {
            let copying = scope.spawn(|| copy(&options, &stop, &mut |_| {}));
            while !copying.is_finished() && begin.elapsed().as_millis() < 100 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            // After a truncated reply the client correctly waits for the rest.
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            copying.join().unwrap()
        });
        match ended {
            Ok(report) => {
                whole += 1;
                assert_eq!(fs::metadata(&target).unwrap().len(), report.size, "seed {seed}");
            }
            Err(_) => {
                failed += 1;
                assert!(!target.exists(), "seed {seed}");
            }
        }
    }
    assert!(failed > 50 && whole > 0, "{failed} failed, {whole} were whole");
}
