//! Peers that break the protocol: theirs is the connection that ends, nobody else notices.
//!
//! Invariant: in every test a second connection works before and after, and bytes that were not named stay.
//! Knows: NBD proto.md. Known by: nobody.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::common::nbd::{
    Client, Command, EINVAL, EPERM, OPT_GO, RawRequest, greet, is_refusal, read_option_reply,
    send_option,
};
use crate::common::{KIB, MIB, Scratch, Server, require_tool};

/// Where the bystander reads and writes: the last 64 KiB.
const BYSTANDER_OFFSET: u64 = 2 * MIB - 64 * KIB;
/// How long the server may take to notice that clients have died.
const PATIENCE: Duration = Duration::from_secs(10);
/// NBD proto.md, "Option types": the option that ends the handshake on purpose.
const OPT_ABORT: u32 = 2;

/// A served image and a well-behaved connection to it.
struct Scene {
    server: Server,
    bystander: Client,
    image: PathBuf,
    before: Vec<u8>,
    _scratch: Scratch,
}

impl Scene {
    fn new() -> Self {
        let scratch = Scratch::new();
        let image = scratch.random("disk.img", 2 * MIB, 2);
        let server = Server::start(&image, &[]);
        let before = fs::read(&image).expect("the image");
        let mut scene =
            Self { bystander: server.connect(), server, image, before, _scratch: scratch };
        scene.bystander_works();
        scene
    }

    fn bystander_works(&mut self) {
        let start = usize::try_from(BYSTANDER_OFFSET).expect("fits usize");
        for byte in &mut self.before[start..] {
            *byte = byte.wrapping_add(1);
        }
        self.bystander
            .write(BYSTANDER_OFFSET, &self.before[start..])
            .expect("the bystander's write");
        let read =
            self.bystander.read(BYSTANDER_OFFSET, 64 * KIB as u32).expect("the bystander's read");
        assert!(read == self.before[start..], "the bystander reads something else than it wrote");
    }

    /// The bystander still works, a newcomer too, and outside `touched` every byte is what it was.
    fn ends_well(mut self, touched: std::ops::Range<usize>) {
        self.bystander_works();
        self.server.connect().read(0, 512).expect("a newcomer's read");
        self.server.stop();
        let after = fs::read(&self.image).expect("the image");
        assert_eq!(after.len(), self.before.len());
        assert!(
            after[..touched.start] == self.before[..touched.start],
            "bytes before the broken request changed"
        );
        assert!(
            after[touched.end..] == self.before[touched.end..],
            "bytes behind the broken request changed"
        );
    }
}

