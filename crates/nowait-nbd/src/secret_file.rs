//! Files with secrets: private keys and tokens.
//!
//! Invariant: a secret comes from a regular file of this user or root, and from no file that a link of another user leads
//! to. (Directories are the user's to protect.) A pipe is not waited for.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// The most links that lead to a file with a secret, as many as the kernel follows (path_resolution(7)).
/// Beyond it: the file is refused.
const MAX_LINKS: usize = 40;

/// Reads the file at `path`, of which at most `most` bytes are looked at. Returns them, and what the kernel says of the
/// file.
///
/// # Errors
/// The errors of open(2) and read(2); `InvalidInput`, with a text: it is not a regular file, it or a link to it belongs to a user
/// other than this one and root.
pub fn read(path: &Path, most: u64) -> io::Result<(Vec<u8>, Metadata)> {
    let mut link = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = fs::read_link(&link) else { break };
        if !is_trusted(&fs::symlink_metadata(&link)?) {
            return refused("it is a link of another user");
        }
        link = link.parent().unwrap_or(Path::new("")).join(target);
    }
    // An open of a pipe would wait for its other end.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if found.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !found.is_file() {
        return refused("it is not a regular file");
    }
    if !is_trusted(&found) {
        return refused("it is another user's, who knows what is in it");
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok((bytes, found))
}

fn is_trusted(found: &Metadata) -> bool {
    found.uid() == 0 || found.uid() == geteuid().as_raw()
}

fn refused<T>(why: &str) -> io::Result<T> {
    Err(io::Error::new(ErrorKind::InvalidInput, why))
}
