//! The server's messages on standard error: clients, storage failures, names chosen by clients.
//!
//! Invariant: each message is one line without control characters.

use std::os::unix::net::UnixDatagram;
use std::path::Path;

use crate::common::{MIB, Scratch, Server, refusal, refusal_under, require_tool, skip, text, tool};
use nowait_testkit::BOUND;
use nowait_testkit::nbd::{
    Client, Command, EIO, ENOSPC, Mode, OPT_GO, RawRequest, export_request, greet,
};
use nowait_testkit::nbd::{is_refusal, read_option_reply, send_option};
use nowait_testkit::wait_for;

/// Waits until the log holds `words`; returns the line.
pub(crate) fn await_line(server: &Server, words: &str) -> String {
    wait_for(format!("'{words}' in the log"), || {
        let log = server.log();
        let line = log.lines().find(|line| line.contains(words)).map(str::to_owned);
        line.ok_or(log)
    })
}

#[test]
fn a_client_is_logged_with_user_process_and_export_when_it_connects_and_disconnects() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start(&image, &["--export", "vm/1", "--verbose"]);
    let (user, process) = (rustix::process::geteuid().as_raw(), std::process::id());
    let client_prefix = format!("nowait: client (uid {user}, pid {process})");
    let mut client = Client::connect_to(&server.socket(), "vm/1", Mode::Structured).expect("one");
    await_line(&server, &format!("{client_prefix} has opened export \"vm/1\""));
    client.expect_answer_to(&RawRequest::read(0, 512));
    drop(client);
    await_line(&server, &format!("{client_prefix} has left"));
    drop(greet(&server.socket()).expect("a greeting"));
    await_line(&server, &format!("{client_prefix} has left without opening an export"));
    server.stop();
}

#[test]
fn a_client_over_tcp_is_named_by_its_address() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", MIB);
    let server = Server::start(&image, &["--nbd", "tcp:127.0.0.1:0", "--json", "--verbose"]);
    let address = format!("127.0.0.1:{}", server.port());
    let stream = std::net::TcpStream::connect(address).expect("a connection");
    let own = stream.local_addr().expect("an address");
    drop(stream);
    await_line(&server, &format!("nowait: client ({own}) has left"));
    server.stop();
}

#[test]
fn an_export_name_from_a_client_is_logged_without_control_characters_and_line_breaks() {
    let scratch = Scratch::new();
    let server = Server::start(&scratch.sparse("disk.img", MIB), &["--verbose"]);
    let mut stream = greet(&server.socket()).expect("a greeting");
    let name = "a\u{1b}[2J\u{9b}b\nnowait: error: c\u{202e}d";
    send_option(&mut stream, OPT_GO, &export_request(name)).expect("a socket");
    assert!(is_refusal(read_option_reply(&mut stream).expect("a reply").0));
    let line = await_line(&server, "unknown export");
    assert!(line.ends_with(r#""a\u{1b}[2J\u{9b}b\nnowait: error: c\u{202e}d""#), "{line}");
    server.stop();
}

#[test]
fn names_on_the_command_line_are_escaped_in_an_error() {
    let refused = refusal(&["serve", "/nonexistent/a\nb\u{1b}[2J"]);
    refused.says(&[r"/nonexistent/a\nb\u{1b}[2J: there is no such file"]);
}

/// Makes `count` reads that fail.
fn fail_reads(client: &mut Client, count: u32) {
    for number in 0..count {
        let read = client.read(4 * MIB + u64::from(number) * 512, 512);
        assert_eq!(read.err(), Some(EIO));
    }
}

#[test]
fn failed_reads_are_logged_once_in_full_and_then_counted() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 8 * MIB, 1);
    let mut server = Server::start(&image, &[]);
    let mut client = server.connect();
    let file = std::fs::File::options().write(true).open(&image).expect("the image");
    file.set_len(MIB).expect("a shorter image");
    fail_reads(&mut client, 20);
    server.terminate();
    server.wait();
    let expected = "nowait: error: export \"\" (disk.img): read of 512 bytes at byte 4194304 failed: \
                    Input/output error\n\
                    nowait: error: export \"\" (disk.img): 19 more of read failed: Input/output error\n";
    assert_eq!(server.log(), expected);
}

#[test]
fn a_write_beyond_the_limit_on_the_size_of_files_is_logged_with_that_limit() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.img", 4 * MIB);
    nowait_testkit::needs!(require_tool("prlimit"));
    let server = Server::start_under(&["prlimit", "--fsize=1048576"], &image, &[]);
    assert_eq!(server.connect().write(2 * MIB, &[1; 4096]).err(), Some(ENOSPC));
    let line = await_line(&server, "write of 4096 bytes");
    assert!(line.ends_with("no file may have more than 1048576 bytes here (ulimit -f)"), "{line}");
    server.stop();
}

