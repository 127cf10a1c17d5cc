//! Stores that answer slowly, or not at all: reads fail in the time that the manual says.

use std::time::Instant;

use super::*;

/// More than reads take that fail in time, and less than one of the limits that do not count here.
const GENEROUS: Duration = Duration::from_secs(15);

fn short() -> ObjectOptions {
    ObjectOptions { reconnect: Duration::from_secs(1), ..ObjectOptions::default() }
}

#[test]
fn reads_of_a_store_that_is_silent_or_too_slow_fail_in_the_time_for_the_reconnect() {
    for lie in [Lie::Stall(0), Lie::Stall(20), Lie::Stall(5000), Lie::Drip, Lie::Slow(1)] {
        let (server, object) = (server(), object());
        let disk = open(&server, &short()).unwrap();
        server.script().always = Some(lie.clone());
        let begun = Instant::now();
        // More of them than there are requests at a time.
        std::thread::scope(|scope| {
            for n in 0..40 {
                let disk = &disk;
                scope.spawn(move || {
                    let error = read(disk, n * 192 * KIB, 4096).unwrap_err();
                    assert_eq!(error.errno(), libc_eio());
                });
            }
        });
        assert!(begun.elapsed() < GENEROUS, "{lie:?}: {:?}", begun.elapsed());
        server.script().always = None;
        assert!(read(&disk, 0, 4096).unwrap() == object[..4096], "{lie:?}");
    }
}

#[test]
fn reads_of_a_store_that_refuses_all_of_them_fail_in_that_time_however_many_they_are() {
    let server = server();
    let disk = open(&server, &short()).unwrap();
    server.script().always = Some(Lie::Status(503, "", ""));
    let begun = Instant::now();
    for _ in 0..3 {
        std::thread::scope(|scope| {
            for n in 0..40 {
                let disk = &disk;
                scope.spawn(move || read(disk, n * 192 * KIB, 4096).unwrap_err());
            }
        });
    }
    assert!(begun.elapsed() < 2 * GENEROUS, "{:?}", begun.elapsed());
    // Those that were given up do not keep later ones from being made.
    server.script().always = None;
    let begun = Instant::now();
    while read(&disk, 0, 4096).is_err() {
        assert!(begun.elapsed() < GENEROUS, "{:?}", begun.elapsed());
    }
}

#[test]
fn a_store_that_is_silent_is_not_waited_for_at_the_open_longer_than_it_says() {
    let server = server();
    server.script().always = Some(Lie::Stall(0));
    let begun = Instant::now();
    let error = open(&server, &short()).err().unwrap();
    assert!(error.contains("has not answered for 10.0 s"), "{error}");
    assert!(begun.elapsed() < GENEROUS, "{:?}", begun.elapsed());
}

#[test]
fn an_answer_that_comes_fast_enough_is_waited_for_beyond_that_time() {
    let object = object()[..64 << 10].to_vec();
    let server = WebServer::start(object.clone(), "/disk.img");
    let at_rate = |minimum_rate| {
        server.script().always = None;
        let disk = open(&server, &ObjectOptions { minimum_rate, ..short() }).unwrap();
        // 8000 bytes a second.
        server.script().always = Some(Lie::Slow(400));
        read(&disk, 0, 4096)
    };
    for rate in [0, 1 << 10] {
        assert!(at_rate(rate).unwrap() == object[..4096], "{rate}");
    }
    assert_eq!(at_rate(1 << 20).unwrap_err().errno(), libc_eio());
}
