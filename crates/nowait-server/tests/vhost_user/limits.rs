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
const IMAGE_BYTES: u64 = 64 << 20;
/// Where the table of the chain is, and the memory that all of its segments have.
const TABLE: u64 = DATA;
const SEGMENT: u64 = 0x20000;

/// What drivers are told: bytes of a segment, and segments of a request.
fn told(driver: &mut Driver) -> (u32, u16) {
    let flags = VhostUserConfigFlags::WRITABLE;
    let config = driver.vmm.get_config(0, 60, flags, &[0; 60]).unwrap().1;
    let number = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    (number(8), number(12) as u16)
}

/// Does a request in a table of its own, with data of `lens` bytes that are all in one place. Returns
/// its status and the bytes written.
fn request(driver: &mut Driver, kind: u32, sector: u64, lens: &[u32]) -> (u8, u32) {
    let flags = if kind == READ { NEXT | WRITABLE } else { NEXT };
    let last = lens.len() as u16 + 1;
    driver.describe_at(TABLE, 0, driver.header(0, kind, sector), NEXT, 1);
    for (n, len) in (1..).zip(lens) {
        driver.describe_at(TABLE, n, (SEGMENT, *len), flags, n + 1);
    }
    driver.describe_at(TABLE, last, Driver::status_place(0), WRITABLE, 0);
    driver.describe(0, (TABLE, 16 * (u32::from(last) + 1)), INDIRECT, 0);
    driver.offer(0);
    driver.kick();
    let (head, written) = driver.used();
    assert_eq!(head, 0);
    (driver.status(0), written)
}

#[test]
fn a_request_of_all_segments_that_drivers_are_told_is_served_and_a_longer_one_is_an_error() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    File::options().write(true).open(file.path()).unwrap().set_len(IMAGE_BYTES).unwrap();
    let disk = Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
    let scene = Scene::of(Export::new(disk, 2, "large".into(), String::new()));
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
