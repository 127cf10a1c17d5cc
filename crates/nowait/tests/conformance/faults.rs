//! One fault in a batch: what it does to the transfer that it befalls, and to no other.
//!
//! Invariant: each fault befalls each transfer of the batch once, in a run of its own, on the queue
//! of a real file.

use std::cell::Cell;
use std::rc::Rc;

use nowait::{Flags, Io, Op};

use crate::rig::{
    BLOCK, Content, Face, KIB, MIB, REAL, Rig, io, on_engines, pattern, pattern_at, read,
};

rules![
    c22_a_transfer_that_fails_fails_its_request_and_no_other,
    c19_c21_a_transfer_that_is_cut_short_interrupted_or_refused_is_made_whole,
];

const SIZE: u64 = MIB;
/// What writes leave.
const NEW: u8 = 0;

/// Requests of every shape, none of which touches another: aligned and not, of one transfer and
/// through bounce buffers, read and written.
fn batch() -> [Io; 6] {
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

/// The bytes that a request must find or leave.
fn bytes_of(io: Io) -> Vec<u8> {
    match io.op {
        Op::Read => pattern(io.range.pos, io.range.len),
        _ => vec![NEW; io.range.len as usize],
    }
}

/// Puts the batch's ranges back, runs the batch, and gives what each request came to; what was read
/// and succeeded is right.
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
            let start = rig.engine.start(io.range.pos);
            let read = &buf[start..start + io.range.len as usize];
            assert!(read == bytes_of(io), "{io:?} {}", rig.case.label);
        }
        assert!(results[at].replace(result).is_none(), "{io:?} twice: {}", rig.case.label);
    }
    results.into_iter().map(|result| result.expect("each request has ended")).collect()
}

/// The image is what it was but for what the batch has written; a request that failed may have left
/// any of its bytes old or new.
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

/// Runs the batch once for each transfer that it makes, with `set` told the number of the one that
/// is to be befallen and where to say that it was; gives `check` what the requests came to.
fn for_each_transfer(
    set: impl Fn(&Rig, usize, Rc<Cell<bool>>),
    check: impl Fn(&str, bool, &[Result<u64, i32>]),
) {
    on_engines(&REAL, SIZE, Content::Data, |rig| {
        let whole: Vec<_> = batch().iter().map(|io| Ok(io.range.len)).collect();
        rig.script.take_placed();
        assert_eq!(run(rig), whole, "{}", rig.case.label);
        let transfers = rig.script.take_placed().len();
        // A write that must read first is a worker's.
        let fewest = if rig.case.config.nowait_first { batch().len() - 1 } else { 0 };
        assert!(transfers >= fewest, "{transfers}: {}", rig.case.label);
        for number in 0..transfers {
            for io in batch().into_iter().filter(|io| io.op == Op::Write) {
                let old = pattern(io.range.pos, io.range.len);
                let put_back = Face::write(rig, io.range.pos, &old, Flags::NONE);
                assert_eq!(put_back, Ok(io.range.len), "{}", rig.case.label);
            }
            let befallen = Rc::new(Cell::new(false));
            set(rig, number, befallen.clone());
            let results = run(rig);
            rig.script.behave();
            check(&rig.case.label, befallen.get(), &results);
            check_image(rig, &results);
            assert_eq!(rig.engine.in_flight(), 0, "{}", rig.case.label);
            assert_eq!(rig.script.out.get(), 0, "{}", rig.case.label);
        }
    });
}

fn c22_a_transfer_that_fails_fails_its_request_and_no_other() {
    for errno in [libc::EIO, libc::ENOSPC] {
        let set = |rig: &Rig, number, befallen: Rc<Cell<bool>>| {
            let mut placed = 0;
            rig.script.on_place(move |_| {
                placed += 1;
                befallen.set(befallen.get() || placed > number);
                (placed == number + 1).then_some(-errno)
            });
        };
        for_each_transfer(set, |label, befallen, results| {
            let failed: Vec<_> = results.iter().filter_map(|result| result.err()).collect();
            assert!(befallen, "no such transfer: {label}");
            assert_eq!(failed, [errno], "{label}");
        });
    }
}

fn c19_c21_a_transfer_that_is_cut_short_interrupted_or_refused_is_made_whole() {
    let all_well = |label: &str, _, results: &[Result<u64, i32>]| {
        let whole: Vec<_> = batch().iter().map(|io| Ok(io.range.len)).collect();
        assert_eq!(results, whole, "{label}");
    };
    for errno in [libc::EINTR, libc::EAGAIN] {
        let set = |rig: &Rig, number, _: Rc<Cell<bool>>| {
            let mut placed = 0;
            rig.script.on_place(move |_| {
                placed += 1;
                (placed == number + 1).then_some(-errno)
            });
        };
        for_each_transfer(set, all_well);
    }
    // Nothing, part of a block, a block.
    for most in [0, 100, BLOCK as i32] {
        let set = |rig: &Rig, number, _: Rc<Cell<bool>>| {
            let mut reaped = 0;
            rig.script.on_reap(move |_, outcome| {
                reaped += 1;
                if reaped == number + 1 { outcome.min(most) } else { outcome }
            });
        };
        for_each_transfer(set, all_well);
    }
}
