//! Lost pages: a page of the page cache whose write-back has failed makes every later flush fail,
//! whichever call has got the error first.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use nowait::{BlockDevice, BlockingFile, Direct, Flags};

const MIB: u64 = 1 << 20;

/// Makes a loop device of 64 MiB with room for 8 MiB, and prints its name. The device goes when
/// standard input ends.
const SMALL: &str = r#"mount -t tmpfs -o size=8m none /mnt && truncate -s 64M /mnt/file &&
dd if=/dev/zero of=/mnt/file bs=64k count=1 conv=notrunc status=none &&
device=$(losetup --find --show /mnt/file) && exec 9<"$device" && losetup --detach "$device" &&
echo "$device" && exec cat"#;

/// A device with less room than its size: the shell that keeps it, and its path.
struct Small(Child, String);

impl Small {
    /// `None` where such a device cannot be made.
    fn new() -> Option<Self> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--", "sh", "-c", SMALL]).stderr(Stdio::null());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
        let mut name = String::new();
        BufReader::new(child.stdout.take()?).read_line(&mut name).ok()?;
        let small = Self(child, name.trim().to_owned());
        (!small.1.is_empty()).then_some(small)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn c51_a_lost_page_reported_to_a_durable_write_fails_every_later_flush() {
    let Some(small) = Small::new() else {
        nowait_testkit::skip("no loop device and no private mount for this user");
        return;
    };
    let options = nowait::OpenOptions::new().direct(Direct::Off);
    let disk = BlockDevice::open(small.1.as_ref(), options).unwrap();
    let file = BlockingFile::new(Arc::new(disk));
    let bytes = vec![7; 16 << 20];
    assert_eq!(file.write_at(&bytes, 16 * MIB, Flags::NONE), Ok(bytes.len()));
    // Another handle's sync gets the error; the device's own handle still has to report it.
    let other = OpenOptions::new().write(true).open(&small.1).unwrap();
    assert!(other.sync_data().is_err(), "there was room for all");
    let durable = file.write_at(&bytes[..4096], 0, Flags::DSYNC);
    assert_eq!(durable.map_err(|error| error.errno()), Err(libc::EIO));
    for _ in 0..3 {
        assert_eq!(file.flush().map_err(|error| error.errno()), Err(libc::EIO));
    }
}
