//! The process that starts the new program of a server: one that is confined cannot.
//!
//! Invariant: it starts the program at the path from which the server was started, with the server's
//! own arguments, and another one only for a server that is not confined. It ends with the server.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nowait_cli::error::os_message;
use nowait_control::ControlError;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::upgrade::channel::{Channel, Message};
use crate::upgrade::{ENVIRONMENT, SUCCESSOR};

/// To start new programs: only the server's own, or any.
const LAUNCHER: &str = "launcher";
const LAUNCHER_OF_ANY: &str = "launcher-of-any";
/// The name of the process in lists.
const NAME: &str = "nowait-launcher";
/// How long the launcher may take for an answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What the server asks for.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    /// Start a program, with the file of this message as its standard input.
    Start { binary: Option<OsString> },
    /// End the program that was started.
    End,
}

/// The process of what was started, or why nothing was.
type Answer = Result<u32, String>;

/// The launcher of this server.
pub(crate) struct Launcher {
    channel: Mutex<Channel>,
    path: PathBuf,
    any: bool,
}

impl Launcher {
    /// Starts the process. To be called before this process is confined. It may start `any` program,
    /// and is `quiet` if it may not hold the caller's output open.
    ///
    /// # Errors
    /// A line that says what is missing.
    pub(crate) fn start(any: bool, quiet: bool) -> Result<Self, String> {
        let cannot =
            |error: io::Error| format!("no process can be started: {}", os_message(&error));
        let path = std::env::current_exe().map_err(cannot)?;
        let (channel, far) = Channel::pair().map_err(cannot)?;
        let mut command = Command::new(&path);
        command.arg0(NAME).args(std::env::args_os().skip(1)).stdin(far);
        command.env(ENVIRONMENT, if any { LAUNCHER_OF_ANY } else { LAUNCHER });
        if quiet {
            command.stdout(Stdio::null()).stderr(Stdio::null());
        }
        command.spawn().map_err(cannot)?;
        Ok(Self { channel: Mutex::new(channel), path, any })
    }

    /// Starts `binary`, or the program at the path from which this one was started, at the other
    /// end of the channel that is returned.
    ///
    /// # Errors
    /// It may not or cannot be started.
    pub(crate) fn launch(
        self: &Arc<Self>,
        binary: Option<&Path>,
    ) -> Result<(Channel, Launched), ControlError> {
        if let Some(binary) = binary.filter(|binary| !self.any && *binary != self.path) {
            return Err(ControlError::Forbidden(format!(
                "{}: a confined server takes its new program only at {} (or start it with --sandbox off)",
                binary.display(),
                self.path.display()
            )));
        }
        let failed = |error: io::Error| {
            ControlError::Failed(format!("no program can be started: {}", os_message(&error)))
        };
        let (channel, far) = Channel::pair().map_err(failed)?;
        let binary = binary.map(|path| path.as_os_str().to_owned());
        let launcher = self.lock();
        let start = Request::Start { binary };
        launcher.send(&start, &[], &[far.as_fd()], TIMEOUT).map_err(failed)?;
        let Message { body, .. } = launcher.receive::<Answer>(TIMEOUT).map_err(failed)?;
        let process = body.map_err(ControlError::Failed)?;
        drop(launcher);
        Ok((channel, Launched { launcher: Some(self.clone()), process }))
    }

    fn lock(&self) -> MutexGuard<'_, Channel> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process that was started, and is ended when this is dropped.
pub(crate) struct Launched {
    launcher: Option<Arc<Launcher>>,
    process: u32,
}

impl Launched {
    /// It goes on. Returns its number.
    pub(crate) fn serves(mut self) -> u32 {
        self.launcher = None;
        self.process
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        if let Some(launcher) = self.launcher.take() {
            let launcher = launcher.lock();
            // A launcher that has ended has no process to end: a new program without an old one ends.
            let ended = launcher.send(&Request::End, &[], &[], TIMEOUT);
            let _ = ended.and_then(|()| launcher.receive::<Answer>(TIMEOUT));
        }
    }
}

/// If this process was started as a launcher, does its work and returns how it ends.
pub(crate) fn run_if_asked() -> Option<u8> {
    let purpose = std::env::var_os(ENVIRONMENT)?;
    // At once: later the file at this path may be another one, and this one has none.
    let own = std::env::current_exe();
    let any = purpose == LAUNCHER_OF_ANY;
    if !any && purpose != LAUNCHER {
        return None;
    }
    // What a terminal sends to all its processes is for the server, with which this one ends. New
    // programs have the signals' defaults.
    for signal in [SIGINT, SIGTERM, SIGQUIT, SIGHUP] {
        let _ = signal_hook::flag::register(signal, Arc::default());
    }
    let Ok(channel) = Channel::of_standard_input() else { return Some(1) };
    let mut started = None;
    while let Ok(Message { body, mut files, .. }) = channel.receive::<Request>(None) {
        end(started.take_if(|_| matches!(body, Request::End)));
        let answer = match body {
            Request::End => Ok(None),
            Request::Start { binary } => {
                let binary = binary.filter(|_| any).map(PathBuf::from);
                let path = binary.as_ref().map_or(own.as_ref(), Ok);
                spawn(path, files.pop().map_or_else(Stdio::null, Stdio::from))
            }
        };
        let answer: Answer = answer.map(|child: Option<Child>| {
            let process = child.as_ref().map_or(0, Child::id);
            started = child;
            process
        });
        if channel.send(&answer, &[], &[], TIMEOUT).is_err() {
            break;
        }
    }
    Some(0)
}

fn spawn(path: Result<&PathBuf, &io::Error>, input: Stdio) -> Result<Option<Child>, String> {
    let path = path.map_err(|error| format!("its program: {}", os_message(error)))?;
    let mut command = Command::new(path);
    command.args(std::env::args_os().skip(1)).env(ENVIRONMENT, SUCCESSOR).stdin(input);
    // The manager's watchdog waits for the server, whatever its number.
    command.env_remove("WATCHDOG_PID");
    match command.spawn() {
        Ok(child) => Ok(Some(child)),
        Err(error) => Err(format!("{}: {}", path.display(), os_message(&error))),
    }
}

fn end(child: Option<Child>) {
    if let Some(mut child) = child {
        // It may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
}
