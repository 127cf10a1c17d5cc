//! One fault in a batch of requests: it affects the request of the faulty transfer and no other.
//!
//! Invariant: each fault hits each transfer of the batch once, in a run of its own, on the queue of
//! a real file.

use std::cell::Cell;
use std::rc::Rc;

use nowait::{Flags, Op, Request};

use crate::rig::{
    Api, BLOCK, Content, KIB, MIB, REAL, Rig, io, on_engines, pattern, pattern_at, read,
};

rules![
    c22_a_transfer_that_fails_fails_its_request_and_no_other,
    c19_c21_a_transfer_that_is_cut_short_interrupted_or_refused_is_completed,
];

const SIZE: u64 = MIB;
/// The byte that the batch writes.
const NEW: u8 = 0;

/// Reads and writes that do not overlap: aligned and not, by one transfer and through bounce
/// buffers.
fn batch() -> [Request; 6] {
    let durable = |pos, len| io(Op::Write, Flags::DSYNC, pos, len);
    [
        read(0, BLOCK),
        io(Op::Write, Flags::NONE, 64 * KIB, 2 * BLOCK),
        read(128 * KIB + 7, 3 * BLOCK),
        io(Op::Write, Flags::NONE, 192 * KIB + 9, 5 * BLOCK),
        durable(256 * KIB, BLOCK),
        read(320 * KIB, 64 * KIB),
    ]
}

/// The bytes that a request must read or write.
fn bytes_of(io: Request) -> Vec<u8> {
    match io.op {
        Op::Read => pattern(io.range.pos, io.range.len),
        _ => vec![NEW; io.range.len as usize],
    }
}

/// Runs the batch and returns the result of each request. Checks the bytes of the reads that have
/// succeeded.
fn run(rig: &mut Rig) -> Vec<Result<u64, i32>> {
    let batch = batch();
    let mut tags = Vec::new();
    for io in batch {
        let bytes = if io.op == Op::Read { Vec::new() } else { bytes_of(io) };
        match rig.submit(io, &bytes) {
            Ok(tag) => tags.push(tag),
            Err(rejected) => panic!("{io:?}: {} {}", rejected.error, rig.case.label),
        }
    }
    let mut results = vec![None; batch.len()];
    for done in rig.finish() {
        let at = tags.iter().position(|tag| *tag == done.tag).expect("a request of the batch");
        let (io, result) = (batch[at], done.result().map_err(|error| error.errno()));
        if io.op == Op::Read && result.is_ok() {
            let buf = done.buf.as_ref().expect("the buffer");
            assert!(buf[..] == bytes_of(io), "{io:?} {}", rig.case.label);
        }
        assert!(results[at].replace(result).is_none(), "{io:?} twice: {}", rig.case.label);
    }
    results.into_iter().map(|result| result.expect("each request has ended")).collect()
}

/// Checks that the image has changed only by the writes of the batch; each byte of a write that has
/// failed may be old or new.
fn check_image(rig: &Rig, results: &[Result<u64, i32>]) {
    let image = rig.image.bytes(0, SIZE);
    let mut may_be_new = vec![Some(false); SIZE as usize];
    for (io, result) in batch().into_iter().zip(results).filter(|(io, _)| io.op == Op::Write) {
        let state = result.is_ok().then_some(true);
        let range = io.range.pos as usize..(io.range.pos + io.range.len) as usize;
        may_be_new[range].fill(state);
    }
    for ((pos, byte), is_new) in (0..).zip(image).zip(may_be_new) {
        let (old, new) = (byte == pattern_at(pos), byte == NEW);
        let is_right = is_new.map_or(old || new, |is_new| if is_new { new } else { old });
        assert!(is_right, "byte {pos} is {byte}, {}", rig.case.label);
    }
}

/// Runs the batch once for each transfer that it makes. `set` gets the number of the transfer that
/// the fault must hit, and a cell to set when it has; `check` gets the cell's value and the
/// results.
fn for_each_transfer(
    set: impl Fn(&Rig, usize, Rc<Cell<bool>>),
    check: impl Fn(&str, bool, &[Result<u64, i32>]),
) {
    on_engines(&REAL, SIZE, Content::Data, |rig| {
        let successes: Vec<_> = batch().iter().map(|io| Ok(io.range.len)).collect();
        rig.script.take_pushed();
        assert_eq!(run(rig), successes, "{}", rig.case.label);
        let transfers = rig.script.take_pushed().len();
        // The write that needs read-modify-write goes to a worker.
        let fewest = if rig.case.config.nowait_first { batch().len() - 1 } else { 0 };
        assert!(transfers >= fewest, "{transfers}: {}", rig.case.label);
        for number in 0..transfers {
            for io in batch().into_iter().filter(|io| io.op == Op::Write) {
                let old = pattern(io.range.pos, io.range.len);
                let put_back = Api::write(rig, io.range.pos, &old, Flags::NONE);
                assert_eq!(put_back, Ok(io.range.len), "{}", rig.case.label);
            }
            let hit = Rc::new(Cell::new(false));
            set(rig, number, hit.clone());
            let results = run(rig);
            rig.script.behave();
            check(&rig.case.label, hit.get(), &results);
            check_image(rig, &results);
            assert_eq!(rig.engine.in_flight(), 0, "{}", rig.case.label);
            assert_eq!(rig.script.out.get(), 0, "{}", rig.case.label);
        }
    });
}

fn c22_a_transfer_that_fails_fails_its_request_and_no_other() {
    for errno in [libc::EIO, libc::ENOSPC] {
        let set = |rig: &Rig, number, hit: Rc<Cell<bool>>| {
            let mut pushed = 0;
            rig.script.on_push(move |_| {
                pushed += 1;
                hit.set(hit.get() || pushed > number);
                (pushed == number + 1).then_some(-errno)
            });
        };
        for_each_transfer(set, |label, hit, results| {
            let failed: Vec<_> = results.iter().filter_map(|result| result.err()).collect();
            assert!(hit, "no such transfer: {label}");
            assert_eq!(failed, [errno], "{label}");
        });
    }
}

fn c19_c21_a_transfer_that_is_cut_short_interrupted_or_refused_is_completed() {
    let all_succeed = |label: &str, _, results: &[Result<u64, i32>]| {
        let successes: Vec<_> = batch().iter().map(|io| Ok(io.range.len)).collect();
        assert_eq!(results, successes, "{label}");
    };
    for errno in [libc::EINTR, libc::EAGAIN] {
        let set = |rig: &Rig, number, _: Rc<Cell<bool>>| {
            let mut pushed = 0;
            rig.script.on_push(move |_| {
                pushed += 1;
                (pushed == number + 1).then_some(-errno)
            });
        };
        for_each_transfer(set, all_succeed);
    }
    // Transfers of nothing, of part of a block, of a block.
    for limit in [0, 100, BLOCK as i32] {
        let set = |rig: &Rig, number, _: Rc<Cell<bool>>| {
            let mut reaped = 0;
            rig.script.on_reap(move |_, outcome| {
                reaped += 1;
                if reaped == number + 1 { outcome.min(limit) } else { outcome }
            });
        };
        for_each_transfer(set, all_succeed);
    }
}
