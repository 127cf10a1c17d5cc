//! Opens the content of a simulated device: a raw disk, or a qcow2 image on a block device or in a
//! file, which may have backing images.
//!
//! Invariant: a qcow2 image is opened for requests only if its metadata is consistent, except for
//! leaked clusters, whatever a power cut has lost; or if it was damaged on purpose.

use std::sync::Arc;

use nowait::sim::{Random, SimDevice, SimOptions};
use nowait::{
    AllocationCache, BlockDevice, BlockMap, BlockingFile, Error, OpenOptions, SimStorage,
    WorkerPool,
};
use nowait_image::check::Report;
use nowait_image::create::Features;
use nowait_image::qcow2_disk::{OpenImage, Opened, ServeOptions, new_simulated, open_simulated};
use nowait_image::{BackingName, Chain, ChainOptions, Format, ImageFile, check, repair, resize};

use crate::model::Violation;
use crate::pattern;
use crate::pattern::BASE;
use crate::scenario::Scenario;
use crate::stored_bitmap;

/// Bytes of a qcow2 image's device beyond twice the size of its disk.
const SPARE_BYTES: u64 = 256 << 10;

/// The step in bytes by which the file of a qcow2 image grows.
const GROW_BYTES: u64 = 16 << 10;

/// The binary logarithm of the smallest cluster with subclusters: they have 512 bytes then.
const SUBCLUSTER_BITS: u32 = 14;

/// The purpose and the expected state of an image that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// For requests; its metadata has to be consistent.
    Consistent,
    /// For requests; its metadata is damaged.
    Damaged,
    /// For reads of an image whose metadata was damaged.
    ReadOnly,
}

/// A disk with any mapping.
type Disk = Arc<BlockDevice<dyn BlockMap>>;

/// An open device: all state that a power cut ends.
pub struct Image {
    /// The open disk with its caches.
    pub disk: Disk,
    /// The workers that may block on the device.
    pub workers: WorkerPool,
    /// The simulated device.
    pub device: Arc<SimDevice>,
    /// Leaked clusters of a qcow2 image when it was opened.
    pub leaks: u64,
    /// Corruptions of a qcow2 image when it was opened.
    pub corruptions: u64,
    /// The handle of a qcow2 image, which writes back its metadata.
    open_image: Option<OpenImage>,
}

fn wrong(error: impl std::fmt::Display) -> Violation {
    Violation::new(error.to_string())
}

/// The device of `scenario`, and the first bytes of its disk; all further bytes are zeros.
///
/// # Errors
/// The image could not be created.
pub fn device(scenario: &Scenario) -> Result<(Arc<SimDevice>, Vec<u8>), Violation> {
    if scenario.qcow2.is_none() {
        return Ok((Arc::new(SimDevice::new(scenario.device)), Vec::new()));
    }
    let mut random = Random::part(scenario.seed, u64::MAX - 3);
    let bytes = (2 * scenario.device.bytes + SPARE_BYTES).next_multiple_of(4096);
    let device = Arc::new(SimDevice::new(SimOptions { bytes, ..scenario.device }));
    let mut disk = Vec::new();
    if random.below(4) > 0 {
        disk = vec![0; scenario.device.bytes as usize];
        fill_parts(&mut disk, &mut random);
    }
    stack(scenario, &device, Some(&disk), scenario.device.bytes, &mut random)?;
    Ok((device, disk))
}

/// Fills about half of `disk`, in parts.
fn fill_parts(disk: &mut [u8], random: &mut Random) {
    let mut pos = 0;
    while pos < disk.len() {
        let unit = random.pick(&[100, 512, 4096]).unwrap_or(512);
        let len = (unit * (1 + random.below(16)) as usize).min(disk.len() - pos);
        if random.below(2) == 0
            && let Some(part) = disk.get_mut(pos..pos + len)
        {
            pattern::fill(part, pos as u64, BASE);
        }
        pos += len;
    }
}

/// Whether the images of a scenario have extended L2 entries: a quarter of those whose storage has room, and
/// blocks that are no larger than a subcluster.
fn has_subclusters(scenario: &Scenario) -> bool {
    let fits = scenario.device.capacity == u64::MAX && scenario.device.align.offset <= 512;
    fits && Random::part(scenario.seed, u64::MAX - 31).below(4) == 0
}

