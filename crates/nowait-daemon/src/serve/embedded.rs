//! A server within a process that does other work, too: a test, or a program that has more to do than to serve.
//!
//! Invariant: it sets no signal handler, confines nothing, takes nothing that the process was given, and ends when that is
//! asked for; several run simultaneously. Of the state of the process it changes what keeps private keys in its memory, and
//! the limit for blocks of objects.

use std::fmt;
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

use crate::config::ServeConfig;
use crate::config::choices::SandboxChoice;
use crate::endpoints::signals::Ending;
use crate::error::{CliError, os_message};
use crate::serve::plan::Plan;
use crate::serve::{Context, Output, serve};

/// A server on threads of this process. It ends when it is dropped: then an error of the last flush is lost.
pub struct EmbeddedServer {
    ending: Ending,
    /// `None` when it has been waited for.
    thread: Option<JoinHandle<Result<(), CliError>>>,
    ready_lines: String,
}

/// Sends the ready lines.
struct Ready(Sender<String>);

impl Output for Ready {
    fn ready(&self, lines: &str) {
        // It is received as long as the start waits.
        let _ = self.0.send(lines.to_owned());
    }

    fn note(&self, _: fmt::Arguments<'_>) {}
}

impl EmbeddedServer {
    /// Serves the images of `config`; returns when clients can connect. It is not confined, and cannot be upgraded.
    ///
    /// # Errors
    /// Like [`serve::run`](super::run); an option is about the process: its messages, its number, its parent, its sandbox, its
    /// memory (`--io-flusher`, `--ublk`), or a descriptor that it has inherited.
    pub fn start(config: ServeConfig) -> Result<Self, CliError> {
        config.check().and_then(|()| check(&config)).map_err(CliError::new)?;
        let config = ServeConfig { sandbox: SandboxChoice::Off, ..config };
        let ending = Ending::on_request();
        let (sender, ready) = mpsc::channel();
        let of_server = ending.clone();
        let serves = move || {
            let (output, mut waiting) = (Ready(sender), Vec::new());
            let context = Context {
                config: &config,
                output: &output,
                embedded: Some(of_server),
                receiver: None,
                waiting: &mut waiting,
            };
            serve(Plan::of_embedded(context))
        };
        let thread = thread::Builder::new().name("nowait-server".into()).spawn(serves);
        let thread = thread.map_err(|error| CliError::new(os_message(&error)))?;
        let mut server = Self { ending, thread: Some(thread), ready_lines: String::new() };
        match ready.recv() {
            Ok(lines) => server.ready_lines = lines,
            Err(_) => server.wait()?,
        }
        Ok(server)
    }

    /// The lines that say where clients can connect, or one that is a JSON object.
    pub fn ready_lines(&self) -> &str {
        &self.ready_lines
    }

    /// Lets the requests in flight end, for 10 s at most, flushes the images and closes them.
    ///
    /// # Errors
    /// A queue has failed, or the flush.
    pub fn stop(mut self) -> Result<(), CliError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), CliError> {
        self.ending.ask();
        self.wait()
    }

    fn wait(&mut self) -> Result<(), CliError> {
        let ended = self.thread.take().map(JoinHandle::join);
        ended.unwrap_or(Ok(Ok(()))).unwrap_or_else(|_| Err(CliError::new("a thread has panicked")))
    }
}

impl Drop for EmbeddedServer {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Refuses what is about the process.
///
/// # Errors
/// A message that names the option.
fn check(config: &ServeConfig) -> Result<(), String> {
    let given = [
        (config.fork, "--fork"),
        (config.exit_with_parent, "--exit-with-parent"),
        (config.pid_file.is_some(), "--pid-file"),
        (config.log_file.is_some(), "--log-file"),
        (config.io_flusher, "--io-flusher"),
        (config.sandbox == SandboxChoice::On, "--sandbox on"),
    ];
    let given = given.into_iter().find(|(is_given, _)| *is_given).map(|(_, option)| option);
    let of_devices = || config.devices().into_iter().find_map(|devices| devices.needs_process());
    match given.or_else(of_devices) {
        Some(option) => Err(format!("{option} is for a process that does nothing but serve")),
        None => Ok(()),
    }
}
