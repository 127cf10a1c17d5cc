//! What is received in one look.
//!
//! Invariant: as that of the module above. Knows: the module above, receive, portion, tls. Known by: nobody.

use std::net::Shutdown;

use rustix::net::sockopt::set_socket_send_buffer_size;

use super::super::super::portion::portion_among;
use super::super::super::tls::Channel;
use super::super::super::tls::tests::Pair;
use super::*;

/// What one look moves beside other connections.
const PORTION: usize = 256 << 10;

impl Bench {
    /// A look at connection 0, of which something was heard. Returns the bytes that it moved.
    fn look(&mut self) -> usize {
        self.conn(0).readable = true;
        self.thread.look_at(0) as usize
    }

    /// Lets a client's socket hold more than is received at once.
    fn widen(&mut self) {
        set_socket_send_buffer_size(&self.clients[0], 2 * RECEIVE_BYTES).unwrap();
    }
}

#[test]
fn a_part_of_a_header_is_kept_until_the_rest_has_come() {
    let mut bench = Bench::new(1);
    let header = read(BLOCK);
    for (at, some) in header.chunks(10).enumerate() {
        bench.send(0, some);
        assert_eq!(bench.look(), if at == 2 { some.len() + BLOCK } else { some.len() });
        assert!(!bench.conn(0).readable);
        // It is looked at again, and nothing more has come.
        let stashed = bench.conn(0).stash.clone();
        assert_eq!(bench.look(), 0);
        assert!(!bench.conn(0).readable && bench.conn(0).stash == stashed);
    }
    assert_eq!((bench.conn(0).in_flight, bench.conn(0).stash.len()), (1, 0));
}

#[test]
fn what_follows_a_payload_is_received_with_the_last_of_it() {
    let mut bench = Bench::new(1);
    let bytes = [write(BLOCK), read(BLOCK)].concat();
    bench.send(0, &bytes[..REQUEST + 100]);
    bench.look();
    assert_eq!(bench.conn(0).payload.as_ref().unwrap().filled, 100);
    bench.send(0, &bytes[REQUEST + 100..]);
    bench.look();
    assert_eq!((bench.conn(0).in_flight, bench.conn(0).readable), (2, false));
    bench.settle();
    assert_eq!(bench.received(0).len(), 2 * REPLY + BLOCK);
}

#[test]
fn beside_others_a_look_receives_its_portion_of_a_payload_and_nothing_behind_it() {
    assert_eq!(portion_among(2), PORTION as u64);
    let mut bench = Bench::new(2);
    bench.widen();
    let mut long = request(wire::CMD_WRITE, 0, 2 * PORTION);
    // With FUA, so that it is not cut.
    long[5] = wire::CMD_FLAG_FUA as u8;
    bench.send(0, &long);
    assert_eq!(bench.look(), REQUEST);
    bench.send(0, &[1; PORTION + 5000]);
    assert_eq!(bench.look(), PORTION);
    // There is more, of which there is no report.
    assert!(bench.conn(0).readable);
    assert_eq!(bench.look(), 5000);
    assert!(!bench.conn(0).readable);
}

#[test]
fn of_a_write_that_was_cut_a_look_receives_a_part_and_nothing_behind_it() {
    let mut bench = Bench::new(2);
    bench.send(0, &request(wire::CMD_WRITE, (PORTION - BLOCK) as u64, PORTION + BLOCK));
    bench.look();
    bench.send(0, &[1; 3 * BLOCK]);
    assert_eq!(bench.look(), BLOCK);
    assert!(bench.conn(0).readable);
    assert_eq!(bench.look(), 2 * BLOCK);
    assert!(!bench.conn(0).readable);
}

