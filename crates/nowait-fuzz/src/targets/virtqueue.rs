//! The memory of a guest with its virtqueue: descriptors, rings, headers.
//!
//! Checked: what the engine would get is in the guest's memory and as long as the request says, and
//! every request is taken and ended as the indices say.

use nowait_server::FuzzedQueue;

use crate::target::{Check, Target};

/// Bytes of a descriptor; descriptors begin the memory.
const DESCRIPTOR: usize = 16;
/// Where the available ring is, and where the seeds have headers.
const AVAILABLE: usize = 256;
const HEADERS: usize = 1024;

pub(crate) const TARGET: Target = Target {
    name: "virtqueue",
    about: "the memory of a guest with the rings of its vhost-user disk",
    prepare,
    seeds,
    words: &[
        &[1, 0],
        &[2, 0],
        &[3, 0],
        &[4, 0],
        &[0, 0x20, 0, 0, 0, 0, 0, 0],
        &[0, 0, 1, 0, 0, 0, 0, 0],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        &[11, 0, 0, 0],
        &[13, 0, 0, 0],
    ],
    longest: 2048,
    memory: 8 << 20,
};

fn prepare() -> Result<Check, String> {
    let mut queue = FuzzedQueue::new()?;
    Ok(Box::new(move |input| queue.check(input)))
}

/// A guest with a request of each kind.
fn seeds() -> Vec<Vec<u8>> {
    [0u32, 1, 4, 8, 11, 13].into_iter().map(seed).collect()
}

fn seed(kind: u32) -> Vec<u8> {
    let mut memory = vec![0; HEADERS + 64];
    let mut put = |at: usize, bytes: &[u8]| memory[at..at + bytes.len()].copy_from_slice(bytes);
    let writable = if matches!(kind, 0 | 8) { 2 } else { 0 };
    let parts =
        [(HEADERS, 16u32, 1u16, 1u16), (0x1ff0, 32, 1 | writable, 2), (HEADERS + 32, 1, 2, 0)];
    for (n, (address, len, flags, next)) in parts.into_iter().enumerate() {
        put(n * DESCRIPTOR, &(address as u64).to_le_bytes());
        put(n * DESCRIPTOR + 8, &len.to_le_bytes());
        put(n * DESCRIPTOR + 12, &flags.to_le_bytes());
        put(n * DESCRIPTOR + 14, &next.to_le_bytes());
    }
    put(AVAILABLE + 2, &1u16.to_le_bytes());
    put(HEADERS, &kind.to_le_bytes());
    memory
}
