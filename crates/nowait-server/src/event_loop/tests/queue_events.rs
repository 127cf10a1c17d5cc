//! Events of the queue, and the connections that they are for.
//!
//! Invariant: as for the module above.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::event_loop::tests::*;
use crate::member::RunQueues;
use crate::nbd::connection::{GENERATIONS, LISTENER, MAX_CONNECTIONS, WRITABLE, connection_of};
use crate::nbd::handshake::timeout::HandshakeDeadlines;
use crate::nbd::stalled_connections::{MIN_BYTES, PERIOD};

/// The event bits of a readable socket.
const CAME: i32 = libc::POLLIN as i32;
/// The rest of this program opens far fewer descriptors than this.
const FAR_DESCRIPTOR: i32 = 700;

impl Bench {
    /// Delivers an event with `bits` for `token`.
    fn report(&mut self, token: Token, bits: i32) {
        self.thread.context.run_queues = RunQueues::default();
        for (_, connection) in &mut self.thread.frontend.connections {
            connection.member.scheduled = false;
        }
        self.thread.events.push((token, bits));
        self.thread.take_events();
    }

    /// The token of a connection's readable events, as the queue reports it.
    fn token_of(&mut self, index: usize) -> Token {
        FD_TOKEN | self.connection(index).readable_token()
    }
}

#[test]
fn a_token_has_one_bit_for_its_kind_apart_from_number_and_generation() {
    let mut bench = Bench::new(1);
    let connection = bench.connection(0);
    (connection.number, connection.generation) = (MAX_CONNECTIONS - 1, GENERATIONS - 1);
    let (readable, writable) = (connection.readable_token(), connection.writable_token());
    for token in [readable, writable] {
        assert_eq!(connection_of(token), (MAX_CONNECTIONS - 1, GENERATIONS - 1));
        assert_eq!((token & LISTENER, token >> TOKEN_BITS), (0, 0));
    }
    assert_eq!((readable & WRITABLE, writable ^ readable), (0, WRITABLE));
    assert_eq!(LISTENER >> TOKEN_BITS, 0);
    connection.number = 0;
}

#[test]
fn an_event_is_for_the_connection_with_its_index_and_generation_only() {
    let mut bench = Bench::new(6);
    bench.settle();
    for index in [0, 1, 2, 5] {
        bench.connection(index).readable = false;
        let token = bench.token_of(index);
        bench.report(token, CAME);
        assert_eq!(bench.thread.context.run_queues.interactive, [index]);
        assert!(bench.connection(index).readable && !bench.connection(index).rdhup);
        // An event for an earlier connection with the same index.
        bench.connection(index).readable = false;
        bench.connection(index).generation += 1;
        bench.report(token, CAME);
        assert!(bench.thread.context.run_queues.is_empty() && !bench.connection(index).readable);
    }
}

#[test]
fn a_writable_event_is_no_readable_event() {
    let mut bench = Bench::new(2);
    bench.settle();
    bench.connection(1).waiting_writable = true;
    bench.connection(1).readable = false;
    let token = bench.token_of(1);
    bench.report(token, CAME);
    assert!(bench.connection(1).waiting_writable && bench.connection(1).readable);
    bench.connection(1).readable = false;
    bench.report(WRITABLE | token, CAME);
    assert!(!bench.connection(1).waiting_writable && !bench.connection(1).readable);
    assert_eq!(bench.thread.context.run_queues.interactive, [1]);
}

#[test]
fn a_hangup_is_remembered_whatever_events_follow() {
    for bits in [libc::POLLRDHUP, libc::POLLHUP, libc::POLLERR] {
        let mut bench = Bench::new(1);
        bench.settle();
        let token = bench.token_of(0);
        bench.report(token, CAME);
        assert!(!bench.connection(0).rdhup);
        bench.report(token, CAME | i32::from(bits));
        assert!(bench.connection(0).rdhup, "{bits:#x}");
        bench.report(token, CAME);
        assert!(bench.connection(0).rdhup);
    }
}

