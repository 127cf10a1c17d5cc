//! Mutates inputs: a few changes each, of kinds that parsers often handle wrongly.
//!
//! Invariant: the result depends only on the corpus and the random numbers, and is never longer
//! than the bound.

use nowait::sim::Random;

/// The most changes of one input.
const MAX_CHANGES: u64 = 6;
/// The longest piece that is inserted, duplicated or removed, in bytes.
const MAX_PIECE: u64 = 64;
/// Widths of the numbers of protocols and formats, in bytes.
const WIDTHS: [usize; 4] = [1, 2, 4, 8];
/// The offsets from a power of two that make boundary values.
const EDGES: [i64; 5] = [-1, 0, 1, -512, 512];

/// Changes `bytes`, to at most `longest` bytes. Parts are copied from `others`; `words` are
/// inserted unchanged.
pub(crate) fn mutate(
    bytes: &mut Vec<u8>,
    random: &mut Random,
    others: &[Vec<u8>],
    words: &[&[u8]],
    longest: usize,
) {
    for _ in 0..1 + random.below(MAX_CHANGES) {
        change(bytes, random, others, words);
        bytes.truncate(longest);
    }
}

fn change(bytes: &mut Vec<u8>, random: &mut Random, others: &[Vec<u8>], words: &[&[u8]]) {
    let at = random.below(bytes.len() as u64) as usize;
    let piece = 1 + random.below(MAX_PIECE) as usize;
    let end = (at + piece).min(bytes.len());
    match random.below(12) {
        0 | 1 => flip(bytes, at, random),
        2 | 3 => number(bytes, at, random),
        4 => step(bytes, at, random),
        5 => drop(bytes.drain(at..end)),
        6 => {
            let doubled = bytes.get(at..end).unwrap_or_default().to_vec();
            insert(bytes, at, &doubled);
        }
        7 => {
            let new: Vec<u8> = (0..piece).map(|_| random.next() as u8).collect();
            insert(bytes, at, &new);
        }
        8 => {
            let word = random.pick(words).unwrap_or_default();
            insert(bytes, at, word);
        }
        9 => {
            let word = random.pick(words).unwrap_or_default();
            write(bytes, at, word);
        }
        10 => bytes.truncate(at),
        _ => splice(bytes, at, random, others),
    }
}

fn flip(bytes: &mut [u8], at: usize, random: &mut Random) {
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

/// Writes a boundary value at `at`.
fn number(bytes: &mut [u8], at: usize, random: &mut Random) {
    let power = 1i64.checked_shl(random.below(65) as u32).unwrap_or(0);
    let value = match random.below(4) {
        0 => random.below(40) as i64,
        1 => -(random.below(3) as i64),
        _ => power.wrapping_add(random.pick(&EDGES).unwrap_or(0)),
    };
    put(bytes, at, value, random);
}

/// Adds a little to the number at `at`.
fn step(bytes: &mut [u8], at: usize, random: &mut Random) {
    let width = random.pick(&WIDTHS).unwrap_or(1);
    let Some(place) = bytes.get_mut(at..at.saturating_add(width)) else { return };
    let mut whole = [0; 8];
    if let Some(low) = whole.get_mut(8 - width..) {
        low.copy_from_slice(place);
        let by = random.below(64).wrapping_sub(32);
        let new = u64::from_be_bytes(whole).wrapping_add(by).to_be_bytes();
        place.copy_from_slice(new.get(8 - width..).unwrap_or_default());
    }
}

fn put(bytes: &mut [u8], at: usize, value: i64, random: &mut Random) {
    let width = random.pick(&WIDTHS).unwrap_or(1);
    let (big, little) = (value.to_be_bytes(), value.to_le_bytes());
    // All formats here are big-endian; little-endian is the exception.
    let word = if random.chance(8000) { little.get(..width) } else { big.get(8 - width..) };
    write(bytes, at, word.unwrap_or_default());
}

fn write(bytes: &mut [u8], at: usize, word: &[u8]) {
    let rest = bytes.get_mut(at..).unwrap_or_default();
    rest.iter_mut().zip(word).for_each(|(to, from)| *to = *from);
}

fn insert(bytes: &mut Vec<u8>, at: usize, new: &[u8]) {
    bytes.splice(at..at, new.iter().copied());
}

/// Replaces the bytes from `at` on by the tail of another input.
fn splice(bytes: &mut Vec<u8>, at: usize, random: &mut Random, others: &[Vec<u8>]) {
    let Some(other) = others.get(random.below(others.len() as u64) as usize) else { return };
    let from = random.below(other.len() as u64 + 1) as usize;
    bytes.truncate(at);
    bytes.extend_from_slice(other.get(from..).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_make_equal_inputs_and_none_is_too_long() {
        let corpus = [vec![1, 2, 3], vec![9; 100], Vec::new()];
        let list = |seed| -> Vec<Vec<u8>> {
            let mut random = Random::new(seed);
            let make = |n: usize| {
                let mut bytes = corpus[n % 3].clone();
                mutate(&mut bytes, &mut random, &corpus, &[b"WORD"], 120);
                bytes
            };
            (0..3000).map(make).collect()
        };
        assert_eq!(list(1), list(1));
        assert_ne!(list(1), list(2));
        assert!(list(1).iter().all(|bytes| bytes.len() <= 120));
        let has = |what: &[u8]| list(1).iter().any(|b| b.windows(what.len()).any(|w| w == what));
        assert!(has(b"WORD") && has(&(u32::MAX - 1).to_be_bytes()) && has(&[9; 110]));
    }
}
