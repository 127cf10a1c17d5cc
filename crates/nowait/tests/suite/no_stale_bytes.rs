//! By default a handle reads nothing that plain direct I/O would not read, with every other
//! writer: another handle, a buffered or a mapping writer, another process.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use nowait::{
    AsyncFile, BlockDevice, BlockingFile, ByteRange, Flags, IoBuffer, LocalAsyncFile, LocalDriver,
    OpenOptions,
};
use nowait_testkit::on_each_file_system;

const SIZE: u64 = 1 << 20;
/// Where the writers write, one after the other: into holes that every reader has read before.
const STEP: u64 = 64 << 10;
/// In the environment of another process: the path of its file.
const OTHER: &str = "NOWAIT_TEST_OTHER_PROCESS";

type Writer = (&'static str, fn(&Path, u64, &[u8]));

const WRITERS: [Writer; 7] = [
    ("a second handle", by_handle),
    ("a second handle, unaligned", |path, pos, bytes| by_handle(path, pos, &bytes[..4001])),
    ("a handle through the page cache", |path, pos, bytes| {
        let options = OpenOptions::new().direct(nowait::Direct::Off);
        BlockingFile::open(path, options).unwrap().write_at(bytes, pos, Flags::NONE).unwrap();
    }),
    ("a buffered writer", |path, pos, bytes| {
        std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, pos).unwrap();
    }),
    ("a mapping writer", by_mapping),
    ("another process", |path, pos, bytes| by_process(path, pos, bytes, "library")),
    ("a buffered writer in another process", |path, pos, bytes| {
        by_process(path, pos, bytes, "plain");
    }),
];

fn by_handle(path: &Path, pos: u64, bytes: &[u8]) {
    let file = BlockingFile::open(path, OpenOptions::default()).unwrap();
    file.write_at(bytes, pos, Flags::NONE).unwrap();
}

fn by_mapping(path: &Path, pos: u64, bytes: &[u8]) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let (protection, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: the mapping is new, as long as the bytes, inside the file, and unmapped once.
    unsafe {
        let at = std::ptr::null_mut();
        let map =
            libc::mmap(at, bytes.len(), protection, shared, file.as_raw_fd(), pos.cast_signed());
        assert_ne!(map, libc::MAP_FAILED);
        map.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        assert_eq!(libc::munmap(map, bytes.len()), 0);
    }
}

fn by_process(path: &Path, pos: u64, bytes: &[u8], how: &str) {
    let what = format!("{how} {pos} {} {}", bytes[0], path.display());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "no_stale_bytes::the_other_process", "--nocapture"]).env(OTHER, what);
    let output = child.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// The other process of a test; without its variable it has nothing to do.
#[test]
fn the_other_process() {
    let Ok(what) = std::env::var(OTHER) else { return };
    let mut words = what.splitn(4, ' ');
    let how = words.next().unwrap();
    let pos: u64 = words.next().unwrap().parse().unwrap();
    let bytes = vec![words.next().unwrap().parse().unwrap(); STEP as usize];
    let path = Path::new(words.next().unwrap());
    match how {
        "library" => by_handle(path, pos, &bytes),
        _ => std::fs::File::options()
            .write(true)
            .open(path)
            .unwrap()
            .write_all_at(&bytes, pos)
            .unwrap(),
    }
}

/// Reads all of the file by each API, and after that the extents by a fourth one.
struct Readers {
    blocking: BlockingFile,
    local: LocalAsyncFile,
    shared: AsyncFile,
    disk: Arc<BlockDevice<nowait::AllocationCache>>,
    driver: LocalDriver,
}

impl Readers {
    fn new(path: &Path) -> Self {
        let options = OpenOptions::default();
        let disk = BlockDevice::open(path, options).unwrap();
        disk.scan();
        Self {
            blocking: BlockingFile::open(path, options).unwrap(),
            local: LocalAsyncFile::open(path, options).unwrap(),
            shared: AsyncFile::open(path, options).unwrap(),
            disk: Arc::new(disk),
            driver: LocalDriver::new().unwrap(),
        }
    }

    fn all_read(&self, expected: &[u8], label: &str) {
        let buffer = || IoBuffer::zeroed(SIZE as usize).unwrap();
        let mut bytes = vec![0; SIZE as usize];
        assert_eq!(self.blocking.read_at(&mut bytes, 0), Ok(bytes.len()), "{label}");
        assert!(bytes == expected, "{label}: BlockingFile");
        let by_disk = BlockingFile::new(self.disk.clone());
        assert_eq!(by_disk.read_at(&mut bytes, 0), Ok(bytes.len()), "{label}");
        assert!(bytes == expected, "{label}: BlockDevice");
        let (done, bytes) = self.driver.block_on(self.local.read_at(buffer(), 0));
        assert!(done == Ok(bytes.len()) && bytes[..] == *expected, "{label}: LocalAsyncFile");
        let (done, bytes) = self.driver.block_on(self.shared.read_at(buffer(), 0));
        assert!(done == Ok(bytes.len()) && bytes[..] == *expected, "{label}: AsyncFile");
        assert!(!self.disk.is_hole(ByteRange::new(0, SIZE)), "{label}: no hole is known");
    }
}

#[test]
fn what_others_write_into_holes_is_read_by_every_api_on_every_file_system() {
    on_each_file_system(Path::new(env!("CARGO_TARGET_TMPDIR")), |directory, system| {
        let path = directory.join("file");
        std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        let mut expected = vec![0; SIZE as usize];
        let readers = Readers::new(&path);
        readers.all_read(&expected, "before");
        for ((label, write), byte) in WRITERS.into_iter().zip(1..) {
            let pos = u64::from(byte) * STEP;
            let before = expected.clone();
            write(&path, pos, &[byte; STEP as usize]);
            let len = if label.ends_with("unaligned") { 4001 } else { STEP as usize };
            expected[pos as usize..][..len].fill(byte);
            assert!(before != expected && std::fs::read(&path).unwrap() == expected, "{label}");
            readers.all_read(&expected, &format!("{system}: {label}"));
            // A range that a reader itself punches does not stay a hole for it when others write there.
            readers.blocking.discard(ByteRange::new(pos, STEP)).unwrap();
            expected[pos as usize..][..STEP as usize].fill(0);
            readers.all_read(&expected, &format!("{system}: {label}, punched"));
            write(&path, pos, &[byte | 0x80; STEP as usize]);
            expected[pos as usize..][..len].fill(byte | 0x80);
            readers.all_read(&expected, &format!("{system}: {label}, again"));
        }
    });
}

#[test]
fn only_a_disk_of_one_writer_knows_its_holes() {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.as_file().set_len(SIZE).unwrap();
    let all = ByteRange::new(0, SIZE);
    for (options, knows) in
        [(OpenOptions::new(), false), (OpenOptions::new().cache_holes(true), true)]
    {
        let disk = BlockDevice::open(file.path(), options).unwrap();
        disk.scan();
        assert_eq!(disk.is_hole(all), knows);
    }
}
