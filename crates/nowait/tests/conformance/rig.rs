//! The fixtures of the tests: an image, and each way to reach it with each switch off in turn.
//!
//! Invariant: a rule is tested through every queue and every API. If this system lacks a queue or
//! direct I/O, the test says so.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use nowait::{
    AllocationCache, BlockDevice, BlockingFile, ByteRange, Completion, Config, Direct, Flags,
    IoSegment, Op, OpenOptions, Rejected, Request, SingleDisk, Stats, WorkerPool,
};
pub(crate) use nowait_testkit::{KIB, MIB, Random};
use nowait_testkit::{TestQueueKind, WaitForRequests, skip, switches};

use crate::async_files::AsyncFiles;
use crate::queue::{Script, Scripted};

/// A multiple of every dio alignment that these tests meet, in bytes.
pub(crate) const BLOCK: u64 = 4096;
/// The byte that fills memory before a test.
pub(crate) const POISON: u8 = 0xee;

/// The contents of a new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// One hole.
    Hole,
    /// `pattern` everywhere.
    Data,
    /// In turn `ISLAND` bytes each of `pattern`, of hole, and of storage never written.
    Islands,
}

/// Bytes of each part of `Content::Islands`.
pub(crate) const ISLAND: u64 = 16 * KIB;

/// One way to reach an image.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) kind: TestQueueKind,
    pub(crate) config: Config,
    pub(crate) options: OpenOptions,
    pub(crate) workers: u32,
    pub(crate) label: String,
}

/// Each of `kinds` with each switch off by direct I/O, and with all on through the page cache.
pub(crate) fn cases(kinds: &[TestQueueKind]) -> Vec<Case> {
    let mut cases = Vec::new();
    let on = Config { slots: 256, ..Config::default() };
    for &kind in kinds {
        for (switch, config, options) in switches(on) {
            let label = format!("{kind:?}, {switch}");
            cases.push(Case { kind, config, options, workers: 4, label });
        }
        let label = format!("{kind:?}, page cache");
        let options = OpenOptions::new().cache_holes(true).direct(Direct::Off);
        cases.push(Case { kind, config: on, options, workers: 4, label });
    }
    cases
}

/// The queues that move data, and every queue.
pub(crate) const REAL: [TestQueueKind; 2] = TestQueueKind::REAL;
pub(crate) const ALL: [TestQueueKind; 3] = TestQueueKind::ALL;

/// The byte of `pattern` at `pos`, never 0.
pub(crate) fn pattern_at(pos: u64) -> u8 {
    (pos.wrapping_mul(31).wrapping_add(pos >> 9) as u8) | 1
}

/// `len` bytes of an image with data, from `pos` on.
pub(crate) fn pattern(pos: u64, len: u64) -> Vec<u8> {
    (pos..pos + len).map(pattern_at).collect()
}

/// Like `pattern`, of an image with islands.
pub(crate) fn islands(pos: u64, len: u64) -> Vec<u8> {
    let at = |pos: u64| if (pos / ISLAND).is_multiple_of(3) { pattern_at(pos) } else { 0 };
    (pos..pos + len).map(at).collect()
}

/// A range of a device of `size` bytes, aligned or not, of at most 64 KiB.
pub(crate) fn range_in(size: u64, random: &mut Random) -> ByteRange {
    let unit = [1, 512, BLOCK][random.below(3) as usize];
    let pos = random.below(size) / unit * unit;
    let len = (1 + random.below(64 * KIB / unit)) * unit;
    ByteRange::new(pos, len.min(size - pos))
}

/// Page-aligned memory, filled with `POISON`.
pub(crate) struct Memory {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Memory {
    pub(crate) fn new(len: u64) -> Self {
        let bytes = vec![POISON; (len + BLOCK) as usize];
        let start = bytes.as_ptr().align_offset(BLOCK as usize);
        Self { bytes, start, len: len as usize }
    }

