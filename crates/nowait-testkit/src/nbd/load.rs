//! Clients that write and check what they read, while something is done to their server.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::nbd::client::Client;
use crate::process::tool;

/// `len` bytes that no other `seed` gives.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at / 7 + at * seed) % 253) as u8).collect()
}

/// Writes and reads until `over`, and checks every answer. Returns how many rounds there were. Uses
/// 2 MiB from `region` on.
pub fn load(client: &mut Client, region: u64, over: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !over.load(Ordering::Relaxed) {
        rounds += 1;
        let (data, at) = (bytes(rounds, 20_000), region + rounds % 64 * 32_768);
        client.write(at, &data).expect("a write");
        assert!(client.read(at, 20_000).expect("bytes") == data, "round {rounds}");
    }
    rounds
}

/// fio for 3 s on the first 8 MiB of the export at `uri`; it fails at the first byte that is
/// not what it has written. Blocks of one size: its own check of overlapping ones is wrong.
pub fn verified_by_fio(directory: &Path, uri: &str) -> Command {
    let uri = format!("--uri={uri}");
    let mut fio = tool("fio");
    fio.current_dir(directory).args(["--name=verified", "--ioengine=nbd", &uri]);
    fio.args(["--rw=randrw", "--bs=4k", "--iodepth=16"]);
    fio.args(["--size=8M", "--time_based", "--runtime=3", "--verify=crc32c"]);
    fio.args(["--verify_backlog=64", "--verify_fatal=1", "--fsync=50"]);
    fio
}
