//! What a server keeps resident: little at rest, a bounded amount whatever its clients do.
//!
//! Invariant: the bounds are the process's own account (proc_pid_status(5)), not an estimate.
//! Knows: the wire. Known by: nobody.

use crate::common::nbd::{Client, Command};
use crate::common::{Finished, GIB, MIB, Scratch, Server, require_tool, tool};

const AT_REST_BYTES: u64 = 16 * MIB;
const UNDER_LOAD_BYTES: u64 = 128 * MIB;
/// The longest write that NBD clients send unasked (NBD proto.md, "Block size constraints").
const LONGEST_BYTES: u64 = 32 * MIB;
/// What one longest write may need: itself, and as much again.
const FOR_ONE_WRITE_BYTES: u64 = 64 * MIB;

const CONNECTIONS: usize = 64;
const DEPTH: u64 = 64;
const ROUNDS: u64 = 8;
const BLOCK_BYTES: u32 = 4096;

/// An image that is one hole, its server, and a first connection.
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
fn a_server_at_rest_keeps_less_than_16_mib_resident() {
    let setting = Setting::new();
    let resident = setting.server.memory("VmRSS");
    assert!(resident < AT_REST_BYTES, "{resident} bytes");
    setting.server.stop();
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
    let highest = setting.server.memory("VmHWM");
    assert!(highest < UNDER_LOAD_BYTES, "{highest} bytes");
    assert_eq!(setting.client.read(0, BLOCK_BYTES).expect("what was written"), data);
    setting.server.stop();
}

#[test]
fn a_write_of_32_mib_needs_at_most_64_mib() {
    let mut setting = Setting::new();
    let before = setting.server.memory("VmHWM");
    let data = vec![0x5a; LONGEST_BYTES as usize];
    setting.client.write(0, &data).expect("a write of the longest length");
    let more = setting.server.memory("VmHWM") - before;
    assert!((1..=FOR_ONE_WRITE_BYTES).contains(&more), "{more} bytes more");
    setting.server.stop();
}

/// Bytes of the disk that are mapped, in an image of 16 times that.
const MAPPED_BYTES: u64 = 1024 * GIB;
/// What an open image may need, with what a server at rest does.
const OPEN_BYTES: u64 = 32 * MIB;
/// What is remembered of where bytes are, at most, and what else a server needs.
const REMEMBERED_BYTES: u64 = 32 * MIB + 48 * MIB;
/// Bytes of the disk that one block of metadata tells of.
const TOLD_AT_ONCE: u64 = 32 * MIB;

#[test]
fn an_image_of_16_tib_needs_less_than_32_mib_when_opened_and_a_bounded_amount_when_read() {
    if !require_tool("qemu-img") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.join("disk.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"];
    tool("qemu-img").args(create).arg(&image).arg(MAPPED_BYTES.to_string()).succeeds();
    tool("qemu-img").args(["resize", "-q"]).arg(&image).arg("16T").succeeds();
    let server = Server::start(&image, &["--queues", "1"]);
    let mut client = server.connect();
    assert_eq!(client.size, 16 * MAPPED_BYTES);
    client.write(0, &[1; 4096]).expect("a write");
    let resident = server.memory("VmHWM");
    assert!(resident < OPEN_BYTES, "{resident} bytes");
    // More than can be remembered, so that some of it is forgotten.
    for at in 0..MAPPED_BYTES / TOLD_AT_ONCE {
        client.read(at * TOLD_AT_ONCE, 4096).expect("a read");
    }
    let resident = server.memory("VmHWM");
    assert!(resident < REMEMBERED_BYTES, "{resident} bytes");
    assert_eq!(client.read(0, 4096).as_deref(), Ok(&[1; 4096][..]));
    drop(client);
    server.stop();
}