/// Puts a new image of a disk of `size` bytes on `device`, backed by a raw image that holds `disk`, or
/// by the existing images.
///
/// # Errors
/// The image could not be created.
pub fn stack(
    scenario: &Scenario,
    device: &Arc<SimDevice>,
    disk: Option<&[u8]>,
    size: u64,
    random: &mut Random,
) -> Result<(), Violation> {
    let format = match disk {
        None => Some(Format::Qcow2),
        Some(disk) => (!disk.is_empty()).then_some(Format::Raw),
    };
    let backing = format.map(|format| BackingName {
        name: "file-1".into(),
        format: Some(format.name().to_owned()),
    });
    let bits = scenario.qcow2.unwrap_or_default() + random.below(3) as u32;
    let features = Features { extended_l2: has_subclusters(scenario), ..Features::default() };
    let bits = if features.extended_l2 { bits.max(SUBCLUSTER_BITS) } else { bits };
    let image = new_simulated(size, bits, features, backing).map_err(wrong)?;
    match disk {
        None => device.put_on_top(&image),
        Some([]) => device.put_on(None, &image),
        Some(disk) => device.put_on(Some(&raw_base(disk, random)), &image),
    }
    match stored_bitmap::is_wanted(scenario) {
        true => stored_bitmap::add(&chain(device, for_writing())?),
        false => Ok(()),
    }
}

fn for_writing() -> ChainOptions {
    ChainOptions { writable: true, ..ChainOptions::default() }
}

/// A raw image that holds `disk`: of the same length, longer, or without the zeros at its end.
fn raw_base(disk: &[u8], random: &mut Random) -> Vec<u8> {
    let mut base = disk.to_vec();
    let more = random.below(10_000) as usize;
    match random.below(3) {
        0 => {}
        1 => {
            base.resize(disk.len() + more, 0);
            pattern::fill(base.get_mut(disk.len()..).unwrap_or_default(), 0, BASE);
        }
        _ => {
            let last = disk.iter().rposition(|&byte| byte != 0);
            let used = last.map_or(0, |last| last + 1);
            base.truncate(used + more % 600);
        }
    }
    base
}

impl Image {
    /// Opens the content of `device`.
    ///
    /// # Errors
    /// The image is corrupt and should not be, or the open failed.
    pub fn open(
        scenario: &Scenario,
        device: &Arc<SimDevice>,
        opening: Opening,
    ) -> Result<Self, Violation> {
        let (disk, report, open_image) = match scenario.qcow2 {
            None => (raw(scenario, device).map_err(wrong)?, Report::default(), None),
            Some(_) => {
                let (disk, report, open_image) = qcow2(scenario, device, opening)?;
                (disk, report, Some(open_image))
            }
        };
        let Report { leaks, corruptions, .. } = report;
        let workers = WorkerPool::simulated();
        Ok(Self { disk, workers, device: device.clone(), leaks, corruptions, open_image })
    }

    /// The next job of the thread that writes back a qcow2 image's metadata, if it has one.
    pub fn pending_writeback(&self) -> Option<impl FnOnce() + 'static> {
        self.open_image.as_ref().and_then(OpenImage::due)
    }

    /// Makes all that has completed durable; no request may be in flight.
    ///
    /// # Errors
    /// The error of the write or the sync.
    pub fn flush(&self) -> Result<(), Error> {
        BlockingFile::new(self.disk.clone()).flush()
    }

    /// Closes the image as a server does; no request may be in flight. `None` for a raw disk.
    pub fn close(&mut self) -> Option<Result<(), Error>> {
        let open_image = self.open_image.take()?;
        let flushed = self.flush();
        Some(flushed.and_then(|()| open_image.close()))
    }
}

fn raw(scenario: &Scenario, device: &Arc<SimDevice>) -> Result<Disk, Error> {
    let OpenOptions { cache_holes, allocate_ahead, .. } = scenario.disk;
    let options = OpenOptions::new().direct(scenario.disk.direct);
    let data = SimStorage::open(device, 0, options);
    let (size, map) = (device.bytes(), AllocationCache::new(device.bytes(), cache_holes));
    let map = map.allocating_ahead(allocate_ahead);
    map.scan(&data);
    Ok(Arc::new(BlockDevice::mapped(Arc::new(data), Vec::new(), size, false, map)))
}

