//! Block devices as images and targets: other users, block sizes, size changes.
//!
//! Invariant: the tests use only their own loop devices.

use std::fs;

use crate::common::loop_device::{LoopDevice, Mounted};
use crate::common::{Finished, MIB, Scratch, Server, accepted, refusal, require_tool, tool};
use nowait_testkit::nbd::{
    Client, Command, ENOTSUP, FAST_ZERO, Mode, NO_HOLE, RawRequest, WRITE_ZEROES,
};

#[test]
fn a_device_with_a_mounted_file_system_is_written_to_only_with_allow_mounted() {
    let scratch = Scratch::new();
    let (file, source) = (scratch.sparse("fs", 16 * MIB), scratch.random("disk.img", MIB, 3));
    let at = scratch.join("mount point");
    fs::create_dir(&at).expect("a directory");
    let Some(device) = LoopDevice::on(&file) else { return };
    nowait_testkit::needs!(require_tool("mkfs.ext4"));
    tool("mkfs.ext4").arg("-q").arg(device.path()).succeeds();
    let Some(mounted) = Mounted::at(&device, &at) else { return };
    let (disk, name) = (source.to_str().expect("UTF-8"), device.0.as_str());
    let place = format!("it is mounted at {}", at.display());
    let words = [name, &place, "--allow-mounted"];
    let before = fs::read(&file).expect("the file system");
    refusal(&["copy", disk, name, "--force"]).says(&words);
    refusal(&["serve", name]).says(&words);
    refusal(&["serve", name, "--format", "qcow2"]).says(&words);
    // The superblock is at the start of the disk: no byte of the source was written there.
    assert!(fs::read(&file).expect("the file system")[..4096] == before[..4096]);
    let server = Server::start(device.path(), &["--read-only"]);
    assert_eq!(server.connect().read(1024, 512).expect("bytes"), before[1024..1536]);
    server.stop();
    let server = Server::start(device.path(), &["--allow-mounted"]);
    server.stop();
    accepted(&["copy", disk, name, "--force", "--allow-mounted"]);
    mounted.unmount();
    accepted(&["copy", disk, name, "--force", "--verify"]);
}

#[test]
fn a_device_that_is_served_for_writing_is_not_mounted_or_copied_to_meanwhile() {
    let scratch = Scratch::new();
    let (file, source) = (scratch.sparse("fs", 16 * MIB), scratch.random("disk.img", MIB, 3));
    let at = scratch.join("at");
    fs::create_dir(&at).expect("a directory");
    let Some(device) = LoopDevice::on(&file) else { return };
    nowait_testkit::needs!(require_tool("mkfs.ext4"));
    tool("mkfs.ext4").arg("-q").arg(device.path()).succeeds();
    let server = Server::start(device.path(), &[]);
    let mounted = tool("mount").arg(device.path()).arg(&at).output().expect("timeout(1)");
    assert!(!mounted.status.success(), "the kernel mounts what is claimed");
    let disk = source.to_str().expect("UTF-8");
    refusal(&["copy", disk, &device.0, "--force"]).says(&[&device.0, "it is in use"]);
    server.stop();
    assert!(Mounted::at(&device, &at).is_some(), "it was given back");
}

/// Offsets and lengths that are not multiples of a device's blocks, some inside one block.
const UNALIGNED: [(u64, u32); 7] = [
    (8193, 100),
    (16_384 + 512, 512),
    (20_000, 20_000),
    (65_536, 8192),
    (99_999, 4097),
    (131_072 - 1, 2),
    (MIB - 5, 5),
];

