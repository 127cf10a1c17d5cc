//! Long writes that are cut.
//!
//! Invariant: as that of the module above. Knows: the module above, parts. Known by: nobody.

use super::*;

const PART: usize = 256 << 10;
/// A long write of three parts and a bit.
const LONG: usize = 3 * PART + 2 * BLOCK;

fn io(op: Op, flags: Flags, pos: u64, len: usize) -> Io {
    Io { op, flags, range: Range::new(pos, len as u64) }
}

impl Bench {
    /// A client sends `bytes`, whatever turns it takes for the server to receive them.
    fn send_all(&mut self, index: usize, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.clients[index].write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            self.conn(index).readable = true;
            self.thread.touch(index);
            self.settle();
        }
    }
}

#[test]
fn only_a_long_write_that_is_neither_durable_nor_refused_is_cut_and_only_beside_others() {
    let long = io(Op::Write, Flags::WHOLE, 0, LONG);
    let bench = Bench::new(2);
    assert!(bench.thread.is_to_be_cut(long));
    assert!(bench.thread.is_to_be_cut(io(Op::Write, Flags::WHOLE, SIZE - LONG as u64, LONG)));
    for whole in [
        io(Op::Read, Flags::WHOLE, 0, LONG),
        io(Op::Write, Flags::WHOLE, 0, PART),
        io(Op::Write, Flags::WHOLE.with(Flags::DSYNC), 0, LONG),
        io(Op::Write, Flags::WHOLE, SIZE - LONG as u64 + 1, LONG),
        io(Op::Write, Flags::WHOLE, u64::MAX, LONG),
    ] {
        assert!(!bench.thread.is_to_be_cut(whole), "{whole:?}");
    }
    assert!(!Bench::new(1).thread.is_to_be_cut(long));
    let strict = Bench::with(2, Config { strict: true, ..Config::default() });
    assert!(!strict.thread.is_to_be_cut(long));
}

#[test]
fn parts_have_begun_before_all_has_come_and_are_answered_once() {
    let mut bench = Bench::new(2);
    let bytes = [write(LONG), read(BLOCK)].concat();
    let (first, rest) = bytes.split_at(REQUEST + PART + 100);
    bench.send_all(0, first);
    assert_eq!(bench.thread.cuts.len(), 1);
    let payload = bench.conn(0).payload.as_ref().unwrap();
    assert_eq!((payload.io.range, payload.filled), (Range::new(PART as u64, PART as u64), 100));
    bench.send_all(0, rest);
    assert_eq!(bench.received(0).len(), 2 * REPLY + BLOCK);
    assert!(bench.thread.cuts.is_empty() && bench.conn(0).coming.is_none());
    assert_eq!(bench.conn(0).held, 0);
}

#[test]
fn parts_wait_while_there_is_no_room_for_them() {
    let mut bench = Bench::with(2, Config { slots: 1, ..Config::default() });
    bench.send(1, &read(BLOCK));
    bench.thread.look_at(1);
    bench.send(0, &write(PART + BLOCK)[..REQUEST + 100]);
    bench.thread.look_at(0);
    assert_eq!(bench.conn(0).input, Input::Stalled);
    assert!(bench.conn(0).payload.is_none());
    bench.settle();
    bench.send_all(0, &write(PART + BLOCK)[REQUEST + 100..]);
    assert_eq!(errors(&bench.received(0)), [0]);

    // Nor is there room for a connection that holds all that it may.
    let mut bench = Bench::new(2);
    bench.conn(0).in_flight = MAX_REQUESTS;
    bench.conn(0).coming = None;
    bench.thread.cut(0, asked(), io(Op::Write, Flags::WHOLE, 0, LONG));
    assert!(matches!(bench.thread.begin_part(0), Taken::Stall));
    bench.conn(0).in_flight = MAX_REQUESTS - 1;
    assert!(matches!(bench.thread.begin_part(0), Taken::Bytes(0)));
}

fn asked() -> Request {
    let header = wire::RequestHeader::parse(wire::Mode::Simple, &write(LONG)[..REQUEST]).unwrap();
    Request { header, contexts: Dialect::default().contexts, held: 0 }
}

