//! Threads of exports without connections: they retire, and start again.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use nowait::{
    BlockDevice, BlockMap, ByteRange, Error, Extent, ExtentStatus, FileStorage, Flags, ImageFormat,
    Intent, OpenOptions, ReadCursor, WouldBlock, WriteCursor,
};
use nowait_server::{AnyExport, Export, Listener, Options, QueueKind, Server, Tls};

const SIZE: u64 = 1 << 20;
/// How long a test waits for a prompt event.
const BOUND: Duration = Duration::from_secs(60);

/// An image that stores nothing, and counts its flushes.
struct Counting(Arc<AtomicUsize>);

impl BlockMap for Counting {
    fn map_extent(&self, _: ByteRange, _: Intent) -> Result<Extent, WouldBlock> {
        Err(WouldBlock)
    }

    fn is_mapped(&self, _: ByteRange) -> bool {
        false
    }

    fn image(&self) -> Option<&dyn ImageFormat> {
        Some(self)
    }
}

impl ImageFormat for Counting {
    fn read(&self, _: u64, mut memory: ReadCursor<'_>) -> Result<(), Error> {
        memory.fill(7);
        Ok(())
    }

    fn write(&self, _: u64, _: WriteCursor<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn discard(&self, _: ByteRange) -> Result<(), Error> {
        Ok(())
    }

    fn zero(&self, _: ByteRange, _: Flags) -> Result<(), Error> {
        Ok(())
    }

    fn flush(&self) -> Result<(), Error> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn status(
        &self,
        range: ByteRange,
        _: usize,
        spans: &mut Vec<ExtentStatus>,
    ) -> Result<(), Error> {
        spans.push(ExtentStatus { len: range.len, hole: false, depth: 1 });
        Ok(())
    }
}

/// A client that has chosen the export `name` by `OPT_EXPORT_NAME`.
fn client(socket: &Path, name: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let option = [&b"IHAVEOPT"[..], &[0, 0, 0, 1], &(name.len() as u32).to_be_bytes()].concat();
    stream.write_all(&[&[0, 0, 0, 3][..], &option, name.as_bytes()].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

/// Reads a block, and finds it full of sevens.
fn read(stream: &mut UnixStream) {
    let header = [&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0][..], &[9; 8], &[0; 8], &[0, 0, 16, 0]];
    stream.write_all(&header.concat()).unwrap();
    let mut reply = [0; 16 + 4096];
    stream.read_exact(&mut reply).unwrap();
    assert!(reply[16..] == [7; 4096]);
}

/// The event loops of this process, as export and queue.
fn event_loops() -> BTreeSet<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).ok();
    let names = tasks.filter_map(|task| name(task.ok()?));
    names.filter_map(|name| Some(name.trim().strip_prefix("nowait-nbd-")?.to_owned())).collect()
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < BOUND, "{what}: {:?}", event_loops());
        thread::sleep(Duration::from_millis(5));
    }
}

/// Runs `run` with a server of `exports` exports, named by their indices; its threads are those of
/// this process. The counters are the flushes of each export.
fn serving(
    exports: usize,
    queues: u16,
    idle: Duration,
    run: impl FnOnce(&Path, &[Arc<AtomicUsize>]),
) {
    let directory = tempfile::tempdir().unwrap();
    let flushes: Vec<Arc<AtomicUsize>> = (0..exports).map(|_| Arc::default()).collect();
    let export = |(n, flushes): (usize, &Arc<AtomicUsize>)| {
        let path = directory.path().join(n.to_string());
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let storage = FileStorage::open(&path, OpenOptions::default()).unwrap();
        let map = Counting(flushes.clone());
        let disk = Arc::new(BlockDevice::mapped(Arc::new(storage), Vec::new(), SIZE, false, map));
        AnyExport::new(Export::new(disk, 1, n.to_string(), String::new()))
    };
    let exports = flushes.iter().enumerate().map(export).collect();
    let socket = directory.path().join("socket");
    let (kind, config, max_connections) = (QueueKind::Threads, Default::default(), 100);
    let split_bytes = Options::SPLIT_BYTES;
    let options =
        Options { queues, kind, config, tls: Tls::Off, max_connections, idle, split_bytes };
    let server = Server::start(exports, vec![Listener::unix(&socket).unwrap()], options).unwrap();
    let stopper = server.shutdown_handle();
    let running = thread::spawn(move || server.run(BOUND));
    run(&socket, &flushes);
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
    serving(2, 1, Duration::from_millis(50), |socket, flushes| {
        for round in 1..=3 {
            let mut stream = client(socket, "1");
            read(&mut stream);
            // A connection without requests uses the export as well.
            thread::sleep(Duration::from_millis(120));
            assert!(event_loops().contains("1.0"));
            read(&mut stream);
            assert_eq!(flushes[1].load(Ordering::SeqCst), round - 1);
            drop(stream);
            wait_until("it ends", || event_loops() == BTreeSet::from(["0.0".into()]));
            wait_until("it was flushed", || flushes[1].load(Ordering::SeqCst) == round);
        }
        assert_eq!(flushes[0].load(Ordering::SeqCst), 0);
    });
}

fn only_a_few_idle_threads_wait_for_their_timeout() {
    /// The most idle threads, the acceptor thread, and the thread of the visited export.
    const MAX_THREADS: usize = 18;
    serving(60, 2, Duration::from_secs(1000), |socket, flushes| {
        for n in 1..60 {
            read(&mut client(socket, &n.to_string()));
        }
        wait_until("they end", || event_loops().len() <= MAX_THREADS);
        let flushed = flushes.iter().filter(|flushes| flushes.load(Ordering::SeqCst) > 0);
        assert!(flushed.count() >= 60 - MAX_THREADS);
        // The first ones are served again.
        read(&mut client(socket, "1"));
    });
}

fn a_thread_is_started_for_a_second_connection_and_ends_while_the_first_one_goes_on() {
    serving(2, 2, Duration::from_millis(50), |socket, flushes| {
        let mut first = client(socket, "1");
        read(&mut first);
        assert!(!event_loops().contains("1.1"));
        let mut second = client(socket, "1");
        read(&mut second);
        assert!(event_loops().contains("1.1"));
        drop(second);
        wait_until("one ends", || {
            event_loops().iter().filter(|n| n.starts_with("1.")).count() == 1
        });
        read(&mut first);
        assert_eq!(flushes[1].load(Ordering::SeqCst), 0, "the export is in use");
    });
}
