//! Group F: completion.

use std::collections::HashSet;
use std::thread;
use std::time::Duration;

use nowait::{ByteRange, Config, Flags, Op};
use rustix::event::{Timespec, epoll};

use nowait_testkit::{TestQueueKind, WaitForRequests, within};

use crate::queue::Pushed;
use crate::rig::{
    ALL, Api, BLOCK, Case, Content, Image, MIB, Memory, REAL, Random, Rig, cases, io, on_engines,
    pattern, range_in, read, write,
};

rules![
    c41_each_request_completes_once_whatever_its_transfers_come_to,
    c41_polling_alone_finds_what_a_worker_has_ended,
    c41_a_thread_that_sleeps_on_the_descriptor_is_woken,
    c42_a_read_is_finished_where_it_was_reaped,
    c42_a_sync_a_refusal_and_a_short_transfer_pass_to_a_worker,
    c43_the_completion_comes_last,
    c44_a_chain_of_completions_does_not_deepen_the_stack,
    c45_dropping_an_engine_waits_for_its_transfers,
    c46_an_engine_is_dropped_by_the_only_thread_that_could_reap,
    c47_no_slot_is_lost,
    c48_hipri_reaches_the_queue_and_every_device_serves_it,
];

fn c41_each_request_completes_once_whatever_its_transfers_come_to() {
    const REQUESTS: usize = 300;
    on_engines(&ALL, MIB + 99, Content::Islands, |rig| {
        let mut outcomes = Random::from_seed(0x41);
        rig.script.on_reap(move |_, outcome| match outcomes.below(6) {
            0 => -libc::EAGAIN,
            1 => -libc::EIO,
            2 => outcome / 2,
            3 => 0,
            _ => outcome,
        });
        let mut random = Random::from_seed(0x4141);
        let (mut submitted, mut completed) = (HashSet::new(), HashSet::new());
        let mut take = |rig: &mut Rig| {
            while let Some(done) = rig.engine.next() {
                assert!(completed.insert(done.tag), "completed twice: {}", rig.case.label);
            }
            completed.len()
        };
        while submitted.len() < REQUESTS {
            let range = range_in(MIB + 99, &mut random);
            let op = [Op::Read, Op::Write][random.below(2) as usize];
            let flags = [Flags::NONE, Flags::NOWAIT, Flags::DSYNC][random.below(3) as usize];
            rig.script.full.set(random.below(2) as u32);
            match rig.submit(io(op, flags, range.pos, range.len), &[]) {
                Ok(tag) => assert!(submitted.insert(tag)),
                Err(_) => rig.engine.wait_once(),
            }
            if random.below(4) == 0 {
                rig.engine.poll().unwrap();
                take(rig);
            }
        }
        while take(rig) < REQUESTS {
            rig.engine.wait_once();
        }
        assert_eq!(rig.engine.in_flight(), 0, "{}", rig.case.label);
        assert_eq!(rig.script.out.get(), 0, "{}", rig.case.label);
        assert!(rig.finish().is_empty(), "{}", rig.case.label);
        assert_eq!(completed, submitted, "{}", rig.case.label);
    });
}

fn c41_polling_alone_finds_what_a_worker_has_ended() {
    const STEP: Duration = Duration::from_millis(1);
    const STEPS: u32 = 5000;
    on_engines(&ALL, MIB, Content::Data, |rig| {
        let flush = io(Op::Flush, Flags::NONE, 0, 0);
        assert!(rig.engine.submit_no_data(flush, 1).is_ok(), "{}", rig.case.label);
        for _ in 0..STEPS {
            rig.engine.poll().unwrap();
            if rig.engine.has_done() {
                break;
            }
            thread::sleep(STEP);
        }
        assert!(rig.engine.has_done(), "never found: {}", rig.case.label);
        assert_eq!(rig.only().result(), Ok(0), "{}", rig.case.label);
    });
}

