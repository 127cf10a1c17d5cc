//! The process that starts the new program of a server, changes the server's own names, looks up the addresses of hosts,
//! and has credentials given: a server that is confined cannot.
//!
//! Invariant: it starts the program at the path from which the server was started, with the server's
//! own arguments, and another one only for a server that is not confined. The names, and the program that gives credentials,
//! are recorded once, before the server is confined. It ends with the server.

use std::ffi::{CStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{CliError, os_message};
use nowait_control::ControlError;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use tracing::warn;

use crate::process::background::Detached;
use crate::process::owned_paths::{self, Change, OwnedPaths};
use crate::secrets;
use crate::upgrade::channel::{Bounds, Channel, Message};
use crate::upgrade::credential_processes::{self, CredentialClient};
use crate::upgrade::host_names::{self, HostNameClient};
use crate::upgrade::{ENVIRONMENT, SUCCESSOR};

/// The name of the process in lists.
const NAME: &str = "nowait-launcher";
/// Its name for pidof(1) and killall(1), which would find it as the server; the kernel's limit is 15 bytes.
const SHORT_NAME: &CStr = c"nowait-launcher";
/// How long the process that starts the new program of an upgrade may take for a request and its answer.
/// Beyond it: the upgrade fails, and the old program serves on.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no upgrade of a confined server any more.
pub(crate) const ENDED: &str = "the process that starts the new program of an upgrade has exited (restart the server \
                                instead)";

/// The new programs that a launcher starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Starts {
    Nothing,
    /// The program at the path from which the server was started.
    Own,
    Any,
}

impl Starts {
    /// The launcher's purpose in its environment.
    fn purpose(self) -> &'static str {
        match self {
            Self::Nothing => "launcher-of-nothing",
            Self::Own => "launcher",
            Self::Any => "launcher-of-any",
        }
    }
}

/// Requests of the server.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Start a program, with the file of this message as its standard input.
    Start {
        binary: Option<OsString>,
    },
    /// End the program that was started.
    End,
    /// Names of files that later [`Request::Change`]s may be about; sent at most once. The files of this message are sockets:
    /// requests for addresses of hosts arrive at all but the last one if there is a `command`, the program that prints
    /// credentials, and requests for credentials at the last one.
    Keep {
        names: OwnedPaths,
        command: Option<String>,
    },
    Change(Change),
}

/// The process of what was started, or why nothing was.
type Answer = Result<u32, String>;

/// The launcher of this server.
pub(crate) struct Launcher {
    /// `None` once it has ended.
    process: Mutex<Option<Process>>,
    path: PathBuf,
    starts: Starts,
    quiet: bool,
    /// The limit of descriptors with which this server was started: that of each program it starts.
    descriptors: Rlimit,
    /// Additional environment variables of the launcher.
    variables: Vec<(String, String)>,
}

/// The process, and this end of the connection to it.
struct Process {
    channel: Arc<Channel>,
    child: Child,
}

impl Launcher {
    /// Starts the process, from one that forks no more. To be called before this process is confined. It `starts` programs with the limit
    /// `descriptors`, has the `variables` in its environment, and is `quiet` if it may not hold the caller's output open.
    ///
    /// # Errors
    /// A line that says what is missing.
    pub(crate) fn start(
        _: &Detached,
        starts: Starts,
        quiet: bool,
        descriptors: Rlimit,
        variables: Vec<(String, String)>,
    ) -> Result<Arc<Self>, String> {
        let path = std::env::current_exe().map_err(cannot_start)?;
        let process = Mutex::new(None);
        let launcher = Arc::new(Self { process, path, starts, quiet, descriptors, variables });
        *launcher.lock() = Some(launcher.spawn()?);
        Ok(launcher)
    }

