//! `nowait top` shows what a server does: once, and on a terminal until a key ends it,
//! with the columns that its width has place for.
//!
//! Invariant: the load is one that the test makes.

use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use nowait_testkit::{Finished, no_child_starts, require_tool, tool};
use serde_json::Value;

use crate::common::{NOWAIT, text};
use crate::control::Controlled;

/// Does `act` while a client of `it` writes.
fn under_load<T>(it: &Controlled, act: impl FnOnce() -> T) -> T {
    let (mut client, is_done) = (it.server.connect(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                client.write(0, &[1; 4096]).expect("a write");
            }
        });
        let result = act();
        is_done.store(true, Ordering::Relaxed);
        result
    })
}

/// The bytes a second that clients write to the first export, as `top --json` prints it.
fn written_per_second(printed: &str) -> Option<f64> {
    let value: Value = serde_json::from_str(printed).expect("JSON");
    value["exports"][0]["written_bytes_per_second"].as_f64()
}

#[test]
fn top_prints_one_second_where_there_is_no_terminal() {
    let it = Controlled::start();
    // Seconds are shown until there is one in which a busy machine has given the client a processor.
    let seconds = |arguments: &[&str], shows_load: fn(&str) -> bool| {
        (0..60).map(|_| it.nowait(arguments).succeeds()).find(|printed| shows_load(printed))
    };
    let (printed, value) = under_load(&it, || {
        let printed = seconds(&["top"], |printed| printed.contains("served by: simple"));
        (printed, seconds(&["top", "--json"], |value| written_per_second(value) > Some(0.0)))
    });
    let (printed, value) = (printed.expect("a load"), value.expect("a load"));
    assert!(printed.contains(&format!("process {}, up ", it.server.pid())), "{printed}");
    assert!(!printed.contains('\x1b'), "{printed}");
    let row = printed.lines().find(|line| line.starts_with("@0 ")).expect("a row of the export");
    assert!(row.contains("8 MiB") && row.ends_with("disk.img"), "{row}");
    let value: Value = serde_json::from_str(&value).expect("JSON");
    let load = &value["exports"][0];
    assert!(load["requests_per_second"].as_f64() > Some(0.0), "{load}");
    assert!(load["p99_seconds"].as_f64() > Some(0.0), "{load}");
    let socket = it.socket.clone();
    it.server.stop();
    let why = tool(NOWAIT).args(["top", "--once", "--control", text(&socket)]).fails();
    assert!(why.contains("no server answers there"), "{why}");
}

#[test]
fn top_is_drawn_on_a_terminal_and_ends_by_a_key() {
    nowait_testkit::needs!(require_tool("script"));
    let it = Controlled::start();
    let command = format!("stty rows 40 cols 80; {NOWAIT} top --control {}", it.socket.display());
    let mut script = tool("script");
    script.args(["--quiet", "--return", "--command", &command, "/dev/null"]);
    let alone = no_child_starts();
    let child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    drop(alone);
    let mut child = child.expect("a terminal");
    let (mut keys, mut screen) =
        (child.stdin.take().expect("keys"), child.stdout.take().expect("a screen"));
    let (mut shown, mut bytes) = (String::new(), [0; 4096]);
    while !shown.contains("CONNECTION") {
        let count = screen.read(&mut bytes).expect("the screen");
        assert_ne!(count, 0, "it has ended: {shown}");
        shown += &String::from_utf8_lossy(&bytes[..count]);
    }
    let title = shown.lines().find(|line| line.contains("EXPORT ")).expect("titles");
    assert!(title.contains("ERRORS") && !title.contains("IMAGE"), "{title:?}");
    assert!(shown.contains("q quit   ? help"), "{shown:?}");
    keys.write_all(b"?").expect("a key");
    while !shown.contains("CLIENTS     connections and queues") {
        let count = screen.read(&mut bytes).expect("the screen");
        assert_ne!(count, 0, "it has ended: {shown}");
        shown += &String::from_utf8_lossy(&bytes[..count]);
    }
    keys.write_all(b"?q").expect("keys");
    screen.read_to_string(&mut shown).expect("the rest");
    assert!(child.wait().expect("its end").success(), "{shown}");
    // The other screen of the terminal, and back; and the cursor again.
    for sequence in ["\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"] {
        assert!(shown.contains(sequence), "{shown:?}");
    }
    it.server.stop();
}
