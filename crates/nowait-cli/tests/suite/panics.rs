//! A panic of any thread, which debug builds can inject, ends the process immediately.
//!
//! Invariant: the server's message names the location of the panic.

use crate::common::{Scratch, Server, accepted};
use nowait_testkit::nbd::{Client, Command, Mode};

const CLUSTER: u64 = 64 << 10;

#[test]
fn a_panic_on_any_thread_ends_the_process_at_once_with_one_line_and_status_70() {
    let scratch = Scratch::new();
    for location in ["acceptor", "event loop", "worker", "flush", "flusher"] {
        let image = scratch.join(location);
        accepted(&["create", image.to_str().unwrap(), "16M", "--format", "qcow2"]);
        let variable = format!("NOWAIT_TEST_PANIC={location}");
        let mut server = Server::start_under(&["env", &variable], &image, &[]);
        let mut client = Client::connect(&server.socket(), Mode::Structured).ok();
        // How far the client gets depends on the location.
        if let Some(client) = &mut client {
            let data = vec![1; CLUSTER as usize];
            let write = Command::Write { offset: 3 * CLUSTER, data, fua: false };
            let answered = client.send(&write).and_then(|_| client.receive());
            assert_eq!(answered.is_ok(), location.starts_with("flush"), "{location}");
            if location == "flush" {
                let answered = client.send(&Command::Flush).and_then(|_| client.receive());
                assert!(answered.is_err(), "the flush was answered");
            }
        }
        assert_eq!(server.wait().code(), Some(70), "{location}: {}", server.log());
        let log = server.log();
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(log.starts_with("nowait: a mistake in this program: on purpose, at "), "{log}");
        assert!(log.contains(location), "{log}");
    }
}
