//! Which names in a header are those of files.
//!
//! Invariant: a name with a protocol other than `file:` is never that of a file.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The file name in `name`, as QEMU parses it: a `file:` prefix is dropped; `None` for any other
/// protocol (`json:`, `nbd:`, …).
pub(crate) fn plain_name(name: &OsStr) -> Option<&Path> {
    let bytes = name.as_bytes();
    let protocol = bytes
        .iter()
        .position(|&byte| byte == b':' || byte == b'/')
        .filter(|&at| bytes[at] == b':' && at > 0)
        .map(|at| &bytes[..at]);
    match protocol {
        None => Some(Path::new(name)),
        Some(b"file") => Some(Path::new(OsStr::from_bytes(&bytes[5..]))),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_and_file_names_are_files() {
        let plain = |name| plain_name(OsStr::new(name));
        assert_eq!(plain("base.raw"), Some(Path::new("base.raw")));
        assert_eq!(plain("file:../base.raw"), Some(Path::new("../base.raw")));
        assert_eq!(plain("./odd:name"), Some(Path::new("./odd:name")));
        for name in ["json:{}", "nbd:unix:/x", "nbd+unix:///?socket=x", "https://a/b"] {
            assert_eq!(plain(name), None, "{name}");
        }
    }
}
