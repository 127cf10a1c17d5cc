//! Which raw disk bitmaps are of, and as of which moment: a record that is kept with the bitmaps.
//!
//! Invariant: a record of a file that was changed since, or of another file, is another one, as far as the file's times tell.
//! Nothing tells that a block device was changed.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, thread};

use crc_fast::{CrcAlgorithm, checksum};
use rustix::fs::{AtFlags, StatxFlags, fstat, major, minor, statx};
use rustix::time::{ClockId, clock_gettime};

use crate::formats::qcow2::header::{BITMAPS_BYTES, be64};
use crate::image_file::ImageFile;

/// The first byte of a record of this form.
const FORM: u8 = 1;
/// A state that is not known.
const UNKNOWN: u64 = 0;
/// The state of each block device.
const OF_DEVICE: u64 = 1;
/// How often, and how long each time, the clock of the times of files is waited for.
const TICKS: u32 = 20;
const TICK: Duration = Duration::from_millis(1);

/// A disk at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskRecord {
    /// The checksum of what tells the disk from others.
    identity: u64,
    /// The checksum of the size and the times of a file.
    state: u64,
}

impl DiskRecord {
    /// The record in these bytes; `None` if it has another form.
    pub(crate) fn parse(bytes: &[u8; BITMAPS_BYTES]) -> Option<Self> {
        let is_known = bytes.first() == Some(&FORM);
        is_known.then(|| Self { identity: be64(bytes, 8), state: be64(bytes, 16) })
    }

    /// The record as bytes.
    pub(crate) fn bytes(&self) -> [u8; BITMAPS_BYTES] {
        let mut bytes = [0; BITMAPS_BYTES];
        let (form, rest) = bytes.split_at_mut(8);
        form[0] = FORM;
        let (identity, state) = rest.split_at_mut(8);
        identity.copy_from_slice(&self.identity.to_be_bytes());
        state.copy_from_slice(&self.state.to_be_bytes());
        bytes
    }

    /// Whether both are of one disk.
    pub(crate) fn is_of_same_disk(&self, other: &Self) -> bool {
        self.identity == other.identity
    }

    /// Whether nothing has changed between the two.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.is_of_same_disk(other) && self.state == other.state && self.state != UNKNOWN
    }

    /// The record of a disk that is being written to.
    pub(crate) fn in_use(self) -> Self {
        let state = if self.state == OF_DEVICE { OF_DEVICE } else { UNKNOWN };
        Self { state, ..self }
    }
}

/// A raw disk that has bitmaps.
#[derive(Clone, Debug)]
pub(crate) struct RawDisk {
    pub(crate) file: Arc<ImageFile>,
    identity: u64,
}

impl RawDisk {
    /// The regular file `file`.
    ///
    /// # Errors
    /// The errnos of fstat(2).
    pub(crate) fn of_file(file: &Arc<ImageFile>) -> io::Result<Self> {
        let inode = fstat(file.fd()?)?.st_ino;
        let empty = AtFlags::EMPTY_PATH;
        let born = statx(file.fd()?, c"", empty, StatxFlags::BTIME).map(|it| it.stx_btime);
        let born = born.map_or((0, 0), |at| (at.tv_sec, at.tv_nsec));
        let words = [inode, born.0.cast_unsigned(), born.1.into()];
        Ok(Self { file: file.clone(), identity: sum(&words) })
    }

    /// The simulated file `file`.
    #[cfg(feature = "sim")]
    pub(crate) const fn simulated(file: Arc<ImageFile>) -> Self {
        Self { file, identity: 1 }
    }

    /// The block device `file`, which has this name as long as it is one disk.
    pub(crate) fn of_device(file: &Arc<ImageFile>, name: &str) -> Self {
        let identity = checksum(CrcAlgorithm::Crc64Nvme, name.as_bytes());
        Self { file: file.clone(), identity }
    }