    /// Memory that holds `bytes`.
    pub(crate) fn with(bytes: &[u8]) -> Self {
        let mut memory = Self::new(bytes.len() as u64);
        memory.copy_from_slice(bytes);
        memory
    }

    /// One segment of it.
    pub(crate) fn segment(&mut self, range: std::ops::Range<usize>) -> IoSegment {
        let part = &mut self[range];
        IoSegment { base: part.as_mut_ptr(), len: part.len() }
    }
}

impl Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// An image in a directory of its own.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Image {
    pub(crate) fn new(size: u64, content: Content) -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("disk.img");
        match content {
            Content::Hole => std::fs::File::create(&path).unwrap().set_len(size).unwrap(),
            Content::Data => std::fs::write(&path, pattern(0, size)).unwrap(),
            Content::Islands => make_islands(&std::fs::File::create(&path).unwrap(), size),
        }
        let image = Self { path, _dir: dir };
        image.leave_cache();
        image
    }

    /// `len` bytes of the image from `pos` on, read through the page cache.
    pub(crate) fn bytes(&self, pos: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        buffered(&self.path).read_exact_at(&mut bytes, pos).unwrap();
        self.leave_cache();
        bytes
    }

    /// Writes its dirty pages back and drops its cached pages: direct I/O without waiting is
    /// refused where the page cache holds pages.
    fn leave_cache(&self) {
        let file = buffered(&self.path);
        // fsync(2), because some tests make fdatasync(2) fail.
        file.sync_all().unwrap();
        let advice = rustix::fs::Advice::DontNeed;
        rustix::fs::fadvise(&file, 0, None, advice).unwrap();
    }

    /// Bytes of storage that back it.
    pub(crate) fn allocated(&self) -> u64 {
        std::fs::metadata(&self.path).unwrap().blocks() * 512
    }

    pub(crate) fn open(&self, case: &Case) -> BlockDevice<AllocationCache> {
        let disk = BlockDevice::open(&self.path, case.options).unwrap();
        if case.options.direct == Direct::Auto && !disk.is_direct() {
            skip(&format!("no direct I/O: {} goes through the page cache", case.label));
        }
        disk
    }
}

fn make_islands(file: &std::fs::File, size: u64) {
    file.set_len(size).unwrap();
    for pos in (0..size).step_by(ISLAND as usize) {
        let len = ISLAND.min(size - pos);
        match pos / ISLAND % 3 {
            0 => file.write_all_at(&pattern(pos, len), pos).unwrap(),
            1 => {}
            _ => {
                let mode = rustix::fs::FallocateFlags::empty();
                if let Err(error) = rustix::fs::fallocate(file, mode, pos, len) {
                    skip(&format!("no unwritten extents on this file system: {error}"));
                }
            }
        }
    }
    // Data that is only in the page cache may have no extent yet.
    file.sync_all().unwrap();
}

/// The requests of every API; errors are errnos.
pub(crate) trait Api {
    fn label(&self) -> &str;
    fn image(&self) -> &Image;
    fn is_direct(&self) -> bool;
    fn read(&mut self, pos: u64, len: u64) -> Result<Vec<u8>, i32>;
    fn write(&mut self, pos: u64, bytes: &[u8], flags: Flags) -> Result<u64, i32>;
    fn read_vectored(&mut self, pos: u64, bufs: &mut [&mut [u8]]) -> Result<u64, i32>;
    fn write_vectored(&mut self, pos: u64, bufs: &[&[u8]]) -> Result<u64, i32>;
    fn bare(&mut self, op: Op, flags: Flags, range: ByteRange) -> Result<(), i32>;
}

/// An engine on an image.
pub(crate) struct Rig {
    pub(crate) engine: SingleDisk<Scripted, AllocationCache>,
    pub(crate) script: Rc<Script>,
    pub(crate) disk: Arc<BlockDevice<AllocationCache>>,
    pub(crate) case: Case,
    pub(crate) image: Image,
    next_tag: u64,
}

