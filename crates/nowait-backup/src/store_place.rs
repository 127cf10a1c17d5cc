//! A chain in a folder of an object store.
//!
//! Invariant: a data file is there when all of it is, or not at all. Who adds or removes has the lock of the chain, and
//! looks that it has it before a manifest is put and before anything is removed.

use std::fmt;
use std::io::IoSliceMut;
use std::sync::Arc;
use std::time::Duration;

use nowait::Storage;
use nowait_image::os_message;
use nowait_remote::{ObjectFolder, ObjectOptions, ObjectStorage, ObjectUpload, ObjectUrl};

use crate::manifest::MAX_MANIFEST_BYTES;
use crate::place::{Access, FileName, NewFile, Place, Put, StoredFile};
use crate::store_lock::{LOCK, StoreLock};

/// How long a request is made again after its first transient fault.
pub(crate) const RETRY: Duration = Duration::from_secs(30);
/// The most data objects that are read at a time; each has connections and memory.
/// Beyond it: all are closed, and opened again where they are needed.
const MAX_OPEN_OBJECTS: usize = 8;

/// A folder with the files of a chain.
pub(crate) struct StorePlace {
    folder: Arc<ObjectFolder>,
    /// Of who adds or removes.
    lock: Option<Arc<StoreLock>>,
}

impl fmt::Debug for StorePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a folder of a store")
    }
}

impl StorePlace {
    /// Opens the folder at `url`, and locks it for who adds or removes.
    ///
    /// # Errors
    /// The store refuses or does not answer; the folder has other objects; another process adds or removes.
    pub(crate) fn open(url: &ObjectUrl, access: Access) -> Result<Self, String> {
        let folder = ObjectFolder::open(url, RETRY)?;
        let listed = folder.list()?;
        let is_own = |name: &str| name == LOCK || FileName::parse(name).is_some();
        if !listed.iter().any(|(name, _)| is_own(name)) {
            match access {
                Access::Add if listed.is_empty() => {}
                Access::Add => return Err("it has other objects, and no backups".into()),
                _ => return Err("there are no backups in it".into()),
            }
        }
        let lock = match access {
            Access::List | Access::Read => None,
            Access::Add | Access::Remove => {
                Some(Arc::new(StoreLock::acquire(ObjectFolder::open(url, RETRY)?)?))
            }
        };
        Ok(Self { folder: Arc::new(folder), lock })
    }

    /// The lock, after it was looked at whether it is held.
    fn locked(&self) -> Result<&Arc<StoreLock>, String> {
        let lock = self.lock.as_ref().ok_or("it is open to be read only")?;
        lock.check()?;
        Ok(lock)
    }
}

impl Place for StorePlace {
    fn list(&self) -> Result<Vec<(FileName, u64)>, String> {
        let listed = self.folder.list()?;
        Ok(listed.iter().filter_map(|(name, len)| Some((FileName::parse(name)?, *len))).collect())
    }

    fn open(&self, name: FileName) -> Result<Box<dyn StoredFile>, String> {
        let text = name.to_string();
        let failed = |why: String| format!("cannot open {name}: {why}");
        if let FileName::Data(_) = name {
            let url = self.folder.url_of(&text);
            let storage = ObjectStorage::open(&url, &ObjectOptions::default()).map_err(failed)?;
            let len = storage.size().map_err(|error| failed(error.to_string()))?;
            return Ok(Box::new(Opened { storage, len, name }));
        }
        match self.folder.get(&text, MAX_MANIFEST_BYTES).map_err(failed)? {
            Some(object) => Ok(Box::new(InMemory(object.bytes))),
            None => Err(failed("there is no such object".into())),
        }
    }

    fn create(&self, name: FileName, most: u64) -> Result<Box<dyn NewFile>, String> {
        let failed = |why: String| format!("cannot make {name}: {why}");
        let lock = self.locked()?.clone();
        let upload = self.folder.upload(&name.to_string(), most).map_err(failed)?;
        let (text, id) = (name.to_string(), upload.id().to_owned());
        let uploaded = Uploaded {
            folder: self.folder.clone(),
            lock,
            name,
            part: Vec::with_capacity(upload.part_bytes() as usize),
            upload: Some(upload),
            sent: 0,
            in_flight: 0,
            is_there: false,
        };
        uploaded.lock.note(&text, &id)?;
        Ok(Box::new(uploaded))
    }

