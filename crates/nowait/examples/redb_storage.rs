//! A database of others on nowait: redb, which asks for its storage by a trait, with its file by direct I/O.
//!
//! `redb_storage FILE put KEY VALUE`, `get KEY`: one durable transaction each. `redb_storage FILE compare COMMITS`: durable
//! transactions and reads a second, in turn on nowait and on redb's own file backend, each in a new file beside FILE.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Instant;

use nowait::{AsyncFile, FileLock, Flags, IoBuffer, OpenOptions};
use redb::{Builder, Database, StorageBackend, TableDefinition};

pub(crate) type Failure = Box<dyn std::error::Error>;

pub(crate) const TABLE: TableDefinition<&[u8], &[u8]> = TableDefinition::new("pairs");

/// Bytes of writes that are held back until the next sync, at most.
const HELD_BYTES: usize = 16 << 20;

/// A file by direct I/O, locked against other handles. Writes are held back until a sync, which makes all of them
/// simultaneously: one after the other each would wait for the disk.
#[derive(Debug)]
pub(crate) struct DirectStorage {
    file: AsyncFile,
    /// Writes by position, none of which overlap.
    held: Mutex<BTreeMap<u64, IoBuffer>>,
}

impl DirectStorage {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = AsyncFile::open(path, OpenOptions::new().create(true))?;
        file.try_lock(FileLock::Exclusive)?;
        Ok(Self { file, held: Mutex::default() })
    }

    /// Makes the writes that are held back.
    fn write_out(&self, held: &mut BTreeMap<u64, IoBuffer>) -> io::Result<()> {
        let writes = std::mem::take(held).into_iter();
        let mut writes: Vec<_> = writes
            .map(|(pos, data)| Some((data.len(), self.file.write_at(data, pos, Flags::NONE))))
            .collect();
        let mut result = Ok(());
        pollster::block_on(poll_fn(|context| {
            for place in &mut writes {
                let Some((len, write)) = place else { continue };
                let Poll::Ready((written, _)) = Pin::new(write).poll(context) else { continue };
                match written {
                    Ok(bytes) if bytes == *len => {}
                    Ok(_) => result = Err(io::ErrorKind::WriteZero.into()),
                    Err(error) => result = Err(error.into()),
                }
                *place = None;
            }
            if writes.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
        }));
        result
    }
}

/// Whether a write that is held back, other than one of exactly these bytes, overlaps them.
fn overlaps(held: &BTreeMap<u64, IoBuffer>, pos: u64, len: usize) -> bool {
    let last = held.range(..pos + len as u64).next_back();
    last.is_some_and(|(&at, data)| at + data.len() as u64 > pos && (at, data.len()) != (pos, len))
}

impl StorageBackend for DirectStorage {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.size())
    }

    fn read(&self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if overlaps(&held, offset, len) {
            self.write_out(&mut held)?;
        } else if let Some(data) = held.get(&offset) {
            return Ok(data.to_vec());
        }
        drop(held);
        let (read, buffer) = pollster::block_on(self.file.read_at(IoBuffer::zeroed(len)?, offset));
        match read? {
            read if read == len => Ok(buffer.to_vec()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_out(&mut held)?;
        Ok(pollster::block_on(self.file.set_len(len))?)
    }

    fn sync_data(&self, _eventual: bool) -> io::Result<()> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_out(&mut held)?;
        Ok(pollster::block_on(self.file.flush())?)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: usize = held.values().map(|data| data.len()).sum();
        if bytes + data.len() > HELD_BYTES || overlaps(&held, offset, data.len()) {
            self.write_out(&mut held)?;
        }
        let mut buffer = IoBuffer::zeroed(data.len())?;
        buffer.copy_from_slice(data);
        held.insert(offset, buffer);
        Ok(())
    }
}

impl Drop for DirectStorage {
    /// A database that is closed has written what it wants to keep; an error of the rest is lost.
    fn drop(&mut self) {
        let mut held =
            std::mem::take(&mut self.held).into_inner().unwrap_or_else(PoisonError::into_inner);
        let _ = self.write_out(&mut held);
    }
}

pub(crate) fn open(path: &Path) -> Result<Database, Failure> {
    Ok(Builder::new().create_with_backend(DirectStorage::open(path)?)?)
}

/// Adds pairs, all of them or none, durably.
pub(crate) fn put(
    database: &Database,
    pairs: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
) -> Result<(), Failure> {
    let transaction = database.begin_write()?;
    {
        let mut table = transaction.open_table(TABLE)?;
        for (key, value) in pairs {
            table.insert(&key[..], &value[..])?;
        }
    }
    Ok(transaction.commit()?)
}

/// The value of a key.
pub(crate) fn get(database: &Database, key: &[u8]) -> Result<Option<Vec<u8>>, Failure> {
    let table = database.begin_read()?.open_table(TABLE)?;
    Ok(table.get(key)?.map(|value| value.value().to_vec()))
}

/// Commits and reads a second, of ten pairs of 1 KiB each.
fn rates(database: &Database, commits: u64) -> Result<[f64; 2], Failure> {
    let key = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes().to_vec();
    let began = Instant::now();
    for commit in 0..commits {
        let values = commit * 10..commit * 10 + 10;
        put(database, values.map(|n| (key(n), vec![n as u8; 1024])))?;
    }
    let committed = commits as f64 / began.elapsed().as_secs_f64();
    let began = Instant::now();
    for n in 0..commits * 10 {
        get(database, &key(n))?.ok_or("a pair is missing")?;
    }
    Ok([committed, (commits * 10) as f64 / began.elapsed().as_secs_f64()])
}

/// Prints the rates of three rounds on either backend.
fn compare(path: &Path, commits: u64) -> Result<(), Failure> {
    for _ in 0..3 {
        for name in ["nowait", "file"] {
            let path = path.with_extension(name);
            if path.exists() {
                return Err(format!("{} is there already", path.display()).into());
            }
            let database = match name {
                "nowait" => open(&path)?,
                _ => Database::create(&path)?,
            };
            let [committed, read] = rates(&database, commits)?;
            println!("{name}: {committed:.0} commits/s, {read:.0} reads/s");
            drop(database);
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

pub(crate) fn run(words: &[&str]) -> Result<(), Failure> {
    match words {
        [path, "put", key, value] => {
            let pair = (key.as_bytes().to_vec(), value.as_bytes().to_vec());
            put(&open(Path::new(path))?, [pair])
        }
        [path, "get", key] => {
            let value = get(&open(Path::new(path))?, key.as_bytes())?.ok_or("no such key")?;
            println!("{}", String::from_utf8_lossy(&value));
            Ok(())
        }
        [path, "compare", commits] => compare(Path::new(path), commits.parse()?),
        _ => Err("usage: redb_storage FILE put KEY VALUE | get KEY | compare COMMITS".into()),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("redb_storage: {error}");
            ExitCode::FAILURE
        }
    }
}