#[test]
fn c52_a_device_of_any_block_is_zeroed_trimmed_and_written_to_the_byte() {
    let scratch = Scratch::new();
    for (n, (block, direct)) in [(512, "on"), (4096, "on"), (4096, "off")].into_iter().enumerate() {
        let file = scratch.random(&format!("disk-{n}"), MIB, 9);
        let Some(device) = LoopDevice::with_blocks(&file, block) else { return };
        let mut expected = fs::read(&file).expect("the bytes");
        let server = Server::start(device.path(), &["--direct", direct]);
        let mut client = Client::connect(&server.socket(), Mode::Extended).expect("a connection");
        for (n, (offset, len)) in UNALIGNED.into_iter().enumerate() {
            let here = offset as usize..(offset + u64::from(len)) as usize;
            // The device may refuse FAST_ZERO; then no byte has changed.
            for flags in [FAST_ZERO, NO_HOLE, 0] {
                client.write(offset, &vec![n as u8 + 1; len as usize]).expect("written");
                expected[here.clone()].fill(n as u8 + 1);
                let request =
                    RawRequest { kind: WRITE_ZEROES, flags, ..RawRequest::write(offset, len) };
                match client.call_raw(&request, &[]) {
                    Ok(_) => expected[here.clone()].fill(0),
                    Err(_) => assert_eq!(flags, FAST_ZERO, "{block} {offset} {len}"),
                }
                let got = client.read(0, MIB as u32).expect("bytes");
                assert!(got == expected, "{block} {direct} {offset} {len} {flags}");
            }
            client.write(offset, &vec![7; len as usize]).expect("written");
            expected[here.clone()].fill(7);
            client.call(&Command::Trim { offset, len }).expect("trimmed");
            let got = client.read(0, MIB as u32).expect("bytes");
            let (before, after) = (&expected[..here.start], &expected[here.end..]);
            assert!(got[..here.start] == *before && got[here.end..] == *after, "{offset} {len}");
            assert!(got[here.clone()].iter().all(|&byte| byte == 0 || byte == 7));
            expected = got;
        }
        server.stop();
        assert!(fs::read(&file).expect("the bytes") == expected, "{block} {direct}");
    }
}

#[test]
fn a_resized_device_has_its_new_size_for_new_connections_and_no_old_holes() {
    let scratch = Scratch::new();
    let file = scratch.random("disk", 4 * MIB, 5);
    let Some(device) = LoopDevice::on(&file) else { return };
    let server = Server::start(device.path(), &[]);
    let resized = |bytes| {
        let file = fs::File::options().write(true).open(&file).expect("the file");
        file.set_len(bytes).expect("another size");
        device.resize();
    };
    let mut first = server.connect();
    let zero = RawRequest { kind: WRITE_ZEROES, ..RawRequest::write(MIB, MIB as u32) };
    first.call_raw(&zero, &[]).expect("zeroed, and known to be zeros");
    resized(8 * MIB);
    let mut second = server.connect();
    second.write(7 * MIB, &[3; 4096]).expect("there is room");
    assert_eq!(second.read(7 * MIB, 4096).expect("bytes"), [3; 4096]);
    // The truncated part is later restored with other bytes.
    resized(MIB);
    let mut third = server.connect();
    assert!(third.read(MIB, 512).is_err(), "it is behind the end");
    fs::write(&file, vec![9; 4 << 20]).expect("other bytes");
    device.resize();
    let mut fourth = server.connect();
    assert!(fourth.read(MIB, MIB as u32).expect("bytes") == vec![9; 1 << 20]);
    server.stop();
}

/// NBD proto.md, "Command flags": where zeroing is no faster than writing, the server MUST fail quickly
/// with `NBD_ENOTSUP`. A kernel that is to zero a device and keep its storage may write zeros.
#[test]
fn nbd_must_fast_zeroing_of_a_device_never_writes_zeros() {
    let scratch = Scratch::new();
    let image = scratch.random("disk.img", 4 * MIB, 7);
    let Some(device) = LoopDevice::on(&image) else { return };
    let mut expected = fs::read(&image).expect("the image");
    let server = Server::start(device.path(), &[]);
    let mut client = Client::connect(&server.socket(), Mode::Extended).expect("a connection");
    let mut zero = |offset: u64, flags| {
        let request =
            RawRequest { kind: WRITE_ZEROES, flags, ..RawRequest::write(offset, 1 << 20) };
        client.call_raw(&request, &[])
    };
    assert_eq!(zero(0, FAST_ZERO | NO_HOLE), Err(ENOTSUP));
    zero(MIB, NO_HOLE).expect("zeroes, however long it takes");
    expected[1 << 20..2 << 20].fill(0);
    // Freeing storage is fast where the device supports it.
    match zero(2 * MIB, FAST_ZERO) {
        Ok(_) => expected[2 << 20..3 << 20].fill(0),
        Err(error) => assert_eq!(error, ENOTSUP),
    }
    assert!(client.read(0, 4 * MIB as u32).expect("bytes") == expected);
    server.stop();
}
