//! Reports of the queue, and the connections that they are for.
//!
//! Invariant: as that of the module above. Knows: the module above, patience. Known by: nobody.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::*;

/// A report that something has come, and nothing else.
const CAME: i32 = libc::POLLIN as i32;
/// Descriptors from here on are nobody else's in this program, which opens far fewer.
const FAR_DESCRIPTOR: i32 = 700;

impl Bench {
    /// The queue reports `bits` of `token`.
    fn report(&mut self, token: Token, bits: i32) {
        self.thread.lines = Lines::default();
        for (_, conn) in &mut self.thread.conns {
            conn.touched = false;
        }
        self.thread.events.push((token, bits));
        self.thread.take_events();
    }

    fn token_of(&mut self, index: usize) -> Token {
        token(index, self.conn(index).generation)
    }
}

#[test]
fn a_report_says_by_one_bit_what_it_is_about_and_leaves_number_and_generation_alone() {
    let names = (MAX_CONNECTIONS as u64 - 1) | (GENERATIONS - 1) << INDEX_BITS;
    assert_eq!(token(MAX_CONNECTIONS - 1, GENERATIONS - 1), WATCHED | names);
    for kind in [INBOX, LISTENER, ROOM | WATCHED] {
        assert_ne!(kind & WATCHED, 0);
        let bit = kind & !WATCHED;
        assert!(bit.is_power_of_two() && bit & names == 0, "{kind:#x}");
    }
    let bits = [INBOX, LISTENER, ROOM].map(|kind| kind & !WATCHED);
    assert!(bits[0] != bits[1] && bits[1] != bits[2] && bits[0] != bits[2]);
}

#[test]
fn a_report_is_for_the_connection_of_its_number_and_generation_only() {
    let mut bench = Bench::new(6);
    bench.settle();
    for index in [0, 1, 2, 5] {
        bench.conn(index).readable = false;
        let token = bench.token_of(index);
        bench.report(token, CAME);
        assert_eq!(bench.thread.lines.little, [index]);
        assert!(bench.conn(index).readable && !bench.conn(index).hung_up);
        // One that was in the same place before.
        bench.conn(index).readable = false;
        bench.conn(index).generation += 1;
        bench.report(token, CAME);
        assert!(bench.thread.lines.is_empty() && !bench.conn(index).readable);
    }
}

#[test]
fn a_report_of_room_is_not_one_of_something_to_read() {
    let mut bench = Bench::new(2);
    bench.settle();
    bench.conn(1).awaits_room = true;
    bench.conn(1).readable = false;
    let token = bench.token_of(1);
    bench.report(token, CAME);
    assert!(bench.conn(1).awaits_room && bench.conn(1).readable);
    bench.conn(1).readable = false;
    bench.report(of_room(token), CAME);
    assert!(!bench.conn(1).awaits_room && !bench.conn(1).readable);
    assert_eq!(bench.thread.lines.little, [1]);
}

#[test]
fn who_has_hung_up_stays_so_whatever_is_reported_then() {
    for bits in [libc::POLLRDHUP, libc::POLLHUP, libc::POLLERR] {
        let mut bench = Bench::new(1);
        bench.settle();
        let token = bench.token_of(0);
        bench.report(token, CAME);
        assert!(!bench.conn(0).hung_up);
        bench.report(token, CAME | i32::from(bits));
        assert!(bench.conn(0).hung_up, "{bits:#x}");
        bench.report(token, CAME);
        assert!(bench.conn(0).hung_up);
    }
}

#[test]
fn generations_go_round_and_two_in_a_row_differ() {
    let mut bench = Bench::new(2);
    assert_eq!([0, 1].map(|index| bench.conn(index).generation), [1, 2]);
    bench.thread.generation = GENERATIONS - 2;
    bench.connect(2);
    bench.connect(3);
    assert_eq!([2, 3].map(|index| bench.conn(index).generation), [GENERATIONS - 1, 0]);
}

#[test]
fn who_comes_when_the_server_stops_is_closed() {
    let mut bench = Bench::new(0);
    bench.thread.shared.stop();
    let (near, mut far) = UnixStream::pair().unwrap();
    let seat = bench.thread.shared.seats.take().unwrap();
    bench.thread.add(Arrival::new(near.into(), Secrecy::Off, seat));
    assert!(bench.thread.conns.is_empty());
    assert_eq!(far.read(&mut [0]).unwrap(), 0);
}

