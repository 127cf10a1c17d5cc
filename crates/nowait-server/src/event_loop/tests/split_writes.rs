//! Long writes that are split.
//!
//! Invariant: as for the module above.

use crate::event_loop::tests::*;
use crate::nbd::submit::ParseProgress;
use crate::nbd::write_split::{SplitPolicy, SplitWrite};

const FRAGMENT: usize = 256 << 10;
/// A long write of three fragments and a bit.
const LONG: usize = 3 * FRAGMENT + 2 * BLOCK;

fn io(op: Op, flags: Flags, pos: u64, len: usize) -> Request {
    Request { op, flags, range: ByteRange::new(pos, len as u64) }
}

impl Bench {
    /// Begins a split write of `LONG` bytes.
    fn begin_split(&mut self) {
        let policy = self.thread.frontend.shared.requests.split_policy;
        let io = io(Op::Write, Flags::ALL_OR_ERROR, 0, LONG);
        self.connection(0).session.begin_split(request_context(), io, policy.fragment_bytes);
    }

    fn begin_fragment(&mut self) -> ParseProgress {
        self.thread.frontend.connections[0].begin_fragment(&mut self.thread.context)
    }

    /// A fragment of `bytes` has completed.
    fn on_fragment_done(&mut self, split: usize, of: &RequestContext, bytes: u64, errno: i32) {
        let EventLoop { frontend, context, .. } = &mut self.thread;
        frontend.connections[0].on_fragment_done(context, split, of, bytes, errno);
    }

    /// Sends `bytes` from a client, in as many iterations as the server needs to receive them.
    fn send_all(&mut self, index: usize, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.clients[index].write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            self.connection(index).readable = true;
            self.schedule(index);
            self.settle();
        }
    }
}

#[test]
fn only_a_long_write_that_is_not_durable_is_split_and_only_beside_others() {
    let policy = SplitPolicy { fragment_bytes: FRAGMENT as u64, strict: false };
    let long = io(Op::Write, Flags::ALL_OR_ERROR, 0, LONG);
    assert!(policy.applies(long, false));
    for whole in [
        io(Op::Read, Flags::ALL_OR_ERROR, 0, LONG),
        io(Op::Write, Flags::ALL_OR_ERROR, 0, FRAGMENT),
        io(Op::Write, Flags::ALL_OR_ERROR | Flags::DSYNC, 0, LONG),
    ] {
        assert!(!policy.applies(whole, false), "{whole:?}");
    }
    assert!(!policy.applies(long, true));
    assert!(!SplitPolicy { strict: true, ..policy }.applies(long, false));
}

#[test]
fn a_long_write_beyond_the_end_is_refused_whole_and_one_up_to_it_is_split() {
    for (pos, splits) in [(SIZE - LONG as u64, 1), (SIZE - LONG as u64 + 1, 0), (u64::MAX, 0)] {
        let mut bench = Bench::new(2);
        bench.send(0, &request(wire::CMD_WRITE, pos, LONG));
        bench.thread.service(0);
        assert_eq!(bench.splits(), splits, "at {pos}");
        assert_eq!(errors(&bench.received(0)).len(), 1 - splits);
    }
}

#[test]
fn fragments_begin_before_the_payload_is_complete_and_are_answered_once() {
    let mut bench = Bench::new(2);
    let bytes = [write(LONG), read(BLOCK)].concat();
    let (first, rest) = bytes.split_at(REQUEST + FRAGMENT + 100);
    bench.send_all(0, first);
    assert_eq!(bench.splits(), 1);
    let payload = bench.connection(0).session.payload.as_ref().unwrap();
    assert_eq!(
        (payload.io.range, payload.filled),
        (ByteRange::new(FRAGMENT as u64, FRAGMENT as u64), 100)
    );
    bench.send_all(0, rest);
    assert_eq!(bench.received(0).len(), 2 * REPLY + BLOCK);
    assert!(bench.splits() == 0 && bench.connection(0).session.incoming_split.is_none());
    assert_eq!(bench.connection(0).member.budget_used, 0);
}

#[test]
fn fragments_wait_while_there_is_no_room_for_them() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(1, &read(BLOCK));
    bench.thread.service(1);
    bench.send(0, &write(FRAGMENT + BLOCK)[..REQUEST + 100]);
    bench.thread.service(0);
    assert_eq!(bench.connection(0).session.input, ReadState::Blocked);
    assert!(bench.connection(0).session.payload.is_none());
    bench.settle();
    bench.send_all(0, &write(FRAGMENT + BLOCK)[REQUEST + 100..]);
    assert_eq!(errors(&bench.received(0)), [0]);

    // Nor is there room for a connection that is at its limit.
    let mut bench = Bench::new(2);
    bench.connection(0).session.in_flight = MAX_REQUESTS;
    bench.connection(0).session.incoming_split = None;
    bench.begin_split();
    assert!(matches!(bench.begin_fragment(), ParseProgress::Blocked));
    bench.connection(0).session.in_flight = MAX_REQUESTS - 1;
    assert!(matches!(bench.begin_fragment(), ParseProgress::Bytes(0)));
}