impl Rig {
    /// An engine that knows the image's holes. `None` where the system does not have the queue.
    pub(crate) fn new(case: &Case, image: Image) -> Option<Self> {
        let disk = Arc::new(image.open(case));
        disk.scan();
        Self::on(case, image, disk)
    }

    /// Like `new`, on a disk that is open already and is not scanned.
    pub(crate) fn on(
        case: &Case,
        image: Image,
        disk: Arc<BlockDevice<AllocationCache>>,
    ) -> Option<Self> {
        let queue = case.kind.queue(case.config.slots)?;
        let script = Rc::new(Script::default());
        let queue = Scripted::new(queue, script.clone());
        let workers = WorkerPool::new(case.workers);
        let engine = SingleDisk::new(disk.clone(), workers, queue, case.config).unwrap();
        Some(Self { engine, script, disk, case: case.clone(), image, next_tag: 0 })
    }

    /// Submits a read or write with a buffer of the engine, filled with `POISON`; `bytes` are a
    /// write's data. Returns the tag.
    pub(crate) fn submit(&mut self, io: Request, bytes: &[u8]) -> Result<u64, Rejected> {
        self.next_tag += 1;
        let mut buf = self.engine.buffer(io.range).expect("a buffer");
        buf.fill(POISON);
        buf[..bytes.len()].copy_from_slice(bytes);
        self.engine.submit(io, buf, self.next_tag).map(|()| self.next_tag)
    }

    /// Submits a request with the caller's memory, which is not accessed until `finish`. Returns
    /// the tag.
    pub(crate) fn submit_segments(
        &mut self,
        io: Request,
        list: &[IoSegment],
    ) -> Result<u64, Rejected> {
        self.next_tag += 1;
        // SAFETY: the tests keep the memory until `finish` or the engine's end.
        let submitted = unsafe { self.engine.submit_user_memory(io, list, self.next_tag) };
        submitted.map(|()| self.next_tag)
    }

    /// Waits until every request was given back.
    pub(crate) fn finish(&mut self) -> Vec<Completion> {
        self.engine.finish()
    }

    /// Waits for the only request that was submitted.
    pub(crate) fn only(&mut self) -> Completion {
        let mut all = self.finish();
        assert_eq!(all.len(), 1, "{}: completed once", self.case.label);
        all.remove(0)
    }

    /// Runs one request with the engine's own buffer.
    pub(crate) fn run(&mut self, io: Request, bytes: &[u8]) -> Result<u64, i32> {
        self.submit(io, bytes).map_err(|rejected| rejected.error.errno())?;
        self.only().result().map_err(|error| error.errno())
    }

    /// Runs one request with the caller's memory.
    pub(crate) fn run_segments(&mut self, io: Request, list: &[IoSegment]) -> Result<u64, i32> {
        self.submit_segments(io, list).map_err(|rejected| rejected.error.errno())?;
        self.only().result().map_err(|error| error.errno())
    }

    pub(crate) fn stats(&self) -> Stats {
        self.engine.stats()
    }

    /// Whether reads that follow each other may be served without a transfer of the queue.
    pub(crate) fn reads_ahead(&self) -> bool {
        self.case.options.read_ahead
    }

    /// Whether all switches are on and the image uses direct I/O: the case for which tests check
    /// the counts of the paths.
    pub(crate) fn is_plain(&self) -> bool {
        self.case.label.ends_with("all on") && self.disk.is_direct()
    }
}

/// A request without its memory.
pub(crate) fn io(op: Op, flags: Flags, pos: u64, len: u64) -> Request {
    Request { op, flags, range: ByteRange::new(pos, len) }
}

pub(crate) fn read(pos: u64, len: u64) -> Request {
    io(Op::Read, Flags::NONE, pos, len)
}

pub(crate) fn write(pos: u64, len: u64) -> Request {
    io(Op::Write, Flags::NONE, pos, len)
}

impl Api for Rig {
    fn label(&self) -> &str {
        &self.case.label
    }

    fn image(&self) -> &Image {
        &self.image
    }

