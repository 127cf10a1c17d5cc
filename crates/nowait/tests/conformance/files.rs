//! The fixtures of files that grow: an empty file, and each way to reach it.
//!
//! Invariant: a rule of files is tested through every queue and every API.

use std::sync::Arc;

use nowait::{
    Allocate, AllocationCache, BlockDevice, BlockingFile, ByteRange, Direct, Flags, OpenOptions,
};

use crate::async_files::AsyncFiles;
use crate::rig::{Api, Blocking, Case, Content, Image, REAL, Rig, cases};

/// The calls to a file, of every API; errors are errnos.
pub(crate) trait FileApi: Api {
    fn append(&mut self, data: &[u8], flags: Flags) -> Result<u64, i32>;
    fn set_len(&mut self, bytes: u64) -> Result<(), i32>;
    fn allocate(&mut self, range: ByteRange, mode: Allocate) -> Result<(), i32>;
    fn sync_all(&mut self) -> Result<(), i32>;
    fn size(&mut self) -> u64;
}

impl FileApi for Blocking {
    fn append(&mut self, data: &[u8], flags: Flags) -> Result<u64, i32> {
        self.file.append(data, flags).map_err(|error| error.errno())
    }

    fn set_len(&mut self, bytes: u64) -> Result<(), i32> {
        self.file.set_len(bytes).map_err(|error| error.errno())
    }

    fn allocate(&mut self, range: ByteRange, mode: Allocate) -> Result<(), i32> {
        self.file.allocate(range, mode).map_err(|error| error.errno())
    }

    fn sync_all(&mut self) -> Result<(), i32> {
        self.file.sync_all().map_err(|error| error.errno())
    }

    fn size(&mut self) -> u64 {
        assert_eq!(self.file.metadata().unwrap().len(), self.file.size());
        self.file.size()
    }
}

/// The engine has no requests for these; a thread that may block makes the calls.
impl FileApi for Rig {
    fn append(&mut self, data: &[u8], flags: Flags) -> Result<u64, i32> {
        BlockingFile::new(self.disk.clone()).append(data, flags).map_err(|error| error.errno())
    }

    fn set_len(&mut self, bytes: u64) -> Result<(), i32> {
        self.disk.set_len(bytes).map_err(|error| error.errno())
    }

    fn allocate(&mut self, range: ByteRange, mode: Allocate) -> Result<(), i32> {
        self.disk.allocate(range, mode).map_err(|error| error.errno())
    }

    fn sync_all(&mut self) -> Result<(), i32> {
        self.disk.sync_all().map_err(|error| error.errno())
    }

    fn size(&mut self) -> u64 {
        self.disk.size()
    }
}

/// A file as one that grows, as `case` opens it.
pub(crate) fn open(image: &Image, case: &Case) -> Arc<BlockDevice<AllocationCache>> {
    let options = OpenOptions::new().read_only(case.options.read_only).direct(case.options.direct);
    let options = options.read_ahead(case.options.read_ahead);
    Arc::new(BlockDevice::open_file(&image.path, options).unwrap())
}

/// Runs `test` on a file of `size` bytes of zeros by every API on every queue that moves data, by direct I/O and through the
/// page cache.
pub(crate) fn on_files_with_all_on(size: u64, test: impl Fn(&mut dyn FileApi)) {
    let is_wanted =
        |case: &Case| case.label.ends_with("all on") || case.options.direct == Direct::Off;
    for case in cases(&REAL).into_iter().filter(is_wanted) {
        let image = Image::new(size, Content::Hole);
        let disk = open(&image, &case);
        if let Some(mut rig) = Rig::on(&case, image, disk) {
            test(&mut rig);
        }
        for several_threads in [false, true] {
            let image = Image::new(size, Content::Hole);
            let disk = open(&image, &case);
            if let Some(mut files) = AsyncFiles::on(&case, image, disk, several_threads) {
                test(&mut files);
            }
        }
    }
    for direct in [Direct::Auto, Direct::Off] {
        let image = Image::new(size, Content::Hole);
        let file = BlockingFile::open(&image.path, OpenOptions::new().direct(direct)).unwrap();
        let label = format!("BlockingFile, {direct:?}");
        let direct = file.disk().is_direct();
        test(&mut Blocking { file, image, direct, label });
    }
}

/// Runs `test` on a file of `size` bytes by every API, those with an engine with each switch off on every
/// queue that moves data.
pub(crate) fn on_files(size: u64, content: Content, test: impl Fn(&mut dyn FileApi)) {
    for case in cases(&REAL) {
        let image = Image::new(size, content);
        let disk = open(&image, &case);
        if let Some(mut rig) = Rig::on(&case, image, disk) {
            test(&mut rig);
        }
        // The drivers of the async APIs change nothing about the switches.
        let ahead = case.options.read_ahead;
        let all_on = case.label.ends_with("all on") || ahead || case.options.direct == Direct::Off;
        for several_threads in [false, true].into_iter().filter(|_| all_on) {
            let image = Image::new(size, content);
            let disk = open(&image, &case);
            if let Some(mut files) = AsyncFiles::on(&case, image, disk, several_threads) {
                test(&mut files);
            }
        }
    }
    for (direct, ahead) in [(Direct::Auto, false), (Direct::Auto, true), (Direct::Off, false)] {
        let image = Image::new(size, content);
        let options = OpenOptions::new().direct(direct).read_ahead(ahead);
        let file = BlockingFile::open(&image.path, options).unwrap();
        let label = format!("BlockingFile, {direct:?}, read ahead {ahead}");
        let direct = file.disk().is_direct();
        test(&mut Blocking { file, image, direct, label });
    }
}
