//! A device that grows while it is in use: what is new reads as zeros and takes writes, what was
//! there stays, and no cached hole hides bytes that others have written.

use nowait::{
    AllocationCache, AsyncFile, BlockDevice, BlockingFile, Flags, LocalAsyncFile, OpenOptions,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// The file at `path` with its holes known.
fn device(path: &Path, read_only: bool) -> Arc<BlockDevice<AllocationCache>> {
    let options = OpenOptions::new().read_only(read_only).cache_holes(true);
    let device = BlockDevice::open(path, options).unwrap();
    device.scan();
    Arc::new(device)
}

fn file_of(bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

#[test]
fn c53_a_grown_device_takes_requests_behind_its_old_end_and_keeps_what_it_had() {
    let file = file_of(MIB + 512);
    let device = device(file.path(), false);
    let disk = BlockingFile::new(device.clone());
    disk.write_at(&[1; 512], MIB, Flags::NONE).unwrap();
    let behind = disk.write_at(&[2; 512], 2 * MIB, Flags::NONE).unwrap_err();
    assert_eq!(behind.errno(), libc::ENOSPC);
    device.grow(4 * MIB).unwrap();
    assert_eq!((device.size(), file.as_file().metadata().unwrap().len()), (4 * MIB, 4 * MIB));
    disk.write_at(&[2; 512], 2 * MIB, Flags::NONE).unwrap();
    let mut all = vec![9; 2 * MIB as usize];
    assert_eq!(disk.read_at(&mut all, MIB).unwrap(), all.len());
    let (old, new) = all.split_at(512);
    assert!(old == [1; 512] && new[..MIB as usize - 512].iter().all(|byte| *byte == 0));
    assert!(all[MIB as usize..][..512] == [2; 512]);
}

#[test]
fn a_refresh_finds_what_others_have_written_behind_the_old_end_and_in_its_block() {
    let file = file_of(MIB + 512);
    let device = device(file.path(), false);
    let disk = BlockingFile::new(device.clone());
    // The hole that the device's end cuts is known now.
    assert_eq!(disk.read_at(&mut [0; 512], MIB).unwrap(), 512);
    let others: File = file.reopen().unwrap();
    others.write_all_at(&[7; 4096], MIB + 512).unwrap();
    assert_eq!(device.refresh().unwrap(), MIB + 4608);
    let mut read = [0; 4096];
    assert_eq!(disk.read_at(&mut read, MIB + 512).unwrap(), read.len());
    assert!(read == [7; 4096]);
}

#[test]
fn a_file_that_was_cut_off_keeps_its_size_as_a_device() {
    let file = file_of(2 * MIB);
    let device = device(file.path(), false);
    file.as_file().set_len(MIB).unwrap();
    assert_eq!(device.refresh().unwrap(), 2 * MIB);
    assert_eq!(device.size(), 2 * MIB);
}

#[test]
fn a_device_grows_neither_backwards_nor_read_only() {
    let file = file_of(2 * MIB);
    let errno =
        |device: &BlockDevice<AllocationCache>, size| device.grow(size).unwrap_err().errno();
    assert_eq!(errno(&device(file.path(), false), MIB), libc::EINVAL);
    assert_eq!(errno(&device(file.path(), true), 3 * MIB), libc::EROFS);
    assert_eq!(file.as_file().metadata().unwrap().len(), 2 * MIB);
}

#[test]
fn a_device_that_has_grown_has_its_new_size_in_every_api() {
    let file = file_of(MIB);
    let device = device(file.path(), false);
    let blocking = BlockingFile::new(device.clone());
    let local = LocalAsyncFile::new(device.clone()).unwrap();
    let shared = AsyncFile::new(device.clone()).unwrap();
    let sizes = || [blocking.size(), local.size(), shared.size()];
    assert_eq!(sizes(), [MIB; 3]);
    device.grow(2 * MIB).unwrap();
    assert_eq!(sizes(), [2 * MIB; 3]);
}
