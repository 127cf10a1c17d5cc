//! A new point: blocks are compressed and appended to data files, the manifest comes last.
//!
//! Invariant: there is a point when its manifest is there, and that is put when all that it names is durable. Of a
//! point that is not finished the data files are removed.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use nowait::ByteRange;
use nowait_copy::{Changes, Error, Increment, IncrementTarget, TargetDisk};
use nowait_image::ClusterCompressor;

use crate::block::{block_bytes_of, compressor, sum_of};
use crate::chain::{Chain, PointInfo};
use crate::data_writer::DataWriter;
use crate::manifest::{Entry, Header, Manifest};
use crate::place::{FileName, Put};
use crate::table::Table;

/// The blocks that a new point has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contents {
    /// All blocks, whatever the points before have.
    Whole,
    /// The blocks that differ from the last point, by their checksums; all without one that can be used.
    Differences,
    /// The blocks that this dirty bitmap of the source tells, as far as they differ; all without a point.
    Bitmap(String),
}

/// A point that is being made.
pub struct NewPoint {
    /// Holds the lock.
    chain: Chain,
    /// The last point and all its blocks.
    base: Option<(Header, Table)>,
    /// The number of the new point.
    number: u32,
    bitmap: Option<String>,
    /// Whether backups have left something that were interrupted, and what that is.
    has_interrupted: bool,
    interrupted: Mutex<Vec<Manifest>>,
    /// The header, and the blocks of these that are of such a disk.
    started: OnceLock<(Header, Table)>,
    state: Mutex<State>,
    /// Compressors that no thread uses.
    compressors: Mutex<Vec<ClusterCompressor>>,
}

