//! Bytes that one service receives.
//!
//! Invariant: as for the module above.

use std::net::Shutdown;

use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::event_loop::tests::*;
use crate::fairness::quantum_among;
use crate::nbd::tls_session::Transport;
use crate::nbd::tls_session::tests::Pair;

/// The quantum beside other connections.
const QUANTUM: usize = 256 << 10;

impl Bench {
    /// Services connection 0 after a readable event. Returns the bytes moved.
    fn service(&mut self) -> usize {
        self.connection(0).readable = true;
        self.thread.service(0) as usize
    }

    /// Lets a client's socket hold more than one receive takes.
    fn widen(&mut self) {
        set_socket_send_buffer_size(&self.clients[0], 2 * RECEIVE_BYTES).unwrap();
    }
}

#[test]
fn an_incomplete_header_is_kept_until_the_rest_has_arrived() {
    let mut bench = Bench::new(1);
    let header = read(BLOCK);
    for (at, some) in header.chunks(10).enumerate() {
        bench.send(0, some);
        assert_eq!(bench.service(), if at == 2 { some.len() + BLOCK } else { some.len() });
        assert!(!bench.connection(0).readable);
        // Another service receives nothing more.
        let unparsed = bench.connection(0).session.unparsed.clone();
        assert_eq!(bench.service(), 0);
        assert!(!bench.connection(0).readable && bench.connection(0).session.unparsed == unparsed);
    }
    assert_eq!(
        (bench.connection(0).session.in_flight, bench.connection(0).session.unparsed.len()),
        (1, 0)
    );
}

#[test]
fn bytes_after_a_payload_are_received_with_its_last_bytes() {
    let mut bench = Bench::new(1);
    let bytes = [write(BLOCK), read(BLOCK)].concat();
    bench.send(0, &bytes[..REQUEST + 100]);
    bench.service();
    assert_eq!(bench.connection(0).session.payload.as_ref().unwrap().filled, 100);
    bench.send(0, &bytes[REQUEST + 100..]);
    bench.service();
    assert_eq!((bench.connection(0).session.in_flight, bench.connection(0).readable), (2, false));
    bench.settle();
    assert_eq!(bench.received(0).len(), 2 * REPLY + BLOCK);
}

#[test]
fn beside_others_a_service_receives_its_quantum_of_a_payload_and_nothing_after_it() {
    assert_eq!(quantum_among(2), QUANTUM as u64);
    let mut bench = Bench::new(2);
    bench.widen();
    let mut long = request(wire::CMD_WRITE, 0, 2 * QUANTUM);
    // With FUA, so that it is not split.
    long[5] = wire::CMD_FLAG_FUA as u8;
    bench.send(0, &long);
    assert_eq!(bench.service(), REQUEST);
    bench.send(0, &[1; QUANTUM + 5000]);
    assert_eq!(bench.service(), QUANTUM);
    // More data are there, without an event.
    assert!(bench.connection(0).readable);
    assert_eq!(bench.service(), 5000);
    assert!(!bench.connection(0).readable);
}

#[test]
fn of_a_split_write_a_service_receives_one_fragment_and_nothing_after_it() {
    let mut bench = Bench::new(2);
    bench.send(0, &request(wire::CMD_WRITE, (QUANTUM - BLOCK) as u64, QUANTUM + BLOCK));
    bench.service();
    bench.send(0, &[1; 3 * BLOCK]);
    assert_eq!(bench.service(), BLOCK);
    assert!(bench.connection(0).readable);
    assert_eq!(bench.service(), 2 * BLOCK);
    assert!(!bench.connection(0).readable);
}

#[test]
fn a_connection_stays_readable_after_a_receive_that_has_filled_all_buffers() {
    // Refused writes: the payload is discarded.
    let header = request(wire::CMD_WRITE, SIZE, 2 * RECEIVE_BYTES);
    for (before, then, stays_readable) in [
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
        bench.service();
        bench.send(0, &bytes[before..]);
        bench.service();
        assert_eq!(bench.connection(0).readable, stays_readable, "{before}, {then}");
    }
    // The end of a payload, and the bytes after it.
    for (then, stays_readable) in [(RECEIVE_BYTES, true), (RECEIVE_BYTES - 1, false)] {
        let mut bench = Bench::new(1);
        bench.widen();
        bench.send(0, &write(BLOCK)[..REQUEST]);
        bench.service();
        let mut bytes = [vec![1; BLOCK], header.clone()].concat();
        bytes.resize(BLOCK + then, 1);
        bench.send(0, &bytes);
        bench.service();
        assert_eq!(bench.connection(0).readable, stays_readable, "{then}");
    }
}