fn c41_a_thread_that_sleeps_on_the_descriptor_is_woken() {
    const TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
    on_engines(&REAL, MIB, Content::Data, |rig| {
        let event_loop = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let data = epoll::EventData::new_u64(0);
        epoll::add(&event_loop, rig.engine.fd(), data, epoll::EventFlags::IN).unwrap();
        // The first is served by a worker, the second by the queue.
        for io in [io(Op::Flush, Flags::NONE, 0, 0), read(0, MIB)] {
            let submitted = match io.op {
                Op::Flush => rig.engine.submit_no_data(io, 1).is_ok(),
                _ => rig.submit(io, &[]).is_ok(),
            };
            assert!(submitted, "{}", rig.case.label);
            rig.engine.poll().unwrap();
            while !rig.engine.has_done() {
                let mut events = Vec::with_capacity(1);
                let events = rustix::buffer::spare_capacity(&mut events);
                let woken = epoll::wait(&event_loop, events, Some(&TIMEOUT));
                // A ring may interrupt the call.
                let is_woken = matches!(woken, Ok(1) | Err(rustix::io::Errno::INTR));
                assert!(is_woken, "{woken:?} {:?} {}", io.op, rig.case.label);
                rig.engine.poll().unwrap();
            }
            assert_eq!(rig.only().result(), Ok(io.range.len), "{}", rig.case.label);
        }
    });
}

fn c42_a_read_is_finished_where_it_was_reaped() {
    on_engines(&[TestQueueKind::Null], MIB, Content::Data, |rig| {
        let config = rig.case.config;
        for (pos, len) in [(0, BLOCK), (4096, 3 * BLOCK), (5, 9)] {
            for op in [Op::Read, Op::Write] {
                let unaligned = pos == 5 && op == Op::Write && rig.disk.is_direct();
                let at_once = config.inline_completion && config.nowait_first && !unaligned;
                let before = rig.engine.stats().remote;
                assert!(rig.submit(io(op, Flags::NONE, pos, len), &[]).is_ok());
                rig.engine.poll().unwrap();
                assert!(!at_once || rig.engine.has_done(), "{op:?} {}", rig.case.label);
                assert_eq!(rig.only().result(), Ok(len), "{}", rig.case.label);
                let stayed = rig.engine.stats().remote == before;
                assert_eq!(stayed, at_once, "{op:?} {}", rig.case.label);
            }
        }
    });
}

fn c42_a_sync_a_refusal_and_a_short_transfer_pass_to_a_worker() {
    on_engines(&[TestQueueKind::Null], MIB, Content::Data, |rig| {
        // Segments of lengths that no device takes: the write goes by bounced fragments, or by one
        // transfer through the page cache. In either case a sync makes it durable.
        let mut memory = Memory::new(MIB + BLOCK);
        memory[..5].copy_from_slice(&pattern(0, 5));
        memory[4101..].copy_from_slice(&pattern(5, MIB - 5));
        let list = [memory.segment(0..5), memory.segment(4101..4096 + MIB as usize)];
        let dsync = io(Op::Write, Flags::DSYNC, 0, MIB);
        let before = rig.engine.stats().remote;
        assert!(rig.submit_segments(dsync, &list).is_ok(), "{}", rig.case.label);
        assert_eq!(rig.only().result(), Ok(MIB), "{}", rig.case.label);
        assert!(rig.engine.stats().remote > before, "{}", rig.case.label);

        // This queue moves no data, so that only a worker can have read this.
        for change in [-libc::EAGAIN, 100] {
            rig.script.on_reap(move |_, _| change);
            let before = rig.engine.stats().remote;
            assert!(rig.submit(read(BLOCK, BLOCK), &[]).is_ok(), "{}", rig.case.label);
            let done = rig.only();
            assert!(rig.engine.stats().remote > before, "{}", rig.case.label);
            assert_eq!(done.result(), Ok(BLOCK), "{}", rig.case.label);
            let got = &done.buf.expect("the buffer")[..4096];
            assert!(got == pattern(BLOCK, BLOCK), "{change} {}", rig.case.label);
        }
    });
}

