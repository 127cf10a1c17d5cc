//! A client that follows the events of a running server sees what others do, each second, and one
//! that comes later what they have done.
//!
//! Invariant: every event is one line of JSON; statistics end each second.

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nowait_testkit::wait_until;
use serde_json::{Value, json};

use crate::control::Controlled;

/// The events of a server, as a client reads them.
struct Followed(Lines<BufReader<UnixStream>>);

impl Followed {
    fn at(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).expect("the control socket");
        stream.set_read_timeout(Some(nowait_testkit::BOUND)).expect("a timeout");
        stream.write_all(b"GET /v1/events HTTP/1.1\r\nhost: a\r\n\r\n").expect("a request");
        Self(BufReader::new(stream).lines())
    }

    /// The data of the next event called `name` which has what is asked for.
    fn next(&mut self, name: &str, has: impl Fn(&Value) -> bool) -> Value {
        let head = format!("event: {name}");
        loop {
            let line = self.0.next().expect("an event").expect("a line");
            if line != head {
                continue;
            }
            let data = self.0.next().expect("its data").expect("a line");
            let data = data.strip_prefix("data: ").expect("data");
            let data: Value = serde_json::from_str(data).expect("JSON");
            if has(&data) {
                return data;
            }
        }
    }
}

#[test]
fn what_others_do_is_told_to_who_follows_the_events() {
    let it = Controlled::start();
    let mut events = Followed::at(&it.socket);
    let first = events.next("statistics", |_| true);
    assert_eq!(first["server"]["pid"], it.server.pid());
    assert_eq!(first["server"]["event_subscribers"], 1);
    assert_eq!(it.json("GET", "/v1/server", None, 200)["event_subscribers"], 1);
    let path = it.image("more.img", "1M");
    it.json("POST", "/v1/exports", Some(json!({"name": "more", "path": path})), 201);
    assert_eq!(events.next("export_added", |_| true)["name"], "more");
    it.json("PATCH", "/v1/exports/more", Some(json!({"read_only": true})), 200);
    assert_eq!(events.next("export_changed", |_| true)["read_only"], true);
    it.json("DELETE", "/v1/exports/more", None, 204);
    assert_eq!(events.next("export_removed", |_| true)["name"], "more");
    let mut client = it.server.connect();
    client.write(0, &[1; 4096]).expect("a write");
    let opened = events.next("connection_opened", |_| true);
    let requests = |it: &Value| {
        it["exports"][0]["frontends"]["nbd"]["operations"]["write"]["requests"].as_u64()
    };
    events.next("statistics", |it| requests(it) == Some(1));
    drop(client);
    assert_eq!(events.next("connection_closed", |_| true)["id"], opened["id"]);
    it.server.stop();
}

#[test]
fn the_seventeenth_client_that_follows_is_refused_and_the_first_goes_on() {
    let it = Controlled::start();
    let mut all: Vec<_> = (0..16).map(|_| Followed::at(&it.socket)).collect();
    for events in &mut all {
        events.next("statistics", |_| true);
    }
    let why = it.refusal("GET", "/v1/events", None, 503);
    assert_eq!(why, "too many clients follow the events");
    all[0].next("statistics", |_| true);
    it.server.stop();
}

#[test]
fn who_asks_later_is_told_what_was_done_before_and_which_requests_failed() {
    let it = Controlled::start();
    let sum = |series: &Value, name: &str| -> f64 {
        let samples = series[name].as_array().expect("samples");
        samples.iter().filter_map(Value::as_f64).sum()
    };
    let asked = || it.json("GET", "/v1/history", None, 200);
    // Statistics come each second.
    let (mut client, mut events) = (it.server.connect(), Followed::at(&it.socket));
    wait_until("the first sample", || {
        events.next("statistics", |_| true);
        client.write(0, &[1; 4096]).expect("a write");
        sum(&asked()["total"], "writes_per_second") > 0.0
    });
    // Another program cuts off what was written.
    let image = std::fs::File::options().write(true).open(it.scratch.join("disk.img"));
    image.and_then(|image| image.set_len(0)).expect("an image");
    client.read(0, 4096).expect_err("the image is shorter");
    wait_until("the sample after the error", || {
        events.next("statistics", |_| true);
        asked()["errors"][0].is_object()
    });
    let history = asked();
    assert_eq!(history["period_seconds"], 10);
    let error = &history["errors"][0];
    assert_eq!((&error["errno"], &error["requests"]), (&5.into(), &1.into()), "{error}");
    assert_eq!((&error["export"], &error["frontend"]), (&0.into(), &"nbd".into()), "{error}");
    let (total, export) = (&history["total"], &history["exports"][0]);
    assert_eq!((&export["id"], &export["series"]), (&0.into(), total));
    let samples = history["seconds_ago"].as_array().expect("samples").len();
    assert_eq!(total["errors"].as_array().map(Vec::len), Some(samples));
    assert_eq!(sum(total, "errors"), 1.0);
    it.server.stop();
}
