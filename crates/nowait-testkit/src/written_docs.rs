//! Parts of documents that the code gives: a test compares them and, with `NOWAIT_WRITE_DOCS=1`, writes them.
//!
//! Invariant: nothing is written without the variable, and never outside of the part.

use std::path::Path;

/// The document at `path` has `part` from the first `begin` to the first `end` behind it, with both.
///
/// # Panics
/// If it has not, unless `NOWAIT_WRITE_DOCS` is set: then it is written.
pub fn assert_part(path: &Path, (begin, end): (&str, &str), part: &str) {
    let mut document = std::fs::read_to_string(path).unwrap();
    let shown = path.display();
    let from = document.find(begin).unwrap_or_else(|| panic!("{shown} has no {begin:?}"));
    let to = document[from..].find(end).unwrap_or_else(|| panic!("{shown} has no {end:?}"));
    let range = from..from + to + end.len();
    if document.get(range.clone()) == Some(part) {
        return;
    }
    let writes = std::env::var_os("NOWAIT_WRITE_DOCS").is_some();
    assert!(writes, "{shown} is stale behind {begin:?}: run the test with NOWAIT_WRITE_DOCS=1");
    document.replace_range(range, part);
    std::fs::write(path, document).unwrap();
}

/// The file at `path` is `text`.
///
/// # Panics
/// If it is not, unless `NOWAIT_WRITE_DOCS` is set: then it is written.
pub fn assert_file(path: &Path, text: &str) {
    if std::fs::read_to_string(path).is_ok_and(|known| known == text) {
        return;
    }
    let writes = std::env::var_os("NOWAIT_WRITE_DOCS").is_some();
    assert!(writes, "{} is stale: run the test with NOWAIT_WRITE_DOCS=1", path.display());
    std::fs::write(path, text).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scratch;

    #[test]
    fn a_part_that_is_the_same_is_left_and_another_is_reported() {
        let directory = Scratch::new();
        let path = directory.join("a.md");
        std::fs::write(&path, "x<1>y\n").unwrap();
        assert_part(&path, ("<", ">"), "<1>");
        assert_file(&path, "x<1>y\n");
        let stale = std::panic::catch_unwind(|| assert_part(&path, ("<", ">"), "<2>"));
        let writes = std::env::var_os("NOWAIT_WRITE_DOCS").is_some();
        assert_eq!(stale.is_ok(), writes, "only the variable has it written");
    }
}