    fn spawn(self: &Arc<Self>) -> Result<Process, String> {
        let (channel, far) = Channel::pair().map_err(cannot_start)?;
        let mut command = Command::new(&self.path);
        command.arg0(NAME).args(std::env::args_os().skip(1)).stdin(far);
        command.env(ENVIRONMENT, self.starts.purpose());
        command.envs(self.variables.iter().cloned());
        if self.quiet {
            command.stdout(Stdio::null()).stderr(Stdio::null());
        }
        let child = command.spawn().map_err(cannot_start)?;
        // It starts nothing before it is asked to. Lowering a limit is always allowed.
        let pid = Pid::from_raw(child.id() as i32);
        let _ = prlimit(pid, Resource::Nofile, self.descriptors);
        let (channel, launcher) = (Arc::new(channel), Arc::downgrade(self));
        let watched = channel.clone();
        let watch = move || {
            let _ = watched.wait_ended();
            if let Some(launcher) = launcher.upgrade() {
                launcher.on_ended(&watched);
            }
        };
        let watcher = thread::Builder::new().name("launcher".into()).spawn(watch);
        watcher.map_err(cannot_start)?;
        Ok(Process { channel, child })
    }

    /// The process at the other end of `channel` has ended, or this one has closed the connection.
    fn on_ended(&self, channel: &Arc<Channel>) {
        let ended = self.lock().take_if(|process| Arc::ptr_eq(&process.channel, channel));
        if let Some(Process { mut child, .. }) = ended {
            match self.starts {
                Starts::Nothing => {
                    warn!("the process that removes the names of this server has exited")
                }
                Starts::Own | Starts::Any => warn!("{ENDED}"),
            }
            // Without the lock: it may take long to end.
            let _ = child.wait();
        }
    }

