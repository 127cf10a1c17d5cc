//! A chain: the points in a place, and what each stands on.
//!
//! Invariant: a point is used only if its manifest and those of all that it stands on are whole, are of one chain and
//! one size, and all files that they name are there in their length.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nowait_copy::Error;

use crate::chain_place::ChainPlace;
use crate::directory::Directory;
#[cfg(not(feature = "encryption"))]
use crate::disabled::Keys;
#[cfg(feature = "encryption")]
use crate::encryption::Keys;
use crate::manifest::{DataFile, ENCRYPTED, Header, MAX_FILES, MAX_MANIFEST_BYTES, Manifest};
use crate::place::{Access, FileName, Place};
use crate::store_place::StorePlace;
use crate::table::Table;

/// A point as it is listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointInfo {
    /// Its number: later points have higher ones.
    pub number: u32,
    /// The point that has what is unchanged; `None` for a whole one.
    pub parent: Option<u32>,
    /// The begin of the backup, in seconds since 1970.
    pub seconds: u64,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of the blocks of data that it has itself, as they are on the disk.
    pub data_bytes: u64,
    /// Bytes of these blocks as they are stored.
    pub stored_bytes: u64,
    /// The dirty bitmap that told what had changed.
    pub bitmap: Option<String>,
}

impl PointInfo {
    /// The begin of the backup as text, in UTC: `2001-09-09T01:46:40Z`.
    #[must_use]
    pub fn time(&self) -> String {
        let time = i64::try_from(self.seconds).ok();
        let time = time.and_then(|seconds| chrono::DateTime::from_timestamp(seconds, 0));
        time.map_or_else(|| "-".into(), |time| format!("{:?}Z", time.naive_utc()))
    }

    pub(crate) fn of(manifest: &Manifest) -> Self {
        let Manifest { header, entries } = manifest;
        let data = entries.iter().filter(|entry| !entry.is_zero());
        Self {
            number: header.number,
            parent: header.parent,
            seconds: header.seconds,
            size: header.size,
            data_bytes: data.clone().count() as u64 * header.block_bytes,
            stored_bytes: data.map(|entry| u64::from(entry.len)).sum(),
            bitmap: header.bitmap.clone(),
        }
    }
}

/// A point of the list: how it is, or what is wrong with its manifest.
pub type ListedPoint = (u32, Result<PointInfo, String>);

pub(crate) struct Point {
    pub(crate) header: Header,
    pub(crate) info: PointInfo,
}

/// A chain of backups that is open.
pub struct Chain {
    pub(crate) place: Arc<dyn Place>,
    /// The place in errors.
    pub(crate) name: String,
    pub(crate) points: BTreeMap<u32, Result<Point, String>>,
    /// The random number that all of them have.
    pub(crate) id: u64,
    /// Lengths of the data files.
    files: BTreeMap<u64, u64>,
}

impl Chain {
    /// Opens the chain at `at`, encrypted by `keys` if there are any. With [`Access::Add`] a directory is made if it is absent.
    ///
    /// # Errors
    /// There is no chain there; another process uses it; it cannot be read.
    pub fn open(
        at: impl Into<ChainPlace>,
        access: Access,
        keys: Option<Keys>,
    ) -> Result<Self, Error> {
        let at = at.into();
        let name = at.to_string();
        let place: Result<Arc<dyn Place>, String> = match &at {
            ChainPlace::Directory(path) => {
                Directory::open(path, access).map(|place| Arc::new(place) as _)
            }
            ChainPlace::Store(url) => {
                StorePlace::open(url, access).map(|place| Arc::new(place) as _)
            }
        };
        let place = place.map_err(|what| Error::at(&name, what))?;
        let Some(keys) = keys else {
            let chain = Self::in_place(place, name)?;
            return match chain.points.values().find_map(|point| is_encrypted(point.as_ref().err()))
            {
                Some(why) => Err(chain.error(why)),
                None => Ok(chain),
            };
        };
        let chain = Self::in_place(keys.place(place), name)?;
        // With keys that fit none of its points nothing is known of the chain.
        match chain.points.values().next() {
            Some(Err(why)) if chain.points.values().all(Result::is_err) => Err(chain.error(why)),
            _ => Ok(chain),
        }
    }

    pub(crate) fn in_place(place: Arc<dyn Place>, name: String) -> Result<Self, Error> {
        let listed = place.list().map_err(|what| Error::at(&name, what))?;
        let (mut points, mut files) = (BTreeMap::new(), BTreeMap::new());
        let mut numbers = BTreeSet::new();
        for (file, bytes) in listed {
            match file {
                FileName::Point(number) => drop(numbers.insert(number)),
                FileName::Data(id) => drop(files.insert(id, bytes)),
                FileName::Partial(_) | FileName::Index(_) | FileName::PartialIndex(_) => {}
            }
        }
        if numbers.len() > MAX_FILES {
            return Err(Error::at(&name, format!("it has more than {MAX_FILES} points")));
        }
        let mut id = None;
        for number in numbers {
            let point = read(&*place, number).and_then(|manifest| {
                match *id.get_or_insert(manifest.header.chain) == manifest.header.chain {
                    true => {
                        place.learn(&manifest.header.recipients);
                        let info = PointInfo::of(&manifest);
                        Ok(Point { header: manifest.header, info })
                    }
                    false => Err("it is of another chain".into()),
                }
            });
            // A point that was removed meanwhile is not damaged.
            let is_there = |files: Vec<(FileName, u64)>| {
                files.iter().any(|(name, _)| *name == FileName::Point(number))
            };
            if point.is_ok() || place.list().is_ok_and(is_there) {
                points.insert(number, point);
            }
        }
        let id = id.unwrap_or_else(|| fastrand::u64(..));
        Ok(Self { place, name, points, id, files })
    }