#[test]
fn generations_wrap_around_and_two_in_a_row_differ() {
    let mut bench = Bench::new(2);
    assert_eq!([0, 1].map(|index| bench.connection(index).generation), [1, 2]);
    bench.thread.frontend.generation = GENERATIONS - 2;
    bench.connect(2);
    bench.connect(3);
    assert_eq!([2, 3].map(|index| bench.connection(index).generation), [GENERATIONS - 1, 0]);
}

#[test]
fn a_connection_that_arrives_when_the_server_stops_is_closed() {
    let mut bench = Bench::new(0);
    bench.begin_shutdown();
    let (near, mut far) = UnixStream::pair().unwrap();
    let permit = bench.thread.shared.limit.take().unwrap();
    bench.add(HandoffConnection::new(near.into(), TlsState::Off, permit));
    assert!(bench.thread.frontend.connections.is_empty());
    assert_eq!(far.read(&mut [0]).unwrap(), 0);
}

#[test]
fn the_thread_sleeps_only_if_it_has_nothing_to_do() {
    let mut bench = Bench::new(1);
    bench.settle();
    // The queue has not reported the bytes before it sleeps.
    bench.clients[0].write_all(&read(BLOCK)).unwrap();
    bench.thread.wait().unwrap();
    assert_eq!(bench.thread.events.len(), 1);
    // From here on no event comes that would wake it up.
    bench.thread.wait().unwrap();
    bench.thread.take_events();
    assert!(bench.thread.events.is_empty());
    bench.thread.wait().unwrap();
    bench.thread.service_interactive();
    assert_eq!(bench.connection(0).session.in_flight, 1);
    bench.thread.wait().unwrap();
    bench.thread.complete();
    bench.thread.service_interactive();
    assert_eq!(bench.received(0).len(), REPLY + BLOCK);
    // The socket was drained, so it is read once more.
    bench.thread.wait().unwrap();
    assert_eq!(bench.thread.context.run_queues.interactive, [0]);
}

#[test]
fn the_last_reader_is_read_without_an_event_unless_it_is_blocked() {
    let mut bench = Bench::new(3);
    bench.settle();
    bench.send(2, &read(BLOCK));
    bench.thread.service(2);
    for (input, expected) in [(ReadState::Open, true), (ReadState::Blocked, false)] {
        bench.thread.context.run_queues = RunQueues::default();
        let connection = bench.connection(2);
        (connection.session.input, connection.readable) = (input, false);
        connection.member.scheduled = false;
        bench.poll_last_reader();
        assert_eq!(bench.connection(2).readable, expected);
        assert_eq!(bench.thread.context.run_queues.interactive.contains(&2), expected);
    }
    // The connection may have been closed since.
    bench.close(2);
    bench.poll_last_reader();
    assert!(bench.thread.context.run_queues.is_empty());
}

#[test]
fn a_connection_that_waited_for_a_writable_event_leaves_no_watch_on_its_descriptor() {
    let mut bench = Bench::new(0);
    let mut numbers = Vec::new();
    for _ in 0..2 {
        let (near, far) = UnixStream::pair().unwrap();
        let near: OwnedFd = rustix::io::fcntl_dupfd_cloexec(&near, FAR_DESCRIPTOR).unwrap();
        rustix::io::ioctl_fionbio(&near, true).unwrap();
        numbers.push(std::os::fd::AsRawFd::as_raw_fd(&near));
        let permit = bench.thread.shared.limit.take().unwrap();
        bench.add(HandoffConnection::new(near.into(), TlsState::Off, permit));
        assert_eq!(bench.thread.frontend.connections.len(), 1, "it could not be watched");
        bench.connection(0).session.send_queue.push_bytes(vec![0; 4 << 20]);
        bench.thread.frontend.shared.handshakes.deadlines = HandshakeDeadlines::default();
        bench.connection(0).session.phase = Phase::Transmission(TransmissionMode::default());
        bench.thread.service(0);
        assert!(bench.connection(0).waiting_writable);
        far.shutdown(Shutdown::Both).unwrap();
        drop(far);
        bench.close(0);
    }
    assert_eq!(numbers[0], numbers[1]);
}