    fn is_direct(&self) -> bool {
        self.disk.is_direct()
    }

    fn read(&mut self, pos: u64, len: u64) -> Result<Vec<u8>, i32> {
        self.submit(read(pos, len), &[]).map_err(|rejected| rejected.error.errno())?;
        let completion = self.only();
        let done = completion.result().map_err(|error| error.errno())? as usize;
        Ok(completion.buf.expect("a read gives its buffer back")[..done].to_vec())
    }

    fn write(&mut self, pos: u64, bytes: &[u8], flags: Flags) -> Result<u64, i32> {
        self.run(io(Op::Write, flags, pos, bytes.len() as u64), bytes)
    }

    fn read_vectored(&mut self, pos: u64, bufs: &mut [&mut [u8]]) -> Result<u64, i32> {
        let list: Vec<IoSegment> = bufs
            .iter_mut()
            .map(|buf| IoSegment { base: buf.as_mut_ptr(), len: buf.len() })
            .collect();
        let len = list.iter().map(|segment| segment.len as u64).sum();
        self.run_segments(read(pos, len), &list)
    }

    fn write_vectored(&mut self, pos: u64, bufs: &[&[u8]]) -> Result<u64, i32> {
        let list: Vec<IoSegment> = bufs
            .iter()
            .map(|buf| IoSegment { base: buf.as_ptr().cast_mut(), len: buf.len() })
            .collect();
        let len = list.iter().map(|segment| segment.len as u64).sum();
        self.run_segments(write(pos, len), &list)
    }

    fn bare(&mut self, op: Op, flags: Flags, range: ByteRange) -> Result<(), i32> {
        self.next_tag += 1;
        let submitted = self.engine.submit_no_data(Request { op, flags, range }, self.next_tag);
        submitted.map_err(|rejected| rejected.error.errno())?;
        self.only().result().map(|_| ()).map_err(|error| error.errno())
    }
}

/// The blocking API on an image.
pub(crate) struct Blocking {
    pub(crate) file: BlockingFile,
    pub(crate) image: Image,
    pub(crate) direct: bool,
    pub(crate) label: String,
}

impl Api for Blocking {
    fn label(&self) -> &str {
        &self.label
    }

    fn image(&self) -> &Image {
        &self.image
    }

    fn is_direct(&self) -> bool {
        self.direct
    }

    fn read(&mut self, pos: u64, len: u64) -> Result<Vec<u8>, i32> {
        let mut memory = Memory::new(len);
        let done = self.file.read_at(&mut memory, pos).map_err(|error| error.errno())?;
        assert!(memory[done..].iter().all(|&byte| byte == POISON), "{}", self.label);
        Ok(memory[..done].to_vec())
    }

    fn write(&mut self, pos: u64, bytes: &[u8], flags: Flags) -> Result<u64, i32> {
        let done = self.file.write_at(&Memory::with(bytes), pos, flags);
        done.map(|done| done as u64).map_err(|error| error.errno())
    }

    fn read_vectored(&mut self, pos: u64, bufs: &mut [&mut [u8]]) -> Result<u64, i32> {
        let mut slices: Vec<_> = bufs.iter_mut().map(|buf| IoSliceMut::new(buf)).collect();
        let done = self.file.read_vectored_at(&mut slices, pos);
        done.map(|done| done as u64).map_err(|error| error.errno())
    }

    fn write_vectored(&mut self, pos: u64, bufs: &[&[u8]]) -> Result<u64, i32> {
        let slices: Vec<_> = bufs.iter().map(|buf| IoSlice::new(buf)).collect();
        let done = self.file.write_vectored_at(&slices, pos, Flags::NONE);
        done.map(|done| done as u64).map_err(|error| error.errno())
    }

    fn bare(&mut self, op: Op, flags: Flags, range: ByteRange) -> Result<(), i32> {
        let done = match op {
            Op::Flush => self.file.flush(),
            Op::Discard => self.file.discard(range),
            Op::Zero => self.file.zero(range, flags),
            Op::Read | Op::Write | Op::Status => panic!("the blocking API has no such call"),
        };
        done.map_err(|error| error.errno())
    }
}

