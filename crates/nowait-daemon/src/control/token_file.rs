//! The files with the tokens for control interfaces on TCP.
//!
//! Invariant: a token is taken only from a file of this user or root that no other user can read; one that is made here
//! is new, has mode 0600 from its beginning, and 256 random bits.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{CliError, create_message, open_message};
use nowait_control::Token;
use nowait_nbd::secret_file;

use crate::control::control_socket;
use crate::process::owned_paths;

/// The permission bits of others than the owner.
const OTHERS: u32 = 0o077;
/// The longest file with a token, in bytes.
/// Beyond it: the file is refused.
const MAX_BYTES: u64 = 4096;

/// A file that is removed when this is dropped: one that was made here or, once this process serves,
/// one that was taken over.
pub(crate) struct OwnTokenFile {
    path: PathBuf,
    is_own: bool,
}

impl OwnTokenFile {
    /// This process serves: the program before it needs the file no more.
    pub(crate) fn own(self) -> Self {
        let mut owned = self;
        owned.is_own = true;
        owned
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Another process uses it from now on.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for OwnTokenFile {
    fn drop(&mut self) {
        if self.is_own {
            // The user may have removed it.
            let _ = owned_paths::remove_file(&self.path);
        }
    }
}

/// The file for the server at `port` of this host where none was given; `None` where there is no
/// directory for it.
pub fn of_port(port: u16) -> Option<PathBuf> {
    Some(control_socket::directory()?.join(format!("control-{port}.token")))
}

/// Reads the token in `path`.
///
/// # Errors
/// The file cannot be read, is another user's, others can read it, or it has no token.
pub fn read(path: &Path) -> Result<Token, CliError> {
    let (bytes, found) = secret_file::read(path, MAX_BYTES)
        .map_err(|error| CliError::at(path, open_message(path, "read", &error)))?;
    if found.mode() & OTHERS != 0 {
        return Err(CliError::at(path, "other users may read this token (chmod 600 it)"));
    }
    Token::parse(&String::from_utf8_lossy(&bytes)).map_err(|why| CliError::at(path, why))
}

/// Makes a token for the server at `port`, or, if it `is_taken_over`, reads the one that it has.
///
/// # Errors
/// There is no directory for it, or it cannot be written.
pub(crate) fn make(port: u16, is_taken_over: bool) -> Result<(Token, OwnTokenFile), CliError> {
    let no_directory =
        || CliError::new("there is no directory for a token (give a file by --control-token)");
    let path = of_port(port).ok_or_else(no_directory)?;
    if is_taken_over && let Ok(token) = read(&path) {
        return Ok((token, OwnTokenFile { path, is_own: false }));
    }
    let text =
        write_new(&path).map_err(|error| CliError::at(&path, create_message("write", &error)))?;
    let token = Token::parse(&text).map_err(|why| CliError::at(&path, why))?;
    Ok((token, OwnTokenFile { path, is_own: true }))
}

fn write_new(path: &Path) -> io::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    // A file that is there belonged to a server which was killed: the port is this one's.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{text}")?;
    Ok(text)
}

#[cfg(test)]
#[cfg(feature = "control")]
mod tests {
    use std::os::unix::fs::{lchown, symlink};

    use super::*;

    #[test]
    fn a_pipe_and_a_file_or_link_of_another_user_have_no_token() {
        let directory = tempfile::tempdir().unwrap();
        let (pipe, file) = (directory.path().join("pipe"), directory.path().join("file"));
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        assert!(read(&pipe).unwrap_err().to_string().contains("not a regular file"));
        let mut new =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&file).unwrap();
        writeln!(new, "0123456789abcdef").unwrap();
        read(&file).unwrap();
        // Kubernetes keeps its secrets so.
        let (link, twice) = (directory.path().join("link"), directory.path().join("twice"));
        symlink(directory.path().join("file"), &link).unwrap();
        symlink("link", &twice).unwrap();
        read(&twice).unwrap();
        match lchown(&link, Some(1), None) {
            Ok(()) => {
                assert!(read(&twice).unwrap_err().to_string().contains("a link of another user"));
                lchown(&file, Some(1), None).unwrap();
                assert!(read(&file).unwrap_err().to_string().contains("another user's"));
            }
            Err(_) => nowait_testkit::say_skipped("needs root: to give a file to another user"),
        }
    }

    #[test]
    fn the_file_of_another_program_stays_until_this_one_serves() {
        let path = std::env::temp_dir().join(format!("nowait-token-{}", std::process::id()));
        fs::write(&path, "0123456789abcdef").unwrap();
        drop(OwnTokenFile { path: path.clone(), is_own: false });
        assert!(path.exists());
        drop(OwnTokenFile { path: path.clone(), is_own: false }.own());
        assert!(!path.exists());
    }
}
