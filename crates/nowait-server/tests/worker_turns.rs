//! Exports whose requests all wait for workers have turns there by their weights, on every thread.

use std::path::Path;
use std::thread;

use nowait_server::{AnyExport, Export, Exports, Listener, Options, QueueKind, Server};
use nowait_testkit::nbd::{Client, Command, Mode};
use nowait_testkit::worker_only_image::WorkerOnlyImage;
use nowait_testkit::{BOUND, wait_until};

const SIZE: u64 = 1 << 20;
const BLOCK: u32 = 4096;
/// Reads of each client, and clients of each export: one on each thread, most probably.
const READS: usize = 40;
const CLIENTS: usize = 2;

/// The clients of an export, each with [`READS`] reads at `offset` that are not answered yet.
fn reading(socket: &Path, name: &str, offset: u64) -> Vec<Client> {
    let client = |_| {
        let mut client = Client::connect_to(socket, name, Mode::Simple).unwrap();
        for _ in 0..READS {
            client.send(&Command::Read { offset, len: BLOCK }).unwrap();
        }
        client
    };
    (0..CLIENTS).map(client).collect()
}

fn in_flight(exports: &Exports) -> usize {
    exports.status().iter().map(|status| status.in_flight).sum()
}

/// How many of the 20 reads that workers take next are of the second export, while both
/// exports have many.
fn turns_of_the_second(image: &WorkerOnlyImage, exports: &Exports, socket: &Path) -> usize {
    let (before, held) = (image.reads().len(), image.hold());
    let first = reading(socket, "first", 0);
    let second = reading(socket, "second", u64::from(BLOCK));
    let all = 2 * CLIENTS * READS;
    wait_until("all wait for the worker", || in_flight(exports) == all);
    // These were taken before all were there.
    let begun = image.reads().len();
    drop(held);
    for mut client in first.into_iter().chain(second) {
        (0..READS).for_each(|_| drop(client.receive().unwrap().1.unwrap()));
    }
    let reads = image.reads();
    assert_eq!(reads.len(), before + all);
    reads[begun..begun + 20].iter().filter(|pos| **pos == u64::from(BLOCK)).count()
}

#[test]
fn exports_have_equal_turns_on_the_workers_and_others_by_weights_that_are_changed() {
    let directory = tempfile::tempdir().unwrap();
    // Both exports have the image, which records the reads of both in one list.
    let image = WorkerOnlyImage::default();
    let export = |name: &str| {
        let disk = image.device(&directory.path().join(name), SIZE);
        AnyExport::new(Export::new(disk, name.to_owned(), String::new()))
    };
    let socket = directory.path().join("socket");
    let kind = QueueKind::Threads;
    let options = Options { threads: 2, kind, workers: 1, ..Options::default() };
    let listeners = vec![Listener::unix(&socket).unwrap()];
    let server = Server::start(vec![export("first"), export("second")], listeners, options);
    let server = server.unwrap();
    let (stopper, exports) = (server.shutdown_handle(), server.exports());
    let running = thread::spawn(move || server.run(BOUND));
    let second = exports.find("second").unwrap();
    for (weight, turns) in [(None, 10), (Some(400), 16), (Some(100), 10), (Some(25), 4)] {
        weight.into_iter().for_each(|weight| exports.set_weight(second, weight).unwrap());
        let found = turns_of_the_second(&image, &exports, &socket);
        assert!(found.abs_diff(turns) <= 2, "{weight:?}: {found} of 20");
    }
    stopper.stop();
    assert_eq!(running.join().unwrap().unwrap().unfinished, 0);
}