/// True once the server has closed the connection; what it sends before that is passed over.
fn is_closed(stream: &mut impl Read) -> bool {
    let mut sink = [0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn a_request_without_the_magic_ends_the_connection() {
    let scene = Scene::new();
    let mut broken = scene.server.connect();
    let request = RawRequest { magic: 0xdead_beef, ..RawRequest::write(0, 0) };
    broken.stream().write_all(&request.bytes()).expect("a socket");
    assert!(is_closed(broken.stream()), "the connection stays open");
    scene.ends_well(0..0);
}

#[test]
fn an_unknown_command_is_refused_and_the_connection_goes_on() {
    let scene = Scene::new();
    let mut broken = scene.server.connect();
    let answer = broken.call_raw(&RawRequest { kind: 0x7777, ..RawRequest::write(0, 0) }, &[]);
    assert_eq!(answer.err(), Some(EINVAL));
    broken.read(0, 512).expect("a read afterwards");
    scene.ends_well(0..0);
}

#[test]
fn c09_an_unknown_command_flag_is_refused_and_the_payload_is_not_taken_for_a_request() {
    let scene = Scene::new();
    let mut broken = scene.server.connect();
    let answer =
        broken.call_raw(&RawRequest { flags: 1 << 14, ..RawRequest::write(0, 512) }, &[0x77; 512]);
    assert_eq!(answer.err(), Some(EINVAL));
    broken.read(0, 512).expect("a read afterwards");
    scene.ends_well(0..0);
}

#[test]
fn a_write_longer_than_any_payload_may_be_touches_nothing() {
    let scene = Scene::new();
    for len in [33 << 20, u32::MAX] {
        let mut broken = scene.server.connect();
        broken.stream().write_all(&RawRequest::write(0, len).bytes()).expect("a socket");
        // The server may answer, or hang up at once: then these two find no peer.
        let _ = broken.stream().write(&[0x77; 4096]);
        let _ = broken.stream().shutdown(Shutdown::Write);
        assert!(is_closed(broken.stream()), "the connection stays open");
    }
    scene.ends_well(0..0);
}

#[test]
fn a_read_longer_than_any_payload_may_be_is_refused() {
    let scene = Scene::new();
    let mut broken = scene.server.connect();
    for (offset, len) in [(0, u32::MAX), (u64::MAX, 1), (u64::MAX - 511, 512), (2 * MIB, 1)] {
        assert_eq!(broken.read(offset, len).err(), Some(EINVAL), "read of {len} at {offset}");
    }
    broken.read(0, 512).expect("a read afterwards");
    scene.ends_well(0..0);
}

#[test]
fn half_a_request_and_silence_holds_up_nobody() {
    let scene = Scene::new();
    let mut broken = scene.server.connect();
    broken.stream().write_all(&RawRequest::write(0, 512).bytes()[..13]).expect("a socket");
    scene.ends_well(0..0);
}

#[test]
fn half_a_payload_and_no_more_to_come_ends_the_connection() {
    let scene = Scene::new();
    let mut broken = scene.server.connect();
    broken.stream().write_all(&RawRequest::write(4096, 8192).bytes()).expect("a socket");
    broken.stream().write_all(&[0x77; 4096]).expect("a socket");
    broken.stream().shutdown(Shutdown::Write).expect("a socket");
    assert!(is_closed(broken.stream()), "the connection stays open");
    scene.ends_well(4096..4096 + 8192);
}

#[test]
fn death_amid_a_payload_touches_at_most_the_range_it_named() {
    let scene = Scene::new();
    let mut broken = scene.server.connect();
    broken.stream().write_all(&RawRequest::write(4096, 256 << 10).bytes()).expect("a socket");
    broken.stream().write_all(&[0x77; 100_000]).expect("a socket");
    drop(broken);
    scene.ends_well(4096..4096 + (256 << 10));
}

#[test]
fn death_with_answers_outstanding_holds_up_nobody() {
    let scene = Scene::new();
    for _ in 0..8 {
        let mut broken = scene.server.connect();
        for _ in 0..16 {
            broken.send(&Command::Read { offset: 0, len: 1 << 20 }).expect("a socket");
        }
    }
    scene.ends_well(0..0);
}

/// A connection whose answers are more than the sockets hold, and nobody takes them.
fn silent_client(server: &Server) -> Client {
    let mut silent = server.connect();
    for _ in 0..64 {
        silent
            .send(&Command::Read { offset: 0, len: 1 << 20 })
            .expect("room for 64 request headers");
    }
    silent
}

#[test]
fn a_client_that_never_reads_its_answers_holds_up_nobody() {
    let mut scene = Scene::new();
    let silent = silent_client(&scene.server);
    scene.bystander_works();
    drop(silent);
    scene.ends_well(0..0);
}

#[test]
fn sigterm_is_not_held_up_by_a_client_that_never_reads_its_answers() {
    let scene = Scene::new();
    let _silent = silent_client(&scene.server);
    scene.ends_well(0..0);
}

#[test]
fn c02_a_write_to_a_read_only_export_is_eperm() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", MIB, 3);
    let before = fs::read(&image).expect("the image");
    let server = Server::start(&image, &["--read-only"]);
    let mut client = server.connect();
    assert_eq!(client.write(0, b"no").err(), Some(EPERM));
    assert_eq!(client.call(&Command::Zero { offset: 0, len: 512, keep: false }).err(), Some(EPERM));
    assert_eq!(client.call(&Command::Trim { offset: 0, len: 512 }).err(), Some(EPERM));
    assert!(client.read(0, MIB as u32).expect("bytes") == before);
    server.stop();
    assert!(fs::read(&image).expect("the image") == before);
}

#[test]
fn a_handshake_of_rubbish_ends_the_connection() {
    let scene = Scene::new();
    let mut stream = greet(&scene.server.socket()).expect("a greeting");
    stream.write_all(&[0x77; 64]).expect("a socket");
    assert!(is_closed(&mut stream), "the connection stays open");
    scene.ends_well(0..0);
}

#[test]
fn an_option_that_claims_four_gibibytes_ends_the_connection_or_is_refused() {
    let scene = Scene::new();
    let mut stream = greet(&scene.server.socket()).expect("a greeting");
    let mut option = Vec::from(*b"IHAVEOPT");
    option.extend(OPT_GO.to_be_bytes());
    option.extend(u32::MAX.to_be_bytes());
    stream.write_all(&option).expect("a socket");
    // The server may have hung up already.
    let _ = stream.shutdown(Shutdown::Write);
    assert!(is_closed(&mut stream), "the connection stays open");
    scene.ends_well(0..0);
}

#[test]
fn unknown_options_and_lengths_that_do_not_add_up_are_refused_and_the_handshake_goes_on() {
    let scene = Scene::new();
    let mut stream = greet(&scene.server.socket()).expect("a greeting");
    let name_longer_than_the_option = [0, 0, 1, 0, 0, 0];
    for (option, data) in
        [(0x7777, &[1, 2, 3][..]), (OPT_GO, &name_longer_than_the_option), (OPT_GO, &[0; 3])]
    {
        send_option(&mut stream, option, data).expect("a socket");
        let (kind, _) = read_option_reply(&mut stream).expect("a reply");
        assert!(is_refusal(kind), "option {option:#x} with {data:?} answered {kind:#x}");
    }
    send_option(&mut stream, OPT_ABORT, &[]).expect("a socket");
    assert!(is_closed(&mut stream), "the connection stays open");
    scene.ends_well(0..0);
}

/// Connects if the server's backlog has room; says nothing. Does not wait.
fn knock(socket: &Path) -> Option<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
    let address = SocketAddrUnix::new(socket).expect("a short path");
    connect(&fd, &address).is_ok().then_some(fd)
}