    /// Why no upgrade is possible any more, if that is so. Does not wait.
    pub(crate) fn warning(&self) -> Option<&'static str> {
        // While it is locked it is being asked.
        let has_ended = self.process.try_lock().is_ok_and(|process| process.is_none());
        (has_ended && self.starts == Starts::Own).then_some(ENDED)
    }

    /// Starts `binary`, or the program at the path from which this one was started, at the other
    /// end of the channel that is returned. Where any program may be started, that includes another
    /// launcher in place of one that has ended.
    ///
    /// # Errors
    /// It may not or cannot be started.
    pub(crate) fn launch(
        self: &Arc<Self>,
        binary: Option<&Path>,
    ) -> Result<(Channel, Launched), ControlError> {
        if let Some(binary) =
            binary.filter(|binary| self.starts != Starts::Any && *binary != self.path)
        {
            return Err(ControlError::Forbidden(format!(
                "{}: a confined server takes its new program only at {} (or start it with --sandbox off)",
                binary.display(),
                self.path.display()
            )));
        }
        let (channel, far) = Channel::pair().map_err(failed)?;
        let binary = binary.map(|path| path.as_os_str().to_owned());
        let answer = self.ask(&Request::Start { binary }, far.as_fd())?;
        let process = answer.map_err(ControlError::Failed)?;
        Ok((channel, Launched { launcher: Some(self.clone()), process }))
    }

    /// From now on the launcher changes these `names` where this process may not, and if it `looks_up` them, the addresses
    /// of hosts come from it. Credentials come from the program of the `command`, if there is one.
    ///
    /// # Errors
    /// It has ended, or does not answer; there are not enough descriptors.
    pub(crate) fn keep(
        self: &Arc<Self>,
        names: OwnedPaths,
        looks_up: bool,
        command: Option<String>,
    ) -> Result<(), CliError> {
        let failed = |error: io::Error| CliError::new(cannot_start(error));
        let client = looks_up.then(HostNameClient::new).transpose().map_err(failed)?;
        let program = command.is_some().then(CredentialClient::new).transpose();
        let program = program.map_err(|error| failed(error.into()))?;
        let ((client, hosts), (program, output)) = (client.unzip(), program.unzip());
        let far: Vec<_> = hosts.iter().flatten().chain(&output).map(AsFd::as_fd).collect();
        let kept = self.ask_present(&Request::Keep { names, command }, &far).map_err(cannot_start);
        kept.and_then(|message| message.body).map_err(CliError::new)?;
        if let Some(client) = client {
            nowait_remote::look_up_names_by(Box::new(move |host| client.ask(host)));
        }
        if let Some(client) = program {
            let run = Box::new(move |command: &str| client.ask(command));
            nowait_remote::run_credential_processes_by(run);
        }
        let launcher = self.clone();
        owned_paths::change_by(Box::new(move |change| launcher.change(change)));
        Ok(())
    }

    /// Has the launcher do `change`. Returns the file that it has opened.
    ///
    /// # Errors
    /// Like [`OwnedPaths::change`]; the launcher has ended, or does not answer.
    fn change(&self, change: Change) -> io::Result<Option<File>> {
        let Message { body, mut files, .. } = self.ask_present(&Request::Change(change), &[])?;
        body.map_err(io::Error::other)?;
        Ok(files.pop().map(File::from))
    }

    /// Asks the launcher that there is.
    fn ask_present(
        &self,
        request: &Request,
        files: &[BorrowedFd<'_>],
    ) -> io::Result<Message<Answer>> {
        match &*self.lock() {
            Some(Process { channel, .. }) => {
                exchange(channel, request, files, Bounds::ANSWER_WITH_FILE)
            }
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Asks the launcher, or another one in place of one that has ended, where there may be another.
    fn ask(
        self: &Arc<Self>,
        request: &Request,
        file: BorrowedFd<'_>,
    ) -> Result<Answer, ControlError> {
        let mut process = self.lock();
        if let Some(Process { channel, .. }) = &*process {
            match exchange(channel, request, &[file], Bounds::ANSWER) {
                Err(error) if has_ended(&error) => {}
                answer => return answer.map(|message| message.body).map_err(failed),
            }
        }
        if self.starts != Starts::Any {
            return Err(ControlError::Conflict(ENDED.into()));
        }
        let next = self.spawn().map_err(ControlError::Failed)?;
        let channel = next.channel.clone();
        if let Some(Process { mut child, .. }) = process.replace(next) {
            let _ = child.wait();
        }
        let answer = exchange(&channel, request, &[file], Bounds::ANSWER);
        answer.map(|message| message.body).map_err(failed)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks the launcher at the other end of `channel`, which is asked nothing more if that fails: a later
/// answer would be taken for that to another request.
fn exchange(
    channel: &Channel,
    request: &Request,
    files: &[BorrowedFd<'_>],
    bounds: Bounds,
) -> io::Result<Message<Answer>> {
    let deadline = Instant::now() + TIMEOUT;
    let sent = channel.send(request, &[], files, deadline);
    sent.and_then(|()| channel.receive(deadline, bounds)).inspect_err(|_| channel.close())
}

fn has_ended(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

fn failed(error: io::Error) -> ControlError {
    ControlError::Failed(format!("no program can be started: {}", os_message(&error)))
}

fn cannot_start(error: io::Error) -> String {
    format!("no process can be started: {}", os_message(&error))
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
            // A launcher that has ended has no process to end: a new program without an old one ends.
            if let Some(Process { channel, .. }) = &*launcher.lock() {
                let _ = exchange(channel, &Request::End, &[], Bounds::ANSWER);
            }
        }
    }
}

/// If this process was started as a launcher, does its work and returns how it ends.
pub fn run_if_asked() -> Option<u8> {
    let purpose = std::env::var_os(ENVIRONMENT)?;
    // At once: later the file at this path may be another one, and this one has none.
    let own =
        std::env::current_exe().map_err(|error| format!("its program: {}", os_message(&error)));
    let starts = [Starts::Nothing, Starts::Own, Starts::Any];
    let starts = starts.into_iter().find(|starts| purpose == starts.purpose())?;
    // It fails for no such name.
    let _ = rustix::thread::set_name(SHORT_NAME);
    // Signals that a terminal sends to all its processes is for the server, with which this one ends. New
    // programs have the signals' defaults.
    for signal in [SIGINT, SIGTERM, SIGQUIT, SIGHUP] {
        let _ = signal_hook::flag::register(signal, Arc::default());
    }
    let Ok(channel) = Channel::of_standard_input() else { return Some(1) };
    let mut work: Work<Child> = Work { own, starts, started: None, names: None, credentials: None };
    while let Ok(message) = channel.receive::<Request>(None, Bounds::REQUEST) {
        let (answer, file) = match work.answer(message.body, message.files) {
            Ok((process, file)) => (Ok(process), file),
            Err(why) => (Err(why), None),
        };
        let files: Vec<BorrowedFd<'_>> = file.iter().map(AsFd::as_fd).collect();
        let answer: Answer = answer;
        if channel.send(&answer, &[], &files, Instant::now() + TIMEOUT).is_err() {
            break;
        }
    }
    // The program that gives credentials is ended with the server.
    work.credentials.into_iter().for_each(|thread| drop(thread.join()));
    Some(0)
}

/// A program that was started.
pub(crate) trait Program: Sized {
    /// Starts the program at `path` with `input`.
    ///
    /// # Errors
    /// One line that says why it cannot be started.
    fn start(path: &Path, input: Stdio) -> Result<Self, String>;

    /// The number of its process.
    fn number(&self) -> u32;

    /// Whether it has not ended yet.
    fn runs(&mut self) -> bool;

    /// Ends it.
    fn end(self);
}

/// The work of a launcher.
pub(crate) struct Work<P> {
    /// The path of the program, or why it is not known.
    pub(crate) own: Result<PathBuf, String>,
    pub(crate) starts: Starts,
    pub(crate) started: Option<P>,
    pub(crate) names: Option<OwnedPaths>,
    /// The thread that has a program give credentials.
    pub(crate) credentials: Option<JoinHandle<()>>,
}

impl<P: Program> Work<P> {
    /// Does what the server asks for, which has sent `files`. Returns the process that was started, or 0, and the
    /// file that was opened.
    pub(crate) fn answer(
        &mut self,
        request: Request,
        mut files: Vec<OwnedFd>,
    ) -> Result<(u32, Option<File>), String> {
        match request {
            Request::End => {
                self.started.take().into_iter().for_each(P::end);
                Ok((0, None))
            }
            Request::Start { .. } if self.starts == Starts::Nothing => {
                Err("this server is not upgraded".into())
            }
            Request::Start { .. } if self.started.as_mut().is_some_and(P::runs) => {
                Err("another new program is running".into())
            }
            Request::Start { binary } => {
                let given = binary.filter(|_| self.starts == Starts::Any).map(PathBuf::from);
                let path = given.map_or_else(|| self.own.clone(), Ok)?;
                let program = P::start(&path, files.pop().map_or_else(Stdio::null, Stdio::from))?;
                let number = program.number();
                self.started = Some(program);
                Ok((number, None))
            }
            Request::Keep { .. } if self.names.is_some() => Err("there are names already".into()),
            Request::Keep { names, command } => {
                let end = command.and_then(|command| Some((files.pop()?, command)));
                if let Some((end, command)) = end {
                    secrets::keep_in_memory();
                    let answer = move || credential_processes::answer(&end, &command);
                    self.credentials = Some(spawn("credentials", answer)?);
                }
                for end in files {
                    let answer = move || host_names::answer(&end, nowait_remote::looked_up_here);
                    spawn("resolve", answer)?;
                }
                self.names = Some(names);
                Ok((0, None))
            }
            Request::Change(change) => {
                let names = self.names.as_ref().ok_or("there are no names")?;
                let file = names.change(&change).map_err(|error| os_message(&error))?;
                Ok((0, file))
            }
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, String> {
    thread::Builder::new().name(name.into()).spawn(run).map_err(|error| os_message(&error))
}

impl Program for Child {
    fn start(path: &Path, input: Stdio) -> Result<Self, String> {
        let mut command = Command::new(path);
        command.args(std::env::args_os().skip(1)).env(ENVIRONMENT, SUCCESSOR).stdin(input);
        // The manager's watchdog waits for the server, whatever its number.
        command.env_remove("WATCHDOG_PID");
        command.spawn().map_err(|error| format!("{}: {}", path.display(), os_message(&error)))
    }

    fn number(&self) -> u32 {
        self.id()
    }

    fn runs(&mut self) -> bool {
        matches!(self.try_wait(), Ok(None))
    }

    fn end(mut self) {
        // It may have ended by itself.
        let _ = self.kill();
        let _ = self.wait();
    }
}
