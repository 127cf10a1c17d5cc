//! In steady state an NBD request allocates nothing, in the server or in its client.
//!
//! Invariant: one test function in this program; the client allocates all of its memory before the
//! count begins, so that all counted allocations are the server's.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use nowait::{BlockDevice, Config, OpenOptions, Uring};
use nowait_server::{AnyExport, BitmapSpec, Export, Listener, Options, QueueKind, Server};
use nowait_testkit::allocations::{Counting, allocations};
use nowait_testkit::nbd::{READ, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, WRITE, go, greet};
use nowait_testkit::{BOUND, required};

const BLOCK: u32 = 4096;
const SIZE: u64 = 4 << 20;
const DEPTH: u64 = 16;
/// Requests before the count begins: every list and pool has reached its size by then.
const WARM_UP: u64 = 4_000;
const REQUESTS: u64 = 10_000;
/// Bytes of a request's header, and of the header of a simple reply.
const REQUEST_BYTES: usize = 28;
const REPLY_BYTES: usize = 16;

#[global_allocator]
static COUNTING: Counting = Counting;

/// A client with one buffer for each direction.
struct Client {
    stream: UnixStream,
    request: Vec<u8>,
    data: Vec<u8>,
}

impl Client {
    /// Opens the default export at `socket`; replies are simple ones.
    fn connect(socket: &Path) -> Self {
        let mut stream = greet(socket).unwrap();
        assert_eq!(go(&mut stream).unwrap(), SIZE);
        let request = vec![0x5a; REQUEST_BYTES + BLOCK as usize];
        Self { stream, request, data: vec![0; BLOCK as usize] }
    }

    /// Sends request `n`: alternating reads and writes, all over the export.
    fn send(&mut self, n: u64) {
        let kind = if n.is_multiple_of(2) { READ } else { WRITE };
        let offset = n * 7 * u64::from(BLOCK) % SIZE;
        let header = &mut self.request[..REQUEST_BYTES];
        header[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header[4..6].copy_from_slice(&[0, 0]);
        header[6..8].copy_from_slice(&kind.to_be_bytes());
        header[8..16].copy_from_slice(&n.to_be_bytes());
        header[16..24].copy_from_slice(&offset.to_be_bytes());
        header[24..28].copy_from_slice(&BLOCK.to_be_bytes());
        let bytes = if kind == READ { REQUEST_BYTES } else { self.request.len() };
        self.stream.write_all(&self.request[..bytes]).unwrap();
    }

    /// Receives one reply, to any request.
    fn receive(&mut self) {
        let mut head = [0; REPLY_BYTES];
        self.stream.read_exact(&mut head).unwrap();
        assert_eq!(head[..4], SIMPLE_REPLY_MAGIC.to_be_bytes());
        assert_eq!(head[4..8], [0; 4], "the request failed");
        if head[15] % 2 == 0 {
            self.stream.read_exact(&mut self.data).unwrap();
            assert!(self.data.iter().all(|&byte| byte == 0x5a));
        }
    }

    /// Runs `count` requests, `DEPTH` of them in flight.
    fn run(&mut self, count: u64) {
        (0..DEPTH).for_each(|n| self.send(n));
        for n in DEPTH..count {
            self.receive();
            self.send(n);
        }
        (0..DEPTH).for_each(|_| self.receive());
    }
}

/// Allocations of the whole process during `REQUESTS` requests.
fn count(kind: QueueKind, config: Config, bitmap: Option<&str>) -> u64 {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = dir.path().join("disk.img");
    std::fs::write(&image, vec![0x5a; SIZE as usize]).unwrap();
    let disk = Arc::new(BlockDevice::open(&image, OpenOptions::new().cache_holes(true)).unwrap());
    disk.scan();
    // The path of a Unix socket has a length limit that the path of this directory may exceed.
    let sockets = tempfile::tempdir().unwrap();
    let socket = sockets.path().join("nbd");
    let listener = Listener::unix(&socket).unwrap();
    let export = Export::new(disk, String::new(), String::new());
    let options = Options { kind, config, max_connections: 2, ..Options::default() };
    let mut export = AnyExport::new(export);
    if let Some(name) = bitmap {
        export = export.with_bitmap(&BitmapSpec::new(name.into())).unwrap();
    }
    let server = Server::start(vec![export], vec![listener], options).unwrap();
    let stopper = server.shutdown_handle();
    let mut client = Client::connect(&socket);
    client.run(WARM_UP);
    let before = allocations();
    client.run(REQUESTS);
    let counted = allocations() - before;
    drop(client);
    stopper.stop();
    assert_eq!(server.run(BOUND).unwrap().unfinished, 0);
    counted
}

#[test]
fn an_nbd_request_of_4_kib_allocates_nothing() {
    if required("io_uring", Uring::new()).is_none() {
        return;
    }
    let config = Config::default();
    assert_eq!(count(QueueKind::Uring, config, None), 0, "simple");
    assert_eq!(count(QueueKind::Uring, config, Some("a")), 0, "with a dirty bitmap");
    assert_eq!(count(QueueKind::Uring, Config { simple: false, ..config }, None), 0, "general");
    // Proves that the counter counts: without the pool every request allocates.
    assert!(count(QueueKind::Uring, Config { pool: false, ..config }, None) >= REQUESTS);
}