#[test]
fn clients_that_are_refused_are_told_once_in_full_and_then_counted() {
    let scratch = Scratch::new();
    let mut server = Server::start(&scratch.sparse("disk.img", MIB), &[]);
    for name in ["one\n\u{1b}[2J", "two", "three"] {
        let mut stream = greet(&server.socket()).expect("a greeting");
        send_option(&mut stream, OPT_GO, &export_request(name)).expect("a socket");
        assert!(is_refusal(read_option_reply(&mut stream).expect("a reply").0));
    }
    server.terminate();
    server.wait();
    let expected = "nowait: warning: a client asked for an unknown export, \"one\\n\\u{1b}[2J\"\n\
                    nowait: warning: 2 more clients were refused: unknown export\n";
    assert_eq!(server.log(), expected);
}

#[test]
fn at_its_end_a_verbose_server_says_what_it_has_done() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 4 * MIB, 1);
    let mut server = Server::start(&image, &["--export", "vm", "--verbose"]);
    let mut client = server.connect();
    client.write(0, &[1; 4096]).expect("a write");
    (0..3).for_each(|_| assert_eq!(client.read(0, 4096).expect("bytes"), [1; 4096]));
    client.call(&Command::Flush).expect("a flush");
    let file = std::fs::File::options().write(true).open(&image).expect("the image");
    file.set_len(MIB).expect("a shorter image");
    assert_eq!(client.read(2 * MIB, 512).err(), Some(EIO));
    drop(client);
    server.terminate();
    server.wait();
    let line = await_line(&server, "nbd: ");
    assert_eq!(
        line,
        "nowait: export \"vm\" (disk.img): nbd: 4 read (12 KiB), 1 write (4 KiB), 1 flush; errors: 1 x \
         Input/output error"
    );
    let line = await_line(&server, "mechanisms: ");
    assert!(line.starts_with("nowait: export \"vm\" (disk.img): mechanisms: simple "), "{line}");
}

/// Binds the socket of the first argument as that of the journal, with the descriptor of standard
/// error as its stream, and executes the command after it.
const WITH_JOURNAL: &str = r#"
socket=$1 && shift && mount -t tmpfs none /run && mkdir -p /run/systemd/journal &&
touch /run/systemd/journal/socket && mount --bind "$socket" /run/systemd/journal/socket || exit 77
JOURNAL_STREAM=$(stat -Lc %d:%i /proc/self/fd/2) exec "$@""#;

#[test]
fn the_journal_gets_each_message_with_its_priority_and_its_fields() {
    let scratch = Scratch::new();
    let socket = scratch.join("journal");
    let journal = UnixDatagram::bind(&socket).expect("a socket");
    journal.set_read_timeout(Some(BOUND)).expect("a timeout");
    let wrapper =
        ["unshare", "--map-root-user", "--mount", "sh", "-c", WITH_JOURNAL, "sh", text(&socket)];
    if !tool(wrapper[0]).args(&wrapper[1..]).arg("true").status().is_ok_and(|it| it.success()) {
        skip("no mount namespace can be made here");
        return;
    }
    let image = scratch.random("disk.img", 8 * MIB, 1);
    let server = Server::start_under(&wrapper, &image, &["--export", "a\n\u{1b}b"]);
    let mut client = Client::connect(&server.socket(), Mode::Structured).expect("a connection");
    let file = std::fs::File::options().write(true).open(&image).expect("the image");
    file.set_len(MIB).expect("a shorter image");
    fail_reads(&mut client, 1);
    let mut datagram = [0; 8192];
    let len = journal.recv(&mut datagram).expect("a message");
    let message = String::from_utf8_lossy(&datagram[..len]).into_owned();
    for field in [
        "PRIORITY=3",
        "SYSLOG_IDENTIFIER=nowait",
        r"NOWAIT_EXPORT=a\n\u{1b}b",
        "NOWAIT_OPERATION=read",
        "NOWAIT_POSITION=4194304",
        "NOWAIT_LENGTH=512",
        "ERRNO=5",
    ] {
        assert!(message.lines().any(|line| line == field), "no {field} in {message}");
    }
    let text = message.lines().find(|line| line.starts_with("MESSAGE=")).expect("a text");
    assert!(text.ends_with("read of 512 bytes at byte 4194304 failed: Input/output error"));
    assert_eq!(server.log(), "", "it is on standard error, too");
    server.stop();
}

#[test]
fn lines_have_priorities_only_where_the_journal_reads_them() {
    if Path::new("/run/systemd/journal/socket").exists() {
        skip("the journal of this host takes messages itself");
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 8 * MIB, 1);
    let script = r#"JOURNAL_STREAM=$(stat -Lc %d:%i /proc/self/fd/2) exec "$@""#;
    let wrapper = ["sh", "-c", script, "sh"];
    let server = Server::start_under(&wrapper, &image, &["--verbose"]);
    let mut client = server.connect();
    let file = std::fs::File::options().write(true).open(&image).expect("the image");
    file.set_len(MIB).expect("a shorter image");
    fail_reads(&mut client, 1);
    assert!(await_line(&server, "failed: Input/output error").starts_with("<3>nowait: error: "));
    assert!(await_line(&server, "has opened export").starts_with("<6>nowait: client"));
    server.stop();

    let refused = refusal_under(&wrapper, &["serve", "/nonexistent"]);
    assert!(refused.error.starts_with("<3>nowait: /nonexistent"), "{}", refused.error);
    refusal_under(&["env", "JOURNAL_STREAM=1:2"], &["serve", "/nonexistent"]).says(&["/nonexist"]);
}
