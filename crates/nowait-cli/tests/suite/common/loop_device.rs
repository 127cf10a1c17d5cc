//! A loop device on a file, and a file system mounted on it.
//!
//! Invariant: the device is unmounted and detached when it is dropped.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use nowait_testkit::{require_tool, skip, wait_for};
use rustix::fs::OFlags;

/// A loop device, detached when it is dropped.
pub(crate) struct LoopDevice(pub(crate) String);

impl LoopDevice {
    /// A loop device on `file`; `None`, with a message, where none can be made.
    pub(crate) fn on(file: &Path) -> Option<Self> {
        Self::with_blocks(file, 512)
    }

    /// A loop device with logical blocks of `bytes`.
    pub(crate) fn with_blocks(file: &Path, bytes: u32) -> Option<Self> {
        if !require_tool("losetup") {
            return None;
        }
        let blocks = bytes.to_string();
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--sector-size", &blocks]).arg(file);
        let made = losetup.output().expect("losetup is there");
        if !made.status.success() {
            skip("no loop device for this user");
            return None;
        }
        Some(Self(String::from_utf8(made.stdout).expect("a name").trim().to_owned()))
    }

    /// Reads the size of its file again.
    pub(crate) fn resize(&self) {
        let done = Command::new("losetup").args(["--set-capacity", &self.0]).status();
        assert!(done.expect("losetup is there").success());
    }

    /// The path of the device.
    pub(crate) fn path(&self) -> &Path {
        Path::new(&self.0)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // It fails only if the device is already detached.
        let _ = Command::new("losetup").args(["--detach", &self.0]).output();
    }
}

/// A mounted file system, unmounted when it is dropped.
pub(crate) struct Mounted {
    device: String,
    directory: String,
}

impl Mounted {
    /// Mounts `device` at `directory`; `None`, with a message, where this user may not mount.
    pub(crate) fn at(device: &LoopDevice, directory: &Path) -> Option<Self> {
        let directory = directory.to_str().expect("a name in UTF-8").to_owned();
        let done = Command::new("mount").args([&device.0, &directory]).output();
        if !done.expect("mount is there").status.success() {
            skip("no mounts for this user");
            return None;
        }
        Some(Self { device: device.0.clone(), directory })
    }

    /// Unmounts it, and waits until nothing has the device: another test may have made a mount namespace meanwhile,
    /// with a copy of the mount.
    pub(crate) fn unmount(self) {
        let device = self.device.clone();
        drop(self);
        wait_for("nothing has the device", || {
            let mut open = fs::OpenOptions::new();
            open.read(true).custom_flags(OFlags::EXCL.bits().cast_signed()).open(&device)
        });
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.directory).output();
    }
}
