//! Threads of exports without connections: they retire, and start again.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use nowait_server::{AnyExport, Export, Listener, Options, QueueKind, Server, Tls};
use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::sevens::{SEVEN, Sevens};
use nowait_testkit::{BOUND, wait_for, wait_until};

const SIZE: u64 = 1 << 20;
fn client(socket: &Path, name: &str) -> Client {
    Client::connect_to(socket, name, Mode::Simple).unwrap()
}

/// Reads a block, and finds it full of sevens.
fn read(client: &mut Client) {
    assert!(client.read(0, 4096).unwrap() == [SEVEN; 4096]);
}

/// The event loops of this process, as export and queue.
fn event_loops() -> BTreeSet<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    let names = tasks.filter_map(|task| name(task.ok()?));
    names.filter_map(|name| Some(name.trim().strip_prefix("nowait-nbd-")?.to_owned())).collect()
}

fn wait_for_event_loops(what: &str, mut are_right: impl FnMut(&BTreeSet<String>) -> bool) {
    wait_for(what, || {
        let loops = event_loops();
        if are_right(&loops) { Ok(()) } else { Err(loops) }
    });
}

/// Runs `run` with a server of `exports` exports, named by their indices; its threads are those of
/// this process. The images are those of the exports.
fn serving(exports: usize, queues: u16, idle: Duration, run: impl FnOnce(&Path, &[Sevens])) {
    let directory = tempfile::tempdir().unwrap();
    let images = vec![(); exports].into_iter().map(|()| Sevens::default()).collect::<Vec<_>>();
    let export = |(n, image): (usize, &Sevens)| {
        let disk = image.device(&directory.path().join(n.to_string()), SIZE);
        AnyExport::new(Export::new(disk, 1, n.to_string(), String::new()))
    };
    let exports = images.iter().enumerate().map(export).collect();
    let socket = directory.path().join("socket");
    let (kind, config, max_connections) = (QueueKind::Threads, Default::default(), 100);
    let split_bytes = Options::SPLIT_BYTES;
    let options =
        Options { queues, kind, config, tls: Tls::Off, max_connections, idle, split_bytes };
    let server = Server::start(exports, vec![Listener::unix(&socket).unwrap()], options).unwrap();
    let stopper = server.shutdown_handle();
    let running = thread::spawn(move || server.run(BOUND));
    run(&socket, &images);
    stopper.stop();
    assert_eq!(running.join().unwrap().unwrap().unfinished, 0);
}

/// In sequence, because the threads of the process are counted.
#[test]
fn threads_without_connections_flush_retire_and_start_again() {
    an_export_that_no_connection_uses_has_no_threads_after_a_while();
    only_a_few_idle_threads_wait_for_their_timeout();
    a_thread_is_started_for_a_second_connection_and_ends_while_the_first_one_goes_on();
}

fn an_export_that_no_connection_uses_has_no_threads_after_a_while() {
    serving(2, 1, Duration::from_millis(50), |socket, images| {
        for round in 1..=3 {
            let mut stream = client(socket, "1");
            read(&mut stream);
            // A connection without requests uses the export as well.
            thread::sleep(Duration::from_millis(120));
            assert!(event_loops().contains("1.0"));
            read(&mut stream);
            assert_eq!(images[1].flushes(), round - 1);
            drop(stream);
            wait_for_event_loops("it ends", |loops| *loops == BTreeSet::from(["0.0".into()]));
            wait_until("it was flushed", || images[1].flushes() == round);
        }
        assert_eq!(images[0].flushes(), 0);
    });
}

fn only_a_few_idle_threads_wait_for_their_timeout() {
    /// The most idle threads, the acceptor thread, and the thread of the visited export.
    const MAX_THREADS: usize = 18;
    serving(60, 2, Duration::from_secs(1000), |socket, images| {
        for n in 1..60 {
            read(&mut client(socket, &n.to_string()));
        }
        // A thread that starts retires idle ones: of those that became idle later, the next one.
        let mut names = (1..60).cycle();
        wait_for_event_loops("they end", |loops| {
            let are_few = loops.len() <= MAX_THREADS;
            if !are_few {
                names.by_ref().take(3).for_each(|n| read(&mut client(socket, &n.to_string())));
            }
            are_few
        });
        let flushed = images.iter().filter(|image| image.flushes() > 0);
        assert!(flushed.count() >= 60 - MAX_THREADS);
        // The first ones are served again.
        read(&mut client(socket, "1"));
    });
}

fn a_thread_is_started_for_a_second_connection_and_ends_while_the_first_one_goes_on() {
    serving(2, 2, Duration::from_millis(50), |socket, images| {
        let mut first = client(socket, "1");
        read(&mut first);
        assert!(!event_loops().contains("1.1"));
        let mut second = client(socket, "1");
        read(&mut second);
        assert!(event_loops().contains("1.1"));
        drop(second);
        wait_for_event_loops("one ends", |loops| {
            loops.iter().filter(|name| name.starts_with("1.")).count() == 1
        });
        read(&mut first);
        assert_eq!(images[1].flushes(), 0, "the export is in use");
    });
}
