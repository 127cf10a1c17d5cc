//! Set-up of each program of this package, and how it ends: a panic ends the process, and a write
//! beyond the file size limit is an error.
//!
//! Invariant: no thread continues after another has panicked, so that no client waits for an answer
//! that never comes, and no service manager regards the process as working.

pub(crate) mod journal;
pub mod log;
pub mod systemd;
pub(crate) mod malloc_threshold;
pub(crate) mod io_flusher;
pub(crate) mod owned_paths;
pub(crate) mod lifetime;
pub(crate) mod background;
pub(crate) mod log_file;
pub(crate) mod watchdog;

use std::io::{self, Write};
use std::panic::PanicHookInfo;
use std::sync::Arc;

use nowait_image::plain;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The exit status of a process in which a thread has panicked: `EX_SOFTWARE` of sysexits.h.
const STATUS: i32 = 70;

/// From now on a panic on any thread ends the process, with one line on standard error and status
/// 70. A write beyond the file size limit fails with `EFBIG`.
pub fn set_up() {
    // Without a handler the signal would end the process. A failed registration is ignored.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    std::panic::set_hook(Box::new(|info| {
        let thread = std::thread::current();
        let line = line(info, thread.name().unwrap_or("?"));
        let _ = io::stderr().write_all(line.as_bytes());
        // No handlers and no destructors: they might wait for the thread that has panicked.
        signal_hook::low_level::exit(STATUS);
    }));
}

/// Raises the soft limit of descriptors of this process to the hard limit: by default it is low, for
/// programs that use select(2). Returns the limit as it was, which is that of programs started by this
/// one. A limit that remains too low is reported where a descriptor is missing.
pub fn raise_descriptor_limit() -> Rlimit {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    limit
}

/// Ends the process with `status` when what was printed is written.
pub fn end(status: u8) -> ! {
    let _ = io::stdout().flush();
    end_at_once(status)
}

/// Ends the process with `status`, without waiting for a thread that prints, and without the destructors
/// of libraries: where an image of a Ceph cluster is open, or being opened, threads of Ceph's library
/// still use what those would destroy.
pub fn end_at_once(status: u8) -> ! {
    signal_hook::low_level::exit(status.into())
}

fn line(info: &PanicHookInfo<'_>, thread: &str) -> String {
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let text = plain(&text.unwrap_or("no reason given").replace('\n', " "));
    let location = info.location().map(|at| format!("{}:{}", at.file(), at.line()));
    let location = location.unwrap_or_default();
    format!("nowait: a mistake in this program: {text} (thread {thread}, {location})\n")
}
