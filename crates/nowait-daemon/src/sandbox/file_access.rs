//! The files that a confined process may open, by landlock.
//!
//! Invariant: what is not listed cannot be opened, made, renamed or removed by path, and no program
//! can be executed; descriptors that are open keep what they can do. A path that does not exist when
//! the sandbox is entered gives no rights.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope, make_bitflags,
};
use rustix::thread::CapabilitySet;

use crate::error::CliError;
use crate::sandbox::all_threads;
use crate::sandbox::failed;

/// The kinds of access that are forbidden unless listed. Of a kernel that does not know them all,
/// those that it knows.
const HANDLED: ABI = ABI::V8;

/// Paths, and what may be done with them and with what is below them; and the TCP ports that may be
/// connected to.
#[derive(Clone, Debug, Default)]
pub struct FileAccess {
    paths: BTreeMap<PathBuf, BitFlags<AccessFs>>,
    ports: Vec<u16>,
    /// Connections to Unix sockets may be made.
    sockets: bool,
    /// A driver is told what only an administrator may tell it.
    administers: bool,
    /// Why there is no such restriction.
    unrestricted: Option<&'static str>,
}

/// The capabilities that a confined server keeps: to open the images and keys of other users, without a change of their
/// access times, and to lock memory.
const KEPT: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::IPC_LOCK);

impl FileAccess {
    /// `path` and what is below it may be read.
    pub fn read(&mut self, path: impl AsRef<Path>) {
        self.add(path, make_bitflags!(AccessFs::{ReadFile | ReadDir}));
    }

    /// `path` and what is below it may be read and written; no entry of a directory changes.
    pub fn write(&mut self, path: impl AsRef<Path>) {
        let access =
            make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | Truncate | IoctlDev});
        self.add(path, access);
    }

    /// Regular files below `directory` may be read, written, made, renamed and removed.
    pub fn change(&mut self, directory: impl AsRef<Path>) {
        self.write(&directory);
        self.add(directory, make_bitflags!(AccessFs::{MakeReg | RemoveFile}));
    }

    /// Unix sockets below `directory` may be made and removed.
    pub fn make_sockets(&mut self, directory: impl AsRef<Path>) {
        self.add(directory, make_bitflags!(AccessFs::{ReadDir | MakeSock | RemoveFile}));
    }

    /// Connections to this TCP port of any host may be made.
    pub fn connect(&mut self, port: u16) {
        self.ports.push(port);
    }

    /// Connections to Unix sockets may be made: to any, for landlock does not tell them apart.
    pub fn connect_sockets(&mut self) {
        self.sockets = true;
    }

    /// The capability CAP_SYS_ADMIN stays, if this process has it.
    pub fn administer(&mut self) {
        self.administers = true;
    }

    /// There is no restriction, because of `why`.
    pub fn allow_all(&mut self, why: &'static str) {
        self.unrestricted = Some(why);
    }

    /// Whether connections may be made.
    pub(super) fn connects(&self) -> bool {
        self.sockets || self.connects_by_tcp()
    }

    /// Whether connections by TCP may be made.
    pub(crate) fn connects_by_tcp(&self) -> bool {
        self.unrestricted.is_some() || !self.ports.is_empty()
    }

    /// Whether threads that cannot be restricted find their servers by themselves.
    pub(super) fn is_unrestricted(&self) -> bool {
        self.unrestricted.is_some()
    }

    fn add(&mut self, path: impl AsRef<Path>, access: BitFlags<AccessFs>) {
        *self.paths.entry(path.as_ref().to_owned()).or_default() |= access;
    }
}

/// Restricts all threads of this process to `files`. The inner error says why the kernel cannot do
/// it.
///
/// # Errors
/// Some threads may be restricted, and others are not.
pub(super) fn enter(files: &FileAccess) -> Result<Result<(), String>, CliError> {
    if let Some(why) = files.unrestricted {
        return Ok(Err(why.into()));
    }
    let ruleset = match ruleset(files) {
        Ok(Some(ruleset)) => ruleset,
        Ok(None) => return Ok(Err("this kernel has no Landlock, or it is not enabled".into())),
        Err(error) => return Ok(Err(error.to_string())),
    };
    let mut kept = KEPT;
    kept.set(CapabilitySet::SYS_ADMIN, files.administers);
    all_threads::restrict(ruleset.as_fd(), kept).map(Ok).map_err(failed)
}

/// The ruleset of `files`; `None` where the kernel has no landlock.
fn ruleset(files: &FileAccess) -> Result<Option<OwnedFd>, RulesetError> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(HANDLED))?
        .handle_access(AccessNet::from_all(HANDLED))?
        // No signal to, and no abstract socket of, a process that is not confined with this one.
        .scope(Scope::from_all(HANDLED))?
        .create()?;
    for port in &files.ports {
        ruleset = ruleset.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    for (path, access) in &files.paths {
        // A missing path needs no access.
        let Ok(found) = PathFd::new(path) else { continue };
        if path.starts_with("/proc") {
            keep_open(&found);
        }
        let access = if path.is_dir() { *access } else { *access & AccessFs::from_file(HANDLED) };
        if !access.is_empty() {
            ruleset = ruleset.add_rule(PathBeneath::new(found, access))?;
        }
    }
    Ok(ruleset.into())
}

/// Keeps `file` open as long as this process runs: an entry of /proc that nothing has open may become
/// another file, which has no rule.
fn keep_open(file: &PathFd) {
    if let Ok(kept) = file.as_fd().try_clone_to_owned() {
        let _ = kept.into_raw_fd();
    }
}
