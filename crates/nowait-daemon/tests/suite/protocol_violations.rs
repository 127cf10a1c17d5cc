//! Clients that break the protocol lose their own connection; other clients are not affected.
//!
//! Invariant: in every test a second connection works before and after, and bytes outside the
//! requests are unchanged.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::path::PathBuf;

use crate::common::{KIB, MIB, Scratch, Server};
use nowait_testkit::nbd::{
    Client, Command, EINVAL, EPERM, OPT_ABORT, OPT_GO, RawRequest, greet, is_refusal,
    read_option_reply, send_option,
};

/// The range of the bystander: the last 64 KiB.
const BYSTANDER_OFFSET: u64 = 2 * MIB - 64 * KIB;

/// A served image and a well-behaved connection to it.
struct Fixture {
    server: Server,
    bystander: Client,
    image: PathBuf,
    before: Vec<u8>,
    _scratch: Scratch,
}

impl Fixture {
    fn new() -> Self {
        let scratch = Scratch::new();
        let image = scratch.random("disk.img", 2 * MIB, 2);
        let server = Server::start(&image, "");
        let before = fs::read(&image).expect("the image");
        let mut fixture =
            Self { bystander: server.connect(), server, image, before, _scratch: scratch };
        fixture.bystander_works();
        fixture
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

    /// The bystander still works, a new connection too, and every byte outside `touched` is
    /// unchanged.
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

/// True once the server has closed the connection; bytes that it sends before are ignored.
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
    let fixture = Fixture::new();
    let mut broken = fixture.server.connect();
    let request = RawRequest { magic: 0xdead_beef, ..RawRequest::write(0, 0) };
    broken.stream().write_all(&request.bytes()).expect("a socket");
    assert!(is_closed(broken.stream()), "the connection stays open");
    fixture.ends_well(0..0);
}

#[test]
fn an_unknown_command_is_refused_and_the_connection_continues() {
    let fixture = Fixture::new();
    let mut broken = fixture.server.connect();
    let answer = broken.call_raw(&RawRequest { kind: 0x7777, ..RawRequest::write(0, 0) }, &[]);
    assert_eq!(answer.err(), Some(EINVAL));
    broken.read(0, 512).expect("a read afterwards");
    fixture.ends_well(0..0);
}

#[test]
fn c09_an_unknown_command_flag_is_refused_and_the_payload_is_not_parsed_as_a_request() {
    let fixture = Fixture::new();
    let mut broken = fixture.server.connect();
    let answer =
        broken.call_raw(&RawRequest { flags: 1 << 14, ..RawRequest::write(0, 512) }, &[0x77; 512]);
    assert_eq!(answer.err(), Some(EINVAL));
    broken.read(0, 512).expect("a read afterwards");
    fixture.ends_well(0..0);
}

#[test]
fn a_write_longer_than_any_payload_may_be_touches_nothing() {
    let fixture = Fixture::new();
    for len in [33 << 20, u32::MAX] {
        let mut broken = fixture.server.connect();
        broken.stream().write_all(&RawRequest::write(0, len).bytes()).expect("a socket");
        // The server may answer, or close the connection immediately: then these two calls fail.
        let _ = broken.stream().write(&[0x77; 4096]);
        let _ = broken.stream().shutdown(Shutdown::Write);
        assert!(is_closed(broken.stream()), "the connection stays open");
    }
    fixture.ends_well(0..0);
}

#[test]
fn a_read_longer_than_any_payload_may_be_is_refused() {
    let fixture = Fixture::new();
    let mut broken = fixture.server.connect();
    for (offset, len) in [(0, u32::MAX), (u64::MAX, 1), (u64::MAX - 511, 512), (2 * MIB, 1)] {
        assert_eq!(broken.read(offset, len).err(), Some(EINVAL), "read of {len} at {offset}");
    }
    broken.read(0, 512).expect("a read afterwards");
    fixture.ends_well(0..0);
}

#[test]
fn half_a_request_and_silence_blocks_no_other_client() {
    let fixture = Fixture::new();
    let mut broken = fixture.server.connect();
    broken.stream().write_all(&RawRequest::write(0, 512).bytes()[..13]).expect("a socket");
    fixture.ends_well(0..0);
}

#[test]
fn half_a_payload_and_no_more_to_come_ends_the_connection() {
    let fixture = Fixture::new();
    let mut broken = fixture.server.connect();
    broken.stream().write_all(&RawRequest::write(4096, 8192).bytes()).expect("a socket");
    broken.stream().write_all(&[0x77; 4096]).expect("a socket");
    broken.stream().shutdown(Shutdown::Write).expect("a socket");
    assert!(is_closed(broken.stream()), "the connection stays open");
    fixture.ends_well(4096..4096 + 8192);
}

#[test]
fn death_within_a_payload_changes_at_most_the_range_of_the_request() {
    let fixture = Fixture::new();
    let mut broken = fixture.server.connect();
    broken.stream().write_all(&RawRequest::write(4096, 256 << 10).bytes()).expect("a socket");
    broken.stream().write_all(&[0x77; 100_000]).expect("a socket");
    drop(broken);
    fixture.ends_well(4096..4096 + (256 << 10));
}

#[test]
fn death_with_answers_outstanding_blocks_no_other_client() {
    let fixture = Fixture::new();
    for _ in 0..8 {
        let mut broken = fixture.server.connect();
        for _ in 0..16 {
            broken.send(&Command::Read { offset: 0, len: 1 << 20 }).expect("a socket");
        }
    }
    fixture.ends_well(0..0);
}

/// A connection that never reads its answers, which are more than the sockets hold.
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
fn a_client_that_never_reads_its_answers_blocks_no_other_client() {
    let mut fixture = Fixture::new();
    let silent = silent_client(&fixture.server);
    fixture.bystander_works();
    drop(silent);
    fixture.ends_well(0..0);
}

#[test]
fn an_end_is_not_delayed_by_a_client_that_never_reads_its_answers() {
    let fixture = Fixture::new();
    let _silent = silent_client(&fixture.server);
    fixture.ends_well(0..0);
}

#[test]
fn c02_a_write_to_a_read_only_export_is_eperm() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", MIB, 3);
    let before = fs::read(&image).expect("the image");
    let server = Server::start(&image, "read-only = true");
    let mut client = server.connect();
    assert_eq!(client.write(0, b"no").err(), Some(EPERM));
    assert_eq!(client.call(&Command::Zero { offset: 0, len: 512, keep: false }).err(), Some(EPERM));
    assert_eq!(client.call(&Command::Trim { offset: 0, len: 512 }).err(), Some(EPERM));
    assert!(client.read(0, MIB as u32).expect("bytes") == before);
    server.stop();
    assert!(fs::read(&image).expect("the image") == before);
}

#[test]
fn an_invalid_handshake_ends_the_connection() {
    let fixture = Fixture::new();
    let mut stream = greet(&fixture.server.socket()).expect("a greeting");
    stream.write_all(&[0x77; 64]).expect("a socket");
    assert!(is_closed(&mut stream), "the connection stays open");
    fixture.ends_well(0..0);
}

#[test]
fn an_option_that_claims_four_gibibytes_ends_the_connection_or_is_refused() {
    let fixture = Fixture::new();
    let mut stream = greet(&fixture.server.socket()).expect("a greeting");
    let mut option = Vec::from(*b"IHAVEOPT");
    option.extend(OPT_GO.to_be_bytes());
    option.extend(u32::MAX.to_be_bytes());
    stream.write_all(&option).expect("a socket");
    // The server may have closed the connection already.
    let _ = stream.shutdown(Shutdown::Write);
    assert!(is_closed(&mut stream), "the connection stays open");
    fixture.ends_well(0..0);
}

#[test]
fn unknown_options_and_lengths_that_do_not_add_up_are_refused_and_the_handshake_continues() {
    let fixture = Fixture::new();
    let mut stream = greet(&fixture.server.socket()).expect("a greeting");
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
    fixture.ends_well(0..0);
}