#[test]
fn a_client_sees_the_end_even_if_its_socket_is_open_elsewhere() {
    let mut bench = Bench::new(0);
    let (near, far) = UnixStream::pair().unwrap();
    // A queue may hold it for a moment.
    let _held = near.try_clone().unwrap();
    bench.adopt(0, near, far);
    bench.received(0);
    bench.close(0);
    assert_eq!(bench.clients[0].read(&mut [0]).unwrap(), 0);
}

#[test]
fn only_a_handshake_can_time_out() {
    let mut bench = Bench::new(3);
    let long = Duration::from_secs(3600);
    let now = Instant::now();
    let dues = [now - long, now + long, now - long];
    for (index, due) in dues.into_iter().enumerate() {
        bench.connection(index).due = due;
    }
    for index in [0, 1] {
        bench.connection(index).session.phase = Phase::Handshake(Handshake::new(TlsState::Off));
        bench.thread.frontend.shared.handshakes.deadlines.begin(dues[index]);
    }
    bench.thread.expire();
    let left: Vec<usize> =
        bench.thread.frontend.connections.iter().map(|(index, _)| index).collect();
    assert_eq!(left, [1, 2]);
    assert_eq!(bench.thread.frontend.shared.handshakes.deadlines.due(), Some(dues[1]));
    bench.thread.expire();
    assert_eq!(bench.thread.frontend.connections.len(), 2);
}

#[test]
fn a_client_that_stands_still_with_much_memory_is_closed_only_if_another_waits_for_it() {
    let mut bench = Bench::new(2);
    let much = 64 << 20;
    let now = Instant::now();
    bench.thread.frontend.watch_memory(&bench.thread.context, now);
    assert_eq!(bench.thread.frontend.stalls.due(), None, "nothing is held");
    bench.thread.context.budget.set_connection_count(2, 2);
    bench.thread.context.budget.charge(&mut 0, much);
    bench.connection(0).member.budget_used = much;
    let mut later = now;
    // Whether the connection is left after the next check, before which it moves `bytes` and others may wait.
    let mut is_left = |bench: &mut Bench, bytes, others_wait: bool| {
        bench.thread.frontend.watch_memory(&bench.thread.context, later);
        let due = bench.thread.frontend.stalls.due().expect("much is held");
        assert_eq!(due, later + PERIOD);
        later = due;
        bench.connection(0).moved += bytes;
        if others_wait {
            bench.thread.context.budget.note_refused(later);
        }
        bench.thread.frontend.expire(&mut bench.thread.context, later);
        bench.thread.frontend.connections.contains(0)
    };
    for _ in 0..3 {
        assert!(is_left(&mut bench, 0, false), "no client waits");
    }
    assert!(is_left(&mut bench, MIN_BYTES, true), "it moves");
    bench.connection(0).session.in_flight = 1;
    assert!(is_left(&mut bench, 0, true), "its request is at the device");
    bench.connection(0).session.in_flight = 0;
    assert!(is_left(&mut bench, 0, true), "it was not looked at before");
    assert!(!is_left(&mut bench, MIN_BYTES - 1, true));
    assert!(bench.thread.frontend.connections.contains(1));
}

#[test]
fn a_stopping_thread_answers_the_requests_in_flight_and_closes() {
    let mut bench = Bench::new(3);
    bench.send(0, &read(BLOCK));
    bench.thread.service(0);
    bench.connection(1).session.phase = Phase::Handshake(Handshake::new(TlsState::Off));
    bench.thread.frontend.shared.handshakes.deadlines.begin(Instant::now());
    bench.connection(2).session.input = ReadState::Blocked;
    bench.begin_shutdown();
    bench.settle();
    assert_eq!(bench.received(0).len(), REPLY + BLOCK);
    assert!(bench.thread.frontend.connections.is_empty());
}