    fn put(&self, name: FileName, bytes: &[u8], put: Put) -> Result<(), String> {
        self.locked()?;
        let put = self.folder.put_long(&name.to_string(), bytes, put == Put::Replaces);
        put.map_err(|why| format!("cannot put {name}: {why}"))
    }

    fn remove(&self, name: FileName) -> Result<(), String> {
        self.locked()?;
        let removed = self.folder.remove(&name.to_string());
        removed.map_err(|why| format!("cannot remove {name}: {why}"))
    }

    fn max_open(&self) -> usize {
        MAX_OPEN_OBJECTS
    }
}

/// A data file.
struct Opened {
    storage: ObjectStorage,
    len: u64,
    name: FileName,
}

impl StoredFile for Opened {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, pos: u64, bytes: &mut [u8]) -> Result<(), String> {
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let read = self.storage.read(&mut [IoSliceMut::new(rest)], pos + done as u64);
            let failed = |error| format!("cannot read {}: {}", self.name, os_message(&error));
            match read.map_err(|error| failed(error.into()))? {
                0 => return Err("its file is too short".into()),
                read => done += read,
            }
        }
        Ok(())
    }
}

/// A manifest.
struct InMemory(Vec<u8>);

impl StoredFile for InMemory {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, pos: u64, bytes: &mut [u8]) -> Result<(), String> {
        let part = usize::try_from(pos).ok().and_then(|pos| self.0.get(pos..));
        let part = part.and_then(|part| part.get(..bytes.len()));
        bytes.copy_from_slice(part.ok_or("its file is too short")?);
        Ok(())
    }
}

/// A data file that is being uploaded.
struct Uploaded {
    folder: Arc<ObjectFolder>,
    lock: Arc<StoreLock>,
    name: FileName,
    /// `None` when it is complete.
    upload: Option<ObjectUpload>,
    /// The part that is being filled.
    part: Vec<u8>,
    /// Parts that were sent, and those of them that the store does not have yet.
    sent: usize,
    in_flight: usize,
    /// The object is there, and not to stay.
    is_there: bool,
}

impl fmt::Debug for Uploaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the upload of {}", self.name)
    }
}

impl Uploaded {
    fn failed(&self, why: &str) -> String {
        format!("cannot write {}: {why}", self.name)
    }

    fn upload(&self) -> Result<&ObjectUpload, String> {
        self.upload.as_ref().ok_or_else(|| self.failed("it is complete"))
    }

    /// Sends the part that was filled, when fewer than the most are in flight.
    fn send_part(&mut self) -> Result<(), String> {
        let upload = self.upload()?;
        let (most, capacity) = (upload.parts_at_once(), upload.part_bytes() as usize);
        self.wait_until_in_flight(most.saturating_sub(1))?;
        let part = std::mem::replace(&mut self.part, Vec::with_capacity(capacity));
        self.upload()?.send(self.sent, part);
        self.sent += 1;
        self.in_flight += 1;
        Ok(())
    }

    fn wait_until_in_flight(&mut self, most: usize) -> Result<(), String> {
        while self.in_flight > most {
            self.upload()?.wait_sent().map_err(|why| self.failed(&why))?;
            self.in_flight -= 1;
        }
        Ok(())
    }
}

impl NewFile for Uploaded {
    fn append(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        let part_bytes = self.upload()?.part_bytes() as usize;
        while !bytes.is_empty() {
            let room = part_bytes.saturating_sub(self.part.len()).min(bytes.len());
            let (now, later) = bytes.split_at(room);
            self.part.extend_from_slice(now);
            bytes = later;
            if self.part.len() >= part_bytes {
                self.send_part()?;
            }
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<(), String> {
        if !self.part.is_empty() {
            self.send_part()?;
        }
        self.wait_until_in_flight(0)?;
        let id = self.upload()?.id().to_owned();
        let completed = self.upload.take().map_or(Ok(()), ObjectUpload::complete);
        // Also where the answer was an error, it may be there.
        self.is_there = true;
        self.part = Vec::new();
        self.lock.forget(&id);
        completed.map_err(|why| self.failed(&why))
    }

    fn keep(mut self: Box<Self>) {
        self.is_there = false;
    }
}

impl Drop for Uploaded {
    fn drop(&mut self) {
        if let Some(upload) = self.upload.take() {
            let id = upload.id().to_owned();
            // Noted, the next backup or prune aborts it.
            if upload.abort().is_ok() {
                self.lock.forget(&id);
            }
        }
        if self.is_there && self.lock.check().is_ok() {
            // The next backup removes what no manifest names.
            let _ = self.folder.remove(&self.name.to_string());
        }
    }
}