fn c43_the_completion_comes_last() {
    on_engines(&REAL, MIB, Content::Islands, |rig| {
        let mut random = Random::from_seed(0x43);
        let mut memory = Memory::new(MIB);
        for _ in 0..30 {
            let range = range_in(MIB - BLOCK, &mut random);
            let (cut, len) = ((range.len / 2) as usize, range.len as usize);
            let list = [memory.segment(1..1 + cut), memory.segment(9000 + cut..9000 + len)];
            let op = [Op::Read, Op::Write][random.below(2) as usize];
            let request = io(op, Flags::DSYNC, range.pos, range.len);
            assert!(rig.submit_segments(request, &list).is_ok(), "{}", rig.case.label);
            while !rig.engine.has_done() {
                rig.engine.wait_once();
            }
            // All of its transfers have ended, and its blocks are not locked any more.
            assert_eq!(rig.script.out.get(), 0, "{}", rig.case.label);
            assert!(rig.engine.next().is_some(), "{}", rig.case.label);
            assert_eq!(rig.engine.in_flight(), 0, "{}", rig.case.label);
            let file = nowait::BlockingFile::new(rig.disk.clone());
            assert_eq!(file.write_at(&[1], range.pos, Flags::NONE), Ok(1), "{}", rig.case.label);
        }
    });
}

