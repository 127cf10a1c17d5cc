//! Bytes of a store, a record of a boot and a file of a cache: the first byte selects one of them.
//!
//! Checked: bytes of an object are taken only from an answer that is about its version and the range
//! that was asked for; of a record each block within the object once; of a cache only what was written.
//! A fault is one line.

use std::collections::HashSet;

use nowait_remote::fuzz::{CACHED_BYTES, CacheFile, Judge, READ, URL, Verdict, record};
use tempfile::TempDir;

use crate::target::{Check, Target};

/// Bytes between the answers of two connections.
const NEXT: u8 = 0x1e;
/// Blocks of the object of a record.
const RECORD_END: u64 = 1000;
/// The longest words of a fault.
const FAULT_BYTES: usize = 1000;

pub(crate) const TARGET: Target = Target {
    name: "remote",
    about: "what stores and web servers answer, records of boots, files of a cache",
    prepare,
    seeds,
    words: &[
        b"HTTP/1.1 206 P\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"content-range: bytes 10-29/100\r\n",
        b"content-length: 20\r\n",
        b"transfer-encoding: chunked\r\n",
        b"etag: \"a\"\r\n",
        b"etag: W/\"a\"\r\n",
        b"last-modified: Tue, 01 Jul 2025 10:00:00 GMT\r\n",
        b"location: /other\r\n",
        b"connection: close\r\n",
        b"18446744073709551615",
        b"<Code>",
        &[NEXT],
    ],
    longest: 8192,
    memory: 32 << 20,
};

fn prepare() -> Result<Check, String> {
    let judge = Judge::new()?;
    let (scratch, cache) = new_cache()?;
    Ok(Box::new(move |input| {
        let _kept = &scratch;
        let Some((&first, bytes)) = input.split_first() else { return Ok(()) };
        match first % 4 {
            0 => check_record(bytes),
            1 => check_cache(&cache, bytes),
            _ => check_answers(&judge, bytes),
        }
    }))
}

/// A cache, and its directory, which goes with the value.
fn new_cache() -> Result<(TempDir, CacheFile), String> {
    let scratch = TempDir::new().map_err(|error| error.to_string())?;
    let cache = CacheFile::new(&scratch.path().join("cache"))?;
    Ok((scratch, cache))
}

fn check_answers(judge: &Judge, bytes: &[u8]) -> Result<(), String> {
    let answers: Vec<_> = bytes.split(|&byte| byte == NEXT).map(<[u8]>::to_vec).collect();
    match judge.judge(answers) {
        Verdict::Fault(text) => {
            let is_line = !text.is_empty() && !text.chars().any(char::is_control);
            let is_short = text.len() <= FAULT_BYTES;
            (is_line && is_short).then_some(()).ok_or_else(|| format!("a fault that says {text:?}"))
        }
        Verdict::Read(data) => check_read(bytes, &data),
    }
}

/// `data` was read from servers that have sent `bytes`.
fn check_read(bytes: &[u8], data: &[u8]) -> Result<(), String> {
    let (pos, len) = READ;
    if data.len() as u64 != len {
        return Err(format!("{} bytes instead of {len}", data.len()));
    }
    let has = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
    let range = format!("{pos}-{}/", pos + len - 1);
    if !has(b"206") || !has(range.as_bytes()) {
        return Err("bytes of no answer about this range".into());
    }
    let is_chunked = bytes.to_ascii_lowercase().windows(7).any(|window| window == b"chunked");
    let is_sent = is_chunked || has(data);
    is_sent.then_some(()).ok_or_else(|| "bytes that no server has sent".into())
}

fn check_record(bytes: &[u8]) -> Result<(), String> {
    let Ok(text) = std::str::from_utf8(bytes) else { return Ok(()) };
    let mut known = HashSet::new();
    let end = format!(" {URL}");
    let blocks = text.lines().filter_map(|line| line.strip_suffix(&end)?.parse().ok());
    let blocks: Vec<u64> =
        blocks.filter(|&block| block < RECORD_END && known.insert(block)).collect();
    let found = record(text, URL, RECORD_END);
    let is_right = found == blocks;
    is_right.then_some(()).ok_or_else(|| format!("{found:?} instead of {blocks:?}"))
}

/// The object in the cache.
fn cached() -> Vec<u8> {
    (0..CACHED_BYTES).map(|at| (at / 3) as u8).collect()
}

fn check_cache(cache: &CacheFile, bytes: &[u8]) -> Result<(), String> {
    let found = cache.read(bytes).map_err(|error| error.to_string())?;
    let is_right = found.is_none_or(|data| data == cached());
    is_right.then_some(()).ok_or_else(|| "a block that was not written".into())
}

/// The answers of a server with an object of 100 bytes, whose headers have `version`.
fn answers(version: &str) -> Vec<u8> {
    let one = format!(
        "HTTP/1.1 206 P\r\ncontent-length: 1\r\ncontent-range: bytes 0-0/100\r\n{version}\r\nx"
    );
    let other = format!(
        "HTTP/1.1 206 P\r\ncontent-length: 20\r\ncontent-range: bytes 10-29/100\r\n{version}\r\n\
         abcdefghijklmnopqrst"
    );
    [&[2], one.as_bytes(), &[NEXT], other.as_bytes()].concat()
}

fn seeds() -> Vec<Vec<u8>> {
    let strong = answers("etag: \"a\"\r\n");
    let dated = answers("last-modified: Tue, 01 Jul 2025 10:00:00 GMT\r\netag: W/\"a\"\r\n");
    let moved = b"\x02HTTP/1.1 302 F\r\nlocation: http://other/a\r\ncontent-length: 0\r\n\r\n\x1e";
    let moved = [&moved[..], &strong[1..]].concat();
    let refused = b"\x02HTTP/1.1 403 F\r\nx-amz-bucket-region: eu-west-1\r\n\r\n<Code>AccessDenied";
    let lines = format!("\0001 {URL}\n7 s3://b/k\n3 {URL}\r\n1 {URL}\n2000 {URL}\n");
    let mut seeds = vec![strong, dated, moved, refused.to_vec(), lines.into_bytes()];
    let file = new_cache().ok().and_then(|(_scratch, cache)| cache.written(&cached()).ok());
    seeds.extend(file.map(|file| [&[1], file.as_slice()].concat()));
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_read_as_they_were_meant() {
        let judge = Judge::new().unwrap();
        let read = |seed: &[u8]| {
            judge.judge(seed[1..].split(|&byte| byte == NEXT).map(<[u8]>::to_vec).collect())
        };
        let seeds = seeds();
        for seed in &seeds[..3] {
            assert_eq!(read(seed), Verdict::Read(b"abcdefghijklmnopqrst".to_vec()));
        }
        let refused = Verdict::Fault("the store refuses access (403)".into());
        assert_eq!(read(&seeds[3]), refused);
        let text = std::str::from_utf8(&seeds[4][1..]).unwrap();
        assert_eq!(record(text, URL, RECORD_END), [1, 3]);
        let (_scratch, cache) = new_cache().unwrap();
        assert_eq!(cache.read(&seeds[5][1..]).unwrap(), Some(cached()));
    }
}
