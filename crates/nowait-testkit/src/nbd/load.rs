//! Clients that write and check what they read, while something is done to their server.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::nbd::client::Client;
use crate::process::tool;
use crate::random::Random;

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

/// Writes and reads back at the start of the disk, in requests of each of `sizes` bytes.
///
/// # Panics
/// A request fails, or reads other bytes than were written.
pub fn write_and_read_back(client: &mut Client, sizes: &[u64]) {
    for (n, &size) in (0..).zip(sizes) {
        let data = Random::from_seed(n).bytes(size as usize);
        client.write(0, &data).expect("a write");
        let read = client.read(0, size as u32).expect("a read");
        assert!(read == data, "a client reads other bytes than it has written");
    }
}

/// Reads to the end of a connection.
///
/// # Panics
/// It does not end.
pub fn rest_of(stream: &mut UnixStream) -> Vec<u8> {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("no end: {error}"),
        _ => rest,
    }
}
