//! The blocks of a disk that a guest is told, and requests for parts of one.

use std::sync::Arc;

use nowait::{BlockDevice, OpenOptions};
use nowait_server::{BlockSize, Export};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

use crate::driver::*;
use crate::scene::Scene;

/// Bytes of a logical block, and physical blocks in log2 of these.
fn blocks(driver: &mut Driver) -> (u32, u8) {
    let flags = VhostUserConfigFlags::WRITABLE;
    let config = driver.vmm.get_config(0, 60, flags, &[0; 60]).unwrap().1;
    (u32::from_le_bytes(config[20..24].try_into().unwrap()), config[24])
}

#[test]
fn requests_are_for_whole_blocks_of_the_size_that_the_guest_is_told() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    for (block_size, told, sectors_are_taken) in [
        (None, (512, 3), true),
        (Some(BlockSize::Sector), (512, 3), true),
        (Some(BlockSize::Page), (4096, 0), false),
    ] {
        let disk = Arc::new(BlockDevice::open(file.path(), OpenOptions::default()).unwrap());
        let export = Export::new(disk, String::new(), String::new()).with_block_size(block_size);
        let scene = Scene::of(export);
        let mut driver = Driver::connect(&scene.sockets[0]);
        assert_eq!(blocks(&mut driver), told);
        assert_eq!(driver.request(WRITE, 8, &[(DATA, 4096)]), (OK, 1));
        assert_eq!(driver.request(READ, 8, &[(DATA, 512), (DATA + 512, 3584)]), (OK, 4097));
        let expected = if sectors_are_taken { OK } else { IOERR };
        for (kind, sector, len) in
            [(READ, 8, 512), (READ, 1, 4096), (WRITE, 1, 4096), (WRITE, 8, 4096 + 512)]
        {
            let (status, _) = driver.request(kind, sector, &[(DATA, len)]);
            assert_eq!(status, expected, "{block_size:?}: {kind} of {len} at {sector}");
        }
        for kind in [DISCARD, WRITE_ZEROES] {
            for (sector, sectors, expected) in [(8, 8u32, OK), (8, 1, expected), (1, 8, expected)] {
                let range = [&u64::to_le_bytes(sector)[..], &sectors.to_le_bytes(), &[0; 4]];
                driver.write(DATA, &range.concat());
                let (status, _) = driver.request(kind, 0, &[(DATA, 16)]);
                assert_eq!(status, expected, "{block_size:?}: {kind} of {sectors} at {sector}");
            }
        }
        assert_eq!(driver.request(FLUSH, 0, &[]), (OK, 1));
    }
}
