//! Group E: requests that must not wait, and the engine's own first try without waiting.

use std::fs;
use std::thread;

use nowait::{ByteRange, Config, Flags, Op, Request};

use nowait_testkit::TestQueueKind;

use crate::rig::{
    ALL, Api, BLOCK, Case, Content, ISLAND, Image, KIB, MIB, REAL, Rig, cases, io, islands,
    on_engines, pattern, read, write,
};

rules![
    c32_a_request_that_would_have_to_wait_is_eagain,
    c32_no_free_slot_is_eagain,
    c33_after_eagain_the_same_request_can_be_submitted_again,
    c34_eagain_at_completion_is_like_eagain_at_submission,
    c35_a_mapping_that_covers_a_part_is_eagain_for_the_whole,
    c35_a_short_transfer_is_eagain_and_no_short_result,
    c36_a_nowait_write_allocates_nothing,
    c36_nowait_writes_together_allocate_nothing,
    c37_each_request_is_tried_once_and_then_goes_to_a_worker,
    c37_of_overwrites_refused_in_a_burst_one_goes_to_a_worker_and_the_others_are_tried_twice,
    c38_a_range_that_was_allocated_is_written_inline_from_then_on,
    c39_a_file_that_always_refuses_is_left_alone_and_tried_again_later,
    c40_workers_stay_within_their_bound_and_drop_nothing,
];

fn nowait(op: Op, pos: u64, len: u64) -> Request {
    io(op, Flags::NOWAIT, pos, len)
}

fn c32_a_request_that_would_have_to_wait_is_eagain() {
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let all = ByteRange::new(0, MIB);
        for op in [Op::Flush, Op::Zero, Op::Discard, Op::Status] {
            assert_eq!(rig.bare(op, Flags::NOWAIT, all), Err(libc::EAGAIN), "{}", rig.case.label);
        }
        if rig.disk.is_direct() {
            // The block would have to be read, under a lock.
            let done = rig.run(nowait(Op::Write, 5, 10), &[1; 10]);
            assert_eq!(done, Err(libc::EAGAIN), "{}", rig.case.label);
        }
        assert!(rig.image.bytes(0, MIB) == pattern(0, MIB), "{}", rig.case.label);
        if rig.is_plain() {
            assert_eq!(rig.run(nowait(Op::Read, 0, BLOCK), &[]), Ok(BLOCK), "{}", rig.case.label);
        }
    });
}

/// Each case with room for `slots` requests only.
fn on_few_slots(kinds: &[TestQueueKind], slots: u32, test: impl Fn(&mut Rig)) {
    for case in cases(kinds) {
        let case = Case { config: Config { slots, ..case.config }, ..case };
        if let Some(mut rig) = Rig::new(&case, Image::new(MIB, Content::Data)) {
            test(&mut rig);
        }
    }
}

fn c32_no_free_slot_is_eagain() {
    on_few_slots(&ALL, 1, |rig| {
        assert!(rig.submit(read(0, BLOCK), &[]).is_ok(), "{}", rig.case.label);
        assert!(!rig.engine.has_free_slot(), "{}", rig.case.label);
        for flags in [Flags::NONE, Flags::NOWAIT] {
            let refused = rig.submit(io(Op::Write, flags, 0, BLOCK), &[7; 4096]).err();
            let refused = refused.expect("a refusal");
            assert_eq!(refused.error.errno(), libc::EAGAIN, "{}", rig.case.label);
            let buf = refused.buf.expect("the buffer");
            assert_eq!(buf[..4096], [7; 4096], "{}", rig.case.label);
        }
        assert_eq!(rig.only().result(), Ok(BLOCK), "{}", rig.case.label);
        assert!(rig.submit(write(0, BLOCK), &[7; 4096]).is_ok(), "{}", rig.case.label);
        assert_eq!(rig.only().result(), Ok(BLOCK), "{}", rig.case.label);
    });
}

