//! Verification: every manifest and every stored block is read and compared with its checksum.
//!
//! Invariant: a point is sound only if each block of its disk was read and found right, those of older points too.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use nowait::ByteRange;
use nowait_copy::Error;

use crate::chain::Chain;
use crate::data_files::DataFiles;
use crate::manifest::{Header, Manifest};

/// A damaged part of the disk of a point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The bytes of the disk that are damaged.
    pub range: ByteRange,
    /// The point that has them.
    pub point: u32,
    /// The reason, of the first block.
    pub why: String,
}

/// The state of a point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PointHealth {
    /// Its number.
    pub number: u32,
    /// The reason why nothing of it can be restored.
    pub unusable: Option<String>,
    /// The parts that cannot be restored.
    pub damage: Vec<Damage>,
}

impl PointHealth {
    /// Whether all of the disk can be restored.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.unusable.is_none() && self.damage.is_empty()
    }
}

/// A damaged block: the point that has it, and what is wrong.
type DamagedBlock = (u32, String);

/// The faults of the points up to one, from the whole one before it on.
#[derive(Default)]
struct Findings {
    blocks: BTreeMap<u32, DamagedBlock>,
    unusable: Option<String>,
    /// The last point, unless its manifest is damaged.
    previous: Option<Header>,
}

/// Reads everything that the point `number` of `chain`, or all points without one, are restored from. `progress` is told of
/// the stored bytes that were read, and of all that will be.
///
/// # Errors
/// There is no such point; [`Error::Interrupted`].
pub fn verify(
    chain: &Chain,
    number: Option<u32>,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<PointHealth>, Error> {
    if let Some(number) = number.filter(|number| !chain.points.contains_key(number)) {
        return Err(chain.error(format!("there is no point {number}")));
    }
    let first = number.and_then(|number| chain.lineage(number).ok()?.first().copied());
    let numbers = chain.points.keys().copied();
    let numbers: Vec<u32> = numbers
        .filter(|it| first.is_none_or(|first| *it >= first))
        .filter(|it| number.is_none_or(|number| *it <= number))
        .collect();
    let known = numbers.iter().filter_map(|number| chain.points.get(number)?.as_ref().ok());
    let total = known.map(|point| point.info.stored_bytes).sum();
    let (mut done, mut findings, mut all) = (0, Findings::default(), Vec::new());
    let files = DataFiles::new(chain.place.clone());
    for &it in &numbers {
        let known = match chain.points.get(&it) {
            Some(Err(why)) => Err(why.clone()),
            _ => chain.manifest(it),
        };
        let health = match known {
            Ok(manifest) => {
                findings.cover(&manifest);
                for entry in manifest.entries.iter().filter(|entry| !entry.is_zero()) {
                    if cancel.load(Ordering::Relaxed) {
                        return Err(Error::Interrupted);
                    }
                    let mut block = vec![0; manifest.header.block_bytes as usize];
                    if let Err(why) = files.read(&manifest.header.files, entry, &mut block) {
                        findings.blocks.insert(entry.block, (it, why));
                    }
                    done += u64::from(entry.len);
                    progress(done, total);
                }
                let health = findings.health(&manifest);
                findings.previous = Some(manifest.header);
                health
            }
            Err(why) => {
                let why = format!("the manifest of point {it} is damaged: {why}");
                findings.unusable = Some(why.clone());
                findings.previous = None;
                PointHealth { number: it, unusable: Some(why), damage: Vec::new() }
            }
        };
        all.push(health);
    }
    all.retain(|health| number.is_none_or(|number| number == health.number));
    Ok(all)
}
impl Findings {
    /// Forgets what `manifest` has blocks of its own for.
    fn cover(&mut self, manifest: &Manifest) {
        match manifest.header.parent {
            None => *self = Self::default(),
            Some(_) if manifest.header.stands_on(self.previous.as_ref()) => {}
            Some(parent) => {
                let why =
                    format!("point {parent}, which it stands on, is missing or of another disk");
                self.unusable.get_or_insert(why);
            }
        }
        for entry in &manifest.entries {
            self.blocks.remove(&entry.block);
        }
    }

    fn health(&self, manifest: &Manifest) -> PointHealth {
        let header = &manifest.header;
        let mut damage: Vec<Damage> = Vec::new();
        for (&block, (point, why)) in &self.blocks {
            let pos = u64::from(block) * header.block_bytes;
            let len = header.block_bytes.min(header.size.saturating_sub(pos));
            match damage.last_mut() {
                Some(last) if last.range.end() == pos && last.point == *point => {
                    last.range.len += len;
                }
                _ => {
                    let (range, why) = (ByteRange::new(pos, len), why.clone());
                    damage.push(Damage { range, point: *point, why });
                }
            }
        }
        PointHealth { number: header.number, unusable: self.unusable.clone(), damage }
    }
}
