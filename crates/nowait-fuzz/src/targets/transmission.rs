//! The bytes of a client after the handshake, sent to a real server over a socket: the first byte
//! selects the mode.
//!
//! Checked: each request gets one reply; the replies are complete messages in the format of the
//! mode, with exactly the requested bytes; and the replies do not depend on how the requests are
//! split. The data is not compared: concurrent requests may be executed in any order.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nowait::{BlockDevice, Config, OpenOptions};
use nowait_nbd::client::{HandshakeError, Wanted, choose, greet};
use nowait_nbd::{self as nbd, ReplyMode};
use nowait_server::{AnyExport, Export, Listener, Options, QueueKind, Server};

use super::image::scratch;
use crate::split::cut;
use crate::target::{Check, Target};
use crate::wire::{Answers, Request, renumbered};

/// Small, so that the replies to an input full of reads are short.
const IMAGE_BYTES: u64 = 96 << 10;
/// The time limit for the requests in flight when a target ends.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// The most bytes that are read together.
const READ_BYTES: usize = 64 << 10;

pub(crate) const TARGET: Target = Target {
    name: "transmission",
    about: "NBD requests to a whole server, in each of the three modes",
    prepare,
    seeds,
    words: &[
        &[0x25, 0x60, 0x95, 0x13],
        &[0x21, 0xe4, 0x1c, 0x71],
        &[0, 0, 0, 1],
        &[0, 1, 0, 6],
        &[0, 0, 0, 7],
        &[0, 32, 0, 1],
        &[0, 32, 0, 7],
        &[0, 8, 0, 7],
        &[0, 0, 0, 0, 0, 1, 0x80, 0],
        &[0, 0, 2, 0],
    ],
    longest: 3000,
    // The payload memory of a thread, which is allocated at its first use.
    memory: 320 << 20,
};

/// A running server; it stops when this is dropped.
struct RunningServer {
    socket: PathBuf,
    stopper: nowait_server::ShutdownHandle,
    running: Option<std::thread::JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(running) = self.running.take() {
            // A panic of the thread was recorded.
            let _ = running.join();
        }
    }
}

fn prepare() -> Result<Check, String> {
    let directory = scratch()?;
    let (image, socket) = (directory.path().join("image"), directory.path().join("nbd"));
    let failed = |error: &dyn std::fmt::Display| format!("no server: {error}");
    let file = File::create_new(&image).map_err(|e| failed(&e))?;
    let written = file.set_len(IMAGE_BYTES).and_then(|()| file.write_all_at(&[7; 20_000], 9000));
    written.map_err(|e| failed(&e))?;
    let disk =
        BlockDevice::open(&image, OpenOptions::new().cache_holes(true)).map_err(|e| failed(&e))?;
    disk.scan();
    let config = Config::default();
    let device = Export::new(Arc::new(disk), "disk".into(), String::new());
    let listener = Listener::unix(&socket).map_err(|e| failed(&e))?;
    let options =
        Options { kind: QueueKind::Threads, config, max_connections: 8, ..Options::default() };
    let server = Server::start(vec![AnyExport::new(device)], vec![listener], options);
    let server = server.map_err(|e| failed(&e))?;
    let stopper = server.shutdown_handle();
    let running = std::thread::spawn(move || {
        let _ = server.run(SHUTDOWN_TIMEOUT);
    });
    let server_under_test =
        RunningServer { socket, stopper, running: Some(running), _directory: directory };
    Ok(Box::new(move |input| check(&server_under_test, input)))
}

fn check(server_under_test: &RunningServer, input: &[u8]) -> Result<(), String> {
    let Some((&first, bytes)) = input.split_first() else { return Ok(()) };
    let mode =
        [ReplyMode::Simple, ReplyMode::Structured, ReplyMode::Extended][usize::from(first % 3)];
    let contexts = first & 0x80 == 0;
    let (bytes, requests, end) = renumbered(mode, bytes);
    let whole = server_under_test.answers(mode, contexts, [&bytes[..]], &requests)?;
    let pieces = server_under_test.answers(mode, contexts, cut(&bytes, 24), &requests)?;
    let complete = end.is_orderly();
    for (cookie, request) in (0..).zip(&requests) {
        let (one, other) = (whole.get(&cookie), pieces.get(&cookie));
        let alike = match (one, other) {
            // Requests in flight are lost with the connection.
            (None, _) | (_, None) if !complete => true,
            // Whether the operation is fast depends on the content of the disk.
            _ if request.flags & nbd::CMD_FLAG_FAST_ZERO != 0 => one.is_some() == other.is_some(),
            _ => one == other,
        };
        if !alike {
            return Err(format!("{request:?} is answered {one:?} whole, {other:?} in pieces"));
        }
        if complete && request.is_whole && one.is_none() {
            return Err(format!("{request:?} has no answer"));
        }
    }
    Ok(())
}

