//! `--fork`: the server in the background, and the process that was called, which waits until it is
//! ready.
//!
//! Invariant: the caller's process ends with status 0 only when clients can connect, else with the
//! status of the server, whose error line is on standard error by then. The server leaves the
//! caller's session, input and output when it is ready, and not before: until then Ctrl-C ends both.
#![allow(unsafe_code)]

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use rustix::process::{Pid, WaitOptions, setsid, waitpid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use tracing::Level;

use crate::error::{CliError, os_message};
use crate::process::log;

/// The byte that the server sends when clients can connect.
const READY: u8 = b'R';
/// The exit status where the server was killed by a signal.
const ENDED_BY_SIGNAL: i32 = 1;

/// The server's end of its tie to the process that was called.
struct Background(io::PipeWriter);

/// A process that goes on to be the server: threads may be started, for it forks no more.
pub(crate) struct Detached(Option<Background>);

impl Detached {
    /// Of a process that does other work, too, and does not fork.
    pub(crate) const fn not() -> Self {
        Self(None)
    }

    /// Goes to the background if that is asked for (`forks`). To be called while there is one thread, and no file that
    /// only one of both processes should have open.
    ///
    /// # Errors
    /// There are too many processes or descriptors.
    pub(crate) fn detach(forks: bool) -> Result<Self, CliError> {
        forks.then(fork).transpose().map(Self)
    }

    /// Clients can connect: a server in the background leaves its caller. Standard error stays if it `is_log_file`.
    ///
    /// # Errors
    /// /dev/null cannot be opened.
    pub(crate) fn ready(self, is_log_file: bool) -> io::Result<()> {
        self.0.map_or(Ok(()), |background| background.ready(is_log_file))
    }
}

/// Forks. Returns in the new process, which becomes the server; the calling process waits, and
/// ends.
///
/// # Errors
/// There are too many processes or descriptors.
fn fork() -> Result<Background, CliError> {
    let cannot =
        |error: io::Error| CliError::new(format!("--fork: cannot: {}", os_message(&error)));
    let (reader, writer) = io::pipe().map_err(cannot)?;
    // SAFETY: there is one thread, so that the new process finds no lock held by another one.
    match unsafe { libc::fork() } {
        0 => {
            drop(reader);
            Ok(Background(writer))
        }
        child => match Pid::from_raw(child).filter(|_| child > 0) {
            Some(child) => {
                drop(writer);
                wait(reader, child)
            }
            None => Err(cannot(io::Error::last_os_error())),
        },
    }
}

/// Waits until the server is ready or has ended, and ends this process.
fn wait(mut reader: io::PipeReader, server: Pid) -> ! {
    let mut answer = [0];
    if reader.read_exact(&mut answer).is_ok() && answer[0] == READY {
        std::process::exit(0);
    }
    let status = loop {
        match waitpid(Some(server), WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(Some((_, status))) => break status.exit_status(),
            Ok(None) | Err(_) => break None,
        }
    };
    if status.is_none() {
        log::write_line(Level::ERROR, "--fork: the server was killed by a signal");
    }
    std::process::exit(status.unwrap_or(ENDED_BY_SIGNAL));
}

impl Background {
    /// Clients can connect: leaves the session, input and output of the caller, whose process ends
    /// with success. Standard error stays if it `is_log_file`.
    ///
    /// # Errors
    /// /dev/null cannot be opened.
    fn ready(mut self, is_log_file: bool) -> io::Result<()> {
        let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
        dup2_stdin(null.as_fd())?;
        dup2_stdout(null.as_fd())?;
        if !is_log_file {
            dup2_stderr(null.as_fd())?;
        }
        // It fails only for the leader of a group of processes, which a new process is not.
        let _ = setsid();
        // A caller that has been killed waits for nothing.
        let _ = self.0.write_all(&[READY]);
        Ok(())
    }
}