#[test]
fn running_out_of_descriptors_is_survived() {
    if !require_tool("prlimit") {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", MIB, 5);
    let server = Server::start_under(&["prlimit", "--nofile=64"], &image, &[]);
    let mut early = server.connect();
    let crowd: Vec<_> = (0..90).map_while(|_| knock(&server.socket())).collect();
    assert!(crowd.len() > 10, "only {} fit the backlog", crowd.len());
    early.read(0, 512).expect("a read amid the crowd");
    drop(crowd);
    server.connect().read(0, 512).expect("a newcomer's read");
    server.stop();
}

#[test]
fn a_client_that_dies_amid_a_request_gives_its_descriptor_back() {
    let scene = Scene::new();
    let before = scene.server.descriptors();
    for _ in 0..50 {
        for sent in [13, 28, 4000] {
            let mut dying = scene.server.connect();
            // By now the server sleeps, so that it learns of the bytes and of the end together.
            thread::sleep(Duration::from_millis(1));
            let mut bytes = RawRequest::write(4096, 8192).bytes();
            bytes.resize(sent, 0x77);
            dying.stream().write_all(&bytes).expect("a socket");
        }
    }
    let start = Instant::now();
    while scene.server.descriptors() > before {
        let after = scene.server.descriptors();
        assert!(start.elapsed() < PATIENCE, "{before} descriptors before, {after} after");
        thread::sleep(Duration::from_millis(10));
    }
    scene.ends_well(4096..4096 + 8192);
}
