//! `nowait create`: a new, sparse image.
//!
//! Invariant: what was there before stays as it was, and a failure leaves no file behind.
//! Knows: args, error, size. Known by: main.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::args::{CreateArgs, Format};
use crate::error::{CliError, reason};
use crate::size;

const MODE: u32 = 0o644;

pub(crate) fn run(args: &CreateArgs) -> Result<(), CliError> {
    match args.format {
        Format::Raw => raw(&args.image, args.size)?,
    }
    let (image, size) = (args.image.display(), size::human(args.size));
    writeln!(io::stdout(), "created {image}: {size}, sparse")
        .map_err(|e| CliError::new(format!("standard output: {}", reason(&e))))
}

/// Makes `path` a file of `bytes` zeros that takes no space yet.
fn raw(path: &Path, bytes: u64) -> Result<(), CliError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(MODE)
        .open(path)
        .map_err(|error| explain(path, &error))?;
    file.set_len(bytes).map_err(|error| {
        // Ours alone: create_new made it. If it cannot be removed, the first error still counts.
        let _ = fs::remove_file(path);
        explain(path, &error)
    })
}

fn explain(path: &Path, error: &io::Error) -> CliError {
    let what = match error.kind() {
        ErrorKind::AlreadyExists => "there is such a file already (remove it first, with rm)",
        ErrorKind::NotFound => "its directory does not exist (make it first, with mkdir -p)",
        ErrorKind::FileTooLarge | ErrorKind::InvalidInput => {
            "the file system holds no file of this size (choose a smaller size)"
        }
        ErrorKind::StorageFull => "no space left on the file system",
        ErrorKind::QuotaExceeded => "your quota on the file system is used up",
        _ => return CliError::at(path, format_args!("cannot create: {}", reason(error))),
    };
    CliError::at(path, what)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_new_image_has_the_size_asked_for_to_the_byte_and_takes_no_space() {
        let directory = tempfile::tempdir().unwrap();
        for bytes in [1, 511, 4096, 1_000_000_007, 1 << 40] {
            let path = directory.path().join(bytes.to_string());
            raw(&path, bytes).unwrap();
            let found = fs::metadata(&path).unwrap();
            assert_eq!((found.len(), found.blocks()), (bytes, 0));
            assert_eq!(found.mode() & 0o133, 0, "nobody but the owner writes, nobody executes");
        }
    }

    #[test]
    fn a_file_that_exists_is_refused_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        fs::write(&path, "precious").unwrap();
        let error = raw(&path, 4096).unwrap_err().to_string();
        assert!(error.contains("disk.img: there is such a file already (remove it"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_size_that_is_refused_leaves_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let error = raw(&path, u64::MAX).unwrap_err().to_string();
        assert!(error.contains("no file of this size"), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn errors_of_the_file_system_are_said_in_words() {
        for (errno, words) in [
            (Errno::NOSPC, "no space left"),
            (Errno::DQUOT, "quota"),
            (Errno::FBIG, "choose a smaller size"),
            (Errno::NOENT, "directory does not exist"),
            (Errno::ROFS, "cannot create: Read-only file system"),
        ] {
            let error = explain(Path::new("a.img"), &errno.into()).to_string();
            assert!(error.starts_with("a.img: ") && error.contains(words), "{error}");
            assert!(!error.contains("os error"), "{error}");
        }
    }
}
