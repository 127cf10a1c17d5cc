//! The server's messages on standard error: clients, storage failures, names chosen by clients.
//!
//! Invariant: each message is one line without control characters.

use crate::common::{MIB, Scratch, Server, refusal, refusal_under};
use nowait_testkit::nbd::{Client, EIO, Mode, OPT_GO, RawRequest, export_request, greet};
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
                    Input/output error (os error 5)\n\
                    nowait: error: export \"\" (disk.img): 19 more of read failed: Input/output error \
                    (os error 5)\n";
    assert_eq!(server.log(), expected);
}

#[test]
fn lines_have_priorities_only_where_the_journal_reads_them() {
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