fn c33_after_eagain_the_same_request_can_be_submitted_again() {
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let bytes = pattern(77, 3 * BLOCK);
        for op in [Op::Write, Op::Read] {
            rig.script.on_reap(|_, _| -libc::EAGAIN);
            let request = nowait(op, BLOCK, 3 * BLOCK);
            let data = if op == Op::Write { &bytes[..] } else { &[] };
            assert!(rig.submit(request, data).is_ok(), "{}", rig.case.label);
            let refused = rig.only();
            assert_eq!(refused.result().unwrap_err().errno(), libc::EAGAIN, "{}", rig.case.label);
            assert_eq!(refused.io, request, "{}", rig.case.label);
            rig.script.behave();
            // A second try without `NOWAIT`: with it, the configurations without a first try
            // would refuse it again.
            let again = Request { flags: Flags::NONE, ..request };
            assert!(rig.engine.submit(again, refused.buf.expect("the buffer"), 1).is_ok());
            let done = rig.only();
            assert_eq!(done.result(), Ok(3 * BLOCK), "{}", rig.case.label);
            let buf = done.buf.expect("the buffer");
            assert!(buf[..3 * 4096] == bytes, "{op:?} {}", rig.case.label);
        }
        assert!(rig.image.bytes(BLOCK, 3 * BLOCK) == bytes, "{}", rig.case.label);
    });
}

fn c34_eagain_at_completion_is_like_eagain_at_submission() {
    const SLOTS: u32 = 8;
    on_few_slots(&REAL, SLOTS, |rig| {
        if rig.reads_ahead() {
            return;
        }
        let tried = rig.case.config.nowait_first;
        for round in 0..3 * SLOTS {
            // First no room in the queue, before and after its submission to the kernel; then
            // EAGAIN at completion.
            for late in [false, true] {
                match late {
                    false => rig.script.full.set(if tried { 2 } else { 0 }),
                    true => rig.script.on_reap(|_, _| -libc::EAGAIN),
                }
                let request = nowait(Op::Read, u64::from(round) * BLOCK, BLOCK);
                let done = rig.run(request, &[]);
                assert_eq!(done, Err(libc::EAGAIN), "late: {late}, {}", rig.case.label);
                rig.script.behave();
                assert_eq!(rig.script.full.get(), 0, "{}", rig.case.label);
            }
        }
        // All slots are free again, and none was freed twice.
        assert!(rig.read(0, MIB) == Ok(pattern(0, MIB)), "{}", rig.case.label);
        assert_eq!(rig.engine.in_flight(), 0, "{}", rig.case.label);
        assert_eq!(rig.script.out.get(), 0, "{}", rig.case.label);
        let pool = rig.stats().pool;
        assert!(!rig.case.config.pool || pool.allocated <= u64::from(SLOTS), "{pool:?}");
    });
    on_engines(&REAL, MIB, Content::Data, |rig| {
        // Without the flag a worker does the request, once.
        rig.script.on_reap(|_, _| -libc::EAGAIN);
        let bytes = pattern(5, 64 * KIB);
        let done = Api::write(rig, 12_288, &bytes, Flags::NONE);
        assert_eq!(done, Ok(64 * KIB), "{}", rig.case.label);
        assert!(rig.read(12_288, 64 * KIB) == Ok(bytes), "{}", rig.case.label);
        assert!(rig.read(1, 9) == Ok(pattern(1, 9)), "{}", rig.case.label);
    });
}

fn c35_a_mapping_that_covers_a_part_is_eagain_for_the_whole() {
    const SIZE: u64 = 6 * ISLAND;
    on_engines(&REAL, SIZE, Content::Islands, |rig| {
        for pos in [0, ISLAND - BLOCK] {
            let bytes = vec![9; 2 * ISLAND as usize];
            let done = rig.run(nowait(Op::Write, pos, 2 * ISLAND), &bytes);
            assert_eq!(done, Err(libc::EAGAIN), "{}", rig.case.label);
        }
        assert!(rig.image.bytes(0, SIZE) == islands(0, SIZE), "{}", rig.case.label);
    });
}

fn c35_a_short_transfer_is_eagain_and_no_short_result() {
    on_engines(&REAL, MIB, Content::Data, |rig| {
        rig.script.on_reap(|_, outcome| outcome.min(4096));
        for op in [Op::Read, Op::Write] {
            let done = rig.run(nowait(op, 0, 3 * BLOCK), &pattern(0, 3 * BLOCK));
            assert_eq!(done, Err(libc::EAGAIN), "{op:?} {}", rig.case.label);
        }
    });
}

fn c36_a_nowait_write_allocates_nothing() {
    on_engines(&REAL, MIB, Content::Hole, |rig| {
        let before = rig.image.allocated();
        let done = rig.run(nowait(Op::Write, 64 * KIB, 2 * BLOCK), &[1; 8192]);
        assert_eq!(done, Err(libc::EAGAIN), "{}", rig.case.label);
        assert_eq!(rig.image.allocated(), before, "{}", rig.case.label);
        assert!(rig.image.bytes(0, MIB) == vec![0; MIB as usize], "{}", rig.case.label);
    });
}