fn request_context() -> RequestContext {
    let header =
        wire::RequestHeader::parse(wire::ReplyMode::Simple, &write(LONG)[..REQUEST]).unwrap();
    RequestContext { header, contexts: TransmissionMode::default().contexts, budget_used: 0 }
}

#[test]
fn after_a_fragment_has_failed_the_rest_is_discarded_and_then_the_failure_is_reported() {
    for begun in [true, false] {
        let mut bench = Bench::new(2);
        let bytes = [write(LONG), read(BLOCK)].concat();
        let received = match begun {
            true => REQUEST + FRAGMENT + 100,
            false => REQUEST,
        };
        let dropped = match begun {
            // The second fragment goes on.
            true => {
                bench.send_all(0, &bytes[..received]);
                LONG - 2 * FRAGMENT
            }
            // There was no room for any fragment.
            false => {
                bench.begin_split();
                LONG
            }
        };
        let number = bench.connection(0).session.incoming_split.as_ref().unwrap().split;
        // A fragment of no bytes, because the real ones have succeeded.
        bench.on_fragment_done(number, &request_context(), 0, libc::ENOSPC);
        assert_eq!(bench.connection(0).session.discard_bytes, dropped as u64);
        assert_eq!(bench.connection(0).session.incoming_split.is_some(), begun);
        assert_eq!(bench.splits(), usize::from(begun));
        // A second failure changes nothing.
        bench.on_fragment_done(number, &request_context(), 0, libc::EIO);
        bench.send_all(0, &bytes[received..bytes.len() - REQUEST]);
        assert_eq!(errors(&bench.received(0)), [28]);
        bench.send_all(0, &bytes[bytes.len() - REQUEST..]);
        assert_eq!(bench.received(0).len(), REPLY + BLOCK);
        assert!(bench.splits() == 0 && bench.connection(0).session.incoming_split.is_none());
    }
}

#[test]
fn a_write_whose_first_fragment_is_refused_is_answered_once_and_holds_no_budget() {
    let mut bench = Bench::new(2);
    let mut bytes = [write(LONG), read(BLOCK)].concat();
    bytes[REQUEST..REQUEST + FRAGMENT].fill(FORBIDDEN[0]);
    bench.send_all(0, &bytes[..REQUEST + LONG]);
    assert_eq!(errors(&bench.received(0)), [1]);
    bench.send_all(0, &bytes[REQUEST + LONG..]);
    assert_eq!(bench.received(0).len(), REPLY + BLOCK);
    assert!(bench.splits() == 0 && bench.connection(0).member.budget_used == 0);
}

#[test]
fn the_failure_of_an_earlier_write_does_not_end_the_incoming_one() {
    let mut bench = Bench::new(2);
    let earlier = bench
        .connection(0)
        .session
        .splits
        .insert(SplitWrite::new(request_context(), io(Op::Write, Flags::ALL_OR_ERROR, 0, LONG)));
    bench.send_all(0, &write(LONG)[..REQUEST + FRAGMENT + 100]);
    bench.on_fragment_done(earlier, &request_context(), 100, libc::EIO);
    assert_eq!(bench.connection(0).session.discard_bytes, 0);
    assert!(bench.connection(0).session.incoming_split.is_some());
    bench.send_all(0, &write(LONG)[REQUEST + FRAGMENT + 100..]);
    assert_eq!(errors(&bench.received(0)), [0]);
}

#[test]
fn a_fragment_releases_its_budget_and_a_lost_client_gets_no_reply() {
    let mut bench = Bench::new(2);
    let split = bench
        .connection(0)
        .session
        .splits
        .insert(SplitWrite::new(request_context(), io(Op::Write, Flags::ALL_OR_ERROR, 0, 100)));
    bench.charge(0, 5000);
    let fragment = RequestContext { budget_used: 3000, ..request_context() };
    bench.on_fragment_done(split, &fragment, 50, 0);
    assert_eq!(bench.connection(0).member.budget_used, 2000);
    bench.connection(0).session.input = ReadState::Aborted;
    bench.on_fragment_done(split, &fragment, 50, 0);
    assert!(bench.splits() == 0 && bench.connection(0).session.send_queue.is_empty());
}

#[test]
fn an_incomplete_split_write_is_dropped_with_its_connection() {
    for received in [0, 100, FRAGMENT, FRAGMENT + 100] {
        let mut bench = Bench::new(2);
        bench.send_all(0, &write(LONG)[..REQUEST + received]);
        assert_eq!(bench.splits(), 1);
        bench.clients[0].shutdown(std::net::Shutdown::Both).unwrap();
        bench.connection(0).readable = true;
        bench.schedule(0);
        bench.settle();
        assert_eq!((bench.splits(), bench.thread.frontend.connections.len()), (0, 1), "{received}");
    }
}