#[derive(Default)]
struct State {
    /// The data files, when it has begun.
    data: Option<DataWriter>,
    entries: Vec<Entry>,
    /// The entries and data files that are in an index.
    indexed: (usize, usize),
    /// Blocks that an interrupted backup has stored, with the same content.
    reused: Vec<Entry>,
    /// A bit for each block that was written or made zero.
    seen: Vec<u64>,
    made: Option<PointInfo>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NewPoint {
    /// Begins a point of `chain`. Of a backup that was interrupted, blocks that are in files that were complete are taken if the disk
    /// still has their content; its other remains are removed.
    ///
    /// # Errors
    /// The last point cannot be used with a bitmap; remains cannot be removed.
    pub fn new(chain: Chain, contents: Contents) -> Result<Arc<Self>, Error> {
        let interrupted = chain.interrupted().map_err(|what| chain.error(what))?;
        let files = interrupted.iter().flat_map(|index| &index.header.files);
        let kept = files.flat_map(|file| [FileName::Data(file.id), FileName::Index(file.id)]);
        chain.remove_remains(&kept.collect()).map_err(|what| chain.error(what))?;
        let last = chain.last();
        let number = last.unwrap_or(0).checked_add(1);
        let number =
            number.ok_or_else(|| chain.error("it has had all points that are possible"))?;
        let is_whole = contents == Contents::Whole;
        let bitmap = match contents {
            Contents::Bitmap(name) => Some(name),
            Contents::Whole | Contents::Differences => None,
        };
        let base = match last.filter(|_| !is_whole).map(|last| (last, chain.table(last))) {
            Some((last, Ok(table))) => {
                let point = chain.points.get(&last).and_then(|point| point.as_ref().ok());
                point.map(|point| (point.header.clone(), table))
            }
            Some((_, Err(why))) if bitmap.is_some() => {
                let what = format!("{why} (leave out --bitmap, to make a whole point)");
                return Err(chain.error(what));
            }
            Some((_, Err(_))) | None => None,
        };
        Ok(Arc::new(Self {
            bitmap: bitmap.filter(|_| base.is_some()),
            chain,
            base,
            number,
            has_interrupted: !interrupted.is_empty(),
            interrupted: Mutex::new(interrupted),
            started: OnceLock::new(),
            state: Mutex::default(),
            compressors: Mutex::default(),
        }))
    }

    /// The place of its chain, for errors.
    #[must_use]
    pub fn name(&self) -> String {
        self.chain.name.clone()
    }

    /// The bitmap that tells the copy what to read; `None`: all of the disk.
    #[must_use]
    pub fn increment(&self) -> Option<Increment> {
        let bitmap = self.bitmap.clone()?;
        Some(Increment { changes: Changes::Bitmap(bitmap), target: IncrementTarget::InPlace })
    }

    /// The point, when it is made.
    #[must_use]
    pub fn made(&self) -> Option<PointInfo> {
        lock(&self.state).made.clone()
    }

    /// Stored bytes of its blocks that a backup had stored that was interrupted.
    #[must_use]
    pub fn resumed_bytes(&self) -> u64 {
        lock(&self.state).reused.iter().map(|entry| u64::from(entry.len)).sum()
    }

    /// The header of the point, with the table of its parent.
    fn started(&self) -> Result<(&Header, Option<&Table>), String> {
        let (header, _) = self.started.get().ok_or("it has not begun")?;
        let table = self.base.as_ref().map(|(_, table)| table);
        Ok((header, table.filter(|_| header.parent.is_some())))
    }

    /// Takes a block, which is not all zeros.
    fn take(&self, block: u32, bytes: &[u8]) -> Result<(), String> {
        let (header, base) = self.started()?;
        let sum = sum_of(bytes);
        if base.and_then(|table| table.get(block)).is_some_and(|entry| entry.sum == sum) {
            lock(&self.state).see(block);
            return Ok(());
        }
        let stored = self.started.get().and_then(|(_, stored)| stored.get(block));
        if let Some(entry) = stored.filter(|entry| entry.sum == sum) {
            let mut state = lock(&self.state);
            state.see(block);
            state.reused.push(*entry);
            return Ok(());
        }
        let spare = lock(&self.compressors).pop();
        let mut compressor = spare
            .or_else(|| compressor(header.block_bytes))
            .ok_or("no memory for the compression")?;
        let stored = compressor.compress(bytes).unwrap_or(bytes);
        let mut state = lock(&self.state);
        let len = stored.len() as u32;
        if state.data.as_ref().is_some_and(|data| data.is_full_for(len.into())) {
            self.index(header, &mut state)?;
        }
        let data = state.data.as_mut().ok_or("it has ended")?;
        let (file, position) = data.append(stored)?;
        state.see(block);
        state.entries.push(Entry { sum, position, block, file, len });
        drop(state);
        lock(&self.compressors).push(compressor);
        Ok(())
    }

    /// Completes a data file that is full and puts its index, so that it is of use if this backup is interrupted.
    fn index(&self, header: &Header, state: &mut State) -> Result<(), String> {
        let (from, at) = state.indexed;
        let Some(data) = &mut state.data else { return Ok(()) };
        let Some(file) = data.complete()?.get(at).copied() else { return Ok(()) };
        let entries = state.entries.get(from..).unwrap_or_default().iter();
        let mut entries: Vec<Entry> = entries.map(|entry| Entry { file: 0, ..*entry }).collect();
        entries.retain(|entry| !entry.is_zero());
        entries.sort_unstable_by_key(|entry| entry.block);
        let index = Manifest { header: Header { files: vec![file], ..header.clone() }, entries };
        self.chain.place.put(FileName::Index(file.id), &index.encode()?, Put::New)?;
        data.keep();
        state.indexed = (state.entries.len(), at + 1);
        Ok(())
    }

    fn take_zero(&self, block: u32) -> Result<(), String> {
        let (_, base) = self.started()?;
        let mut state = lock(&self.state);
        state.see(block);
        if base.is_some_and(|table| table.get(block).is_some()) {
            state.entries.push(Entry::zero(block));
        }
        Ok(())
    }

    /// The manifest of `entries`, in the files of `header`, and of `reused` blocks.
    fn with_reused(&self, header: Header, mut entries: Vec<Entry>, reused: &[Entry]) -> Manifest {
        let Some((_, stored)) = self.started.get().filter(|_| !reused.is_empty()) else {
            entries.sort_unstable_by_key(|entry| entry.block);
            return Manifest { header, entries };
        };
        let first = header.files.len() as u32;
        entries.extend(reused.iter().map(|entry| Entry { file: entry.file + first, ..*entry }));
        entries.sort_unstable_by_key(|entry| entry.block);
        let mut table = Table { files: [&header.files[..], &stored.files].concat(), entries };
        table.drop_unused_files();
        Manifest { header: Header { files: table.files, ..header }, entries: table.entries }
    }

    fn block_of(&self, pos: u64) -> Result<u32, String> {
        let block = pos / self.started()?.0.block_bytes;
        u32::try_from(block).map_err(|_| "a block behind the end of the disk".into())
    }
}

impl State {
    fn see(&mut self, block: u32) {
        if let Some(word) = self.seen.get_mut(block as usize / 64) {
            *word |= 1 << (block % 64);
        }
    }

