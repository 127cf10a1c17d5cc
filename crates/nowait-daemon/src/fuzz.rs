//! The messages of an upgrade from a server that was taken over, for fuzz targets.
//!
//! Invariant: the verdict depends only on the bytes; all files are in the given directory.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nowait_remote::CredentialOutput;

use crate::config::{ServeConfig, config_file};
use crate::process::owned_paths::{OwnedPaths, OwnedPidFile};
use crate::upgrade::credential_processes;
use crate::upgrade::launcher::{Program, Request, Starts, Work};
use crate::upgrade::messages::{Begin, ExportState, ListenerState};
use crate::upgrade::receiver_policy::ReceiverPolicy;

/// The program that the launcher may start, below the directory.
const PROGRAM: &str = "program";
/// The configuration of the server, in which DIR is the directory.
const CONFIG: &str = "
nbd = ['unix:DIR/socket']
control = ['unix:DIR/control']
allow-dir = ['DIR/images']
backing-dir = ['DIR/below']
format = 'raw'
pid-file = 'DIR/pid'
log-file = 'DIR/log'
[[export]]
image = 'DIR/disk'
";
/// The command line of the program that gives credentials.
const CREDENTIAL_COMMAND: &str = "credentials --of me";
/// Files, which stay: none of them is one of the server's names.
const FILES: [&str; 5] = ["disk", "neighbour", "images/added", "below/base", "program"];

/// A launcher and the command line of its server, to which the server sends what it likes.
pub struct TakenOverServer {
    directory: PathBuf,
    config: ServeConfig,
}

/// A program that runs until it is ended, and starts only where one may.
struct Fake;

impl Program for Fake {
    fn start(path: &Path, _input: Stdio) -> Result<Self, String> {
        match path.ends_with(PROGRAM) {
            true => Ok(Self),
            false => Err(format!("FINDING: {} is started", path.display())),
        }
    }

    fn number(&self) -> u32 {
        1
    }

    fn runs(&mut self) -> bool {
        true
    }

    fn end(self) {}
}

impl TakenOverServer {
    /// A server whose files are in `directory`, which is empty.
    ///
    /// # Errors
    /// A file cannot be made.
    pub fn new(directory: &Path) -> Result<Self, String> {
        let failed = |error: std::io::Error| error.to_string();
        let directory = directory.canonicalize().map_err(failed)?;
        for name in ["images", "below", "made"] {
            fs::create_dir(directory.join(name)).map_err(failed)?;
        }
        for name in FILES {
            fs::write(directory.join(name), name).map_err(failed)?;
        }
        symlink("../neighbour", directory.join("images/link")).map_err(failed)?;
        let text = CONFIG.replace("DIR", &directory.to_string_lossy());
        let config = config_file::parse(&text).map_err(|(line, why)| format!("{line}: {why}"))?;
        Ok(Self { directory, config })
    }

    /// Receives the messages in `bytes`, which are separated by line feeds: JSON in which DIR is the directory, and
    /// `<PATH>` a path of the system.
    ///
    /// # Errors
    /// The server got something that its command line does not give.
    pub fn receives(&self, bytes: &[u8]) -> Result<(), String> {
        let mut work = self.launcher()?;
        let text = String::from_utf8_lossy(bytes);
        let text = with_paths(&text.replace("DIR", &self.directory.to_string_lossy()));
        for message in text.split('\n') {
            if let Ok(request) = serde_json::from_str::<Request>(message) {
                let kept = matches!(request, Request::Keep { .. });
                match work.answer(request, Vec::new()) {
                    Err(why) if why.starts_with("FINDING") => return Err(why),
                    Ok(_) if kept => return Err("the names were recorded a second time".into()),
                    _ => {}
                }
            }
            runs_only_its_program(message.as_bytes())?;
            if let Ok(begin) = serde_json::from_str::<Begin>(message) {
                self.begins(&begin)?;
            }
        }
        self.stays_whole()
    }

    /// The launcher, whose server has just been confined.
    fn launcher(&self) -> Result<Work<Fake>, String> {
        let at = |name: &str| self.directory.join(name);
        let mut names = OwnedPaths::default();
        for name in ["socket", "control", "pid.1"] {
            fs::write(at(name), "1\n").map_err(|error| error.to_string())?;
        }
        names.file(&at("socket"));
        names.file(&at("control"));
        names.directory(&at("made"));
        names.log_file(&at("log"));
        let (path, temporary) = (at("pid"), at("pid.1"));
        names.pid_file(&OwnedPidFile { path, temporary, content: "1\n".into() });
        Ok(Work {
            own: Ok(at(PROGRAM)),
            starts: Starts::Own,
            started: None,
            names: Some(names),
            credentials: None,
        })
    }

