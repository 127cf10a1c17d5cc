//! Signal handling: which signals end a server, the messages while it ends, and which signals are
//! ignored.
//!
//! Invariant: the first signal that ends a server lets it finish and flush; a second one ends the
//! process immediately, and the remaining work is reported, but only after a message has announced it:
//! timeout(1) and others send a signal twice in a row. No other signal with a handler here ends the
//! process. A hangup ends only a process that was started with a terminal to lose: without one it asks for the
//! reading of what has changed outside, as daemons do (daemon(7)).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use nowait_server::ShutdownHandle;
use signal_hook::consts::{
    SIGALRM, SIGHUP, SIGINT, SIGIO, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM,
};
use signal_hook::iterator::Signals;
use tracing::Level;

use crate::disks::default_image::DefaultSocket;
use crate::endpoints::reload::Reload;
use crate::process;
use crate::process::background::Detached;
use crate::process::lifetime::PidFile;
use crate::process::log;
use crate::process::systemd;

/// The time that a stop may take before its progress is reported, and the interval of the reports.
const REPORT_AFTER: Duration = Duration::from_secs(1);
/// Signals that would end the process unflushed by default, and are ignored.
const IGNORED: [i32; 6] = [SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGIO];
/// The exit status after a second signal.
const ENDED_AT_ONCE: u8 = 1;

/// The signals that ask a command to end: those that a terminal, a shell or a service manager
/// sends. `SIGHUP` is not among them for a process that was started with it ignored, as by
/// nohup(1).
pub(crate) fn that_end() -> Vec<i32> {
    let signals = [SIGINT, SIGTERM, SIGQUIT, SIGHUP];
    let is_handled = |signal: &i32| *signal != SIGHUP || !is_ignored(SIGHUP);
    signals.into_iter().filter(is_handled).collect()
}

