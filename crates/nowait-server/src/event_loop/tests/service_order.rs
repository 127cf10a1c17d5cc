//! The order in which connections are serviced, and what unblocks them.
//!
//! Invariant: as for the module above.

use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::event_loop::tests::*;
use crate::nbd::reply::send_queue::ReplyBody;
use crate::rate_limit::{Limits, TokenBucket};

/// The quantum beside other connections.
const QUANTUM: usize = 256 << 10;

impl Bench {
    /// Bulk connections, scheduled, whose clients have sent `bytes` each.
    fn busy(clients: usize, bytes: usize) -> Self {
        let mut bench = Self::new(clients);
        bench.settle();
        for index in 0..clients {
            set_socket_send_buffer_size(&bench.clients[index], 2 * RECEIVE_BYTES).unwrap();
            // The payload of a refused write is discarded.
            bench.connection(index).session.discard_bytes = u64::MAX;
            bench.connection(index).member.quantum.moved(1 << 30);
            bench.send(index, &vec![1; bytes]);
            bench.schedule(index);
        }
        assert_eq!(bench.thread.context.run_queues.bulk.len(), clients);
        bench
    }

    /// Discarded bytes of each connection.
    fn discarded(&mut self) -> Vec<usize> {
        self.thread
            .frontend
            .connections
            .iter()
            .map(|(_, connection)| (u64::MAX - connection.session.discard_bytes) as usize)
            .collect()
    }
}

#[test]
fn bulk_connections_move_one_quantum_together() {
    const SOME: usize = 100 << 10;
    let mut bench = Bench::busy(5, SOME);
    bench.thread.service_bulk();
    // A service is not cut, so the third moves more than was left.
    assert_eq!(bench.discarded(), [SOME, SOME, SOME, 0, 0]);
    bench.thread.service_bulk();
    assert_eq!(bench.discarded(), [SOME; 5]);

    let mut bench = Bench::busy(3, QUANTUM);
    bench.thread.service_bulk();
    assert_eq!(bench.discarded(), [QUANTUM, 0, 0]);
}

#[test]
fn bulk_connections_move_one_quantum_in_an_iteration_beside_interactive_ones_and_two_alone() {
    let mut bench = Bench::busy(3, QUANTUM);
    bench.thread.run_once().unwrap();
    assert_eq!(bench.discarded(), [QUANTUM, QUANTUM, 0]);

    // The first of them becomes interactive.
    let mut bench = Bench::busy(3, QUANTUM);
    let token = FD_TOKEN | bench.connection(0).readable_token();
    assert_eq!(bench.thread.context.run_queues.bulk.pop(), Some(0));
    bench.thread.context.run_queues.bulk.serviced(0, 100);
    bench.connection(0).member.scheduled = false;
    bench.connection(0).member.quantum = Default::default();
    bench.thread.events.push((token, libc::POLLIN.into()));
    bench.thread.run_once().unwrap();
    assert_eq!(bench.discarded(), [QUANTUM, QUANTUM, 0]);
}

/// Otherwise it would count among those that share what the limit lets through.
#[test]
fn a_connection_that_is_closed_while_its_limit_holds_it_is_not_counted_as_waiting_any_more() {
    let day = TokenBucket::MAX_REFILL_TIME;
    let bucket = TokenBucket { size: 1, one_time_burst: 0, refill_time: day };
    let mut bench = Bench::new(1);
    let export = registered(&bench.thread);
    export.limits.set_of_clients(Limits { requests: Some(bucket), bytes: None });
    bench.thread.review_exports();
    for _ in 0..2 {
        bench.send(0, &read(BLOCK));
        bench.schedule(0);
        bench.iterate();
    }
    let waiting = |bench: &mut Bench| {
        let served = bench.thread.context.exports.iter().next().unwrap();
        served.throttle.borrow().waiting
    };
    assert_eq!(waiting(&mut bench), 1);
    bench.close(0);
    export.limits.set_of_clients(Limits::default());
    bench.thread.review_exports();
    bench.iterate();
    assert_eq!(waiting(&mut bench), 0);
}

#[test]
fn inline_completion_is_known_from_the_last_submitted_requests() {
    let mut bench = Bench::new(1);
    bench.settle();
    assert!(!bench.thread.context.completes_inline, "there were none");
    bench.send(0, &read(BLOCK));
    bench.schedule(0);
    bench.iterate();
    assert!(bench.thread.context.completes_inline);
    bench.settle();
    assert!(bench.thread.context.completes_inline);
}

#[test]
fn a_blocked_connection_is_scheduled_when_others_release_budget() {
    for (bytes, woken) in [(0, false), (1000, true)] {
        let mut bench = Bench::new(2);
        bench.settle();
        bench.thread.context.blocked.push(1);
        bench.charge(0, bytes);
        let header = wire::RequestHeader::parse(wire::ReplyMode::Simple, &read(BLOCK)).unwrap();
        let head = crate::nbd::reply::builder::status_reply(wire::ReplyMode::Simple, &header, 0);
        bench.connection(0).session.send_queue.push(head, ReplyBody::None, bytes as u32);
        bench.thread.service(0);
        assert_eq!(bench.connection(0).member.budget_used, 0);
        assert_eq!(bench.thread.context.blocked.is_empty(), woken);
        assert_eq!(bench.thread.context.run_queues.interactive, if woken { &[1][..] } else { &[] });
    }
    // So does closing a connection.
    let mut bench = Bench::new(2);
    bench.settle();
    bench.thread.context.blocked.push(1);
    bench.charge(0, 1 << 30);
    assert!(!bench.thread.context.budget.admits(0, 16 << 20));
    // The client's side is closed.
    bench.clients[0].shutdown(std::net::Shutdown::Both).unwrap();
    bench.connection(0).readable = true;
    bench.thread.service(0);
    assert!(bench.thread.context.budget.admits(0, 16 << 20));
    assert_eq!(bench.thread.context.run_queues.interactive, [1]);
}

#[test]
fn more_requests_than_a_connection_may_have_are_answered_in_the_end() {
    const MANY: usize = 1500;
    let mut bench = Bench::new(1);
    bench.send(0, &request(77, 0, 0).repeat(MANY));
    bench.schedule(0);
    bench.settle();
    assert_eq!(bench.received(0).len(), MANY * REPLY);
}

#[test]
fn a_connection_that_is_alone_again_has_the_quantum_of_one() {
    let mut bench = Bench::new(1);
    let alone = bench.thread.context.quantum;
    bench.connect(1);
    assert_eq!(bench.thread.context.quantum, QUANTUM as u64);
    bench.close(1);
    assert_eq!(bench.thread.context.quantum, alone);
    assert!(alone > QUANTUM as u64);
}

#[test]
fn a_service_reads_one_quantum_from_the_device_and_the_next_one_goes_on() {
    let mut bench = Bench::new(2);
    let reads = [read(QUANTUM - BLOCK), read(BLOCK), write(BLOCK), read(BLOCK)].concat();
    bench.send(0, &reads);
    bench.thread.service(0);
    let connection = bench.connection(0);
    // A write's payload is received as it arrives.
    assert_eq!((connection.session.in_flight, connection.session.input), (3, ReadState::Blocked));
    assert_eq!(connection.session.unparsed.len(), REQUEST);
    let mut got = 0;
    // The socket does not hold all of it.
    while got < 4 * REPLY + QUANTUM + BLOCK {
        bench.settle();
        let some = bench.received(0).len();
        assert!(some > 0, "after {got}");
        got += some;
    }
    assert_eq!(got, 4 * REPLY + QUANTUM + BLOCK);
}