    /// The points, in their order.
    #[must_use]
    pub fn points(&self) -> Vec<ListedPoint> {
        let listed = |(number, point): (&u32, &Result<Point, String>)| {
            let info = point.as_ref().map(|point| point.info.clone());
            (*number, info.map_err(Clone::clone))
        };
        self.points.iter().map(listed).collect()
    }

    /// The number of the last point, if there is one.
    #[must_use]
    pub fn last(&self) -> Option<u32> {
        self.points.keys().next_back().copied()
    }

    pub(crate) fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::at(&self.name, what)
    }

    /// The manifest of a point.
    pub(crate) fn manifest(&self, number: u32) -> Result<Manifest, String> {
        read(&*self.place, number)
    }

    fn point(&self, number: u32) -> Result<&Point, String> {
        match self.points.get(&number) {
            Some(Ok(point)) => Ok(point),
            Some(Err(why)) => Err(format!("the manifest of point {number} is damaged: {why}")),
            None => Err(format!("there is no point {number}")),
        }
    }

    /// The points that `number` stands on, and itself, from the whole one on.
    ///
    /// # Errors
    /// One of them cannot be used.
    pub(crate) fn lineage(&self, number: u32) -> Result<Vec<u32>, String> {
        let (mut point, mut numbers) = (self.point(number)?, vec![number]);
        loop {
            for file in &point.header.files {
                if self.files.get(&file.id).is_none_or(|bytes| *bytes < file.bytes) {
                    let name = FileName::Data(file.id);
                    return Err(format!("the file {name} is missing or too short"));
                }
            }
            // A parent has a lower number, so this is finite.
            let Some(parent) = point.header.parent else { break };
            let above = &point.header;
            point = self.point(parent)?;
            if !above.stands_on(Some(&point.header)) {
                return Err(format!("point {parent} is of another disk"));
            }
            numbers.push(parent);
        }
        numbers.reverse();
        Ok(numbers)
    }

    /// All blocks of the disk of a point that are not zero.
    ///
    /// # Errors
    /// The point, or one that it stands on, cannot be used.
    pub(crate) fn table(&self, number: u32) -> Result<Table, String> {
        let mut table = Table::default();
        for number in self.lineage(number)? {
            table = table.covered_by(self.manifest(number)?)?.without_zeros();
        }
        Ok(table)
    }

    /// Whether every manifest can be read, so that it is known which files are in use.
    pub(crate) fn is_known(&self) -> bool {
        self.points.values().all(Result::is_ok)
    }

    /// The numbers of the data files that points have.
    fn used(&self) -> BTreeSet<u64> {
        let headers = self.points.values().flatten().map(|point| &point.header);
        headers.flat_map(|header| &header.files).map(|file| file.id).collect()
    }

    /// Data files of interrupted backups that are complete, each with the index of its blocks.
    ///
    /// # Errors
    /// The place cannot be listed.
    pub(crate) fn interrupted(&self) -> Result<Vec<Manifest>, String> {
        // A manifest that cannot be read may name any file.
        if !self.is_known() {
            return Ok(Vec::new());
        }
        let (used, mut found) = (self.used(), Vec::new());
        for (name, _) in self.place.list()? {
            let FileName::Index(id) = name else { continue };
            let Some(bytes) = self.files.get(&id).filter(|_| !used.contains(&id)) else { continue };
            let Ok(index) = read_file(&*self.place, name) else { continue };
            let is_of_it = |file: &DataFile| file.id == id && file.bytes <= *bytes;
            if matches!(&index.header.files[..], [file] if is_of_it(file)) {
                found.push(index);
            }
        }
        Ok(found)
    }

    /// Removes what a backup or a prune has left that was killed: files that no manifest names, and that are not `kept`.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub(crate) fn remove_remains(&self, kept: &BTreeSet<FileName>) -> Result<(), String> {
        if !self.is_known() {
            return Ok(());
        }
        let used = self.used();
        for (name, _) in self.place.list()? {
            let is_used = match name {
                FileName::Data(id) => used.contains(&id),
                FileName::Point(_) => true,
                FileName::Partial(_) | FileName::Index(_) | FileName::PartialIndex(_) => false,
            };
            if !is_used && !kept.contains(&name) {
                self.place.remove(name)?;
            }
        }
        Ok(())
    }
}

/// The reason why a point was not read, if that is that it is encrypted.
fn is_encrypted(why: Option<&String>) -> Option<&String> {
    why.filter(|why| *why == ENCRYPTED)
}

/// Reads the manifest of the point `number`.
fn read(place: &dyn Place, number: u32) -> Result<Manifest, String> {
    let manifest = read_file(place, FileName::Point(number))?;
    match manifest.header.number == number {
        true => Ok(manifest),
        false => Err(format!("it is that of point {}", manifest.header.number)),
    }
}

/// Reads the manifest that the file `name` has.
fn read_file(place: &dyn Place, name: FileName) -> Result<Manifest, String> {
    let file = place.open(name)?;
    let len = file.len();
    if len > MAX_MANIFEST_BYTES {
        return Err("it is too long".into());
    }
    let mut bytes = vec![0; len as usize];
    file.read_at(0, &mut bytes)?;
    Manifest::decode(&bytes)
}
