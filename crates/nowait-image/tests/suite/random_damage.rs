//! Ten thousand damaged images: each gives an error or a result, without a panic, hang or unbounded
//! memory. (A panic fails the test, a hang would exceed the test's own time limit.)

use std::os::unix::fs::FileExt;

use nowait_image::check::check;
use nowait_image::{Chain, ChainOptions, ChainReader, Format, Locking, map};

use crate::images::Images;
use nowait_testkit::{Random, require_qemu};

const DAMAGED: u64 = 10_000;
const SEED: u64 = 4_242;

/// Opens, maps, checks and reads the image, ignoring errors.
fn exercise(images: &Images, outcomes: &mut [u64; 2]) {
    let options = ChainOptions {
        format: Some(Format::Qcow2),
        locking: Locking::Unlocked,
        damaged: true,
        ..ChainOptions::default()
    };
    let Ok(chain) = Chain::open(&images.path(), &options) else {
        outcomes[0] += 1;
        return;
    };
    let mut end = 0;
    let mapped = map::map(&chain, |entry| {
        assert_eq!(entry.start, end);
        end += entry.length;
        Ok(())
    });
    assert!(mapped.is_err() || end == chain.top().size);
    let _ = check(&chain, &mut |_, _| {});
    if let Ok(reader) = ChainReader::new(chain.layers()) {
        let mut memory = vec![0; 1 << 16];
        let mut pos = 0;
        while pos < reader.size().min(4 << 20) {
            let len = memory.len().min((reader.size() - pos) as usize);
            let _ = reader.read_at(pos, &mut memory[..len]);
            pos += 3 << 16;
        }
    }
    outcomes[1] += 1;
}

#[test]
fn ten_thousand_damaged_images_give_an_error_or_a_result() {
    nowait_testkit::needs!(require_qemu());
    let images = Images::qcow2(
        "6M",
        "cluster_size=4096",
        &["write -P 1 0 300k", "write -z 1M 64k", "write -c 2M 64k", "write -P 9 5M 100k"],
    );
    let before = std::fs::read(images.path()).unwrap();
    let file = std::fs::File::options().write(true).open(images.path()).unwrap();
    let mut random = Random::from_seed(SEED);
    let mut outcomes = [0; 2];
    for _ in 0..DAMAGED {
        let mut spots = Vec::new();
        for _ in 0..1 + random.below(3) {
            // Half of the time in the header; else in the tables, which come first in the file.
            let bound = if random.chance(50) { 0x210 } else { 12 << 12 };
            let at = random.below(bound);
            let byte = match random.below(3) {
                0 => before[at as usize] ^ 1 << random.below(8),
                1 => 0xff,
                _ => random.word() as u8,
            };
            file.write_all_at(&[byte], at).unwrap();
            spots.push(at);
        }
        exercise(&images, &mut outcomes);
        for at in spots {
            file.write_all_at(&before[at as usize..=at as usize], at).unwrap();
        }
    }
    assert_eq!(std::fs::read(images.path()).unwrap(), before, "no other test wrote to it");
    assert!(outcomes.iter().all(|&count| count > 100), "refused, looked at: {outcomes:?}");
}
