//! A directory on each file system that there is here: that of the build, tmpfs, and for root ext4 with
//! small blocks and XFS on loop devices.
//!
//! Invariant: a file system that was mounted is unmounted at the end, unless the process is killed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::output;
use crate::requirements::{require_tool, say_skipped, skip};

/// Bytes of a file system on a loop device: XFS takes no fewer than 300 MiB. They are a hole.
const BYTES: u64 = 320 << 20;

/// How file systems on loop devices are made.
const LOOPS: [(&str, &[&str]); 2] = [("mkfs.ext4", &["-b", "1024"]), ("mkfs.xfs", &[])];

/// A file system on a file, mounted in a temporary directory.
struct Mounted(tempfile::TempDir);

impl Mounted {
    /// `None`, with a message, where it cannot be made.
    fn new(mkfs: &str, options: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            say_skipped("file systems on loop devices are only for root");
            return None;
        }
        if !require_tool(mkfs) {
            return None;
        }
        let scratch = tempfile::tempdir().expect("a temporary directory");
        let (file, mount_point) = (scratch.path().join("fs"), scratch.path().join("mounted"));
        std::fs::create_dir(&mount_point).expect("a directory");
        std::fs::File::create(&file).expect("a file").set_len(BYTES).expect("a sparse file");
        let made = output(Command::new(mkfs).arg("-q").args(options).arg(&file));
        assert!(made.status.success(), "{mkfs}: {made:?}");
        let mounted =
            output(Command::new("mount").args(["-o", "loop"]).args([&file, &mount_point]));
        if !mounted.status.success() {
            skip("no loop mounts for this user");
            return None;
        }
        Some(Self(scratch))
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("mounted")
    }
}

impl Mounted {
    /// The file system as it is after a loss of power now: what its device has been given, mounted in the place of this one.
    fn after_power_loss(self) -> Self {
        let (scratch, cut) = (&self.0, tempfile::tempdir().expect("a temporary directory"));
        let (file, mount_point) = (cut.path().join("fs"), cut.path().join("mounted"));
        let copied = output(
            Command::new("cp").args(["--sparse=always"]).arg(scratch.path().join("fs")).arg(&file),
        );
        assert!(copied.status.success(), "{copied:?}");
        drop(self);
        std::fs::create_dir(&mount_point).expect("a directory");
        let mounted =
            output(Command::new("mount").args(["-o", "loop"]).args([&file, &mount_point]));
        assert!(mounted.status.success(), "{mounted:?}");
        Self(cut)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).output();
    }
}

/// Runs `test` in an empty directory of each file system, with its name; `here` is on that of the build.
pub fn on_each_file_system(here: &Path, test: impl Fn(&Path, &str)) {
    let in_directory = |parent: &Path, name: &str| {
        let directory = tempfile::tempdir_in(parent).expect("a temporary directory");
        test(directory.path(), name);
    };
    in_directory(here, "that of the build");
    match Path::new("/dev/shm").is_dir() {
        true => in_directory(Path::new("/dev/shm"), "tmpfs"),
        false => drop(skip("no /dev/shm")),
    }
    for (mkfs, options) in LOOPS {
        if let Some(mounted) = Mounted::new(mkfs, options) {
            in_directory(&mounted.path(), mkfs);
        }
    }
}

/// Runs `change` in an empty directory of each file system on a loop device, and `check` in that directory after a loss of
/// power directly behind it, with the name of the file system.
pub fn on_each_loop_after_power_loss(change: impl Fn(&Path), check: impl Fn(&Path, &str)) {
    for (mkfs, options) in LOOPS {
        let Some(mounted) = Mounted::new(mkfs, options) else { continue };
        let directory = |mounted: &Mounted| mounted.path().join("directory");
        std::fs::create_dir(directory(&mounted)).expect("a directory");
        rustix::fs::sync();
        change(&directory(&mounted));
        let cut = mounted.after_power_loss();
        check(&directory(&cut), mkfs);
    }
}