fn c36_nowait_writes_together_allocate_nothing() {
    on_engines(&REAL, MIB, Content::Hole, |rig| {
        for n in 0..8 {
            let request = nowait(Op::Write, n * 64 * KIB, BLOCK);
            assert!(rig.submit(request, &[1; 4096]).is_ok(), "{}", rig.case.label);
        }
        for done in rig.finish() {
            let errno = done.result().err().map(|error| error.errno());
            assert_eq!(errno, Some(libc::EAGAIN), "{}", rig.case.label);
        }
        assert!(rig.image.bytes(0, MIB) == vec![0; MIB as usize], "{}", rig.case.label);
    });
}

fn c37_each_request_is_tried_once_and_then_goes_to_a_worker() {
    const REQUESTS: u64 = 20;
    on_engines(&REAL, MIB, Content::Data, |rig| {
        if rig.reads_ahead() {
            return;
        }
        rig.script.on_reap(|_, _| -libc::EAGAIN);
        for n in 0..REQUESTS {
            // A block apart: neighbours would be tried together first.
            assert!(rig.submit(read(2 * n * BLOCK, BLOCK), &[]).is_ok(), "{}", rig.case.label);
        }
        let all = rig.finish();
        assert_eq!(all.len() as u64, REQUESTS, "{}", rig.case.label);
        for done in all {
            assert_eq!(done.result(), Ok(BLOCK), "{}", rig.case.label);
            let expected = pattern(done.io.range.pos, BLOCK);
            assert!(done.buf.expect("the buffer")[..4096] == expected, "{}", rig.case.label);
        }
        let tried = if rig.case.config.nowait_first { REQUESTS } else { 0 };
        assert_eq!(rig.script.take_pushed().len() as u64, tried, "{}", rig.case.label);
        let stats = rig.stats();
        assert_eq!((stats.retried, stats.worker), (tried, REQUESTS - tried), "{}", rig.case.label);
    });
}

fn c37_of_overwrites_refused_in_a_burst_one_goes_to_a_worker_and_the_others_are_tried_twice() {
    const BURST: u64 = 9;
    // Overwrites refused once are served by the second try; overwrites refused always each go to a
    // worker after it.
    for (refusals, deferred, retried) in [(BURST, BURST - 1, 1), (u64::MAX, BURST - 1, BURST)] {
        on_engines(&[TestQueueKind::Null], MIB, Content::Data, |rig| {
            let Config { nowait_first, simple, .. } = rig.case.config;
            if !(nowait_first && rig.case.options.cache_holes && simple) {
                return;
            }
            let mut left = refusals;
            rig.script.on_reap(move |_, outcome| {
                let refuses = left > 0;
                left = left.saturating_sub(1);
                if refuses { -libc::EAGAIN } else { outcome }
            });
            for n in 0..BURST {
                let pos = 2 * n * BLOCK;
                let bytes = pattern(pos, BLOCK);
                let overwrite = io(Op::Write, Flags::NONE, pos, BLOCK);
                assert!(rig.submit(overwrite, &bytes).is_ok(), "{}", rig.case.label);
            }
            let all = rig.finish();
            assert_eq!(all.len() as u64, BURST, "{}", rig.case.label);
            assert!(all.iter().all(|done| done.result() == Ok(BLOCK)), "{}", rig.case.label);
            let stats = rig.stats();
            assert_eq!((stats.deferred, stats.retried), (deferred, retried), "{}", rig.case.label);
        });
    }
}

fn c38_a_range_that_was_allocated_is_written_inline_from_then_on() {
    on_engines(&REAL, MIB, Content::Hole, |rig| {
        for round in 1..=3 {
            let before = rig.stats();
            let bytes = vec![round; 16 * 4096];
            assert_eq!(rig.run(write(0, 16 * BLOCK), &bytes), Ok(16 * BLOCK));
            let after = rig.stats();
            let by_worker = after.worker - before.worker;
            let inline = after.simple + after.general - before.simple - before.general;
            assert_eq!(by_worker + inline, 1, "{after:?} {}", rig.case.label);
            if rig.case.options.cache_holes && rig.case.config.nowait_first {
                assert_eq!(by_worker, u64::from(round == 1), "{round} {}", rig.case.label);
            }
            if rig.is_plain() {
                assert_eq!(after.simple, u64::from(round) - 1, "{round} {}", rig.case.label);
            }
            assert!(rig.image.bytes(0, 16 * BLOCK) == bytes, "{}", rig.case.label);
        }
    });
}

