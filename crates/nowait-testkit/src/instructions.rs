//! Counts instructions of an example program with callgrind: a figure that holds on a busy machine.
//!
//! Invariant: the example is built from the code as it is now, by the profile that the caller names.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::process::target_directory;
use crate::requirements::skip;

/// The numbers of requests of the two runs.
const FEW: u64 = 10_000;
const MANY: u64 = 30_000;

/// An example that cargo has built before.
pub struct Example(PathBuf);

impl Example {
    /// The example `name` of the package `package` in `directory`, as built by `profile`; without one that is newer
    /// than the source, the test is skipped.
    pub fn of(profile: &str, package: &str, directory: &str, name: &str) -> Option<Self> {
        let built = target_directory().join(profile).join("examples").join(name);
        let source = ["src", "examples"].map(|part| newest(&Path::new(directory).join(part)));
        if modified(&built) > source.into_iter().max().flatten() {
            return Some(Self(built));
        }
        skip(&format!(
            "no new build of the example {name}: cargo build --profile {profile} -p {package} --example {name}"
        ));
        None
    }

    /// The instructions of one request. The example gets the number of requests as its argument
    /// `{}` of `arguments`.
    pub fn instructions_of_one(&self, arguments: &[impl AsRef<OsStr>]) -> u64 {
        (self.collected(MANY, arguments) - self.collected(FEW, arguments)).div_ceil(MANY - FEW)
    }

    /// The instructions of a whole run.
    fn collected(&self, requests: u64, arguments: &[impl AsRef<OsStr>]) -> u64 {
        let requests = requests.to_string();
        let filled = arguments.iter().map(|argument| match argument.as_ref() {
            word if word == "{}" => requests.as_ref(),
            word => word,
        });
        let run = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(&self.0)
            .args(filled)
            .output()
            .expect("valgrind");
        let report = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{report}");
        let (_, count) = report.split_once("Collected : ").expect("callgrind prints its count");
        count.split_whitespace().next().and_then(|count| count.parse().ok()).expect("a count")
    }
}

/// When the file was written, if there is one.
fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|found| found.modified()).ok()
}

/// When the newest file below `directory` was written.
fn newest(directory: &Path) -> Option<SystemTime> {
    let below = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let times = below.map(|entry| match entry.path() {
        path if path.is_dir() => newest(&path),
        path => modified(&path),
    });
    times.max().flatten()
}
