//! Whose turn it is, and who is woken up by what.
//!
//! Invariant: as that of the module above. Knows: the module above, portion. Known by: nobody.

use rustix::net::sockopt::set_socket_send_buffer_size;

use super::super::super::reply::Body;
use super::*;

/// What one look moves beside other connections.
const PORTION: usize = 256 << 10;

impl Bench {
    /// Clients that have `bytes` each on their way, which move much, and wait in the line of those.
    fn busy(clients: usize, bytes: usize) -> Self {
        let mut bench = Self::new(clients);
        bench.settle();
        for index in 0..clients {
            set_socket_send_buffer_size(&bench.clients[index], 2 * RECEIVE_BYTES).unwrap();
            // Payload of a refused write is passed over.
            bench.conn(index).skip = u64::MAX;
            bench.conn(index).portion.moved(1 << 30);
            bench.send(index, &vec![1; bytes]);
            bench.thread.touch(index);
        }
        assert_eq!(bench.thread.lines.much.len(), clients);
        bench
    }

    /// Bytes that were passed over, for each connection.
    fn passed(&mut self) -> Vec<usize> {
        self.thread.conns.iter().map(|(_, conn)| (u64::MAX - conn.skip) as usize).collect()
    }
}

#[test]
fn those_that_move_much_move_one_portion_together() {
    const SOME: usize = 100 << 10;
    let mut bench = Bench::busy(5, SOME);
    bench.thread.look_at_much();
    // A look is not cut, so the third moves more than was left.
    assert_eq!(bench.passed(), [SOME, SOME, SOME, 0, 0]);
    bench.thread.look_at_much();
    assert_eq!(bench.passed(), [SOME; 5]);

    let mut bench = Bench::busy(3, PORTION);
    bench.thread.look_at_much();
    assert_eq!(bench.passed(), [PORTION, 0, 0]);
}

#[test]
fn those_that_move_much_have_one_portion_in_a_turn_beside_others_and_two_alone() {
    let mut bench = Bench::busy(3, PORTION);
    bench.thread.take_turn().unwrap();
    assert_eq!(bench.passed(), [PORTION, PORTION, 0]);

    // The first of them is heard as one that moves little.
    let mut bench = Bench::busy(3, PORTION);
    let token = token(0, bench.conn(0).generation);
    bench.thread.lines.much.retain(|index| *index != 0);
    bench.conn(0).touched = false;
    bench.conn(0).portion = Default::default();
    bench.thread.events.push((token, libc::POLLIN.into()));
    bench.thread.take_turn().unwrap();
    assert_eq!(bench.passed(), [PORTION, PORTION, 0]);
}

#[test]
fn whether_requests_end_at_once_is_known_from_the_last_that_were_handed_over() {
    let mut bench = Bench::new(1);
    bench.settle();
    assert!(!bench.thread.ends_at_once, "there were none");
    bench.send(0, &read(BLOCK));
    bench.thread.touch(0);
    bench.turn();
    assert!(bench.thread.ends_at_once);
    bench.settle();
    assert!(bench.thread.ends_at_once);
}

#[test]
fn who_waits_for_others_is_looked_at_when_these_give_something_back() {
    for (bytes, woken) in [(0, false), (1000, true)] {
        let mut bench = Bench::new(2);
        bench.settle();
        bench.thread.stalled.push(1);
        let Thread { store, conns, .. } = &mut bench.thread;
        store.take(&mut conns[0].held, bytes);
        let header = wire::RequestHeader::parse(wire::Mode::Simple, &read(BLOCK)).unwrap();
        let head = super::super::super::respond::plain(wire::Mode::Simple, &header, 0);
        bench.conn(0).out.push(head, Body::None, bytes as u32);
        bench.thread.look_at(0);
        assert_eq!(bench.conn(0).held, 0);
        assert_eq!(bench.thread.stalled.is_empty(), woken);
        assert_eq!(bench.thread.lines.little, if woken { &[1][..] } else { &[] });
    }
    // So it is when one of them leaves.
    let mut bench = Bench::new(2);
    bench.settle();
    bench.thread.stalled.push(1);
    let Thread { store, conns, .. } = &mut bench.thread;
    store.take(&mut conns[0].held, 1 << 30);
    assert!(!bench.thread.store.admits(0, 16 << 20));
    bench.thread.close(0);
    assert!(bench.thread.store.admits(0, 16 << 20));
    assert_eq!(bench.thread.lines.little, [1]);
}

#[test]
fn more_requests_than_a_connection_may_have_are_answered_in_the_end() {
    const MANY: usize = 1500;
    let mut bench = Bench::new(1);
    bench.send(0, &request(77, 0, 0).repeat(MANY));
    bench.thread.touch(0);
    bench.settle();
    assert_eq!(bench.received(0).len(), MANY * REPLY);
}

#[test]
fn a_connection_that_is_alone_again_has_the_portion_of_one() {
    let mut bench = Bench::new(1);
    let alone = bench.thread.portion;
    bench.connect(1);
    assert_eq!(bench.thread.portion, PORTION as u64);
    bench.thread.close(1);
    assert_eq!(bench.thread.portion, alone);
    assert!(alone > PORTION as u64);
}

#[test]
fn a_look_asks_the_device_for_one_portion_and_the_next_one_goes_on() {
    let mut bench = Bench::new(2);
    let reads = [read(PORTION - BLOCK), read(BLOCK), write(BLOCK), read(BLOCK)].concat();
    bench.send(0, &reads);
    bench.thread.look_at(0);
    let conn = bench.conn(0);
    // A write is received as it comes.
    assert_eq!((conn.in_flight, conn.input), (3, Input::Stalled));
    assert_eq!(conn.stash.len(), REQUEST);
    let mut got = 0;
    // The socket does not hold all of it.
    while got < 4 * REPLY + PORTION + BLOCK {
        bench.settle();
        let some = bench.received(0).len();
        assert!(some > 0, "after {got}");
        got += some;
    }
    assert_eq!(got, 4 * REPLY + PORTION + BLOCK);
}
