//! Finds the user of a block device that is busy, for messages.
//!
//! The kernel excludes an open of a device for writing with `O_EXCL` and any other claim on it from
//! each other: a mounted file system, swap space, a device made of it, another such program.
//!
//! Invariant: a message names a use only where one was found; that a device is in use at all is the
//! kernel's answer to the open. Source: open(2), `O_EXCL`; proc_pid_mountinfo(5).

use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A device by its major and minor number, as in mountinfo: `7:0`.
type Number = String;

/// The reason why `path`, a block device, cannot be claimed (`EBUSY` of open(2)), and the option
/// that overrides it.
#[must_use]
pub fn in_use(path: &Path) -> String {
    let by = found(path).unwrap_or_else(|| "it is in use, by the system or another program".into());
    format!("{by} (to write to it all the same: --allow-mounted)")
}

fn found(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok().filter(|meta| meta.file_type().is_block_device())?;
    let own = number(device.rdev());
    let mut numbers = partitions(&own);
    numbers.insert(0, own.clone());
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    if let Some(at) = mounted_at(&mounts, |mount| is_on(mount, &numbers)) {
        return Some(format!("it is mounted at {}", at.display()));
    }
    let swaps = fs::read("/proc/swaps").unwrap_or_default();
    let swap = swaps.split(|&byte| byte == b'\n').skip(1).any(|line| {
        let name = line.split(u8::is_ascii_whitespace).next().unwrap_or_default();
        is_device(&unescaped(name), &numbers)
    });
    if swap {
        return Some("it is in use as swap space".into());
    }
    let holder = numbers.iter().find_map(|number| entries(number, "holders").into_iter().next())?;
    Some(format!("it is in use by {}", holder.display()))
}

fn number(rdev: u64) -> Number {
    format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev))
}

/// The names in a directory of the device's in sysfs.
fn entries(number: &str, directory: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(Path::new("/sys/dev/block").join(number).join(directory));
    all.into_iter().flatten().flatten().map(|entry| entry.file_name().into()).collect()
}

/// The partitions of a whole device.
fn partitions(device: &str) -> Vec<Number> {
    let base = Path::new("/sys/dev/block").join(device);
    let of = |name: PathBuf| {
        let part = base.join(name);
        part.join("partition").exists().then(|| fs::read_to_string(part.join("dev")).ok())?
    };
    entries(device, "").into_iter().filter_map(of).map(|dev| dev.trim().to_owned()).collect()
}

/// A line of mountinfo: the mounted device, by number and by name.
struct Mount<'a> {
    number: &'a [u8],
    source: PathBuf,
}

/// A file system may report another number than its device's; then its source tells.
fn is_on(mount: &Mount<'_>, numbers: &[Number]) -> bool {
    numbers.iter().any(|number| number.as_bytes() == mount.number)
        || is_device(&mount.source, numbers)
}

fn is_device(path: &Path, numbers: &[Number]) -> bool {
    path.is_absolute()
        && fs::metadata(path).is_ok_and(|meta| {
            meta.file_type().is_block_device() && numbers.contains(&number(meta.rdev()))
        })
}

/// The mount point of the first mount that `wanted` accepts.
fn mounted_at(mountinfo: &[u8], wanted: impl Fn(&Mount<'_>) -> bool) -> Option<PathBuf> {
    mountinfo.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        let number = fields.nth(2)?;
        let at = fields.nth(1)?;
        let source = unescaped(fields.skip_while(|field| *field != b"-").nth(2)?);
        wanted(&Mount { number, source }).then(|| unescaped(at))
    })
}

/// A name without the octal escapes for blanks and backslashes.
fn unescaped(name: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|_| first == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw\n\
        30 22 7:1 / /mnt/with\\040blank rw - ext4 /dev/loop1 rw\n\
        31 22 0:40 /sub /srv rw,nosuid master:3 propagate_from:2 - btrfs /dev/sdb rw\n\
        no line of mountinfo\n";

    fn at(wanted: impl Fn(&Mount<'_>) -> bool) -> Option<PathBuf> {
        mounted_at(MOUNTS, wanted)
    }

    #[test]
    fn a_mount_is_found_by_its_devices_number_and_its_mount_point_is_unescaped() {
        let by_number = |number: &'static [u8]| at(move |mount| mount.number == number);
        assert_eq!(by_number(b"8:2"), Some("/".into()));
        assert_eq!(by_number(b"7:1"), Some("/mnt/with blank".into()));
        assert_eq!(by_number(b"7:2"), None);
    }

    #[test]
    fn a_mount_is_found_by_its_source_whatever_optional_fields_come_before() {
        let by_source = |source: &'static str| at(move |mount| mount.source == Path::new(source));
        assert_eq!(by_source("/dev/sdb"), Some("/srv".into()));
        assert_eq!(by_source("/dev/loop1"), Some("/mnt/with blank".into()));
    }

    #[test]
    fn a_device_with_an_unknown_user_is_reported_as_in_use_with_the_option_that_overrides_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let words = in_use(file.path());
        assert!(words.starts_with("it is in use, by the system"), "{words}");
        assert!(words.ends_with("(to write to it all the same: --allow-mounted)"), "{words}");
    }
}
