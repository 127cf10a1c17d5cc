//! Exports without connections: they are flushed and detached after a while, and served again. Exports
//! that are added and removed. The threads of a server are the same from its start to its end.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use nowait_server::{
    AnyExport, Export, ExportError, Exports, Listener, Options, QueueKind, Server,
};
use nowait_testkit::nbd::{Client, Mode};
use nowait_testkit::worker_only_image::{SEVEN, WorkerOnlyImage};
use nowait_testkit::{BOUND, wait_until};

const SIZE: u64 = 1 << 20;
fn client(socket: &Path, name: &str) -> Client {
    Client::connect_to(socket, name, Mode::Simple).unwrap()
}

/// Reads a block, and finds it full of sevens.
fn read(client: &mut Client) {
    assert!(client.read(0, 4096).unwrap() == [SEVEN; 4096]);
}

/// The numbers of the serving threads of this process.
fn serving_threads() -> BTreeSet<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    let names = tasks.filter_map(|task| name(task.ok()?));
    let number = |name: String| {
        let number = name.trim().strip_prefix("nowait-")?.to_owned();
        number.parse::<u16>().ok().map(|_| number)
    };
    names.filter_map(number).collect()
}

fn numbers(threads: u16) -> BTreeSet<String> {
    (0..threads).map(|number| number.to_string()).collect()
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
    threads: u16,
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
    let options = Options { threads, kind, max_connections, idle, ..Options::default() };
    let listeners = vec![Listener::unix(&socket).unwrap()];
    let server = Server::start(exports.collect(), listeners, options).unwrap();
    let (stopper, exports) = (server.shutdown_handle(), server.exports());
    let running = thread::spawn(move || server.run(BOUND));
    assert_eq!(serving_threads(), numbers(threads));
    run(&socket, &images, &exports);
    assert_eq!(serving_threads(), numbers(threads));
    stopper.stop();
    assert_eq!(running.join().unwrap().unwrap().unfinished, 0);
    wait_until("its threads exit", || serving_threads().is_empty());
}

/// In sequence, because the threads of the process are counted.
#[test]
fn exports_without_connections_are_flushed_and_served_again() {
    an_export_that_no_connection_uses_is_flushed_after_a_while();
    an_export_that_one_connection_uses_is_not_flushed();
    many_exports_are_served_by_the_same_threads();
    ten_thousand_exports_need_no_thread_no_descriptor_and_little_memory_each();
    an_export_is_added_and_removed_while_clients_use_it();
    an_export_with_clients_is_removed_only_by_force();
}

fn an_export_that_no_connection_uses_is_flushed_after_a_while() {
    serving(2, 1, Duration::from_millis(50), |socket, images, _| {
        for round in 1..=3 {
            let mut stream = client(socket, "1");
            read(&mut stream);
            // A connection without requests uses the export as well.
            thread::sleep(Duration::from_millis(120));
            read(&mut stream);
            assert_eq!(images[1].flushes(), round - 1);
            drop(stream);
            wait_until("it was flushed", || images[1].flushes() == round);
        }
        assert_eq!(images[0].flushes(), 0);
    });
}

fn an_export_that_one_connection_uses_is_not_flushed() {
    serving(2, 1, Duration::from_millis(50), |socket, images, _| {
        let mut first = client(socket, "1");
        read(&mut first);
        read(&mut client(socket, "1"));
        thread::sleep(Duration::from_millis(120));
        read(&mut first);
        assert_eq!(images[1].flushes(), 0, "the export is in use");
    });
}

fn many_exports_are_served_by_the_same_threads() {
    serving(60, 2, Duration::from_millis(50), |socket, images, _| {
        let mut clients: Vec<_> = (0..60).map(|n| client(socket, &n.to_string())).collect();
        clients.iter_mut().for_each(read);
        drop(clients);
        wait_until("all are flushed", || images.iter().all(|image| image.flushes() > 0));
        read(&mut client(socket, "1"));
    });
}