fn chain(device: &Arc<SimDevice>, options: ChainOptions) -> Result<Chain, Violation> {
    let mut files = Vec::new();
    for number in 0..device.files() {
        let file = ImageFile::simulated(device, number);
        let format = Format::probe(&file).map_err(wrong)?;
        files.push((file, format));
    }
    Chain::simulated(files, options).map_err(wrong)
}

/// Repairs the image on `device`.
///
/// # Errors
/// A corruption is left, or the repair failed.
pub fn mend(device: &Arc<SimDevice>) -> Result<(), Violation> {
    let options = ChainOptions { writable: true, damaged: true, ..ChainOptions::default() };
    let repaired = repair::repair(&chain(device, options)?, &mut |_, _| {}).map_err(wrong)?;
    match repaired.report {
        Report { corruptions: 0, leaks: 0, .. } => Ok(()),
        left => Err(Violation::new(format!("a repair leaves {left:?}"))),
    }
}

/// Removes the bitmap of the image on `device`, which is not open.
///
/// # Errors
/// It cannot be removed.
pub fn remove_bitmap(device: &Arc<SimDevice>) -> Result<(), Violation> {
    stored_bitmap::remove(&chain(device, for_writing())?)
}

/// Gives the qcow2 disk on `device`, which is not open, `size` bytes.
///
/// # Errors
/// It has not changed its size.
pub fn resize(device: &Arc<SimDevice>, size: u64) -> Result<(), Violation> {
    let chain = chain(device, for_writing())?;
    stored_bitmap::before_resize(&chain, size)?;
    match resize::resize(&chain, size, true).map_err(wrong)? {
        after if after == size => Ok(()),
        after => Err(Violation::new(format!("a disk has {after} bytes instead of {size}"))),
    }
}

/// The image on `device`, the result of its check, and its handle.
fn qcow2(
    scenario: &Scenario,
    device: &Arc<SimDevice>,
    opening: Opening,
) -> Result<(Disk, Report, OpenImage), Violation> {
    let writable = opening != Opening::ReadOnly;
    let chain = chain(device, ChainOptions { writable, ..ChainOptions::default() })?;
    let report = check::check(&chain, &mut |_, _| {}).map_err(wrong)?;
    if report.corruptions > 0 && opening == Opening::Consistent {
        return Err(Violation::new(format!("the image is corrupt: {report:?}")));
    }
    if opening == Opening::Consistent && stored_bitmap::is_wanted(scenario) {
        stored_bitmap::check(&chain)?;
    }
    let (direct, cache_holes) = (scenario.disk.direct, scenario.disk.cache_holes);
    let options = ServeOptions { writable, direct, cache_holes };
    let Opened { top, below: backing, size, map, open_image } =
        open_simulated(chain, options, GROW_BYTES).map_err(wrong)?;
    let disk = BlockDevice::mapped(top, backing, size, !writable, map);
    Ok((Arc::new(disk), report, open_image))
}

#[cfg(test)]
mod tests {
    use nowait::Flags;
    use nowait::sim::{Fault, Faults};

    use super::*;
    use crate::scenario::Mode;

    fn any_scenario(fits: impl Fn(&Scenario) -> bool) -> Scenario {
        let all = (0..5000).map(|seed| Scenario::of(Mode::Engine, seed));
        let mut images = all.filter(|it| it.qcow2 == Some(9));
        images.find(|it| it.device.bytes > 160 << 10 && fits(it)).unwrap()
    }

    /// A scenario whose storage does not run out.
    fn scenario(fits: impl Fn(&Scenario) -> bool) -> Scenario {
        any_scenario(|it| it.device.capacity == u64::MAX && fits(it))
    }