    /// The record of the disk as of now.
    ///
    /// # Errors
    /// The errnos of fstat(2).
    pub(crate) fn record(&self) -> io::Result<DiskRecord> {
        let state = match self.file.is_block_device() {
            true => OF_DEVICE,
            false => state_of(&self.file.size_and_times()?),
        };
        Ok(DiskRecord { identity: self.identity, state })
    }

    /// The record of the disk to which nothing is written any more: whatever another program changes from now on gives it
    /// other times.
    ///
    /// # Errors
    /// The errnos of fsync(2) and fstat(2).
    pub(crate) fn settled_record(&self) -> io::Result<DiskRecord> {
        // Its times are durable, too: after a loss of power they are not others.
        self.file.sync_with_times()?;
        let [_, _, _, seconds, nanoseconds] = self.file.size_and_times()?;
        let last = (seconds.cast_signed(), nanoseconds.cast_signed());
        for _ in 0..TICKS {
            let clock = clock_gettime(ClockId::RealtimeCoarse);
            let is_later = (clock.tv_sec, clock.tv_nsec) > last;
            if is_later || self.file.is_block_device() {
                break;
            }
            thread::sleep(TICK);
        }
        self.record()
    }
}

/// The checksum of the size and the times of a file; none of those whose file system has whole seconds.
fn state_of(size_and_times: &[u64; 5]) -> u64 {
    let [_, _, mtime_nsec, _, ctime_nsec] = *size_and_times;
    if mtime_nsec == 0 && ctime_nsec == 0 {
        return UNKNOWN;
    }
    let state = sum(size_and_times);
    // The values with a meaning of their own.
    if state <= OF_DEVICE { !state } else { state }
}

fn sum(words: &[u64]) -> u64 {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    checksum(CrcAlgorithm::Crc64Nvme, &bytes)
}

/// Where udev has names of block devices that stay theirs.
const STABLE_NAMES: &str = "/dev/disk/by-id";
/// The names there that no content of a device decides.
const STABLE_PREFIXES: [&str; 9] =
    ["dm-uuid-", "md-uuid-", "wwn-", "nvme-", "scsi-", "ata-", "virtio-", "usb-", "mmc-"];

/// The names of a block device that are its own, also after a restart of the host, the preferred one first.
pub(crate) fn stable_names(device: &ImageFile) -> Vec<PathBuf> {
    let Ok(rdev) = device.fd().and_then(|fd| Ok(fstat(fd.as_fd())?.st_rdev)) else {
        return Vec::new();
    };
    let rank = |name: &str| STABLE_PREFIXES.iter().position(|prefix| name.starts_with(prefix));
    let entries = fs::read_dir(STABLE_NAMES).into_iter().flatten().flatten();
    let found = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let rank = rank(&name)?;
        let is_it = rustix::fs::stat(entry.path()).is_ok_and(|stat| stat.st_rdev == rdev);
        is_it.then_some((rank, name))
    });
    let mut found: Vec<_> = found.collect();
    found.sort();
    found.into_iter().map(|(_, name)| Path::new(STABLE_NAMES).join(name)).collect()
}

/// The file that tells one start of the host from another.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The name of a block device that holds as long as neither the host is restarted nor the device made again. `None` where the kernel does
/// not tell.
pub(crate) fn passing_name(device: &ImageFile) -> Option<String> {
    let rdev = fstat(device.fd().ok()?).ok()?.st_rdev;
    let number = format!("{}:{}", major(rdev), minor(rdev));
    let directory = Path::new("/sys/dev/block").join(&number);
    // A partition has that of its disk.
    let read = |name: &str| fs::read_to_string(directory.join(name));
    let sequence = read("diskseq").or_else(|_| read("../diskseq")).ok()?;
    let boot = fs::read_to_string(BOOT_ID).ok()?;
    Some(format!("{} {} {number}", boot.trim(), sequence.trim()))
}