#[test]
fn a_connection_with_a_hangup_is_read_to_its_end() {
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.connection(0).rdhup = true;
    bench.service();
    assert!(bench.connection(0).readable);
    bench.clients[0].shutdown(Shutdown::Write).unwrap();
    bench.service();
    assert_eq!(bench.connection(0).session.input, ReadState::Eof);
    bench.settle();
    assert!(bench.thread.frontend.connections.is_empty());
}

/// Even on a busy thread: it does not have to sleep before.
#[test]
fn a_connection_is_serviced_once_more_after_close_notify_and_closed() {
    let mut bench = Bench::new(0);
    let Pair { session, near, mut client, mut far } = Pair::established();
    bench.adopt(0, near, far.try_clone().unwrap());
    bench.connection(0).transport = Transport::Tls(Box::new(session));
    bench.settle();
    client.send_close_notify();
    client.write_tls(&mut far).unwrap();
    bench.service();
    assert!(bench.connection(0).readable);
    assert_eq!(bench.thread.context.run_queues.interactive, [0]);
    bench.thread.service_interactive();
    assert!(bench.thread.frontend.connections.is_empty());
    client.read_tls(&mut far).unwrap();
    assert!(client.process_new_packets().unwrap().peer_has_closed());
}

#[test]
fn a_payload_cut_off_by_the_end_of_file_is_dropped() {
    let mut bench = Bench::new(1);
    bench.send(0, &write(BLOCK)[..100]);
    bench.service();
    bench.clients[0].shutdown(Shutdown::Write).unwrap();
    bench.service();
    assert!(bench.thread.frontend.connections.is_empty());
}

#[test]
fn an_end_of_file_without_an_event_is_found_before_the_thread_sleeps() {
    let mut bench = Bench::new(1);
    assert!(!bench.recheck_eof(), "nothing was read");
    for _ in 0..2 {
        bench.send(0, &read(BLOCK));
        bench.service();
    }
    assert_eq!(bench.thread.frontend.maybe_eof, [0], "once, however often it was read from");
    bench.clients[0].shutdown(Shutdown::Write).unwrap();
    assert!(bench.recheck_eof());
    assert_eq!(bench.thread.context.run_queues.interactive, [0]);
    bench.thread.service_interactive();
    assert_eq!(bench.connection(0).session.input, ReadState::Eof);
    assert!(!bench.recheck_eof());
}

#[test]
fn a_blocked_connection_is_read_once_more_when_it_is_unblocked() {
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.service();
    bench.connection(0).session.input = ReadState::Blocked;
    assert!(!bench.recheck_eof());
    assert!(bench.connection(0).readable && bench.thread.context.run_queues.is_empty());
}

#[test]
fn a_connection_with_a_hangup_is_not_listed_for_the_recheck() {
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.connection(0).rdhup = true;
    bench.service();
    assert!(bench.thread.frontend.maybe_eof.is_empty());
}

#[test]
fn a_connection_that_is_blocked_or_not_readable_is_not_read() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(1, &read(BLOCK));
    bench.thread.service(1);
    bench.send(0, &read(BLOCK));
    assert_eq!(bench.service(), REQUEST);
    for _ in 0..2 {
        bench.send(0, &read(BLOCK));
        assert_eq!(bench.service(), 0);
        assert_eq!(
            (bench.connection(0).session.input, bench.connection(0).session.unparsed.len()),
            (ReadState::Blocked, REQUEST)
        );
    }
    let mut bench = Bench::new(1);
    bench.send(0, &read(BLOCK));
    bench.connection(0).readable = false;
    assert_eq!(bench.thread.service(0), 0);
}

#[test]
fn c41_requests_that_wait_for_a_paused_export_are_answered_although_their_client_sends_no_more() {
    let mut bench = Bench::new(1);
    let export = registered(&bench.thread);
    assert!(export.begin_pause());
    let id = export.id;
    let connection = bench.connection(0);
    connection.waits_for = Some(id);
    connection.session.unparsed = read(BLOCK);
    bench.clients[0].shutdown(std::net::Shutdown::Write).unwrap();
    bench.connection(0).readable = true;
    bench.thread.service(0);
    let waiting = export.end_pause().connections;
    assert_eq!(waiting.len(), 1, "it was closed");
    for connection in waiting {
        bench.thread.shared.serve_client(&export, connection);
    }
    bench.thread.wake_up();
    bench.settle();
    assert_eq!(bench.received(0).len(), REPLY + BLOCK);
    assert!(bench.thread.frontend.connections.is_empty());
}
