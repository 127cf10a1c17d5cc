//! Many clients that connect simultaneously, beside a client that is served.
//!
//! Invariant: as for the module above.

use crate::event_loop::tests::*;
use crate::nbd::connection_channel::ARRIVAL_BATCH;
use crate::net::acceptor::ACCEPT_BATCH;

#[test]
fn a_request_is_served_between_two_batches_of_accepted_connections() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let mut bench = Bench::listening(Config::default(), vec![Listener::unix(&path).unwrap()]);
    bench.connect(0);
    let clients = ACCEPT_BATCH + 20;
    let _clients: Vec<_> = (0..clients).map(|_| UnixStream::connect(&path).unwrap()).collect();
    bench.send(0, &read(BLOCK));
    bench.iterate();
    assert_eq!(bench.thread.shared.limit.taken() as usize, 1 + ACCEPT_BATCH);
    assert_eq!(bench.received(0).len(), REPLY + BLOCK, "before the others are accepted");
    // They are accepted without any new event.
    assert!(Frontend::<Null>::has_work(&bench.thread.frontend));
    bench.settle();
    assert_eq!(bench.thread.shared.limit.taken() as usize, 1 + clients);
}

#[test]
fn only_the_replies_to_one_option_are_kept_for_a_client_that_reads_nothing() {
    let mut bench = Bench::new(1);
    // Its socket is full.
    let connection = bench.connection(0);
    connection.session.phase = Phase::Handshake(Handshake::new(TlsState::Off));
    connection.session.send_queue.push_bytes(vec![0; 8 << 20]);
    bench.settle();
    let flags = u32::from(wire::FLAG_FIXED_NEWSTYLE).to_be_bytes();
    let list = [&b"IHAVEOPT"[..], &[0, 0, 0, 3, 0, 0, 0, 0]].concat();
    bench.send(0, &[&flags[..], &list.repeat(1023)].concat());
    for _ in 0..2 {
        bench.settle();
        let connection = bench.connection(0);
        assert_eq!(
            (connection.session.send_queue.len(), connection.session.input),
            (1, ReadState::Blocked)
        );
        assert_eq!(connection.session.unparsed.len(), 4 + 1023 * list.len(), "no option was taken");
    }
    // Once it reads, each option is answered: two replies of 20 bytes and the empty name's length.
    let mut read = 0;
    while read < (8 << 20) + 1023 * (20 + 4 + 20) {
        read += bench.received(0).len();
        bench.settle();
    }
    assert!(
        bench.connection(0).session.unparsed.is_empty()
            && bench.connection(0).session.send_queue.is_empty()
    );
}

#[test]
fn connections_handed_over_at_once_are_taken_in_batches() {
    let mut bench = Bench::new(0);
    let count = ARRIVAL_BATCH + 3;
    for _ in 0..count {
        let (near, _) = UnixStream::pair().unwrap();
        let permit = bench.thread.shared.limit.take().unwrap();
        bench.thread.frontend.channel.assign(HandoffConnection::new(
            near.into(),
            TlsState::Off,
            permit,
        ));
    }
    let mut left = Vec::new();
    while bench.thread.shared.limit.taken() > 0 {
        bench.iterate();
        left.push(bench.thread.shared.limit.taken() as usize);
    }
    assert_eq!(left, [3, 0]);
}
