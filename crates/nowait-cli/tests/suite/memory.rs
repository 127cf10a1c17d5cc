//! The server's resident memory: little at rest, bounded under any load.
//!
//! Invariant: the bounds are checked with the kernel's figures (proc_pid_status(5)), not with an
//! estimate.

use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;

use crate::common::{Finished, GIB, KIB, MIB, Scratch, Server, require_tool, tool};
use nowait_testkit::nbd::{Client, Command, OPT_LIST, greet, send_option};
use nowait_testkit::wait_until;

const AT_REST_BYTES: u64 = 6 * MIB;
const UNDER_LOAD_BYTES: u64 = 128 * MIB;
/// The longest write that NBD clients send without negotiation (NBD proto.md, "Block size
/// constraints").
const LONGEST_BYTES: u64 = 32 * MIB;
/// The memory that one longest write may need: twice its size.
const FOR_ONE_WRITE_BYTES: u64 = 64 * MIB;

const CONNECTIONS: usize = 64;
const DEPTH: u64 = 64;
const ROUNDS: u64 = 8;
const BLOCK_BYTES: u32 = 4096;

/// A sparse image, its server, and a first connection.
struct Setting {
    server: Server,
    client: Client,
    _scratch: Scratch,
}

impl Setting {
    fn new() -> Self {
        let scratch = Scratch::new();
        let server = Server::start(&scratch.sparse("disk.img", GIB), &[]);
        let client = server.connect();
        Self { server, client, _scratch: scratch }
    }
}

#[test]
fn a_server_at_rest_keeps_less_than_6_mib_of_its_own() {
    let setting = Setting::new();
    let resident = setting.server.memory("RssAnon");
    assert!(resident < AT_REST_BYTES, "{resident} bytes");
    setting.server.stop();
}

/// Exports at rest, and the memory of each.
const EXPORTS: u64 = 100;
const EXPORT_AT_REST_BYTES: u64 = 32 * KIB;

#[test]
fn an_export_at_rest_keeps_less_than_32_kib() {
    let scratch = Scratch::new();
    let first = scratch.sparse("first.img", GIB);
    let image = |n| format!("e{n}={}", scratch.sparse(&format!("{n}.img"), GIB).display());
    let more: Vec<String> = (0..EXPORTS).map(image).collect();
    let resident = |more: &[String]| {
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let server = Server::start(&first, &more);
        let resident = server.memory("RssAnon");
        server.stop();
        resident
    };
    let (one, all) = (resident(&[]), resident(&more));
    let each = all.saturating_sub(one) / EXPORTS;
    println!("{each} bytes for each");
    assert!(each < EXPORT_AT_REST_BYTES, "{each} bytes");
}

#[test]
fn sixty_four_connections_at_depth_64_need_less_than_128_mib() {
    let mut setting = Setting::new();
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|_| setting.server.connect()).collect();
    let data = vec![0x5a; BLOCK_BYTES as usize];
    let region = GIB / CONNECTIONS as u64;
    for round in 0..ROUNDS {
        for (base, client) in (0..).step_by(region as usize).zip(&mut clients) {
            for n in 0..DEPTH {
                let offset = base + (round * DEPTH + n) * u64::from(BLOCK_BYTES);
                let command = match n % 2 {
                    0 => Command::Write { offset, data: data.clone(), fua: false },
                    _ => Command::Read { offset, len: BLOCK_BYTES },
                };
                client.send(&command).expect("a server that takes requests");
            }
        }
        for client in &mut clients {
            for _ in 0..DEPTH {
                client.receive().expect("an answer").1.expect("a success");
            }
        }
    }
    let highest = setting.server.peak();
    assert!(highest < UNDER_LOAD_BYTES, "{highest} bytes");
    assert_eq!(setting.client.read(0, BLOCK_BYTES).expect("what was written"), data);
    setting.server.stop();
}