#[test]
fn the_thread_sleeps_until_something_comes_only_if_it_has_nothing_to_do() {
    let mut bench = Bench::new(1);
    bench.settle();
    // What has come is not known before it sleeps.
    bench.clients[0].write_all(&read(BLOCK)).unwrap();
    bench.thread.wait().unwrap();
    assert_eq!(bench.thread.events.len(), 1);
    // From here on nothing comes that would wake it up.
    bench.thread.wait().unwrap();
    bench.thread.take_events();
    assert!(bench.thread.events.is_empty());
    bench.thread.wait().unwrap();
    bench.thread.look_at_little();
    assert_eq!(bench.conn(0).in_flight, 1);
    bench.thread.wait().unwrap();
    bench.thread.complete();
    bench.thread.look_at_little();
    assert_eq!(bench.received(0).len(), REPLY + BLOCK);
    // It was read from, so it is read from once more.
    bench.thread.wait().unwrap();
    assert_eq!(bench.thread.lines.little, [0]);
}

#[test]
fn who_was_heard_last_is_read_without_a_report_unless_it_is_stalled() {
    let mut bench = Bench::new(3);
    bench.settle();
    bench.send(2, &read(BLOCK));
    bench.thread.look_at(2);
    for (input, expected) in [(Input::Open, true), (Input::Stalled, false)] {
        bench.thread.lines = Lines::default();
        let conn = bench.conn(2);
        (conn.input, conn.readable, conn.touched) = (input, false, false);
        bench.thread.expect_last_heard();
        assert_eq!(bench.conn(2).readable, expected);
        assert_eq!(bench.thread.lines.little.contains(&2), expected);
    }
    // It may have left since.
    bench.thread.close(2);
    bench.thread.expect_last_heard();
    assert!(bench.thread.lines.is_empty());
}

#[test]
fn a_connection_that_waited_for_room_leaves_nothing_to_the_next_with_its_descriptor() {
    let mut bench = Bench::new(0);
    let mut numbers = Vec::new();
    for _ in 0..2 {
        let (near, far) = UnixStream::pair().unwrap();
        let near: OwnedFd = rustix::io::fcntl_dupfd_cloexec(&near, FAR_DESCRIPTOR).unwrap();
        rustix::io::ioctl_fionbio(&near, true).unwrap();
        numbers.push(std::os::fd::AsRawFd::as_raw_fd(&near));
        let seat = bench.thread.shared.seats.take().unwrap();
        bench.thread.add(Arrival::new(near.into(), Secrecy::Off, seat));
        assert_eq!(bench.thread.conns.len(), 1, "it could not be watched");
        bench.conn(0).out.push_bytes(vec![0; 4 << 20]);
        bench.thread.handshakes = Handshakes::default();
        bench.conn(0).phase = Phase::Transmission(Dialect::default());
        bench.thread.look_at(0);
        assert!(bench.conn(0).awaits_room);
        far.shutdown(Shutdown::Both).unwrap();
        drop(far);
        bench.thread.close(0);
    }
    assert_eq!(numbers[0], numbers[1]);
}

#[test]
fn a_client_hears_of_the_end_though_somebody_has_its_socket_open() {
    let mut bench = Bench::new(0);
    let (near, far) = UnixStream::pair().unwrap();
    // As a queue may have it for a moment.
    let _held = near.try_clone().unwrap();
    bench.adopt(0, near, far);
    bench.received(0);
    bench.thread.close(0);
    assert_eq!(bench.clients[0].read(&mut [0]).unwrap(), 0);
}

#[test]
fn only_a_handshake_can_be_late() {
    let mut bench = Bench::new(3);
    let long = Duration::from_secs(3600);
    let now = Instant::now();
    let dues = [now - long, now + long, now - long];
    for (index, due) in dues.into_iter().enumerate() {
        bench.conn(index).due = due;
    }
    for index in [0, 1] {
        bench.conn(index).phase = Phase::Handshake(Handshake::new(Secrecy::Off));
        bench.thread.handshakes.begun(dues[index]);
    }
    bench.thread.end_late_handshakes();
    let left: Vec<usize> = bench.thread.conns.iter().map(|(index, _)| index).collect();
    assert_eq!(left, [1, 2]);
    assert_eq!(bench.thread.handshakes.due(), Some(dues[1]));
    bench.thread.end_late_handshakes();
    assert_eq!(bench.thread.conns.len(), 2);
}

#[test]
fn a_thread_that_takes_no_more_answers_what_is_in_flight_and_closes() {
    let mut bench = Bench::new(3);
    bench.send(0, &read(BLOCK));
    bench.thread.look_at(0);
    bench.conn(1).phase = Phase::Handshake(Handshake::new(Secrecy::Off));
    bench.thread.handshakes.begun(Instant::now());
    bench.conn(2).input = Input::Stalled;
    bench.thread.take_no_more();
    bench.settle();
    assert_eq!(bench.received(0).len(), REPLY + BLOCK);
    assert!(bench.thread.conns.is_empty());
}
