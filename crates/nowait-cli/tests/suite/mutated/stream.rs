//! Generates streams of mostly valid requests, with random damage.
//!
//! Invariant: the same random numbers give the same stream.

use nowait_testkit::Random;
use nowait_testkit::nbd::{
    BLOCK_STATUS, DISC, EXTENDED_REQUEST_MAGIC, Mode, PAYLOAD_LEN, REQUEST_MAGIC, WRITE,
};

use super::{IMAGE_BYTES, Terms};

/// A request header with a random cookie. Payloads of writes contain such headers, too.
fn header(terms: Terms, command: u16, flags: u16, random: &mut Random, at: [u64; 2]) -> Vec<u8> {
    let [offset, length] = at;
    let extended = terms.mode == Mode::Extended;
    let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
    let mut bytes = Vec::from(magic.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(random.word().to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    match extended {
        true => bytes.extend(length.to_be_bytes()),
        false => bytes.extend((length as u32).to_be_bytes()),
    }
    bytes
}

/// A valid request.
fn good(terms: Terms, random: &mut Random) -> Vec<u8> {
    let most = if random.chance(5) { IMAGE_BYTES } else { 20_000 };
    let length = 1 + random.below(most);
    let offset = random.below(IMAGE_BYTES - length + 1);
    let fua = u16::from(random.chance(10));
    match random.below(9) {
        0..3 => header(terms, 0, fua, random, [offset, length]),
        3..5 => {
            let flags = if terms.mode == Mode::Extended { fua | PAYLOAD_LEN } else { fua };
            let mut bytes = header(terms, WRITE, flags, random, [offset, length]);
            let end = bytes.len() + length as usize;
            while bytes.len() < end && random.chance(95) {
                // Payload that would be valid requests if it were parsed as such.
                bytes.extend(header(terms, 0, 0, random, [0, 512]));
            }
            bytes.resize(end, 0x77);
            bytes
        }
        5 => header(terms, 3, fua, random, [0, 0]),
        6 => header(terms, 4 + random.below(3) as u16, fua, random, [offset, length]),
        7 => header(terms, BLOCK_STATUS, 0, random, [offset, length]),
        _ => {
            let (Mode::Extended, Some(context)) = (terms.mode, terms.context) else {
                return header(terms, BLOCK_STATUS, 1 << 3, random, [offset, length]);
            };
            let mut bytes = header(terms, BLOCK_STATUS, PAYLOAD_LEN, random, [offset, 12]);
            bytes.extend(length.to_be_bytes());
            bytes.extend(context.to_be_bytes());
            bytes
        }
    }
}

/// A request with random fields, in which extreme values are frequent.
fn any(terms: Terms, random: &mut Random) -> Vec<u8> {
    let mut number = |bound: u64| match random.below(4) {
        0 => random.word(),
        1 => u64::MAX - random.below(3),
        2 => (1 << random.below(63)) - random.below(2),
        _ => random.below(bound),
    };
    let at = [number(2 * IMAGE_BYTES), number(2 * IMAGE_BYTES)];
    let flags = if random.chance(50) { random.word() as u16 } else { 1 << random.below(16) };
    let command = if random.chance(90) { random.below(10) } else { random.word() } as u16;
    // NBD_CMD_DISC would hide all requests after it.
    let command = if command == DISC && random.chance(80) { WRITE } else { command };
    let mut bytes = header(terms, command, flags, random, at);
    let most = if random.chance(20) { at[1].clamp(1, 100_000) } else { 64 };
    let payload = random.below(most);
    bytes.resize(bytes.len() + payload as usize, 0x77);
    bytes
}

/// Some requests, with one or two changes to the bytes in most streams.
pub(super) fn damaged(terms: Terms, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..1 + random.below(40) {
        let odd = random.chance(5);
        bytes.extend(if odd { any(terms, random) } else { good(terms, random) });
    }
    for _ in 0..random.below(3) {
        damage(&mut bytes, random);
    }
    bytes
}

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    if bytes.is_empty() {
        return;
    }
    // Most bytes are payload: half of the changes are close to the start of a request.
    let mut at = random.below(bytes.len() as u64) as usize;
    if random.chance(50) {
        let mut word = 0;
        let found = bytes[at..].iter().position(|byte| {
            word = word << 8 | u32::from(*byte);
            word == REQUEST_MAGIC || word == EXTENDED_REQUEST_MAGIC
        });
        at += found.map_or(0, |last| last - 3 + random.below(32) as usize);
        at = at.min(bytes.len() - 1);
    }
    let until = bytes.len().min(at + 1 + random.below(100) as usize);
    match random.below(6) {
        0 | 1 => bytes[at] ^= 1 << random.below(8),
        2 => bytes[at] = random.word() as u8,
        3 => drop(bytes.drain(at..until)),
        4 => {
            let again = bytes[at..until].to_vec();
            bytes.splice(at..at, again);
        }
        _ => bytes.truncate(at),
    }
}