#[test]
fn a_write_of_32_mib_needs_at_most_64_mib() {
    let mut setting = Setting::new();
    let before = setting.server.peak();
    let data = vec![0x5a; LONGEST_BYTES as usize];
    setting.client.write(0, &data).expect("a write of the longest length");
    let more = setting.server.peak() - before;
    assert!((1..=FOR_ONE_WRITE_BYTES).contains(&more), "{more} bytes more");
    setting.server.stop();
}

/// Mapped bytes of the disk, in an image of 16 times that size.
const MAPPED_BYTES: u64 = 1024 * GIB;
/// The limit with an open image, including a server at rest.
const OPEN_BYTES: u64 = 32 * MIB;
/// The limit of the metadata cache, plus the server's other memory.
const CACHE_LIMIT_BYTES: u64 = 32 * MIB + 48 * MIB;
/// Bytes of the disk that one block of metadata maps.
const METADATA_BLOCK_BYTES: u64 = 32 * MIB;

#[test]
fn an_image_of_16_tib_needs_less_than_32_mib_when_opened_and_a_bounded_amount_when_read() {
    nowait_testkit::needs!(require_tool("qemu-img"));
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"];
    tool("qemu-img").args(create).arg(&image).arg(MAPPED_BYTES.to_string()).succeeds();
    tool("qemu-img").args(["resize", "-q"]).arg(&image).arg("16T").succeeds();
    let server = Server::start(&image, &["--queues", "1"]);
    let mut client = server.connect();
    assert_eq!(client.size, 16 * MAPPED_BYTES);
    client.write(0, &[1; 4096]).expect("a write");
    let resident = server.peak();
    assert!(resident < OPEN_BYTES, "{resident} bytes");
    // More metadata than the cache holds, so that entries are evicted.
    for at in 0..MAPPED_BYTES / METADATA_BLOCK_BYTES {
        client.read(at * METADATA_BLOCK_BYTES, 4096).expect("a read");
    }
    let resident = server.peak();
    assert!(resident < CACHE_LIMIT_BYTES, "{resident} bytes");
    assert_eq!(client.read(0, 4096).as_deref(), Ok(&[1; 4096][..]));
    drop(client);
    server.stop();
}

/// Connections that send options and read nothing.
const FLOOD_CONNECTIONS: usize = 200;
/// The least memory that they must make the server use, or the test proves nothing.
const FLOOD_BYTES: u64 = 8 * MIB;
/// The memory that it may keep after they have disconnected.
const LEFT_BYTES: u64 = 4 * MIB;
/// An unknown option.
const OPT_UNKNOWN: u32 = 0x7777;

/// A client in the handshake that has sent as much as the server accepts, and has read no reply.
fn flood(server: &Server) -> UnixStream {
    let mut stream = greet(&server.socket()).expect("a greeting");
    stream.set_nonblocking(true).expect("a socket");
    let mut options = Vec::new();
    for _ in 0..1000 {
        send_option(&mut options, OPT_LIST, &[]).expect("memory");
    }
    // Most of the option is sent, and the rest never.
    send_option(&mut options, OPT_UNKNOWN, &[0; 60 * KIB as usize]).expect("memory");
    options.truncate(options.len() - 100);
    let mut sent = 0;
    while let Some(rest) = options.get(sent..).filter(|rest| !rest.is_empty()) {
        match stream.write(rest) {
            Ok(len) => sent += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    stream
}

#[test]
fn memory_used_by_clients_in_the_handshake_is_freed_after_they_disconnect() {
    let setting = Setting::new();
    let before = setting.server.memory("RssAnon");
    for round in 0..3 {
        let clients: Vec<UnixStream> =
            (0..FLOOD_CONNECTIONS).map(|_| flood(&setting.server)).collect();
        let resident = || setting.server.memory("RssAnon");
        wait_until("memory in use", || resident() >= before + FLOOD_BYTES);
        drop(clients);
        wait_until(format!("{round}: free memory"), || resident() <= before + LEFT_BYTES);
    }
    setting.server.stop();
}
