//! Counts instructions of an example program with callgrind: a figure that holds on a busy machine.
//!
//! Invariant: the example is a release build of the code as it is now.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{cargo, target_directory};

/// The numbers of requests of the two runs.
const FEW: u64 = 10_000;
const MANY: u64 = 110_000;

/// An example in a release build.
pub struct Example(PathBuf);

impl Example {
    /// Builds the example `name` of the crate in `directory`, by cargo.
    pub fn build(directory: &str, name: &str) -> Self {
        let built = cargo("build")
            .args(["--quiet", "--release", "--example", name, "--manifest-path"])
            .arg(Path::new(directory).join("Cargo.toml"))
            .status();
        assert!(built.expect("cargo").success(), "the example {name} is not built");
        Self(target_directory().join("release/examples").join(name))
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
