//! What a device holds, opened: a raw disk, or a qcow2 image on it as on a block device.
//!
//! Invariant: a qcow2 image is opened only if its metadata holds together, leaks apart: whatever
//! was lost before.
//! Knows: model, scenario. Known by: front, engines, server, world.

use std::io::IoSlice;
use std::path::Path;
use std::sync::Arc;

use nowait::sim::{SimDevice, SimOptions};
use nowait::{
    Direct, Disk, Error, Extent, Extents, Image as Format, Intent, Map, OpenOptions, Range, Span,
    Storage, Workers, WouldBlock,
};
use nowait_image::create::{CreateOptions, Preallocation, create};
use nowait_image::served::{Qcow2, open_simulated};
use nowait_image::{Chain, ChainOptions, check};

use crate::model::Wrong;
use crate::scenario::Scenario;

/// Bytes of a qcow2 image beside those of its disk and as many again.
const SPARE_BYTES: u64 = 256 << 10;

/// What is known of where bytes are.
pub enum AnyMap {
    /// At the same place of the device, or nowhere.
    Raw(Extents),
    /// Where the image says.
    Qcow2(Qcow2),
}

macro_rules! either {
    ($self:ident, $map:ident => $call:expr) => {
        match $self {
            AnyMap::Raw($map) => $call,
            AnyMap::Qcow2($map) => $call,
        }
    };
}

impl Map for AnyMap {
    fn begin(&self, range: Range, intent: Intent) -> Result<Extent, WouldBlock> {
        either!(self, map => map.begin(range, intent))
    }

    fn begin_blocking(&self, range: Range, intent: Intent) -> Extent {
        either!(self, map => map.begin_blocking(range, intent))
    }

    fn is_mapped(&self, range: Range) -> bool {
        either!(self, map => map.is_mapped(range))
    }

    fn written(&self, range: Range) {
        either!(self, map => map.written(range));
    }

    fn forget(&self, range: Range) {
        either!(self, map => map.forget(range));
    }

    fn hole(&self, range: Range) {
        either!(self, map => map.hole(range));
    }

    fn remembers_holes(&self) -> bool {
        either!(self, map => map.remembers_holes())
    }

    fn known(&self, range: Range, limit: usize, spans: &mut Vec<Span>) -> bool {
        either!(self, map => map.known(range, limit, spans))
    }

    fn image(&self) -> Option<&dyn Format> {
        either!(self, map => map.image())
    }
}

/// A device that is open: everything that ends with a power cut.
pub struct Image {
    /// The device, with what is remembered of it.
    pub disk: Arc<Disk<AnyMap>>,
    /// Who may wait for it.
    pub workers: Workers,
    /// What is below.
    pub device: Arc<SimDevice>,
}

fn wrong(error: impl std::fmt::Display) -> Wrong {
    Wrong::new(error.to_string())
}

/// The device of `scenario`, all of whose disk is zeros.
///
/// # Errors
/// What the system said when an image was made.
pub fn device(scenario: &Scenario) -> Result<Arc<SimDevice>, Wrong> {
    let Some(bits) = scenario.qcow2 else { return Ok(Arc::new(SimDevice::new(scenario.device))) };
    let size = scenario.device.bytes;
    let bytes = (2 * size + SPARE_BYTES).next_multiple_of(4096);
    let device = Arc::new(SimDevice::new(SimOptions { bytes, ..scenario.device }));
    let scratch = tempfile::tempdir().map_err(wrong)?;
    let path = scratch.path().join("image");
    let options = CreateOptions {
        size: Some(size),
        format: nowait_image::Format::Qcow2,
        backing: None,
        backing_format: None,
        backing_dirs: Vec::new(),
        cluster_bytes: Some(1 << bits),
        preallocation: Preallocation::Off,
    };
    create(&path, &options).map_err(wrong)?;
    let bytes = std::fs::read(&path).map_err(wrong)?;
    let buffered = OpenOptions { direct: Direct::Off, ..OpenOptions::default() };
    let storage = Storage::simulated(&device, buffered).map_err(wrong)?;
    storage.write_at(&[IoSlice::new(&bytes)], 0).map_err(wrong)?;
    storage.sync().map_err(wrong)?;
    Ok(device)
}

impl Image {
    /// Opens what is on `device`.
    ///
    /// # Errors
    /// What is wrong with it; what the system said.
    pub fn open(scenario: &Scenario, device: &Arc<SimDevice>) -> Result<Self, Wrong> {
        let hint = scenario.config.hint;
        let options = OpenOptions { read_only: false, direct: scenario.direct, no_hint: !hint };
        let storage = || -> Result<Storage, Error> { Storage::simulated(device, options) };
        let data = storage().map_err(wrong)?;
        let (size, map) = match scenario.qcow2 {
            None => {
                let map = Extents::new(data.size(), hint);
                map.scan(&data);
                (data.size(), AnyMap::Raw(map))
            }
            Some(_) => {
                let map = qcow2(device, storage().map_err(wrong)?, hint)?;
                (scenario.device.bytes, AnyMap::Qcow2(map))
            }
        };
        let disk = Arc::new(Disk::mapped(data, Vec::new(), size, false, map));
        let workers = Workers::simulated(&disk);
        Ok(Self { disk, workers, device: device.clone() })
    }
}

/// The image on `device`, of which a copy is checked and read in a file.
fn qcow2(device: &SimDevice, storage: Storage, hint: bool) -> Result<Qcow2, Wrong> {
    let file = tempfile::NamedTempFile::new().map_err(wrong)?;
    std::fs::write(file.path(), device.contents()).map_err(wrong)?;
    let chain = chain(file.path())?;
    let report = check::check(&chain, &mut |_, _| {}).map_err(wrong)?;
    if report.corruptions > 0 {
        return Err(Wrong::new(format!("the image is corrupt: {report:?}")));
    }
    open_simulated(&chain, storage, hint).map_err(wrong)
}

fn chain(path: &Path) -> Result<Chain, Wrong> {
    let format = Some(nowait_image::Format::Qcow2);
    Chain::open(path, &ChainOptions { format, ..ChainOptions::default() }).map_err(wrong)
}

#[cfg(test)]
mod tests {
    use nowait::{File, Flags};

    use super::*;
    use crate::scenario::Mode;

    #[test]
    fn an_image_on_a_larger_device_takes_data_to_its_last_byte() {
        let mut all = (0..2000).map(|seed| Scenario::of(Mode::Engine, seed));
        let large = |it: &Scenario| it.qcow2 == Some(9) && it.device.bytes > 160 << 10;
        let scenario = all.find(large).unwrap();
        let device = device(&scenario).unwrap();
        let image = Image::open(&scenario, &device).unwrap();
        let file = File::new(image.disk.clone());
        let bytes = vec![7; 4096];
        for pos in (0..scenario.device.bytes).step_by(bytes.len()) {
            let part = &bytes[..bytes.len().min((scenario.device.bytes - pos) as usize)];
            assert_eq!(file.write_at(part, pos, Flags::NONE).unwrap(), part.len(), "at {pos}");
        }
        file.flush().unwrap();
        drop((file, image));
        assert!(Image::open(&scenario, &device).is_ok());
    }
}