/// Resident memory of this process in bytes.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Descriptors of this process.
fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// They stand on one image, so that the server's part is all that they need.
fn ten_thousand_exports_need_no_thread_no_descriptor_and_little_memory_each() {
    const EXPORTS: u64 = 10_000;
    let (directory, image) = (tempfile::tempdir().unwrap(), WorkerOnlyImage::default());
    let disk = image.device(&directory.path().join("image"), SIZE);
    let export = |n: u64| AnyExport::new(Export::new(disk.clone(), n.to_string(), String::new()));
    let socket = directory.path().join("socket");
    let listeners = vec![Listener::unix(&socket).unwrap()];
    let options = Options { threads: 2, kind: QueueKind::Threads, ..Options::default() };
    let before = (resident(), descriptors());
    let server = Server::start((0..EXPORTS).map(export).collect(), listeners, options).unwrap();
    let (stopper, exports) = (server.shutdown_handle(), server.exports());
    let running = thread::spawn(move || server.run(BOUND));
    // The socket, and what two threads need.
    assert!(descriptors() <= before.1 + 20, "{} descriptors", descriptors() - before.1);
    let each = resident().saturating_sub(before.0) / EXPORTS;
    assert!(each <= 4 << 10, "{each} bytes for an export");
    assert_eq!(serving_threads(), numbers(2));
    for n in (0..EXPORTS).step_by(100) {
        read(&mut client(&socket, &n.to_string()));
    }
    let mut ids = exports.list().into_iter().map(|(id, _)| id);
    let default = ids.next().unwrap();
    ids.for_each(|id| exports.remove(id, BOUND).unwrap());
    assert_eq!(exports.list(), [(default, "0".to_owned())]);
    stopper.stop();
    assert_eq!(running.join().unwrap().unwrap().unfinished, 0);
    wait_until("its threads exit", || serving_threads().is_empty());
}

/// A removed export refuses new clients, serves the ones it has, and is flushed when they have left.
fn an_export_is_added_and_removed_while_clients_use_it() {
    let (directory, image) = (tempfile::tempdir().unwrap(), WorkerOnlyImage::default());
    let new = || export(directory.path(), "new", &image);
    let mut left_at_the_end = None;
    // The idle timeout is too long to matter.
    serving(1, 1, Duration::from_secs(1000), |socket, _, exports| {
        let names = || exports.list().into_iter().map(|(_, name)| name).collect::<Vec<_>>();
        let failure = |id, timeout| exports.remove(id, timeout).unwrap_err();
        let id = exports.add(new()).unwrap();
        assert_eq!(exports.add(new()).unwrap_err(), ExportError::NameTaken);
        assert_eq!(names(), ["0", "new"]);
        assert_eq!(failure(exports.list()[0].0, BOUND), ExportError::IsDefault);
        let (mut stays, mut leaves) = (client(socket, "new"), client(socket, "new"));
        read(&mut stays);
        read(&mut leaves);
        drop(leaves);

        assert_eq!(failure(id, Duration::ZERO), ExportError::ClientsLeft);
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
        let removed = removed.join().unwrap();
        assert!(matches!(removed, Ok(()) | Err(ExportError::NotFound)), "{removed:?}");
        assert_eq!(image.flushes(), 1);
        assert_eq!(failure(id, BOUND), ExportError::NotFound);
        // A server that stops ends the threads of removed exports, too.
        assert_eq!(failure(again, Duration::ZERO), ExportError::ClientsLeft);
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
        assert_eq!(exports.remove_unused(default, BOUND), Err(ExportError::IsDefault));
        assert_eq!(exports.remove_unused(unused, BOUND), Err(ExportError::NotFound));

        let id = exports.add(export(directory.path(), "new", &image)).unwrap();
        let mut clients = vec![client(socket, "new")];
        let refused = Err(ExportError::HasClients { count: 1 });
        assert_eq!(exports.remove_unused(id, BOUND), refused);
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
