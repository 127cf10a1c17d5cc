//! The longest request of a guest.

use std::fs::File;
use std::sync::Arc;

use nowait::{BlockDevice, OpenOptions};
use nowait_server::Export;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

use crate::driver::*;
use crate::scene::Scene;

/// Size of the image in bytes.
const IMAGE_BYTES: u64 = 320 << 20;
/// The longest request of a driver that does not ask for the limits.
const UNTOLD_BYTES: u64 = 256 << 20;
/// The bits of these limits among the features.
const SIZE_MAX_AND_SEG_MAX: u64 = 1 << 1 | 1 << 2;
/// Where the table of the chain is, and the memory that its segments have: the last of several has its own, all others
/// have the same. Parts of a request are read at the same time, in any order.
const TABLE: u64 = DATA;
const SEGMENT: u64 = 0x20000;
const LAST: u64 = REGION_BYTES;

/// Bounds that drivers read: bytes of a segment, and segments of a request.
fn told(driver: &mut Driver) -> (u32, u16) {
    let flags = VhostUserConfigFlags::WRITABLE;
    let config = driver.vmm.get_config(0, 60, flags, &[0; 60]).unwrap().1;
    let number = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    (number(8), number(12) as u16)
}

/// Does a request in a table of its own, with data of `lens` bytes at [`SEGMENT`], the last of several at [`LAST`]. Returns its
/// status and the bytes written.
fn request(driver: &mut Driver, kind: u32, sector: u64, lens: &[u32]) -> (u8, u32) {
    let flags = if kind == READ { NEXT | WRITABLE } else { NEXT };
    let last = lens.len() as u16 + 1;
    driver.describe_at(TABLE, 0, driver.header(0, kind, sector), NEXT, 1);
    for (n, len) in (1..).zip(lens) {
        let place = if n > 1 && n + 1 == last { LAST } else { SEGMENT };
        driver.describe_at(TABLE, n, (place, *len), flags, n + 1);
    }
    driver.describe_at(TABLE, last, Driver::status_place(0), WRITABLE, 0);
    driver.describe(0, (TABLE, 16 * (u32::from(last) + 1)), INDIRECT, 0);
    driver.offer(0);
    driver.kick();
    let (head, written) = driver.used();
    assert_eq!(head, 0);
    (driver.status(0), written)
}

fn scene() -> (Scene, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    File::options().write(true).open(file.path()).unwrap().set_len(IMAGE_BYTES).unwrap();
    let disk = Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
    (Scene::of(Export::new(disk, "large".into(), String::new())), file)
}

/// Firmware reads a whole kernel by one request.
#[test]
fn a_driver_that_does_not_ask_for_the_limits_has_long_requests_and_a_longer_one_is_an_error() {
    let (scene, _file) = scene();
    let mut driver = Driver::connect_without(&scene.sockets[0], SIZE_MAX_AND_SEG_MAX);
    const LEN: u32 = 256 << 10;
    let all = (UNTOLD_BYTES / u64::from(LEN)) as usize;
    for (sector, count) in [(64, 127), (0, 200), (8, all)] {
        let part = |n: usize| sector + n as u64 * u64::from(LEN) / 512;
        let byte = count as u8;
        driver.write(SEGMENT, &[byte; 512]);
        assert_eq!(request(&mut driver, WRITE, part(count - 1), &[512]), (OK, 1));
        driver.write(SEGMENT, &[!byte; 512]);
        assert_eq!(request(&mut driver, WRITE, part(count), &[512]), (OK, 1));
        let lens = vec![LEN; count];
        let bytes = count as u32 * LEN;
        assert_eq!(request(&mut driver, READ, sector, &lens), (OK, bytes + 1), "{count}");
        assert_eq!(driver.read(LAST, 512), [byte; 512], "the last part is another");
        for place in [SEGMENT, LAST] {
            driver.write(place, &[byte + 1; 512]);
        }
        assert_eq!(request(&mut driver, WRITE, sector, &lens), (OK, 1));
        for n in 0..=count {
            assert_eq!(request(&mut driver, READ, part(n), &[512]), (OK, 513));
            // Bytes behind it were not written.
            let expected = if n < count { byte + 1 } else { !byte };
            assert_eq!(driver.read(SEGMENT, 512), [expected; 512], "part {n} of {count}");
        }
    }
    let longer = [&vec![LEN; all - 1][..], &[LEN + 512]].concat();
    assert_eq!(request(&mut driver, READ, 0, &longer), (IOERR, 1));
    assert_eq!(request(&mut driver, WRITE, 0, &longer), (IOERR, 1));
}

#[test]
fn a_request_of_all_segments_that_drivers_are_told_is_served_and_a_longer_one_is_an_error() {
    let (scene, _file) = scene();
    let mut driver = Driver::connect(&scene.sockets[0]);
    let (segment, segments) = told(&mut driver);
    let limit = vec![segment; segments.into()];
    let bytes = segment * u32::from(segments);
    for sector in [0, 8, 64] {
        assert_eq!(request(&mut driver, READ, sector, &limit), (OK, bytes + 1));
        assert_eq!(request(&mut driver, WRITE, sector, &limit), (OK, 1));
        // By a sector, a segment, and as many as fit the image.
        for more in [&[512][..], &[segment], &[segment; 120]] {
            let longer = [&limit, more].concat();
            driver.write(SEGMENT, &[0x5a; 512]);
            assert_eq!(request(&mut driver, READ, sector, &longer), (IOERR, 1), "{more:?}");
            assert_eq!(driver.read(SEGMENT, 512), [0x5a; 512], "it was read");
            assert_eq!(request(&mut driver, WRITE, sector, &longer), (IOERR, 1), "{more:?}");
        }
    }
    assert_eq!(request(&mut driver, READ, 64, &[512]), (OK, 513));
    assert_eq!(driver.read(SEGMENT, 512), [0; 512], "a part of a request was written");
}

/// The pieces of a long request are found in its descriptors, which are read for each: what the first
/// piece reads into the header of its own request must not lead the next one elsewhere.
#[test]
fn a_long_request_that_changes_during_its_transfer_stops_its_device() {
    let (scene, _file) = scene();
    let mut driver = Driver::connect_without(&scene.sockets[0], SIZE_MAX_AND_SEG_MAX);
    const LEN: u32 = 256 << 10;
    let (sector, parts) = (8, 127);
    let header = driver.header(0, READ, sector);
    driver.describe_at(TABLE, 0, header, NEXT, 1);
    driver.describe_at(TABLE, 1, (header.0, 512), NEXT | WRITABLE, 2);
    for n in 2..parts + 2 {
        driver.describe_at(TABLE, n, (SEGMENT, LEN), NEXT | WRITABLE, n + 1);
    }
    driver.describe_at(TABLE, parts + 2, Driver::status_place(0), WRITABLE, 0);
    driver.describe(0, (TABLE, 16 * (u32::from(parts) + 3)), INDIRECT, 0);
    driver.offer(0);
    driver.kick();
    driver.await_breakdown();
}
