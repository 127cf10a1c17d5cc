//! An append-only table in a file that grows: `nowait::BlockingFile`.
//!
//! `table_file FILE put KEY VALUE` appends a record that is durable when the program ends, `table_file
//! FILE get KEY` prints the last value of a key. A record is two lengths of four bytes, the key and the
//! value. Any number of programs may put and get at the same time: an append is one piece. A record that
//! was cut off by a crash ends the table; `put` then removes it.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use nowait::{BlockingFile, FileLock, Flags, OpenOptions};

/// The key and the value of the first record of `bytes`, and where it ends; `None` if it is not whole.
fn first_record(bytes: &[u8]) -> Option<(&[u8], &[u8], usize)> {
    let lens = bytes.get(..8)?;
    let len = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| lens[at + n])) as usize;
    let (key, value) = bytes[8..].split_at_checked(len(0))?;
    Some((key, value.get(..len(4))?, 8 + key.len() + len(4)))
}

/// Where the last whole record of `bytes` ends, and the last value of `key`.
fn find<'a>(bytes: &'a [u8], key: &[u8]) -> (usize, Option<&'a [u8]>) {
    let (mut end, mut last) = (0, None);
    while let Some((name, value, len)) = first_record(&bytes[end..]) {
        last = if name == key { Some(value) } else { last };
        end += len;
    }
    (end, last)
}

fn read(file: &BlockingFile) -> Result<Vec<u8>, nowait::Error> {
    let mut bytes = vec![0; usize::try_from(file.size()).unwrap_or(usize::MAX)];
    let len = file.read_at(&mut bytes, 0)?;
    bytes.truncate(len);
    Ok(bytes)
}

fn put(path: &Path, key: &[u8], value: &[u8]) -> Result<(), Box<dyn Error>> {
    let file = BlockingFile::open(path, OpenOptions::new().create(true).mode(0o600))?;
    file.lock(FileLock::Exclusive)?;
    let end = find(&read(&file)?, key).0 as u64;
    if end < file.size() {
        file.set_len(end)?;
    }
    let lens = [u32::try_from(key.len())?, u32::try_from(value.len())?].map(u32::to_le_bytes);
    file.append(&[lens.as_flattened(), key, value].concat(), Flags::DSYNC)?;
    // The name of a new file survives a loss of power, too.
    let directory = path.parent().filter(|parent| *parent != Path::new(""));
    Ok(nowait::sync_directory(directory.unwrap_or(Path::new(".")))?)
}

fn get(path: &Path, key: &[u8]) -> Result<(), Box<dyn Error>> {
    let file = BlockingFile::open(path, OpenOptions::new().read_only(true))?;
    let bytes = read(&file)?;
    let value = find(&bytes, key).1.ok_or("there is no such key")?;
    println!("{}", String::from_utf8_lossy(value));
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        [file, "put", key, value] => put(Path::new(file), key.as_bytes(), value.as_bytes()),
        [file, "get", key] => get(Path::new(file), key.as_bytes()),
        _ => Err("usage: table_file FILE put KEY VALUE | FILE get KEY".into()),
    };
    if let Err(error) = done {
        eprintln!("table_file: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