impl RunningServer {
    /// The replies to requests that are sent in `pieces`.
    fn answers<'a>(
        &self,
        mode: ReplyMode,
        contexts: bool,
        pieces: impl IntoIterator<Item = &'a [u8]>,
        requests: &[Request],
    ) -> Result<BTreeMap<u64, Result<u64, u32>>, String> {
        let lost = |error: std::io::Error| format!("the connection: {error}");
        let mut stream = UnixStream::connect(&self.socket).map_err(lost)?;
        negotiate(&mut stream, mode, contexts)?;
        stream.set_nonblocking(true).map_err(lost)?;
        let mut received = Vec::new();
        let mut is_open = true;
        for piece in pieces {
            is_open = is_open
                && send(&mut stream, piece).map_err(lost)?
                && receive(&mut stream, &mut received, Until::Taken).map_err(lost)?;
        }
        // The server may have disconnected; the replies before that can still be read.
        let _ = stream.shutdown(Shutdown::Write);
        receive(&mut stream, &mut received, Until::End).map_err(lost)?;
        Answers::read(mode, requests, &received, is_open)
    }
}

/// When to stop reading.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    /// When the server has read all data that was sent.
    Taken,
    /// When the server closes the connection.
    End,
}

/// Sends all of `bytes`, which fit into the socket buffer. False if the server has disconnected.
fn send(stream: &mut UnixStream, bytes: &[u8]) -> std::io::Result<bool> {
    match stream.write_all(bytes) {
        Ok(()) => Ok(true),
        Err(error) if is_end(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Appends the received bytes to `received`. Returns whether the connection is still open.
fn receive(stream: &mut UnixStream, received: &mut Vec<u8>, until: Until) -> std::io::Result<bool> {
    let mut memory = vec![0; READ_BYTES];
    loop {
        match stream.read(&mut memory) {
            Ok(0) => return Ok(false),
            Ok(count) => received.extend_from_slice(memory.get(..count).unwrap_or_default()),
            Err(error) if is_end(&error) => return Ok(false),
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(error),
            Err(_) if until == Until::Taken && crate::socket::is_taken(stream) => return Ok(true),
            Err(_) => std::thread::yield_now(),
        }
    }
}

fn is_end(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    matches!(error.kind(), BrokenPipe | ConnectionReset)
}

/// Opens the export in `mode`; with `contexts`, block status requests are negotiated.
fn negotiate(stream: &mut UnixStream, mode: ReplyMode, contexts: bool) -> Result<(), String> {
    let failed = |error: HandshakeError| format!("no negotiation: {error}");
    greet(stream).map_err(failed)?;
    let wanted = Wanted { mode, context: contexts.then_some("base:allocation") };
    let export = choose(stream, "disk", wanted).map_err(failed)?;
    if export.mode == mode { Ok(()) } else { Err(format!("{:?} for {mode:?}", export.mode)) }
}

/// A request of every kind in every mode.
fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (first, mode) in (0..).zip([ReplyMode::Simple, ReplyMode::Structured, ReplyMode::Extended])
    {
        let request = |command, flags, offset, len, payload: &[u8]| {
            Request::new(command, flags, offset, len).bytes(mode, payload)
        };
        let payload_flag = if mode == ReplyMode::Extended { nbd::CMD_FLAG_PAYLOAD_LEN } else { 0 };
        let write = |offset, flags, data: &[u8]| {
            request(nbd::CMD_WRITE, flags | payload_flag, offset, data.len() as u64, data)
        };
        let narrowed = [&4096u64.to_be_bytes()[..], &1u32.to_be_bytes()].concat();
        let all = [
            vec![first],
            request(nbd::CMD_READ, 0, 0, 4096, &[]),
            request(nbd::CMD_READ, nbd::CMD_FLAG_DF, 8000, 30_001, &[]),
            write(4096, 0, &[1; 512]),
            write(100, nbd::CMD_FLAG_FUA, &[2; 77]),
            request(nbd::CMD_FLUSH, 0, 0, 0, &[]),
            request(nbd::CMD_TRIM, 0, 16384, 8192, &[]),
            request(nbd::CMD_WRITE_ZEROES, nbd::CMD_FLAG_NO_HOLE, 512, 9000, &[]),
            request(nbd::CMD_BLOCK_STATUS, 0, 0, IMAGE_BYTES, &[]),
            request(nbd::CMD_BLOCK_STATUS, nbd::CMD_FLAG_REQ_ONE, 0, 20_000, &[]),
            request(nbd::CMD_BLOCK_STATUS, payload_flag, 0, 12, &narrowed),
            request(nbd::CMD_CACHE, 0, 0, 4096, &[]),
            request(nbd::CMD_READ, 0, IMAGE_BYTES, 1, &[]),
            write(IMAGE_BYTES - 1, 0, &[3; 2]),
            request(0x77, 0, 1, 1, &[]),
        ];
        seeds.push(all.concat());
        let mut end = vec![first | 0x80];
        end.extend(request(nbd::CMD_BLOCK_STATUS, 0, 0, 4096, &[]));
        end.extend(request(nbd::CMD_DISC, 0, 0, 0, &[]));
        end.extend(request(nbd::CMD_READ, 0, 0, 4096, &[]));
        seeds.push(end);
    }
    seeds
}
