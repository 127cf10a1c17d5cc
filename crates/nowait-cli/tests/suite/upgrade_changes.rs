//! Changes of a server that are made while it is upgraded.
//!
//! Invariant: a change that was answered with success is in force in the process that serves afterwards.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nowait_testkit::{ControlSocket, SetOnDrop};
use serde_json::{Value, json};

use crate::common::{Scratch, accepted, text};
use crate::upgrade::Upgraded;

/// The status of the answer alone.
fn status(control: &ControlSocket, method: &str, path: &str, body: &Value) -> Option<u16> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    control.send(method, path, &body).map(|(status, _)| status)
}

/// Asks for export `name`; `None` if there was no answer from a server that serves.
fn look(control: &ControlSocket, name: &str) -> Option<(u16, Value)> {
    let (status, body) = control.send("GET", &format!("/v1/exports/{name}"), "")?;
    Some((status, serde_json::from_str(&body).unwrap_or_default()))
}

#[test]
fn a_change_that_was_answered_with_success_is_in_force_through_upgrades_beside_it() {
    const UPGRADES: usize = 6;
    let scratch = Scratch::new();
    let image = scratch.join("more.img");
    accepted(&["create", text(&image), "1M"]);
    let mut it = Upgraded::start("raw", &["--allow-dir", text(scratch.path())]);
    let control = ControlSocket { socket: it.control().to_owned() };
    let over = AtomicBool::new(false);
    let go_on = || !over.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        // Each looks at what only it changes.
        let limits = scope.spawn(|| {
            for ops in (1000u64..).take_while(|_| go_on()) {
                let body = json!({"limits": {"ops": {"size": ops, "refill_time": 1000}}});
                if status(&control, "PATCH", "/v1/exports/@0", &body) == Some(200)
                    && let Some((200, export)) = look(&control, "@0")
                {
                    assert_eq!(export["limits"]["ops"]["size"], json!(ops), "{export}");
                }
            }
        });
        let protection = scope.spawn(|| {
            for read_only in [true, false].into_iter().cycle().take_while(|_| go_on()) {
                let body = json!({"read_only": read_only});
                if status(&control, "PATCH", "/v1/exports/@0", &body) == Some(200)
                    && let Some((200, export)) = look(&control, "@0")
                {
                    assert_eq!(export["read_only"], json!(read_only), "{export}");
                }
            }
        });
        let exports = scope.spawn(|| {
            let body = json!({"name": "more", "path": text(&image)});
            while go_on() {
                if status(&control, "POST", "/v1/exports", &body) == Some(201)
                    && let Some((status, _)) = look(&control, "more")
                {
                    assert_eq!(status, 200, "it was added");
                }
                if status(&control, "DELETE", "/v1/exports/more", &Value::Null) == Some(204)
                    && let Some((status, _)) = look(&control, "more")
                {
                    assert_eq!(status, 404, "it was removed");
                }
            }
        });
        let flushes = scope.spawn(|| {
            while go_on() {
                let answer = status(&control, "POST", "/v1/exports/@0/flush", &Value::Null);
                assert!(answer.is_none_or(|status| [204, 503].contains(&status)), "{answer:?}");
            }
        });
        let changing = SetOnDrop(&over);
        for _ in 0..UPGRADES {
            std::thread::sleep(Duration::from_millis(100));
            it.upgrade();
        }
        drop(changing);
        [limits, protection, exports, flushes]
            .into_iter()
            .for_each(|changes| changes.join().expect("no change is lost"));
    });
}
