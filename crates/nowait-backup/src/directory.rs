//! A chain in a directory.
//!
//! Invariant: one process adds or removes points at a time; none are removed while another reads. A file is durable,
//! with its name, before a manifest names it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nowait_image::{AtomicFile, OverwritePolicy, os_message};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use crate::place::{Access, FileName, NewFile, Place, Put, StoredFile};

/// The file that marks a directory as that of a chain; who adds or removes points has it locked.
const LOCK: &str = "nowait-backup.lock";
/// Appended bytes are gathered to writes of this size.
const BUFFER_BYTES: usize = 1 << 20;

/// A directory with the files of a chain.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// The directory itself, locked by who reads, and by who removes what is read.
    directory: Arc<File>,
    /// Held locked by who adds or removes.
    _lock: Option<File>,
}

impl Directory {
    /// Opens the directory at `path`, and locks it.
    ///
    /// # Errors
    /// It is absent or has other files; another process uses it.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, String> {
        let message = |error: io::Error| os_message(&error);
        if access == Access::Add {
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(format!("cannot make the directory: {}", message(error)));
                }
                _ => {}
            }
        }
        let directory = Arc::new(File::open(path).map_err(message)?);
        let marked = fs::symlink_metadata(path.join(LOCK)).is_ok_and(|found| found.is_file());
        if !marked {
            let is_empty = fs::read_dir(path).map_err(message)?.next().is_none();
            match access {
                Access::Add if is_empty => {}
                Access::Add => return Err("it has other files, and no backups".into()),
                _ => return Err("there are no backups in it".into()),
            }
        }
        let lock = match access {
            Access::List | Access::Read => None,
            Access::Add | Access::Remove => Some(lock_file(&path.join(LOCK))?),
        };
        let operation = match access {
            Access::List | Access::Add => None,
            Access::Read => Some(FlockOperation::NonBlockingLockShared),
            Access::Remove => Some(FlockOperation::NonBlockingLockExclusive),
        };
        match operation.map_or(Ok(()), |operation| flock(&directory, operation)) {
            Err(Errno::WOULDBLOCK) if access == Access::Read => {
                return Err("points are being removed from it (try again)".into());
            }
            Err(Errno::WOULDBLOCK) => return Err("its points are being read (try again)".into()),
            // A file system without such locks.
            _ => {}
        }
        Ok(Self { path: path.to_owned(), directory, _lock: lock })
    }

    fn path_of(&self, name: FileName) -> PathBuf {
        self.path.join(name.to_string())
    }

    fn sync(&self) -> io::Result<()> {
        self.directory.sync_all()
    }
}

/// Locks the file that marks the directory of a chain.
fn lock_file(path: &Path) -> Result<File, String> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(path)
        .map_err(|error| format!("cannot make {LOCK}: {}", os_message(&error)))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Err("another backup or prune is at work in it".into()),
        // A file system without such locks.
        _ => Ok(file),
    }
}

impl Place for Directory {
    fn list(&self) -> Result<Vec<(FileName, u64)>, String> {
        let message = |error: io::Error| os_message(&error);
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(message)? {
            let entry = entry.map_err(message)?;
            let Some(name) = entry.file_name().to_str().and_then(FileName::parse) else { continue };
            match entry.metadata() {
                Ok(found) if found.is_file() => files.push((name, found.len())),
                Ok(_) => {}
                // Removed meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(message(error)),
            }
        }
        Ok(files)
    }

    fn open(&self, name: FileName) -> Result<Box<dyn StoredFile>, String> {
        let open = || {
            let mut options = OpenOptions::new();
            let nofollow = OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let file =
                options.read(true).custom_flags(nofollow.bits() as i32).open(self.path_of(name))?;
            let found = file.metadata()?;
            let len = found.is_file().then_some(found.len()).ok_or(Errno::INVAL)?;
            Ok(Opened { file, len })
        };
        match open() {
            Ok(file) => Ok(Box::new(file)),
            Err(error) => {
                let error: io::Error = error;
                Err(format!("cannot open {name}: {}", os_message(&error)))
            }
        }
    }

    fn create(&self, name: FileName, _: u64) -> Result<Box<dyn NewFile>, String> {
        let path = self.path_of(name);
        let failed = |error: io::Error| format!("cannot make {name}: {}", os_message(&error));
        let file = File::create_new(&path).map_err(failed)?;
        let buffer = Vec::with_capacity(BUFFER_BYTES);
        let (file, directory) = (Some(file), self.directory.clone());
        Ok(Box::new(Appended { file, name, path: Some(path), buffer, directory }))
    }

    fn put(&self, name: FileName, bytes: &[u8], put: Put) -> Result<(), String> {
        let path = self.path_of(name);
        let replaces = match fs::symlink_metadata(&path) {
            Ok(_) if put == Put::New => return Err(format!("there is {name} already")),
            Ok(found) => OverwritePolicy::File { mode: found.mode() },
            Err(_) => OverwritePolicy::Nothing,
        };
        // Data that the file names is durable under its name before.
        self.sync().map_err(|error| os_message(&error))?;
        let file = AtomicFile::create(&path, 0, replaces)?;
        let written = file.file().write_at(0, bytes);
        written.map_err(|error| format!("cannot write {name}: {}", os_message(&error)))?;
        file.finish()
    }

    fn remove(&self, name: FileName) -> Result<(), String> {
        let removed = fs::remove_file(self.path_of(name)).and_then(|()| self.sync());
        removed.map_err(|error| format!("cannot remove {name}: {}", os_message(&error)))
    }
}

struct Opened {
    file: File,
    len: u64,
}

impl StoredFile for Opened {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, pos: u64, bytes: &mut [u8]) -> Result<(), String> {
        self.file.read_exact_at(bytes, pos).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => "its file is too short".into(),
            _ => os_message(&error),
        })
    }
}

#[derive(Debug)]
struct Appended {
    /// `None` when it is complete.
    file: Option<File>,
    name: FileName,
    /// `None` when it stays.
    path: Option<PathBuf>,
    buffer: Vec<u8>,
    directory: Arc<File>,
}

impl Appended {
    fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| Errno::BADF.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file()?.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    fn failed(&self, error: &io::Error) -> String {
        format!("cannot write {}: {}", self.name, os_message(error))
    }
}

impl NewFile for Appended {
    fn append(&mut self, bytes: &[u8]) -> Result<(), String> {
        if self.buffer.len() + bytes.len() > BUFFER_BYTES {
            self.flush().map_err(|error| self.failed(&error))?;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    fn complete(&mut self) -> Result<(), String> {
        let synced = self.flush().and_then(|()| self.file()?.sync_all());
        let synced = synced.and_then(|()| self.directory.sync_all());
        (self.file, self.buffer) = (None, Vec::new());
        synced.map_err(|error| self.failed(&error))
    }

    fn keep(mut self: Box<Self>) {
        self.path = None;
    }
}

impl Drop for Appended {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            // The next backup removes what no manifest names.
            let _ = fs::remove_file(path);
        }
    }
}
