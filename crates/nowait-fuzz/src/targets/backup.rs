//! A chain of backups: the input is two manifests, which get their checksums, and stored blocks.
//!
//! Checked: a point that verification calls sound is read as a whole, and stays sound when the other one is removed.

use crate::target::{Check, Target};

pub(crate) const TARGET: Target = Target {
    name: "backup",
    about: "manifests and blocks of backups: list, verify, read, prune",
    prepare,
    seeds: || vec![nowait_backup::fuzz::seed()],
    words: &[
        b"nwbackup",
        b"\"parent\":1",
        b"\"parent\":null",
        b"\"parent\":2",
        b"\"size\":18446744073709551615",
        b"\"size\":549755813888",
        b"\"block_bytes\":16777216",
        b"\"files\":[]",
        b"\"id\":5",
        b"\"bytes\":18446744073709551615",
        &[0x28, 0xb5, 0x2f, 0xfd],
        &[0xff; 8],
    ],
    longest: 4096,
    memory: 128 << 20,
};

fn prepare() -> Result<Check, String> {
    Ok(Box::new(nowait_backup::fuzz::check))
}
