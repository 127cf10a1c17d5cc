//! The service manager's watchdog (sd_notify(3), `WATCHDOG_USEC`).
//!
//! Invariant: it is fed only after every serving thread has answered within a quarter of its time; a
//! thread that is idle answers when it is woken up for that. Storage that does not answer keeps only
//! workers waiting, so it is not a reason for a restart.

use std::thread;
use std::time::Duration;

use nowait_server::Exports;
use tracing::{error, warn};

use crate::process::systemd;

/// A shorter time is not a watchdog, but a mistake.
const SHORTEST: Duration = Duration::from_millis(10);

/// Feeds the watchdog of this process, if the service manager has one, as long as the process runs.
pub(crate) fn start(exports: Exports) {
    let time = systemd::manager().and_then(|_| sd_notify::watchdog_enabled());
    let Some(time) = time.filter(|time| *time >= SHORTEST) else { return };
    let thread = thread::Builder::new().name("watchdog".into());
    if let Err(error) = thread.spawn(move || feed(&exports, time)) {
        warn!("WATCHDOG_USEC: cannot start its thread: {error}");
    }
}

fn feed(exports: &Exports, time: Duration) -> ! {
    let mut answered = true;
    loop {
        let answers = exports.is_responsive(time / 4);
        if answers {
            systemd::notify_watchdog();
        } else if answered {
            error!("a serving thread does not answer; the service manager's watchdog is not fed");
        }
        answered = answers;
        thread::sleep(time / 4);
    }
}