    fn has_seen(&self, block: u32) -> bool {
        self.seen.get(block as usize / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
    }
}

impl fmt::Debug for NewPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.chain.name, self.number)
    }
}

impl TargetDisk for NewPoint {
    fn begin(&self, size: u64) -> Result<u64, String> {
        let block_bytes = block_bytes_of(size).ok_or("the disk is too large: 128 TiB at most")?;
        let base = self.base.as_ref().map(|(header, _)| header);
        let fits = |header: &&Header| (header.size, header.block_bytes) == (size, block_bytes);
        let parent = match base {
            Some(header) if !fits(&header) && self.bitmap.is_some() => {
                return Err(format!(
                    "the disk has another size than at point {}: {size} bytes, it had {} (leave out --bitmap, to make a whole point)",
                    header.number, header.size
                ));
            }
            base => base.filter(fits).map(|header| header.number),
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let header = Header {
            chain: self.chain.id,
            number: self.number,
            parent,
            size,
            block_bytes,
            seconds: now.map_or(0, |now| now.as_secs()),
            bitmap: self.bitmap.clone(),
            recipients: self.chain.place.encrypts_for(),
            files: Vec::new(),
        };
        let words = header.blocks().div_ceil(64) as usize;
        let mut state = lock(&self.state);
        state.seen = vec![0; words];
        let place = self.chain.place.clone();
        let file_bytes = place.file_bytes(size);
        state.data = Some(DataWriter::new(place, file_bytes));
        drop(state);
        let mut interrupted = std::mem::take(&mut *lock(&self.interrupted));
        interrupted
            .retain(|index| (index.header.size, index.header.block_bytes) == (size, block_bytes));
        let started = (header, Table::of_parts(interrupted));
        self.started.set(started).map_err(|_| "it has begun already")?;
        Ok(block_bytes)
    }

    fn write(&self, pos: u64, bytes: &[u8]) -> Result<(), String> {
        let block_bytes = self.started()?.0.block_bytes;
        let first = self.block_of(pos)?;
        for (block, bytes) in (first..).zip(bytes.chunks_exact(block_bytes as usize)) {
            match bytes.iter().all(|byte| *byte == 0) {
                true => self.take_zero(block)?,
                false => self.take(block, bytes)?,
            }
        }
        Ok(())
    }

    fn zero(&self, range: ByteRange) -> Result<(), String> {
        let block_bytes = self.started()?.0.block_bytes;
        let first = self.block_of(range.pos)?;
        let count = (range.len / block_bytes) as usize;
        (first..).take(count).try_for_each(|block| self.take_zero(block))
    }

    fn finish(&self) -> Result<(), String> {
        let (header, base) = self.started()?;
        let mut header = header.clone();
        let mut state = lock(&self.state);
        let mut entries = std::mem::take(&mut state.entries);
        // Without a bitmap what the copy has not sent is zero.
        if let (Some(base), None) = (base, &self.bitmap) {
            let unseen = base.entries.iter().filter(|entry| !state.has_seen(entry.block));
            entries.extend(unseen.map(|entry| Entry::zero(entry.block)));
        }
        if let Some(data) = &mut state.data {
            header.files = data.complete()?.to_vec();
        }
        let manifest = self.with_reused(header, entries, &state.reused);
        let name = FileName::Point(self.number);
        let put = self.chain.place.put(name, &manifest.encode()?, Put::New);
        // A manifest that has its name, but is maybe not durable, needs its data, too.
        if (put.is_ok() || self.chain.place.open(name).is_ok())
            && let Some(mut data) = state.data.take()
        {
            data.keep();
        }
        put?;
        if state.indexed.1 > 0 || self.has_interrupted {
            let files = manifest.header.files.iter().map(|file| FileName::Data(file.id));
            // The next backup removes remains that this one could not.
            let _ = self.chain.remove_remains(&files.collect::<BTreeSet<_>>());
        }
        state.made = Some(PointInfo::of(&manifest));
        Ok(())
    }
}
