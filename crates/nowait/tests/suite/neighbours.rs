//! Requests of one burst that touch on storage share a transfer, on every queue: each is answered
//! once, with its own bytes and its own result.

use std::sync::Arc;

use nowait::{
    BlockDevice, BlockMap, ByteRange, Completion, Config, Flags, IoQueue, Op, OpenOptions, Request,
    SingleDisk,
};
use nowait_testkit::{TestQueueKind, WaitForRequests};

const PAGE: u64 = 4096;
const PAGES: u64 = 64;

/// An image whose page `n` is filled with `n`.
fn image() -> (tempfile::TempDir, std::path::PathBuf, Arc<BlockDevice<impl BlockMap>>) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("disk.img");
    let bytes: Vec<u8> = (0..PAGES * PAGE).map(|at| (at / PAGE) as u8).collect();
    std::fs::write(&path, bytes).unwrap();
    // A read of data that are not on the device yet would be refused without waiting.
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let disk = Arc::new(BlockDevice::open_mapped(&path, OpenOptions::default()).unwrap());
    (dir, path, disk)
}

/// Submits requests for `pages` in one burst, whose buffers are filled with the page's number and
/// `mark`; returns the completions in the order of the pages.
fn burst<Q: IoQueue, M: BlockMap>(
    engine: &mut SingleDisk<Q, M>,
    op: Op,
    pages: std::ops::Range<u64>,
    mark: u8,
) -> Vec<Completion> {
    for page in pages.clone() {
        let range = ByteRange::new(page * PAGE, PAGE);
        let mut buf = engine.buffer(range).unwrap();
        buf.fill(page as u8 | mark);
        let io = Request { op, flags: Flags::NONE, range };
        assert!(engine.submit(io, buf, page).is_ok());
    }
    let mut completions = engine.finish();
    completions.sort_by_key(|done| done.tag);
    assert!(completions.iter().map(|done| done.tag).eq(pages));
    completions
}

#[test]
fn requests_that_share_a_transfer_have_their_own_bytes() {
    for kind in TestQueueKind::REAL {
        for merge in [true, false] {
            let (_dir, path, disk) = image();
            let config = Config { merge, ..Config::default() };
            let Some(mut engine) = kind.engine(&disk, 2, config) else { continue };
            // Twice, because the buffers come back in another order.
            for _ in 0..2 {
                for done in burst(&mut engine, Op::Read, 8..40, 0x80) {
                    assert_eq!(done.result().unwrap(), PAGE);
                    let wanted = vec![done.tag as u8; PAGE as usize];
                    assert_eq!(done.buf.as_deref(), Some(&wanted[..]), "{kind:?}");
                }
            }
            for done in burst(&mut engine, Op::Write, 8..40, 0x40) {
                assert_eq!(done.result().unwrap(), PAGE);
            }
            let merged = engine.stats().merged;
            drop(engine);
            let image = std::fs::read(path).unwrap();
            for (page, bytes) in (0..PAGES).zip(image.chunks(PAGE as usize)) {
                let byte = if (8..40).contains(&page) { page as u8 | 0x40 } else { page as u8 };
                assert_eq!(bytes, vec![byte; PAGE as usize], "page {page}, {kind:?}");
            }
            // The file system may refuse a transfer now and then.
            assert_eq!(merged > 0, merge, "{kind:?}: {merged}");
        }
    }
}

#[test]
fn a_transfer_that_ends_with_the_file_answers_each_request_with_what_there_was_for_it() {
    for kind in TestQueueKind::REAL {
        let (_dir, path, disk) = image();
        let Some(mut engine) = kind.engine(&disk, 2, Config::default()) else { continue };
        // The file is truncated without the engine's knowledge.
        std::fs::File::options().write(true).open(&path).unwrap().set_len(20 * PAGE + 512).unwrap();
        for done in burst(&mut engine, Op::Read, 8..40, 0x80) {
            let wanted = match done.tag {
                ..20 => PAGE,
                20 => 512,
                _ => 0,
            };
            assert_eq!(done.result().unwrap(), wanted, "page {}, {kind:?}", done.tag);
        }
    }
}

#[test]
fn every_request_is_answered_once_where_the_queue_moves_nothing() {
    let (_dir, _, disk) = image();
    let Some(mut engine) = TestQueueKind::Null.engine(&disk, 2, Config::default()) else { return };
    for op in [Op::Read, Op::Write] {
        let completions = burst(&mut engine, op, 0..PAGES, 0);
        assert!(completions.iter().all(|done| done.result().unwrap() == PAGE));
    }
    // The first of a burst touches nothing before it, and a transfer holds no more than 64 of them.
    assert_eq!(engine.stats().merged, 2 * (PAGES - 1));
}