#[test]
fn a_look_that_has_filled_all_the_room_that_there_was_is_not_the_last() {
    // Refused writes: payload that is passed over.
    let header = request(wire::CMD_WRITE, SIZE, 2 * RECEIVE_BYTES);
    for (before, then, goes_on) in [
        (REQUEST, RECEIVE_BYTES, true),
        (REQUEST, RECEIVE_BYTES - 1, false),
        (10, RECEIVE_BYTES - 10, true),
        (10, RECEIVE_BYTES - 11, false),
    ] {
        let mut bench = Bench::new(1);
        bench.widen();
        let mut bytes = header.clone();
        bytes.resize(before + then, 1);
        bench.send(0, &bytes[..before]);
        bench.look();
        bench.send(0, &bytes[before..]);
        bench.look();
        assert_eq!(bench.conn(0).readable, goes_on, "{before}, {then}");
    }
    // The last of a payload, and what is behind it.
    for (then, goes_on) in [(RECEIVE_BYTES, true), (RECEIVE_BYTES - 1, false)] {
        let mut bench = Bench::new(1);
        bench.widen();
        bench.send(0, &write(BLOCK)[..REQUEST]);
        bench.look();
        let mut bytes = [vec![1; BLOCK], header.clone()].concat();
        bytes.resize(BLOCK + then, 1);
        bench.send(0, &bytes);
        bench.look();
        assert_eq!(bench.conn(0).readable, goes_on, "{then}");
    }
}

#[test]
fn who_has_hung_up_is_read_from_to_the_end() {
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.conn(0).hung_up = true;
    bench.look();
    assert!(bench.conn(0).readable);
    bench.clients[0].shutdown(Shutdown::Write).unwrap();
    bench.look();
    assert_eq!(bench.conn(0).input, Input::Ended);
    bench.settle();
    assert!(bench.thread.conns.is_empty());
}

/// However busy the thread is with others: it does not have to sleep before.
#[test]
fn who_says_goodbye_by_tls_is_looked_at_once_more_and_closed() {
    let mut bench = Bench::new(0);
    let Pair { session, near, mut client, mut far } = Pair::established();
    bench.adopt(0, near, far.try_clone().unwrap());
    bench.conn(0).channel = Channel::Tls(Box::new(session));
    bench.settle();
    client.send_close_notify();
    client.write_tls(&mut far).unwrap();
    bench.look();
    assert!(bench.conn(0).readable);
    assert_eq!(bench.thread.lines.little, [0]);
    bench.thread.look_at_little();
    assert!(bench.thread.conns.is_empty());
    client.read_tls(&mut far).unwrap();
    assert!(client.process_new_packets().unwrap().peer_has_closed());
}

#[test]
fn a_payload_that_does_not_come_to_its_end_is_given_up() {
    let mut bench = Bench::new(1);
    bench.send(0, &write(BLOCK)[..100]);
    bench.look();
    bench.clients[0].shutdown(Shutdown::Write).unwrap();
    bench.look();
    assert!(bench.thread.conns.is_empty());
}

#[test]
fn an_end_of_which_there_is_no_report_is_found_before_the_thread_sleeps() {
    let mut bench = Bench::new(1);
    assert!(!bench.thread.read_once_more(), "nothing was read");
    for _ in 0..2 {
        bench.send(0, &read(BLOCK));
        bench.look();
    }
    assert_eq!(bench.thread.read_from, [0], "once, however often it was read from");
    bench.clients[0].shutdown(Shutdown::Write).unwrap();
    assert!(bench.thread.read_once_more());
    assert_eq!(bench.thread.lines.little, [0]);
    bench.thread.look_at_little();
    assert_eq!(bench.conn(0).input, Input::Ended);
    assert!(!bench.thread.read_once_more());
}

#[test]
fn who_is_stalled_is_read_once_more_when_that_is_over() {
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.look();
    bench.conn(0).input = Input::Stalled;
    assert!(!bench.thread.read_once_more());
    assert!(bench.conn(0).readable && bench.thread.lines.is_empty());
}

#[test]
fn who_is_read_from_anyway_is_not_listed() {
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.conn(0).hung_up = true;
    bench.look();
    assert!(bench.thread.read_from.is_empty());
}

#[test]
fn nobody_is_read_from_who_is_stalled_or_of_whom_nothing_was_heard() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(1, &read(BLOCK));
    bench.thread.look_at(1);
    bench.send(0, &read(BLOCK));
    assert_eq!(bench.look(), REQUEST);
    for _ in 0..2 {
        bench.send(0, &read(BLOCK));
        assert_eq!(bench.look(), 0);
        assert_eq!((bench.conn(0).input, bench.conn(0).stash.len()), (Input::Stalled, REQUEST));
    }
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.conn(0).readable = false;
    assert_eq!(bench.thread.look_at(0), 0);
}
