//! The send queue: what one send takes, and what a lost client leaves.
//!
//! Invariant: as for the module above.

use std::io::IoSlice;

use crate::event_loop::tests::*;
use crate::nbd::reply::send_queue::{Chunk, Chunks, MAX_CHUNKS, ReplyBody, SendQueue};
use crate::nbd::wire::{ChunkPosition, EncodedHeader, ReplyEncoder};

/// Iovecs of the smaller kind of send.
const PIECES: usize = 36;

fn used(out: &SendQueue, quota: u64) -> (usize, usize) {
    let mut pieces = [IoSlice::new(&[]); PIECES];
    let used = out.iovecs(&mut pieces, quota);
    (used, pieces[..used].iter().map(|piece| piece.len()).sum())
}

fn answer() -> ReplyEncoder {
    ReplyEncoder::to_cookie(wire::ReplyMode::Structured, 1)
}

/// A reply of `chunks` chunks with a block of data each.
fn chunked(bench: &mut Bench, chunks: usize) -> ReplyBody {
    let EventLoop { frontend, context, .. } = &mut bench.thread;
    let range = ByteRange::new(0, (chunks * BLOCK) as u64);
    let buf = context.buffer(&frontend.connections[0].member, range).unwrap();
    let list = (0..chunks).map(|n| {
        let head = answer().data(ChunkPosition::NotLast, (n * BLOCK) as u64, BLOCK as u32);
        Chunk { head, start: (n * BLOCK) as u32, len: BLOCK as u32 }
    });
    ReplyBody::Chunks(Box::new(Chunks { buf, list: list.collect() }))
}

#[test]
fn a_send_takes_as_many_whole_replies_as_it_has_iovecs_for() {
    let head = answer().simple(0);
    let mut out = SendQueue::default();
    for _ in 0..40 {
        out.push(head, ReplyBody::Bytes(vec![0; 100]), 0);
    }
    assert_eq!(used(&out, u64::MAX), (PIECES, PIECES / 2 * (REPLY + 100)));
    // The quota limits the bytes, even to none.
    assert_eq!(used(&out, 3 * REPLY as u64 + 201), (6, 3 * REPLY + 201));
    assert_eq!(used(&out, 0), (0, 0));
    // Bytes of the first reply that were sent do not come again.
    out.advance(REPLY + 30, &mut 0);
    assert_eq!(used(&out, 170), (3, 70 + REPLY + 84));
}

#[test]
fn the_longest_reply_and_a_short_one_fit_into_one_send() {
    let mut bench = Bench::new(1);
    let mut out = SendQueue::default();
    let long = chunked(&mut bench, MAX_CHUNKS);
    out.push(EncodedHeader::EMPTY, long, 0);
    assert_eq!(used(&out, u64::MAX).0, 2 * MAX_CHUNKS);
    let short = answer().simple(0);
    for _ in 0..5 {
        out.push(short, ReplyBody::None, 0);
    }
    // A reply begins only if there is room for the most iovecs that it may need.
    assert_eq!(used(&out, u64::MAX).0, 2 * MAX_CHUNKS + 3);
    let long = chunked(&mut bench, MAX_CHUNKS);
    out.push(EncodedHeader::EMPTY, long, 0);
    assert_eq!(used(&out, u64::MAX).0, 2 * MAX_CHUNKS + 3);
}

#[test]
fn nothing_is_kept_for_a_lost_client() {
    let mut bench = Bench::new(1);
    bench.send(0, &[read(BLOCK), write(BLOCK)[..100].to_vec()].concat());
    bench.thread.service(0);
    let connection = bench.connection(0);
    connection.session.send_queue.push_bytes(vec![0; 100]);
    connection.session.abort();
    assert!(connection.session.send_queue.is_empty());
    assert!(connection.session.payload.is_none() && connection.session.unparsed.is_empty());
    assert!(!connection.can_close(), "its read is under way");
    bench.settle();
    assert!(bench.thread.frontend.connections.is_empty());
    assert!(bench.received(0).is_empty());
}
