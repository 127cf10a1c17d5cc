//! Threads of exports without connections: they retire, and start again. Exports that are added and
//! removed.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use nowait_server::{AnyExport, Export, Exports, Listener, Options, QueueKind, Server};
use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::worker_only_image::{SEVEN, WorkerOnlyImage};
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

/// An export called `name` of `image`, whose file is in `directory`.
fn export(directory: &Path, name: &str, image: &WorkerOnlyImage) -> AnyExport {
    let disk = image.device(&directory.join(name), SIZE);
    AnyExport::new(Export::new(disk, name.to_owned(), String::new()))
}

/// Runs `run` with a server of `exports` exports, named by their indices; its threads are those of
/// this process. The images are those of the exports.
fn serving(
    exports: usize,
    queues: u16,
    idle: Duration,
    run: impl FnOnce(&Path, &[WorkerOnlyImage], &Exports),
) {
    let directory = tempfile::tempdir().unwrap();
    let images =
        vec![(); exports].into_iter().map(|()| WorkerOnlyImage::default()).collect::<Vec<_>>();
    let numbered = images.iter().enumerate();
    let exports = numbered.map(|(n, image)| export(directory.path(), &n.to_string(), image));
    let socket = directory.path().join("socket");
    let (kind, max_connections) = (QueueKind::Threads, 100);
    let options = Options { queues, kind, max_connections, idle, ..Options::default() };
    let listeners = vec![Listener::unix(&socket).unwrap()];
    let server = Server::start(exports.collect(), listeners, options).unwrap();
    let (stopper, exports) = (server.shutdown_handle(), server.exports());
    let running = thread::spawn(move || server.run(BOUND));
    run(&socket, &images, &exports);
    stopper.stop();
    assert_eq!(running.join().unwrap().unwrap().unfinished, 0);
    wait_for_event_loops("all end", BTreeSet::is_empty);
}

/// In sequence, because the threads of the process are counted.
#[test]
fn threads_without_connections_flush_retire_and_start_again() {
    an_export_that_no_connection_uses_has_no_threads_after_a_while();
    only_a_few_idle_threads_wait_for_their_timeout();
    a_thread_is_started_for_a_second_connection_and_ends_while_the_first_one_goes_on();
    an_export_is_added_and_removed_while_clients_use_it();
    an_export_with_clients_is_removed_only_by_force();
}

fn an_export_that_no_connection_uses_has_no_threads_after_a_while() {
    serving(2, 1, Duration::from_millis(50), |socket, images, _| {
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
    serving(60, 2, Duration::from_secs(1000), |socket, images, _| {
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
    serving(2, 2, Duration::from_millis(50), |socket, images, _| {
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

/// A removed export refuses new clients, serves the ones it has, and is flushed when they have left.
fn an_export_is_added_and_removed_while_clients_use_it() {
    let (directory, image) = (tempfile::tempdir().unwrap(), WorkerOnlyImage::default());
    let new = || export(directory.path(), "new", &image);
    let mut left_at_the_end = None;
    // The idle timeout is too long to matter.
    serving(1, 2, Duration::from_secs(1000), |socket, _, exports| {
        let names = || exports.list().into_iter().map(|(_, name)| name).collect::<Vec<_>>();
        let failure = |id, timeout| exports.remove(id, timeout).unwrap_err().errno();
        let id = exports.add(new()).unwrap();
        assert_eq!(exports.add(new()).unwrap_err().errno(), libc::EEXIST);
        assert_eq!(names(), ["0", "new"]);
        assert_eq!(failure(exports.list()[0].0, BOUND), libc::EBUSY, "the default export");
        let (mut stays, mut leaves) = (client(socket, "new"), client(socket, "new"));
        read(&mut stays);
        read(&mut leaves);
        drop(leaves);

        assert_eq!(failure(id, Duration::ZERO), libc::ETIMEDOUT);
        read(&mut stays);
        assert_eq!((names(), image.flushes()), (vec!["0".to_owned()], 0));
        let refused = Client::connect_to(socket, "new", Mode::Simple);
        assert!(refused.is_err(), "it was chosen after its removal");
        // The name is free, the id is not.
        let again = exports.add(new()).unwrap();
        assert_ne!(again, id);
        let mut other = client(socket, "new");
        read(&mut other);

        let waiting = exports.clone();
        let removed = thread::spawn(move || waiting.remove(id, BOUND));
        drop(stays);
        // Without a caller that waits, the export ends by itself.
        let removed = removed.join().unwrap().map_err(|error| error.errno());
        assert!(matches!(removed, Ok(()) | Err(libc::ENOENT)), "{removed:?}");
        assert_eq!(image.flushes(), 1);
        assert_eq!(failure(id, BOUND), libc::ENOENT);
        // A server that stops ends the threads of removed exports, too.
        assert_eq!(failure(again, Duration::ZERO), libc::ETIMEDOUT);
        read(&mut other);
        left_at_the_end = Some(other);
    });
    assert_eq!(left_at_the_end.unwrap().stream().read(&mut [0]).unwrap(), 0);
}

/// A refused removal leaves the export to its clients and to new ones; by force they are disconnected.
fn an_export_with_clients_is_removed_only_by_force() {
    let (directory, image) = (tempfile::tempdir().unwrap(), WorkerOnlyImage::default());
    serving(1, 2, Duration::from_secs(1000), |socket, _, exports| {
        let unused = exports.add(export(directory.path(), "unused", &image)).unwrap();
        exports.remove_unused(unused, BOUND).unwrap();
        let default = exports.list()[0].0;
        let errno = |removed: Result<(), nowait::Error>| removed.map_err(|error| error.errno());
        assert_eq!(errno(exports.remove_unused(default, BOUND)), Err(libc::EBUSY));
        assert_eq!(errno(exports.remove_unused(unused, BOUND)), Err(libc::ENOENT));

        let id = exports.add(export(directory.path(), "new", &image)).unwrap();
        let mut clients = vec![client(socket, "new")];
        assert_eq!(errno(exports.remove_unused(id, BOUND)), Err(libc::EUSERS));
        clients.push(client(socket, "new"));
        clients.iter_mut().for_each(read);
        let mut other = client(socket, "");
        exports.remove_by_force(id, BOUND).unwrap();
        for client in &mut clients {
            assert_eq!(client.stream().read(&mut [0]).unwrap(), 0, "it is connected still");
        }
        assert_eq!(exports.list().len(), 1);
        read(&mut other);
    });
}