    #[test]
    fn an_image_on_a_larger_device_or_in_a_file_takes_data_to_its_last_byte() {
        for grows in [false, true] {
            let scenario = scenario(|it| it.device.grows == grows);
            let (device, _) = device(&scenario).unwrap();
            let before = device.bytes();
            let image = Image::open(&scenario, &device, Opening::Consistent).unwrap();
            let file = BlockingFile::new(image.disk.clone());
            let bytes = vec![7; 4096];
            for pos in (0..scenario.device.bytes).step_by(bytes.len()) {
                let part = &bytes[..bytes.len().min((scenario.device.bytes - pos) as usize)];
                assert_eq!(file.write_at(part, pos, Flags::NONE).unwrap(), part.len(), "at {pos}");
            }
            file.flush().unwrap();
            drop((file, image));
            assert_eq!(device.bytes() > before, grows);
            assert!(Image::open(&scenario, &device, Opening::Consistent).is_ok());
        }
    }

    #[test]
    fn an_image_whose_storage_runs_out_keeps_all_flushed_data() {
        let scenario = any_scenario(|it| it.device.capacity < u64::MAX && it.device.grows);
        let (device, _) = device(&scenario).unwrap();
        let image = Image::open(&scenario, &device, Opening::Consistent).unwrap();
        let file = BlockingFile::new(image.disk.clone());
        let write = |pos: u64| {
            let part = 4096.min(scenario.device.bytes - pos) as usize;
            file.write_at(&vec![(pos / 4096) as u8; part], pos, Flags::NONE)?;
            file.flush()
        };
        let mut ends = (0..scenario.device.bytes).step_by(4096);
        let (end, error) = ends.find_map(|pos| Some((pos, write(pos).err()?))).unwrap();
        assert_eq!(error.errno(), libc::ENOSPC);
        drop((file, image));
        let file =
            BlockingFile::new(Image::open(&scenario, &device, Opening::Consistent).unwrap().disk);
        let mut found = vec![0; end as usize];
        file.read_at(&mut found, 0).unwrap();
        let kept = found.chunks(4096).zip(0..).all(|(part, n)| part.iter().all(|&byte| byte == n));
        assert!(kept && end > 4 * 4096, "{end}");
    }

    #[test]
    fn a_disk_is_the_same_in_each_image_that_is_put_on_top_of_it() {
        for seed in 0..40 {
            let scenario = scenario(|it| it.seed >= 40 * seed);
            let mut random = Random::new(seed);
            let (device, mut disk) = device(&scenario).unwrap();
            disk.resize(scenario.device.bytes as usize, 0);
            for round in 0..4 {
                let mut image = Image::open(&scenario, &device, Opening::Consistent).unwrap();
                let file = BlockingFile::new(image.disk.clone());
                let mut found = vec![1; disk.len()];
                file.read_at(&mut found, 0).unwrap();
                assert!(found == disk, "seed {seed}, round {round}");
                let pos = random.below(disk.len() as u64 - 700) as usize;
                disk[pos..pos + 700].fill(round + 1);
                file.write_at(&disk[pos..pos + 700], pos as u64, Flags::NONE).unwrap();
                image.close().unwrap().unwrap();
                let raw = (round == 2).then_some(disk.as_slice());
                stack(&scenario, &device, raw, scenario.device.bytes, &mut random).unwrap();
                assert!(raw.is_none() || device.files() == 2);
            }
        }
    }

    #[test]
    fn a_write_that_fails_at_any_of_its_calls_loses_no_cluster() {
        let scenario = scenario(|it| it.device.grows);
        let mut failed = 0;
        for nth in 1..20 {
            let (device, _) = device(&scenario).unwrap();
            let mut image = Image::open(&scenario, &device, Opening::Consistent).unwrap();
            let once = Some((device.operations() + nth, Fault::Errno(libc::EIO)));
            device.set_faults(Faults { once, ..Faults::default() });
            let file = BlockingFile::new(image.disk.clone());
            failed += u32::from(file.write_at(&[7; 2048], 1024, Flags::NONE).is_err());
            device.set_faults(Faults::default());
            image.close().unwrap().unwrap();
            assert_eq!(
                Image::open(&scenario, &device, Opening::Consistent).unwrap().leaks,
                0,
                "operation {nth}"
            );
        }
        assert!(failed > 3, "{failed}");
    }
}
