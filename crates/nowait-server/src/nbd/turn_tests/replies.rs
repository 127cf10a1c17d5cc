//! Replies on their way out: what one send takes of them, and what becomes of them without a client.
//!
//! Invariant: as that of the module above. Knows: the module above, reply, head. Known by: nobody.

use std::io::IoSlice;

use super::super::super::head::{Answer, Place, ReplyHead};
use super::super::super::reply::{Body, Chunk, Chunks, MAX_CHUNKS, Out};
use super::*;

/// Pieces that the shorter kind of send takes.
const PIECES: usize = 36;

fn used(out: &Out, most: u64) -> (usize, usize) {
    let mut pieces = [IoSlice::new(&[]); PIECES];
    let used = out.pieces(&mut pieces, most);
    (used, pieces[..used].iter().map(|piece| piece.len()).sum())
}

fn answer() -> Answer {
    Answer::to_cookie(wire::Mode::Structured, 1)
}

/// A reply of so many chunks, of a block of data each.
fn chunked(bench: &mut Bench, chunks: usize) -> Body {
    let buf = bench.thread.engine.buffer(Range::new(0, (chunks * BLOCK) as u64)).unwrap();
    let list = (0..chunks).map(|n| {
        let head = answer().data(Place::Before, (n * BLOCK) as u64, BLOCK as u32);
        Chunk { head, start: (n * BLOCK) as u32, len: BLOCK as u32 }
    });
    Body::Chunks(Box::new(Chunks { buf, list: list.collect() }))
}

#[test]
fn a_send_takes_as_many_whole_replies_as_it_has_pieces_for() {
    let head = answer().simple(0);
    let mut out = Out::default();
    for _ in 0..40 {
        out.push(head, Body::Bytes(vec![0; 100]), 0);
    }
    assert_eq!(used(&out, u64::MAX), (PIECES, PIECES / 2 * (REPLY + 100)));
    // Or as many bytes as it may take, which may be none.
    assert_eq!(used(&out, 3 * REPLY as u64 + 201), (6, 3 * REPLY + 201));
    assert_eq!(used(&out, 0), (0, 0));
    // What was sent of the first one does not come again.
    out.advance(REPLY + 30, &mut 0);
    assert_eq!(used(&out, 170), (3, 70 + REPLY + 84));
}

#[test]
fn the_longest_reply_and_a_short_one_fit_into_one_send() {
    let mut bench = Bench::new(0);
    let mut out = Out::default();
    let long = chunked(&mut bench, MAX_CHUNKS);
    out.push(ReplyHead::EMPTY, long, 0);
    assert_eq!(used(&out, u64::MAX).0, 2 * MAX_CHUNKS);
    let short = answer().simple(0);
    for _ in 0..5 {
        out.push(short, Body::None, 0);
    }
    // Room is left for two pieces with each that begins.
    assert_eq!(used(&out, u64::MAX).0, 2 * MAX_CHUNKS + 3);
    let long = chunked(&mut bench, MAX_CHUNKS);
    out.push(ReplyHead::EMPTY, long, 0);
    assert_eq!(used(&out, u64::MAX).0, 2 * MAX_CHUNKS + 3);
}

#[test]
fn for_a_client_that_is_gone_nothing_is_kept() {
    let mut bench = Bench::new(1);
    bench.send(0, &[read(BLOCK), write(BLOCK)[..100].to_vec()].concat());
    bench.thread.look_at(0);
    let conn = bench.conn(0);
    conn.out.push_bytes(vec![0; 100]);
    conn.break_off();
    assert!(conn.out.is_empty());
    assert!(conn.payload.is_none() && conn.stash.is_empty());
    assert!(!conn.is_over(), "its read is under way");
    bench.settle();
    assert!(bench.thread.conns.is_empty());
    assert!(bench.received(0).is_empty());
}