fn c39_a_file_that_always_refuses_is_left_alone_and_tried_again_later() {
    const BATCH: u64 = 64;
    /// Far more requests than it takes to begin or to end a back-off.
    const LIMIT: u64 = 1000 * BATCH;
    let batch = |rig: &mut Rig| {
        for n in 0..BATCH {
            assert!(rig.submit(read(2 * n * BLOCK, BLOCK), &[]).is_ok(), "{}", rig.case.label);
        }
        assert!(rig.finish().iter().all(|done| done.result().is_ok()), "{}", rig.case.label);
        rig.script.take_pushed().len() as u64
    };
    let with_attempts = |case: &&Case| case.config.nowait_first && !case.options.read_ahead;
    for case in cases(&REAL).iter().filter(with_attempts) {
        let Some(mut rig) = Rig::new(case, Image::new(MIB, Content::Data)) else { continue };
        rig.script.on_reap(|_, _| -libc::EAGAIN);
        if !case.config.back_off {
            assert!((0..100).all(|_| batch(&mut rig) == BATCH), "{}", case.label);
            assert_eq!(rig.stats().backed_off, 0, "{}", case.label);
            continue;
        }
        let mut submitted = 0;
        while batch(&mut rig) > 0 {
            submitted += BATCH;
            assert!(submitted < LIMIT, "it keeps trying: {}", case.label);
        }
        assert_eq!(rig.stats().backed_off, 1, "{}", case.label);
        rig.script.behave();
        while batch(&mut rig) == 0 {
            submitted += BATCH;
            assert!(submitted < LIMIT, "it never tries again: {}", case.label);
        }
        assert_eq!(batch(&mut rig), BATCH, "{}", case.label);
        let stats = rig.stats();
        assert!(stats.worker > 0 && stats.retried > 0, "{stats:?} {}", case.label);
    }
}

/// The number of worker threads of this process that were started under niceness `nice`.
fn workers_under(nice: i32) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let is_one = |stat: String| {
        // The name, in parentheses, may hold anything; the niceness is the 17th field after it.
        let (name, rest) = stat.rsplit_once(')')?;
        let its_nice: i32 = rest.split_whitespace().nth(16)?.parse().ok()?;
        (name.ends_with("(nowait-worker") && its_nice == nice).then_some(())
    };
    tasks.filter_map(|task| is_one(fs::read_to_string(task.path().join("stat")).ok()?)).count()
}

fn c40_workers_stay_within_their_bound_and_drop_nothing() {
    /// Used by no other test; new threads inherit it.
    const NICE: i32 = 7;
    const WORKERS: u32 = 3;
    let run = || {
        // Added to the niceness that the tests were started with.
        let nice = rustix::process::nice(NICE).unwrap();
        for case in cases(&REAL) {
            // The queue's own threads do not start when it gets no transfer.
            let config = Config { nowait_first: false, ..case.config };
            let case = Case { config, workers: WORKERS, ..case };
            let image = Image::new(MIB, Content::Data);
            let Some(mut rig) = Rig::new(&case, image) else { continue };
            let mut peak = 0;
            for round in 0..4 {
                for n in 0..60 {
                    let pos = (round * 60 + n) * BLOCK;
                    assert!(rig.submit(write(pos, BLOCK), &pattern(pos + 1, BLOCK)).is_ok());
                }
                rig.engine.poll().unwrap();
                peak = peak.max(workers_under(nice));
                let all = rig.finish();
                assert!(all.iter().all(|done| done.result() == Ok(BLOCK)), "{}", case.label);
                assert_eq!(all.len(), 60, "{}", case.label);
                peak = peak.max(workers_under(nice));
            }
            assert!((1..=WORKERS as usize).contains(&peak), "{peak} {}", case.label);
            let expected = pattern(1, 240 * BLOCK);
            assert!(rig.image.bytes(0, 240 * BLOCK) == expected, "{}", case.label);
        }
    };
    // On a thread of its own: an unprivileged thread cannot lower its niceness again.
    thread::scope(|scope| scope.spawn(run).join()).unwrap_or_else(|e| std::panic::resume_unwind(e));
}