#[test]
fn after_a_part_has_failed_the_rest_is_received_and_dropped_and_then_the_failure_is_told() {
    for begun in [true, false] {
        let mut bench = Bench::new(2);
        let bytes = [write(LONG), read(BLOCK)].concat();
        let came = match begun {
            true => REQUEST + PART + 100,
            false => REQUEST,
        };
        let dropped = match begun {
            // The second part goes on.
            true => {
                bench.send_all(0, &bytes[..came]);
                LONG - 2 * PART
            }
            // There was no room for any part.
            false => {
                bench.thread.cut(0, asked(), io(Op::Write, Flags::WHOLE, 0, LONG));
                LONG
            }
        };
        let number = bench.conn(0).coming.as_ref().unwrap().cut;
        // A part of no bytes, as those that have come are well.
        bench.thread.part_ended(0, number, &asked(), 0, libc::ENOSPC);
        assert_eq!(bench.conn(0).skip, dropped as u64);
        assert_eq!(bench.conn(0).coming.is_some(), begun);
        assert_eq!(bench.thread.cuts.len(), usize::from(begun));
        // A second failure changes nothing.
        bench.thread.part_ended(0, number, &asked(), 0, libc::EIO);
        bench.send_all(0, &bytes[came..bytes.len() - REQUEST]);
        assert_eq!(errors(&bench.received(0)), [28]);
        bench.send_all(0, &bytes[bytes.len() - REQUEST..]);
        assert_eq!(bench.received(0).len(), REPLY + BLOCK);
        assert!(bench.thread.cuts.is_empty() && bench.conn(0).coming.is_none());
    }
}

#[test]
fn a_write_whose_first_part_is_refused_is_answered_once_and_holds_nothing() {
    let mut bench = Bench::new(2);
    let mut bytes = [write(LONG), read(BLOCK)].concat();
    bytes[REQUEST..REQUEST + PART].fill(FORBIDDEN[0]);
    bench.send_all(0, &bytes[..REQUEST + LONG]);
    assert_eq!(errors(&bench.received(0)), [1]);
    bench.send_all(0, &bytes[REQUEST + LONG..]);
    assert_eq!(bench.received(0).len(), REPLY + BLOCK);
    assert!(bench.thread.cuts.is_empty() && bench.conn(0).held == 0);
}

#[test]
fn the_failure_of_an_earlier_write_does_not_end_the_one_that_is_coming() {
    let mut bench = Bench::new(2);
    let earlier = bench.thread.cuts.insert(Cut::new(asked(), io(Op::Write, Flags::WHOLE, 0, LONG)));
    bench.send_all(0, &write(LONG)[..REQUEST + PART + 100]);
    bench.thread.part_ended(0, earlier, &asked(), 100, libc::EIO);
    assert_eq!(bench.conn(0).skip, 0);
    assert!(bench.conn(0).coming.is_some());
    bench.send_all(0, &write(LONG)[REQUEST + PART + 100..]);
    assert_eq!(errors(&bench.received(0)), [0]);
}

#[test]
fn a_part_gives_back_what_it_held_and_a_client_that_is_gone_gets_no_answer() {
    let mut bench = Bench::new(2);
    let cut = bench.thread.cuts.insert(Cut::new(asked(), io(Op::Write, Flags::WHOLE, 0, 100)));
    let Thread { store, conns, .. } = &mut bench.thread;
    store.take(&mut conns[0].held, 5000);
    let part = Request { held: 3000, ..asked() };
    bench.thread.part_ended(0, cut, &part, 50, 0);
    assert_eq!(bench.conn(0).held, 2000);
    bench.conn(0).input = Input::Broken;
    bench.thread.part_ended(0, cut, &part, 50, 0);
    assert!(bench.thread.cuts.is_empty() && bench.conn(0).out.is_empty());
}

#[test]
fn a_write_that_does_not_come_to_its_end_is_forgotten_with_its_connection() {
    for came in [0, 100, PART, PART + 100] {
        let mut bench = Bench::new(2);
        bench.send_all(0, &write(LONG)[..REQUEST + came]);
        assert_eq!(bench.thread.cuts.len(), 1);
        bench.clients[0].shutdown(std::net::Shutdown::Both).unwrap();
        bench.conn(0).readable = true;
        bench.thread.touch(0);
        bench.settle();
        assert_eq!((bench.thread.cuts.len(), bench.thread.conns.len()), (0, 1), "{came}");
    }
}
