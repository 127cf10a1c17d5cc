//! Files of text with secrets: tokens, passwords and keys.
//!
//! Invariant: nothing of a file's text is in an error.

use std::fs::Metadata;
use std::io::ErrorKind;
use std::path::Path;

use nowait_image::os_message;
use nowait_nbd::secret_file;

/// Reads the file at `path`, of at most `most` bytes, which is called `what`. Returns its text, and what the kernel says of it;
/// `None` if it does not exist.
///
/// # Errors
/// One line that begins with `path`: as [`secret_file::read`]; the file is longer, or not in UTF-8.
pub(super) fn read(
    path: &Path,
    most: u64,
    what: &str,
) -> Result<Option<(String, Metadata)>, String> {
    let wrong = |why: &str| format!("{}: {why}", path.display());
    let (bytes, found) = match secret_file::read(path, most + 1) {
        Ok(read) => read,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(wrong(&os_message(&error))),
    };
    if bytes.len() as u64 > most {
        return Err(wrong(&format!("it is too long for {what}")));
    }
    let text = String::from_utf8(bytes).map_err(|_| wrong("it is not text in UTF-8"))?;
    Ok(Some((text, found)))
}

/// Whether `text` can be sent in a header: it has printable characters of ASCII only. The library panics at others.
pub(super) fn is_plain(text: &str) -> bool {
    text.bytes().all(|b| (b' '..=b'~').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_header_can_have_is_plain() {
        assert!(is_plain(" aZ0/+=~") && is_plain(""));
        for text in ["\n", "\u{7f}", "\u{e9}", "a\t"] {
            assert!(!is_plain(text), "{text:?}");
        }
    }

    #[test]
    fn a_file_is_read_up_to_its_longest_length_and_an_absent_one_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        assert!(read(&path, 4, "a test").unwrap().is_none());
        std::fs::write(&path, "1234").unwrap();
        assert_eq!(read(&path, 4, "a test").unwrap().unwrap().0, "1234");
        assert!(read(&path, 3, "a test").unwrap_err().ends_with("file: it is too long for a test"));
        std::fs::write(&path, [0xff]).unwrap();
        assert!(read(&path, 4, "a test").unwrap_err().ends_with("file: it is not text in UTF-8"));
    }
}