/// Runs `test` on an engine for each of `kinds` with each switch off.
pub(crate) fn on_engines(
    kinds: &[TestQueueKind],
    size: u64,
    content: Content,
    test: impl Fn(&mut Rig),
) {
    for case in cases(kinds) {
        if let Some(mut rig) = Rig::new(&case, Image::new(size, content)) {
            test(&mut rig);
        }
    }
}

fn on_vectored_apis_of(size: u64, content: Content, read_only: bool, test: impl Fn(&mut dyn Api)) {
    for case in cases(&REAL) {
        let case = Case { options: case.options.read_only(read_only), ..case };
        if let Some(mut rig) = Rig::new(&case, Image::new(size, content)) {
            test(&mut rig);
        }
    }
    for (direct, cache_holes) in [(Direct::Auto, true), (Direct::Auto, false), (Direct::Off, true)]
    {
        let image = Image::new(size, content);
        let options =
            OpenOptions::new().read_only(read_only).direct(direct).cache_holes(cache_holes);
        let disk = BlockDevice::open(&image.path, options).unwrap();
        disk.scan();
        let (is_direct, label) =
            (disk.is_direct(), format!("File, {direct:?}, holes cached {cache_holes}"));
        let file = BlockingFile::new(Arc::new(disk));
        test(&mut Blocking { file, image, direct: is_direct, label });
    }
}

fn on_apis_of(size: u64, content: Content, read_only: bool, test: impl Fn(&mut dyn Api)) {
    on_vectored_apis_of(size, content, read_only, &test);
    for case in cases(&REAL) {
        let case = Case { options: case.options.read_only(read_only), ..case };
        // The driver's thread changes nothing about the switches.
        let all_on = case.label.ends_with("all on") || case.options.direct == Direct::Off;
        for several_threads in [Some(false), all_on.then_some(true)].into_iter().flatten() {
            let image = Image::new(size, content);
            if let Some(mut files) = AsyncFiles::new(&case, image, several_threads) {
                test(&mut files);
            }
        }
    }
}

/// Runs `test` on every API, those with an engine with each switch off on every queue that moves
/// data.
pub(crate) fn on_apis(size: u64, content: Content, test: impl Fn(&mut dyn Api)) {
    on_apis_of(size, content, false, test);
}

/// Like `on_apis`, on those APIs that take lists of segments.
pub(crate) fn on_vectored_apis(size: u64, content: Content, test: impl Fn(&mut dyn Api)) {
    on_vectored_apis_of(size, content, false, test);
}

/// Like `on_apis`, with images opened for reading only.
pub(crate) fn on_read_only_apis(size: u64, test: impl Fn(&mut dyn Api)) {
    on_apis_of(size, Content::Data, true, test);
}

/// A second handle on the image, through the page cache.
pub(crate) fn buffered(path: &Path) -> std::fs::File {
    std::fs::File::options().read(true).write(true).open(path).unwrap()
}

/// Pages of `range` that the page cache has not written back yet. `None` where the system has no
/// cachestat(2) (Linux 6.5).
pub(crate) fn dirty_pages(path: &Path, range: ByteRange) -> Option<u64> {
    const SYS_CACHESTAT: libc::c_long = 451;
    let file = buffered(path);
    let range = [range.pos, range.len];
    let mut counts = [0u64; 5];
    // SAFETY: the call reads two numbers and writes five.
    let done = unsafe {
        let (range, counts) = (range.as_ptr(), counts.as_mut_ptr());
        libc::syscall(SYS_CACHESTAT, std::os::fd::AsRawFd::as_raw_fd(&file), range, counts, 0)
    };
    if done != 0 {
        skip("no cachestat(2)");
        return None;
    }
    let [_, dirty, writeback, ..] = counts;
    Some(dirty + writeback)
}