fn c44_a_chain_of_completions_does_not_deepen_the_stack() {
    const STACK_BYTES: usize = 192 << 10;
    const CHAIN: u64 = 20_000;
    const SEGMENTS: usize = 1024;
    let run = || {
        let mut memory = Memory::new(2 * SEGMENTS as u64 * BLOCK);
        let pages: Vec<_> =
            (0..SEGMENTS).map(|n| memory.segment(2 * n * 4096..(2 * n + 1) * 4096)).collect();
        on_engines(&[TestQueueKind::Null], 4 * MIB, Content::Data, |rig| {
            // Each transfer ends while it is submitted; with `vectored` off the next one is
            // submitted then.
            let all = read(0, SEGMENTS as u64 * BLOCK);
            assert_eq!(rig.run_segments(all, &pages), Ok(all.range.len), "{}", rig.case.label);
            let Config { inline_completion, nowait_first, .. } = rig.case.config;
            if !inline_completion || !nowait_first || rig.reads_ahead() {
                return;
            }
            for n in 0..CHAIN {
                assert!(rig.submit(read(n % 1000 * BLOCK, BLOCK), &[]).is_ok());
                rig.engine.poll().unwrap();
                assert!(rig.engine.next().is_some(), "{}", rig.case.label);
            }
        });
    };
    thread::scope(|scope| {
        let small = thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, run);
        small.unwrap().join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn c45_dropping_an_engine_waits_for_its_transfers() {
    for case in cases(&REAL) {
        let image = Image::new(4 * MIB, Content::Data);
        let Some(mut rig) = Rig::new(&case, image) else { continue };
        let mut memory = Memory::new(3 * MIB);
        let list = [memory.segment(0..1 << 20), memory.segment(2 << 20..3 << 20)];
        assert!(rig.submit_segments(read(BLOCK, 2 * MIB), &list).is_ok(), "{}", case.label);
        for n in 0..20 {
            let bytes = pattern(n, 9000);
            let pos = 3 * MIB + n * 10_000;
            assert!(rig.submit(write(pos, 9000), &bytes).is_ok(), "{}", case.label);
        }
        rig.engine.poll().unwrap();
        let Rig { engine, script, image, .. } = rig;
        drop(engine);
        assert_eq!(script.out.get(), 0, "{}", case.label);
        let got = [&memory[..1 << 20], &memory[2 << 20..]].concat();
        assert!(got == pattern(BLOCK, 2 * MIB), "{}", case.label);
        for n in 0..20 {
            let kept = image.bytes(3 * MIB + n * 10_000, 9000);
            assert!(kept == pattern(n, 9000), "{}", case.label);
        }
    }
}

fn c46_an_engine_is_dropped_by_the_only_thread_that_could_reap() {
    for case in cases(&REAL) {
        let label = case.label.clone();
        within(&format!("the end of an engine: {label}"), move || {
            let image = Image::new(MIB, Content::Data);
            let Some(mut rig) = Rig::new(&case, image) else { return };
            // A read that has ended and is not given back, a write that waits for a worker, and a
            // read that is not yet submitted to the kernel.
            assert!(rig.submit(read(0, BLOCK), &[]).is_ok(), "{label}");
            rig.engine.wait_once();
            assert!(rig.submit(write(3, 5), &[1; 5]).is_ok(), "{label}");
            assert!(rig.submit(read(0, BLOCK), &[]).is_ok(), "{label}");
            let Rig { engine, script, image, .. } = rig;
            drop(engine);
            assert_eq!(script.out.get(), 0, "not reaped: {label}");
            let expected = [pattern(0, 3), vec![1; 5], pattern(8, 100)].concat();
            assert!(image.bytes(0, 108) == expected, "the write is lost: {label}");
        });
    }
}

fn c47_no_slot_is_lost() {
    const SLOTS: u32 = 8;
    for case in cases(&REAL) {
        let config = Config { slots: SLOTS, ..case.config };
        let case = Case { config, ..case };
        let Some(mut rig) = Rig::new(&case, Image::new(MIB, Content::Data)) else { continue };
        for round in 0..50 {
            // Requests for all the room there is, served by the queue and by workers.
            let mut accepted = 0;
            while accepted <= SLOTS {
                let pos = u64::from(accepted) * BLOCK;
                let unaligned = u64::from(accepted % 2);
                let request = write(pos + unaligned, BLOCK - unaligned);
                match rig.submit(request, &pattern(0, BLOCK - unaligned)) {
                    Ok(_) => accepted += 1,
                    Err(refused) => {
                        assert_eq!(refused.error.errno(), libc::EAGAIN, "{}", case.label);
                        break;
                    }
                }
            }
            assert!((SLOTS / 2..=SLOTS).contains(&accepted), "{accepted} {round} {}", case.label);
            assert!(!rig.engine.has_free_slot(), "{}", case.label);
            let all = rig.finish();
            assert_eq!(all.len() as u32, accepted, "{}", case.label);
            assert!(all.iter().all(|done| done.result().is_ok()), "{}", case.label);
            assert!(rig.engine.has_free_slot() && rig.engine.in_flight() == 0, "{}", case.label);
        }
        let pool = rig.stats().pool;
        assert!(pool.empty >= 50, "{pool:?} {}", case.label);
        match case.config.pool {
            true => assert!(pool.allocated <= u64::from(SLOTS), "{pool:?} {}", case.label),
            false => assert_eq!(pool.hit, 0, "{}", case.label),
        }
        assert_eq!(
            rig.bare(Op::Flush, Flags::NONE, ByteRange::new(0, 0)),
            Ok(()),
            "{}",
            case.label
        );
    }
}

/// A queue sees the hint, and whether it can poll is its own matter: a guest with such a device is
/// a test of the command.
fn c48_hipri_reaches_the_queue_and_every_device_serves_it() {
    on_engines(&REAL, MIB, Content::Data, |rig| {
        for hint in [Flags::HIPRI, Flags::NONE] {
            for (pos, len) in [(0, BLOCK), (4096, 64 * BLOCK), (777, 9000)] {
                let bytes = pattern(pos + 5, len);
                assert_eq!(rig.run(io(Op::Write, hint, pos, len), &bytes), Ok(len));
                // An unaligned write is a worker's.
                let tried = rig.case.config.nowait_first;
                assert_hint(rig, hint, tried && pos != 777);
                let mut memory = Memory::new(len);
                let list = [memory.segment(0..len as usize)];
                let back = io(Op::Read, hint, pos, len);
                assert_eq!(rig.run_segments(back, &list), Ok(len), "{}", rig.case.label);
                assert!(memory[..] == bytes, "{}", rig.case.label);
                assert_hint(rig, hint, tried);
            }
        }
    });
}

/// Checks that transfers were pushed, if there must be some, and that each has the hint or none.
fn assert_hint(rig: &Rig, hint: Flags, is_pushed: bool) {
    let pushed = rig.script.take_pushed();
    assert!(!is_pushed || !pushed.is_empty(), "{}", rig.case.label);
    let has_hint = |it: &Pushed| it.transfer.rw_flags & libc::RWF_HIPRI != 0;
    let hinted = pushed.iter().filter(|it| has_hint(it)).count();
    let wanted = if hint.contains(Flags::HIPRI) { pushed.len() } else { 0 };
    assert_eq!(hinted, wanted, "of {} transfers: {}", pushed.len(), rig.case.label);
}
