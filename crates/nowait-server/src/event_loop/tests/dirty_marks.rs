//! Cost of a dirty bitmap for a write over NBD, in instructions, and the moment when its bits are set.
//!
//! Invariant: as of the costs of a read.

use crate::event_loop::tests::request_cost::{check_cost, cost, wanted};
use crate::event_loop::tests::*;

/// Instructions of one write at depth 1, and of one of 64 that arrive together, at most. Without
/// link-time optimisation.
const LIMITS: [(usize, u64); 2] = [(1, 4400), (64, 2620)];
/// The part of a write that a bitmap may cost on top, in percent.
const MOST_PERCENT: u64 = 3;
const WITHOUT: &str = "dirty_marks::a_write_costs_no_more_instructions_than_the_limit";
const WITH: &str =
    "dirty_marks::a_dirty_bitmap_costs_a_write_3_percent_of_its_instructions_at_most";

/// Serves `count` writes, `depth` of them at a time.
fn serve(depth: usize, count: usize, has_bitmap: bool) {
    let mut bench = Bench::new(1);
    bench.settle();
    if has_bitmap {
        add_bitmap(&bench.thread);
    }
    let requests = write(BLOCK).repeat(depth);
    let mut replies = vec![0; depth * REPLY];
    for _ in 0..count / depth {
        let (mut sent, mut got) = (0, 0);
        while got < replies.len() {
            sent += bench.clients[0].write(&requests[sent..]).unwrap_or(0);
            bench.iterate();
            while let Ok(some) = bench.clients[0].read(&mut replies[got..])
                && some > 0
            {
                got += some;
            }
        }
    }
    assert!(!has_bitmap || dirty_blocks(&bench.thread) == 1);
}

#[test]
#[ignore = "needs valgrind and a release build: cargo test --release -p nowait-server --lib"]
fn a_write_costs_no_more_instructions_than_the_limit() {
    match wanted() {
        Some((depth, count)) => serve(depth, count, false),
        None => check_cost(WITHOUT, LIMITS),
    }
}

#[test]
#[ignore = "needs valgrind and a release build: cargo test --release -p nowait-server --lib"]
fn a_dirty_bitmap_costs_a_write_3_percent_of_its_instructions_at_most() {
    if let Some((depth, count)) = wanted() {
        return serve(depth, count, true);
    }
    for (depth, _) in LIMITS {
        let (without, with) = (cost(WITHOUT, depth), cost(WITH, depth));
        println!("depth {depth}: {without} instructions, {with} with a bitmap");
        let is_enough = with * 100 <= without * (100 + MOST_PERCENT);
        assert!(cfg!(debug_assertions) || is_enough, "depth {depth}: {without}, {with}");
    }
}

#[test]
fn a_write_is_marked_when_it_ends_so_that_a_clearing_before_that_does_not_forget_it() {
    let mut bench = Bench::new(1);
    bench.settle();
    add_bitmap(&bench.thread);
    bench.send(0, &write(BLOCK));
    bench.thread.service(0);
    assert_eq!(bench.connection(0).session.in_flight, 1);
    registered(&bench.thread).bitmaps.clear("a").unwrap();
    bench.settle();
    assert_eq!(errors(&bench.received(0)), [0]);
    assert_eq!(dirty_blocks(&bench.thread), 1);
    registered(&bench.thread).bitmaps.clear("a").unwrap();
    bench.send(0, &read(BLOCK));
    bench.settle();
    assert_eq!(dirty_blocks(&bench.thread), 0, "a read changes nothing");
}

#[test]
fn a_removed_bitmap_leaves_the_threads_when_these_look_at_their_exports() {
    let mut bench = Bench::new(1);
    bench.settle();
    add_bitmap(&bench.thread);
    bench.send(0, &write(BLOCK));
    bench.settle();
    let registered = registered(&bench.thread);
    let id = registered.bitmaps.names()[0].id;
    let bitmap = Arc::downgrade(&registered.bitmaps.get(id).unwrap());
    registered.bitmaps.remove("a").unwrap();
    assert!(bitmap.upgrade().is_some());
    bench.thread.review_exports();
    assert!(bitmap.upgrade().is_none());
}