/// A flag that the first of these signals sets. A later one ends the process immediately with
/// `ENDED_AT_ONCE`, unless it comes within `REPORT_AFTER`: then it is the same signal sent
/// twice.
///
/// # Errors
/// sigaction(2) or the creation of a thread failed.
pub fn flag() -> io::Result<Arc<AtomicBool>> {
    let (stop, mut signals) = (Arc::new(AtomicBool::new(false)), Signals::new(that_end())?);
    let set = stop.clone();
    let listen = move || {
        let mut first = None;
        for _ in signals.forever() {
            set.store(true, Ordering::Relaxed);
            if first.get_or_insert_with(Instant::now).elapsed() > REPORT_AFTER {
                process::end_at_once(ENDED_AT_ONCE);
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(listen)?;
    Ok(stop)
}

/// Whether this process ignores `signal` (`SigIgn` in proc_pid_status(5), one bit a signal).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}

/// Whether this process has a controlling terminal, which it loses when that is closed.
fn has_terminal() -> bool {
    // The open fails with ENXIO where there is none (tty(4)).
    std::fs::File::open("/dev/tty").is_ok()
}

/// The phase of a server that may be told to stop.
enum Phase {
    /// Its images are being opened.
    Opening,
    /// Requests may be in flight.
    Serving(ShutdownHandle, Reload),
    /// No request is in flight any more, or the timeout for them has expired.
    Flushing,
}

/// A file or directory that is removed when the process ends.
pub(crate) trait Leftover: Send + Sync {
    /// Removes it; errors are ignored.
    fn remove(&self);
}

impl Leftover for DefaultSocket {
    fn remove(&self) {
        self.remove();
    }
}

impl Leftover for PidFile {
    fn remove(&self) {
        self.remove();
    }
}

struct State {
    is_asked: bool,
    /// The announcement that a second signal ends the process immediately was printed.
    is_reported: bool,
    phase: Phase,
    /// Removed where the process ends immediately.
    leftovers: Vec<Weak<dyn Leftover>>,
}

impl State {
    /// The server stops, immediately when it serves.
    fn ask(&mut self) {
        self.is_asked = true;
        if let Phase::Serving(stopper, _) = &self.phase {
            stopper.stop();
        }
    }
}

/// The shutdown of a server, on a signal or on request; clones share it.
#[derive(Clone)]
pub(crate) struct Ending(Arc<Mutex<State>>);

impl Ending {
    /// One without signals, for a server that is asked.
    pub(crate) fn on_request() -> Self {
        let state = State {
            is_asked: false,
            is_reported: false,
            phase: Phase::Opening,
            leftovers: Vec::new(),
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Stops the server, immediately when it serves.
    pub(crate) fn ask(&self) {
        lock(&self.0).ask();
    }

    /// Installs the signal handlers, in a process that forks no more. To be called once, before any image is opened.
    ///
    /// # Errors
    /// sigaction(2) or the creation of a thread failed.
    pub(crate) fn on_signal(_: &Detached) -> io::Result<Self> {
        let signals = Signals::new(that_end())?;
        for signal in IGNORED {
            signal_hook::flag::register(signal, Arc::default())?;
        }
        let ending = Self::on_request();
        let shared = ending.0.clone();
        // Now: a terminal that has closed is not there to be opened when its signal comes.
        let has_terminal = has_terminal();
        let listen = move || listen(signals, has_terminal, &shared);
        thread::Builder::new().name("signals".into()).spawn(listen)?;
        Ok(ending)
    }

    /// Registers `leftover` to be removed also where a second signal ends the process immediately.
    pub(crate) fn removes<T: Leftover + 'static>(&self, leftover: &Arc<T>) {
        let leftover: Weak<T> = Arc::downgrade(leftover);
        lock(&self.0).leftovers.push(leftover);
    }

    /// The server runs; a signal stops it through `stopper`, immediately if a signal has already
    /// arrived. A hangup starts `reload`.
    pub(crate) fn serving(&self, stopper: ShutdownHandle, reload: Reload) {
        let mut state = lock(&self.0);
        if state.is_asked {
            stopper.stop();
        }
        state.phase = Phase::Serving(stopper, reload);
    }

    /// Requests have ended, or are no longer waited for.
    pub(crate) fn flushing(&self) {
        lock(&self.0).phase = Phase::Flushing;
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn listen(mut signals: Signals, has_terminal: bool, state: &Arc<Mutex<State>>) {
    for signal in signals.forever() {
        let mut now = lock(state);
        if signal == SIGHUP && !has_terminal {
            if let Phase::Serving(_, reload) = &now.phase {
                reload.start();
            }
            continue;
        }
        if now.is_reported {
            end_at_once(&now);
        }
        if now.is_asked {
            continue;
        }
        // Before the server stops: its next notification says that it is flushing.
        systemd::notify_stopping();
        now.ask();
        drop(now);
        let state = state.clone();
        // Without this thread the shutdown is the same, but silent.
        let _ = thread::Builder::new().spawn(move || report(&state));
    }
}

/// Reports what the shutdown waits for, whenever that has changed.
fn report(state: &Mutex<State>) {
    let mut last = String::new();
    loop {
        thread::sleep(REPORT_AFTER);
        let line = match &lock(state).phase {
            Phase::Opening => "stopping, as soon as the images are open".to_owned(),
            Phase::Serving(stopper, _) => format!("stopping, {}", remaining(stopper)),
            Phase::Flushing => "stopping, flushing".to_owned(),
        };
        if line != last {
            log::write_line(
                Level::WARN,
                format!("{line} (a second signal terminates it immediately)"),
            );
            last = line;
            lock(state).is_reported = true;
        }
    }
}

fn end_at_once(state: &State) -> ! {
    let what = match &state.phase {
        Phase::Opening => "nothing was served".to_owned(),
        Phase::Serving(stopper, _) => format!("{}, not flushed", remaining(stopper)),
        Phase::Flushing => "the flush has not completed".to_owned(),
    };
    log::write_line(Level::ERROR, format!("terminated by a second signal: {what}"));
    state.leftovers.iter().filter_map(Weak::upgrade).for_each(|leftover| leftover.remove());
    process::end_at_once(ENDED_AT_ONCE)
}

fn remaining(stopper: &ShutdownHandle) -> String {
    match stopper.in_flight() {
        1 => "1 request left".to_owned(),
        count => format!("{count} requests left"),
    }
}