    /// Validates `begin` as a program that takes over does.
    fn begins(&self, begin: &Begin) -> Result<(), String> {
        let policy = ReceiverPolicy::of(&self.config, None).map_err(|error| error.to_string())?;
        let listeners = begin.listeners.iter().chain(&begin.control_tcp);
        if policy
            .check(&begin.exports, listeners.clone(), begin.control.as_ref(), &begin.nodes())
            .is_err()
        {
            return Ok(());
        }
        begin.exports.iter().try_for_each(|state| self.export_is_right(state))?;
        listeners.clone().try_for_each(|state| self.socket_is_right(state, "socket"))?;
        begin.control.iter().try_for_each(|state| self.socket_is_right(state, "control"))?;
        begin.nodes().first().map_or(Ok(()), |node| Err(format!("a block device: {node:?}")))
    }

    fn export_is_right(&self, state: &ExportState) -> Result<(), String> {
        let at = |name: &str| self.directory.join(name);
        let is_in = |path: &OsStr, directories: &[PathBuf]| {
            let real = Path::new(path).canonicalize().ok();
            real.is_some_and(|real| directories.iter().any(|it| real.starts_with(it)))
        };
        let is_given = state.image == at("disk") && state.format.as_deref() == Some("raw");
        let is_added = is_in(&state.image, &[at("images")]);
        if !is_given && !is_added {
            return Err(format!("an image: {}", state.image.display()));
        }
        let mut allowed: Vec<PathBuf> = vec![at("images"), at("below")];
        allowed.retain(|path| path.is_dir());
        for directory in &state.backing_dirs {
            let is_own = Path::new(directory).canonicalize().is_ok_and(|it| it == self.directory);
            if !is_own && !is_in(directory, &allowed) {
                return Err(format!("a directory of images below: {}", directory.display()));
            }
        }
        match state.backing.iter().find(|name| **name != at("disk").to_string_lossy()) {
            Some(name) => Err(format!("an image below: {name}")),
            None => Ok(()),
        }
    }

    /// A socket that is removed at the end is the server's own.
    fn socket_is_right(&self, state: &ListenerState, name: &str) -> Result<(), String> {
        let own = self.directory.join(name);
        let is_right = match &state.path {
            Some(path) => !state.is_own || *path == own,
            None => true,
        };
        match is_right && state.temporary.is_none() {
            true => Ok(()),
            false => Err(format!("a socket: {state:?}")),
        }
    }

    fn stays_whole(&self) -> Result<(), String> {
        let is_there = |name: &str| fs::read_to_string(self.directory.join(name));
        if let Some(name) = FILES.iter().find(|name| is_there(name).ok().as_deref() != Some(name)) {
            return Err(format!("{name} is changed or gone"));
        }
        let _ = fs::create_dir(self.directory.join("made"));
        let known = ["disk", "neighbour", "images", "below", "program", "made"];
        let passing = ["socket", "control", "pid", "pid.1", "log"];
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let names: BTreeSet<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        let other = names.iter().find(|name| ![&known[..], &passing].concat().contains(&&***name));
        other.map_or(Ok(()), |name| Err(format!("{name} was made")))
    }
}

/// Sends `request` to the launcher's thread that has credentials given.
fn runs_only_its_program(request: &[u8]) -> Result<(), String> {
    let mut ran = None;
    credential_processes::reply(request, CREDENTIAL_COMMAND, |command| {
        ran = Some(command.to_owned());
        CredentialOutput::failed("is not run here")
    });
    match ran.filter(|command| command != CREDENTIAL_COMMAND || request != command.as_bytes()) {
        Some(command) => Err(format!("a program for credentials: {command}")),
        None => Ok(()),
    }
}

/// `text` with each `<PATH>` as serde has a path of the system: by its bytes.
fn with_paths(text: &str) -> String {
    let mut pieces = text.split('<');
    let mut with_paths = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (path, rest) = piece.split_once('>').unwrap_or((piece, ""));
        with_paths += &format!("{{\"Unix\":{:?}}}{rest}", path.as_bytes());
    }
    with_paths
}
