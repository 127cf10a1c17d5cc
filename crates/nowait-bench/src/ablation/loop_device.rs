//! The kernel's loop device over a file, by losetup(8).
//!
//! Invariant: a device that was set up here is detached when the value is dropped.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const CONTROL: &str = "/dev/loop-control";

/// A loop device that this process has set up.
pub(crate) struct LoopDevice {
    /// Its path, such as /dev/loop0.
    pub(crate) path: PathBuf,
}

impl LoopDevice {
    /// The reason why no loop device can be set up, if there is one.
    fn obstacle() -> Option<&'static str> {
        if !rustix::process::geteuid().is_root() {
            return Some("only root can set up a loop device");
        }
        (!Path::new(CONTROL).exists()).then_some("there is no /dev/loop-control")
    }

    /// # Errors
    /// The error of losetup; `ErrorKind::Unsupported` with the reason if it was not started.
    pub(crate) fn over(file: &Path, writable: bool, direct: bool) -> io::Result<LoopDevice> {
        if let Some(obstacle) = Self::obstacle() {
            return Err(io::Error::new(io::ErrorKind::Unsupported, obstacle));
        }
        let mut command = Command::new("losetup");
        command.args(["--find", "--show"]);
        command.arg(if direct { "--direct-io=on" } else { "--direct-io=off" });
        if !writable {
            command.arg("--read-only");
        }
        let output = command.arg("--").arg(file).stdin(Stdio::null()).output()?;
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        let device = path.is_absolute().then_some(LoopDevice { path });
        // A device that losetup has named is detached by this value, even if a later step fails.
        match device {
            Some(device) if output.status.success() => Ok(device),
            _ => {
                let reported = String::from_utf8_lossy(&output.stderr);
                Err(io::Error::other(reported.trim().to_owned()))
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let mut command = Command::new("losetup");
        command.arg("--detach").arg(&self.path).stdin(Stdio::null());
        // A failure can only be reported.
        if !command.status().is_ok_and(|status| status.success()) {
            eprintln!("{} is still there (losetup --detach takes it down)", self.path.display());
        }
    }
}
